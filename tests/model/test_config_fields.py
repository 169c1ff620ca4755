"""Every field of ModelConfig changes the result, the parameters, the memory or the program; none is decoration."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wedlm_jax
from tests.model.tiny import TINY, logits_of, params, tiny_model
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import make_request
from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.parameters import init_params, transformer_from
from wedlm_jax.model.patterns import Causal
from wedlm_jax.model.rope_scaling import RopeScaling
from wedlm_jax.ops.attention import DENSE_BLOCK

# field -> (another value, what must differ: parameter shapes or dtypes, the cache, the logits, the program, a check)
CHANGES = {
    "vocab_size": (48, {"params"}),
    "hidden_size": (24, {"params"}),
    "intermediate_size": (40, {"params"}),
    "num_layers": (3, {"params", "cache"}),
    "num_heads": (2, {"params"}),
    "num_kv_heads": (1, {"params", "cache"}),
    "head_dim": (8, {"params", "cache"}),
    "position_embedding_type": ("learned_absolute", {"params", "logits"}),
    "rope_theta": (100.0, {"logits", "program"}),
    "rope_scaling": (RopeScaling("linear", 4.0), {"logits", "program"}),
    "rms_norm_eps": (0.1, {"logits", "program"}),
    "max_position_embeddings": (20, {"check"}),
    "tie_word_embeddings": (True, {"params", "logits"}),
    "qkv_bias": (True, {"params", "logits"}),
    "qk_norm": (False, {"params", "logits"}),
    "dtype": ("bfloat16", {"logits", "program", "cache"}),
    "param_dtype": ("bfloat16", {"params", "logits"}),
    "kernel_dtype": ("int8", {"params", "logits"}),
    "matmul_precision": ("default", {"program"}),
    "remat": ("full", {"program"}),
    "scan_layers": (False, {"program"}),
    "mlp_tile": (4, {"program"}),
    "attention": ("splash", {"check"}),
    "adapter": (AdapterConfig(), {"params"}),
}
TOKENS = np.random.default_rng(0).integers(0, 40, (1, 8))


def changed(field) -> ModelConfig:
    return dataclasses.replace(TINY, **{field: CHANGES[field][0]})


def fields_that_change(what):
    return [field for field, (_, differs) in CHANGES.items() if what in differs]


def test_no_field_is_forgotten():
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(ModelConfig)}
    assert all(getattr(TINY, field) != value and differs for field, (value, differs) in CHANGES.items())


def abstract_params(config):
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    return {name: (x.shape, x.dtype) for name, x in shapes.items()}


def abstract_cache(config):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(lambda: KVCache.zeros(config, 1, 4)))]


@pytest.mark.parametrize("field", CHANGES)
def test_parameters_and_cache_change_exactly_where_they_should(field):
    assert (abstract_params(changed(field)) != abstract_params(TINY)) == ("params" in CHANGES[field][1])
    assert (abstract_cache(changed(field)) != abstract_cache(TINY)) == ("cache" in CHANGES[field][1])


def logits(config):
    return np.asarray(logits_of(config, params(config), TOKENS, np.arange(8)[None], Causal()))


@pytest.mark.parametrize("field", fields_that_change("logits"))
def test_changing_a_field_changes_the_logits(field):
    other = logits(changed(field))
    assert other.shape == (1, 8, 40) and other.dtype == np.float32
    assert np.abs(other - logits(TINY)).max() > 1e-3


@pytest.mark.parametrize(
    "field", [f for f in fields_that_change("params") if not isinstance(CHANGES[f][0], bool | str)]
)
def test_a_model_of_another_size_runs(field):
    config = changed(field)
    tokens, positions = jnp.zeros((2, 5), jnp.int32), jnp.zeros((2, 5), jnp.int32)
    run = lambda params: transformer_from(config, params)(tokens, positions=positions)  # noqa: E731
    assert jax.eval_shape(run, jax.eval_shape(lambda: init_params(config, 0))).shape == (2, 5, config.vocab_size)


def training_step(config):
    def loss(params):
        transformer, tokens = transformer_from(config, params), jnp.asarray(TOKENS)
        hidden = transformer.hidden(tokens, positions=jnp.arange(8)[None])
        return jnp.mean(transformer.token_losses(hidden, tokens)) + jnp.mean(transformer.logits(hidden))

    return jax.jit(jax.grad(loss))


@functools.cache
def program(config):
    return training_step(config).lower(params(config)).as_text()


@pytest.mark.parametrize("field", fields_that_change("program"))
def test_changing_a_field_changes_the_program(field):
    assert program(changed(field)) != program(TINY)


def is_a_sum(product: str) -> bool:
    """Whether a dot_general of StableHLO has a factor without an axis of its own: a sum of products, or of rows."""
    kinds = ("batching_dims", "contracting_dims")
    used = [re.search(rf"{kind} = \[([\d, ]*)\]", product) for kind in kinds]
    axes_used = sum(len(found[1].split(",")) for found in used if found and found[1])
    ranks = [shape.count("x") for shape in re.findall(r"tensor<([^>]*)>", product)[:2]]
    return min(ranks) == axes_used


@pytest.mark.parametrize(
    ("precision", "expected"), [("highest", {"HIGHEST"}), ("high", {"HIGH"}), ("default", {"DEFAULT"})]
)
@pytest.mark.parametrize(
    ("remat", "mlp_tile"), [("none", None), ("dots", None), ("full", None), ("none", 4), ("full", 4)]
)
def test_matmul_precision_holds_in_every_product_forward_and_backward(precision, expected, remat, mlp_tile):
    config = dataclasses.replace(TINY, matmul_precision=precision, remat=remat, mlp_tile=mlp_tile)
    assert precisions_of_products(program(config)) == expected


def precisions_of_products(text: str) -> set[str]:
    # Sums that are written as products, those of the norms and of the merge, stand in float32 whatever the setting.
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line and not is_a_sum(line)]
    assert len(products) > 20
    found = [re.findall(r"precision = \[(\w+), (\w+)\]", line) or [("DEFAULT", "DEFAULT")] for line in products]
    return {word for pairs in found for pair in pairs for word in pair}


@pytest.mark.parametrize("asked", ["high", "highest"])
def test_products_of_bfloat16_are_made_at_the_default_precision_whatever_is_asked_for(asked):
    """Kernels for TPUs do not compile at another one."""
    half = dataclasses.replace(TINY, dtype="bfloat16", matmul_precision=asked)
    assert precisions_of_products(program(half)) == {"DEFAULT"}


def test_only_the_config_reads_the_precision_that_is_asked_for():
    """All that multiplies reads `ModelConfig.precision`."""
    package = Path(wedlm_jax.__file__).parent
    readers = [path for path in package.rglob("*.py") if re.search(r"\.matmul_precision\b", path.read_text())]
    assert readers == [package / "model" / "config.py"]


def test_remat_computes_the_more_products_again_the_less_it_keeps():
    """In a row of which attention, too, is computed by ranges: of a short one there is nothing that "attention" would keep."""

    def products(remat):
        def loss(params):
            transformer, tokens = transformer_from(config, params), jnp.zeros((1, 4 * DENSE_BLOCK), jnp.int32)
            return jnp.mean(transformer.hidden(tokens, positions=jnp.arange(tokens.size)[None]))

        config = dataclasses.replace(TINY, remat=remat)
        return str(jax.make_jaxpr(jax.grad(loss))(params())).count("dot_general[")

    assert products("none") < products("dots") < products("attention") < products("full")


def test_max_position_embeddings_bounds_prompt_and_output():
    model = tiny_model(max_position_embeddings=20)
    fits = dict(row=0, name="prompt")
    make_request(model, [1] * 12, DecodeConfig(max_new_tokens=8), **fits)
    with pytest.raises(UserError, match="context of 20"):
        make_request(model, [1] * 12, DecodeConfig(max_new_tokens=9), **fits)


def test_splash_where_it_is_asked_for_is_splash_or_an_error():
    with pytest.raises(UserError, match=r"model.attention=splash cannot do this: rows of 8 .*; choose auto or xla"):
        logits(changed("attention"))


def test_tied_logits_are_products_with_the_embedding():
    model = tiny_model(tie_word_embeddings=True)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 16)), jnp.float32)
    expected = np.asarray(hidden) @ np.asarray(params(model.config)["embed.embedding"]).T
    np.testing.assert_allclose(model.logits(hidden), expected, atol=1e-5)


def test_compute_dtype_and_parameter_dtype_are_two_things():
    mixed = dataclasses.replace(TINY, dtype="bfloat16")
    run = lambda params: transformer_from(mixed, params).hidden(jnp.asarray(TOKENS), positions=jnp.arange(8)[None])  # noqa: E731
    assert jax.eval_shape(run, params(mixed)).dtype == jnp.bfloat16
    gradient = jax.eval_shape(jax.grad(lambda params: jnp.sum(run(params)).astype(jnp.float32)), params(mixed))
    assert {x.dtype for x in gradient.values()} == {jnp.dtype("float32")}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3"),
        *(
            ({name: size}, f"model.{name}={size} must be at least 1")
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "max_position_embeddings",
            )
            for size in (0, -1)
        ),
        *(({"rope_theta": x}, f"model.rope_theta={x} must be above 0 and finite") for x in (NAN, INF, 0.0, -1.0)),
        *(({"rms_norm_eps": x}, f"model.rms_norm_eps={x} must be 0 or more and finite") for x in (NAN, INF, -1.0)),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"attention": "flash"}, "model.attention='flash' is unknown; choose auto, xla, splash or tokamax"),
        ({"remat": "half"}, "model.remat='half' is unknown; choose none, dots, attention or full"),
        ({"mlp_tile": 0}, "model.mlp_tile=0 is no number of tokens; give 1 or more, or none for all at once"),
        (
            {"position_embedding_type": "alibi"},
            "position_embedding_type='alibi' is unknown; choose rope or learned_abs",
        ),
    ],
)
def test_values_that_cannot_be_are_one_clear_line(fields, message):
    with pytest.raises(UserError, match=message) as caught:
        dataclasses.replace(TINY, **fields)
    assert "\n" not in str(caught.value)
