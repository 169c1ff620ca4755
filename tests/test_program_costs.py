"""FLOPs and collectives of a program: counted by hand against what is read, and nothing gathered whole that is cut up."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from tests.tiny_training import MODEL, SETTINGS, packed_batch
from wedlm_jax.model.parameters import init_params, transformer_from
from wedlm_jax.objective import ObjectiveConfig
from wedlm_jax.ops.attention import attend_ranges
from wedlm_jax.ops.tiles import by_tiles
from wedlm_jax.program_costs import (
    GATHERING,
    Collective,
    collectives,
    kernel_runs,
    matmul_flops,
    runs_by_computation,
    traffic_by_kind,
)
from wedlm_jax.sharding import MeshConfig, batch_sharding, make_mesh
from wedlm_jax.train_state import abstract_state
from wedlm_jax.train_step import compile_step, wedlm_step

TEXT = """HloModule example

%cond (p: (s32[], f32[4])) -> pred[] {
  %bound = s32[]{:T(128)} constant(36), metadata={op_name="x"}
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

%all-reduce-scatter.1 (p: bf16[64,8]) -> bf16[16,8] {
  %all-reduce.3 = bf16[64,8]{1,0} all-reduce(%p), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add
}

%piece (p: bf16[2,8]) -> bf16[16,8] {
  %all-gather.2 = bf16[16,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %all-gather.1 = bf16[16,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %f = bf16[16,8]{1,0} fusion(%p), kind=kCustom, calls=%piece
  %start = (f32[4,2]{1,0}, f32[4,2]{1,0}, u32[], u32[]) collective-permute-start(%p), channel_id=2, source_target_pairs={{0,1}}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%cond, body=%body
  %r = bf16[16,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %s = (f32[8]{0}, f32[2]{0}) all-reduce(%a, %b), channel_id=4, replica_groups=mesh['x'=4,'y'=2] {'x'}, to_apply=%add
  %d = f32[4,2]{1,0} collective-permute-done(%start)
}
"""


def test_a_compiled_text_is_read_with_its_loops_and_each_channel_once():
    assert sorted(collectives(TEXT)) == [
        Collective("all-gather", (16, 8), 256, 36, 8),
        Collective("all-reduce", (8,), 40, 1, 4),
        Collective("collective-permute", (4, 2), 32, 36, 2),
        Collective("reduce-scatter", (64, 8), 256, 1, 4),
    ]
    assert traffic_by_kind(collectives(TEXT)) == {
        "all-gather": 36 * 256 * 7 / 8,
        "all-reduce": 2 * 40 * 3 / 4,
        "collective-permute": 36 * 32,
        "reduce-scatter": 256 * 3,
    }


def test_a_sum_of_one_number_that_is_started_and_waited_for_is_counted():
    """As XLA compiles for GPUs the reduction by which the devices agree on how many rows run."""
    summed = next(line for line in TEXT.splitlines() if " all-reduce(%a" in line)
    started = summed.replace("all-reduce(", "all-reduce-start(").replace("(f32[8]{0}, f32[2]{0})", "s32[]")
    found = [one for one in collectives(TEXT.replace(summed, started)) if one.kind == "all-reduce"]
    assert found == [Collective("all-reduce", (), 4, 1, 4)]


def test_a_loop_whose_length_is_data_runs_as_often_as_is_said_of_it():
    def run(n, x):
        with kernel_runs(7):
            return jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(x) @ x, x)

    text = jax.jit(run).lower(3, jnp.ones((64, 64))).compile().as_text()
    assert {runs for lines, runs in runs_by_computation(text).values() if "sine(" in "\n".join(lines)} == {7}


def test_a_loop_runs_as_often_as_the_compiler_says_where_it_does():
    """For a GPU the bound that a condition compares with lies in a fusion."""
    known = 'body=%body, backend_config={"known_trip_count":{"n":"28"},"known_init_step":{"init":"0","step":"1"}}'
    found = collectives(TEXT.replace("body=%body", known, 1))
    assert Counter(one.times for one in found) == Counter({28: 2, 1: 2})


def test_equal_collectives_of_two_loops_or_side_by_side_count_each_though_they_share_a_channel():
    gather = next(line for line in TEXT.splitlines() if "all-gather.1 =" in line)
    summed = next(line for line in TEXT.splitlines() if " all-reduce(%a" in line)
    loop = next(line for line in TEXT.splitlines() if " while(" in line)
    other = f"%other (p: f32[4]) -> f32[4] {{\n{gather}\n}}\n\nENTRY"
    text = TEXT.replace("ENTRY", other).replace(
        summed, f"{summed}\n{summed}\n{loop.replace('body=%body', 'body=%other')}"
    )
    added = sorted(collectives(text))
    for one in collectives(TEXT):
        added.remove(one)
    assert [(one.kind, one.times) for one in added] == [("all-gather", 36), ("all-reduce", 1)]


AS_A_SUM = """HloModule example

%placed (param_0.1: bf16[64,8], param_1.1: bf16[1,8], param_2.1: s32[]) -> bf16[64,8] {
  %param_0.1 = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1.1 = bf16[1,8]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %param_2.1 = s32[]{:T(128)} parameter(2)
  %dynamic-update-slice.8 = bf16[64,8]{1,0:T(8,128)(2,1)} dynamic-update-slice(%param_0.1, %param_1.1, %param_2.1)
  ROOT %bitcast.9 = bf16[64,8]{1,0:T(8,128)(2,1)} bitcast(%dynamic-update-slice.8)
}

%plain (param_0.2: bf16[64,8]) -> bf16[64,8] {
  %param_0.2 = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %add.3 = bf16[64,8]{1,0:T(8,128)(2,1)} add(%param_0.2, %param_0.2)
}

ENTRY %main (param: bf16[1,8]) -> bf16[64,8] {
  %broadcast.1 = bf16[64,8]{1,0:T(8,128)(2,1)} broadcast(%constant.1), dimensions={}
  %dynamic-update-slice.1 = bf16[64,8]{1,0:T(8,128)(2,1)} dynamic-update-slice(%broadcast.1, %param, %offset)
  %copy-start.1 = (bf16[64,8]{1,0:T(8,128)(2,1)S(1)}, bf16[64,8]{1,0}, u32[]{:S(2)}) copy-start(%dynamic-update-slice.1)
  %copy-done.1 = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
  %fusion.1 = bf16[64,8]{1,0} fusion(%broadcast.1, %param, %offset), calls=%placed
  %all-reduce.1 = (bf16[64,8],bf16[64,8]) all-reduce(%copy-done.1, /*index=1*/%fusion.1), channel_id=1,replica_groups=[1,64]<=[64]
  %all-reduce.2 = bf16[64,8]{1,0} all-reduce(%dynamic-update-slice.1), channel_id=2, replica_groups=[1,64]<=[64]
  %fusion.2 = bf16[64,8]{1,0} fusion(%gradient), calls=%plain
  %all-reduce.3 = (bf16[64,8], bf16[64,8]) all-reduce(%copy-done.1, %fusion.2), channel_id=3, replica_groups=[1,64]<=[64]
  %fusion.3 = bf16[64,8]{1,0} fusion(%gradient, %param, %offset), calls=%placed
  %all-reduce.4 = bf16[64,8]{1,0} all-reduce(%fusion.3), channel_id=4, replica_groups=[1,64]<=[64]
}
"""


def test_a_gather_that_is_compiled_as_a_sum_of_zeros_and_own_parts_is_read_as_one():
    """As on v5p:4x4x4. A sum of anything else is none: not of a gradient, nor of an array of which a part is replaced."""
    assert sorted(collectives(AS_A_SUM)) == [
        Collective("all-reduce", (64, 8), 1024, 1, 64),
        Collective("all-reduce", (64, 8), 2048, 1, 64),
        Collective(GATHERING, (64, 8), 1024, 1, 64),
        Collective(GATHERING, (64, 8), 2048, 1, 64),
    ]
    assert traffic_by_kind(collectives(AS_A_SUM))[GATHERING] == 2 * 3072 * 63 / 64


def test_flops_count_every_run_of_a_loop_and_what_is_recomputed():
    def loss(w, x):
        layer = jax.checkpoint(lambda x, w: jnp.sin(x @ w), prevent_cse=False)
        return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0])

    product = 2 * 4 * 8 * 8
    w, x = jnp.ones((5, 8, 8)), jnp.ones((4, 8))
    assert matmul_flops(jax.make_jaxpr(loss)(w, x).jaxpr) == 5 * product
    assert matmul_flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(w, x).jaxpr) == 5 * 4 * product


def test_flops_of_what_nobody_reads_do_not_count():
    def frozen(w, x):
        return jax.grad(lambda w, x: jnp.sum(by_tiles(lambda x: jnp.sin(x @ w), 4, x)), argnums=1)(w, x)

    product = 2 * 8 * 16 * 16
    w, x = jnp.ones((16, 16)), jnp.ones((1, 8, 16))
    # Again what was computed, and the gradient of x; not that of w.
    assert matmul_flops(jax.make_jaxpr(frozen)(w, x).jaxpr) == 2 * product


def test_flops_of_a_condition_are_those_of_its_costlier_branch():
    x = jnp.ones((8, 8))
    branches = [lambda x: x, lambda x: x @ x @ x]
    assert matmul_flops(jax.make_jaxpr(lambda n: jax.lax.switch(n, branches, x))(0).jaxpr) == 2 * 2 * 8**3


def test_flops_of_a_kernel_are_those_of_its_grid_or_as_declared():
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] @ x_ref[...]

    def squares(x):
        block = pl.BlockSpec((None, 8, 8), lambda i: (i, 0, 0))
        return pl.pallas_call(kernel, x, grid=(5,), in_specs=[block], out_specs=block, interpret=True)(x)

    def declared(x):
        with kernel_runs(3):
            return jax.jit(squares)(x)

    x = jnp.ones((5, 8, 8))
    assert matmul_flops(jax.make_jaxpr(squares)(x).jaxpr) == 5 * 2 * 8**3
    assert matmul_flops(jax.make_jaxpr(declared)(x).jaxpr) == 3 * 2 * 8**3


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices (tests/conftest.py asks for them)")
def test_flops_of_attention_by_key_ranges_are_those_of_all_tiles_the_most_that_its_loops_may_run():
    rows, length, heads, kv_heads, head_dim = 2, 2048, 4, 2, 8
    q, k = (jnp.zeros((rows, length, n, head_dim)) for n in (heads, kv_heads))
    end = jnp.broadcast_to(jnp.arange(1, length + 1), (rows, length))

    def loss(q, k, v):
        return jnp.sum(attend_ranges(q, k, v, jnp.zeros_like(end), end)[0])

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k)
    products = 2 + 5  # forward, and the scores again with four gradients
    delta = 2 * rows * heads * length * head_dim  # output times its gradient, row by row
    assert matmul_flops(traced.jaxpr.jaxpr) == products * 2 * rows * heads * length * length * head_dim + delta


def test_flops_of_what_each_device_does_for_itself_are_those_of_all():
    mesh = make_mesh(MeshConfig(data=4, tensor=2))
    for spec, rows in ((jax.P(("data", "tensor")), 1), (jax.P("data"), 2)):  # on each device
        product = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        assert matmul_flops(jax.make_jaxpr(product)(jnp.ones((8, 3))).jaxpr) == 8 * 2 * rows * 3 * rows


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices (tests/conftest.py asks for them)")
def test_no_parameter_and_no_logits_are_gathered_whole():
    """One layer at a time over fsdp is what is meant; all layers together, or the logits of all tokens, never are."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    state = abstract_state(MODEL, SETTINGS.optimizer, mesh)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh)), packed_batch(rows=8)
    )
    lowered = compile_step(wedlm_step, dataclasses.replace(SETTINGS, seed=1), mesh).lower(state, batch)
    found = collectives(lowered.compile().as_text())
    assert {one.kind for one in found} >= {"all-gather", "all-reduce"}
    layers, vocabulary = MODEL.num_layers, MODEL.vocab_size
    sizes = {name: x.size // (layers if name.startswith("layers.") else 1) for name, x in state.params.items()}
    whole = {x.shape for name, x in state.params.items() if x.size >= 1024}
    for one in found:
        if one.kind in ("all-gather", GATHERING):
            assert one.shape not in whole, f"{one} gathers a parameter whole"
            assert vocabulary not in one.shape, f"{one} gathers along the vocabulary"
            assert one.nbytes <= 4 * max(sizes.values()) // 2, (
                f"{one} is larger than the tensor-cut part of any parameter"
            )


def test_remat_orders_the_memory_of_a_compiled_gradient():
    """The CPU's compiler says how much a gradient needs beside its arguments: full < attention < dots < none."""
    # Of shorter rows attention is a plain product, of which nothing is kept.
    tokens = jax.ShapeDtypeStruct((1, 1024), jnp.int32)

    def temporaries(remat: str) -> int:
        config = dataclasses.replace(MODEL, remat=remat, num_layers=8)

        def loss(params, tokens):
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            return jnp.sum(transformer_from(config, params).hidden(tokens, positions=positions))

        params = jax.eval_shape(lambda: init_params(config, 0))
        return jax.jit(jax.grad(loss)).lower(params, tokens).compile().memory_analysis().temp_size_in_bytes

    needed = [temporaries(remat) for remat in ("full", "attention", "dots", "none")]
    assert needed == sorted(set(needed))


def test_the_memory_of_a_training_step_grows_as_its_rows_do():
    """Compiled only: four times the row, at most four times the temporaries and a little; [L, L] would be sixteen times."""
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    settings = dataclasses.replace(SETTINGS, objective=ObjectiveConfig(block_size=32))
    state = abstract_state(MODEL, settings.optimizer, mesh)

    def temporaries(length: int) -> int:
        batch = packed_batch(rows=1, length=length, block_size=32)
        lowered = compile_step(wedlm_step, settings, mesh).lower(state, batch)
        quickly = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
        return quickly.memory_analysis().temp_size_in_bytes

    assert temporaries(8192) <= 4.2 * temporaries(2048)
