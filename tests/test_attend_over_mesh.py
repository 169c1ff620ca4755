"""`attend_over_mesh`: eight devices give the attention and the gradients of one, each holding its own rows and heads only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.quick_jit import quick_jit
from wedlm_jax.sharding import MeshConfig, attend_over_mesh, batch_sharding, constrain, make_mesh, on_mesh, replicated

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices (tests/conftest.py asks for them)")

B, T, H = 4, 6, 8


def causal_in_segments(q, k, v, segment_ids):
    """Dense attention that knows nothing of a mesh."""
    q = q.reshape(*q.shape[:2], k.shape[2], -1, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k)
    visible = jnp.tril(jnp.ones((T, T), bool))[None]
    if segment_ids is not None:
        visible = visible & (segment_ids[:, :, None] == segment_ids[:, None, :])
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v).reshape(*q.shape[:2], -1, H)


def arrays(heads, kv_heads, batch=B):
    random = np.random.default_rng(heads + kv_heads)
    shapes = [(batch, T, heads, H), (batch, T, kv_heads, H), (batch, T, kv_heads, H), (batch, T, heads, H)]
    return [np.float32(random.normal(size=shape)) for shape in shapes], np.sort(random.integers(0, 3, (batch, T)))


def output_and_gradients(mesh, attend, arrays, segment_ids):
    def function(q, k, v, d_out, segment_ids):
        with on_mesh(mesh):
            out, pullback = jax.vjp(lambda q, k, v: attend_over_mesh(attend, q, k, v, segment_ids), q, k, v)
            return out, *pullback(d_out)

    return quick_jit(function)(*jax.device_put((*arrays, segment_ids), replicated(mesh)))


ONE = MeshConfig(data=1)
MESHES = {
    "data": (MeshConfig(data=4, tensor=2), 4, 2),
    "fsdp": (MeshConfig(data=2, fsdp=2, tensor=2), 4, 4),
    "more tensor than kv heads": (MeshConfig(data=1, fsdp=2, tensor=4), 8, 2),
    "one kv head": (MeshConfig(data=1, fsdp=1, tensor=8), 8, 1),
    "neither divides": (MeshConfig(data=1, fsdp=2, tensor=4), 12, 6),
    "heads stay whole": (MeshConfig(data=1, fsdp=2, tensor=4), 6, 2),
    "rows stay whole": (MeshConfig(data=8), 4, 2),
}


@pytest.mark.parametrize(("config", "heads", "kv_heads"), MESHES.values(), ids=MESHES)
def test_eight_devices_give_what_one_gives(config, heads, kv_heads):
    given, segment_ids = arrays(heads, kv_heads)
    with jax.enable_x64(True):  # products of other shapes round otherwise: in float64 that is far below any mistake
        given = [np.float64(array) for array in given]
        expected = output_and_gradients(make_mesh(ONE, jax.devices()[:1]), causal_in_segments, given, segment_ids)
        found = output_and_gradients(make_mesh(config), causal_in_segments, given, segment_ids)
    for ours, wanted in zip(found, expected, strict=True):
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-13)


def test_a_device_sees_its_own_rows_and_the_heads_that_they_read():
    seen = []

    def attend(q, k, v, rows):
        seen.append((q.shape, k.shape, v.shape, rows["segment_ids"].shape))
        return causal_in_segments(q, k, v, rows["segment_ids"])

    given, segment_ids = arrays(8, 2)
    output_and_gradients(make_mesh(MeshConfig(data=1, fsdp=2, tensor=4)), attend, given, {"segment_ids": segment_ids})
    assert set(seen) == {((2, T, 2, H), (2, T, 1, H), (2, T, 1, H), (2, T))}


def test_nothing_crosses_devices_where_rows_and_heads_arrive_cut():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

    def function(q, k, v, d_out, segment_ids):
        with on_mesh(mesh):
            q, k, v, d_out = (constrain(x, "batch", None, "heads", None) for x in (q, k, v, d_out))
            out, pullback = jax.vjp(lambda q, k, v: attend_over_mesh(causal_in_segments, q, k, v, segment_ids), q, k, v)
            return [constrain(x, "batch", None, "heads", None) for x in (out, *pullback(d_out))]

    given, segment_ids = arrays(4, 2)
    cut = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))
    arguments = (*jax.device_put(given, cut), jax.device_put(segment_ids, batch_sharding(mesh)))
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert not any(kind in text for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


def test_no_segment_ids_are_no_segment_ids():
    given, _ = arrays(4, 2)
    expected = output_and_gradients(make_mesh(ONE, jax.devices()[:1]), causal_in_segments, given, None)
    found = output_and_gradients(make_mesh(MeshConfig(data=4, tensor=2)), causal_in_segments, given, None)
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-6)
