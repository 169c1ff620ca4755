"""Adapters of all rows in PEFT's format: read, written, and computed as PEFT computes them; what is more than LoRA is refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from wedlm_jax import load, save, save_adapter
from wedlm_jax.errors import UserError
from wedlm_jax.hf import peft as of_peft
from wedlm_jax.hf.adapter import ADAPTER_FILE
from wedlm_jax.model.adapter import TARGETS, AdapterConfig
from wedlm_jax.model.parameters import params_of

from .adapters import BASE, ON_ALL, ON_MASKS, adapted
from .conftest import ORACLE

try:
    import peft
    import torch
    import transformers
except ImportError:
    peft = None
needs_peft = pytest.mark.skipif(
    peft is None, reason="torch and peft are not installed: pip install -r requirements-torch.txt"
)

PLAIN = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
ATTENTION = AdapterConfig(rank=4, alpha=2.0, targets=("q_proj", "v_proj", "o_proj"), rows="all")
TOKENS = np.random.default_rng(1).integers(0, 200, (2, 24))


def logits_in_torch(base, adapter=None):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS)).logits.numpy()


def logits_of_ours(model):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    return np.asarray(model(jnp.asarray(TOKENS), positions=positions))


@needs_peft
@pytest.mark.parametrize(
    ("name", "arch", "adapter"), [("wedlm_qwen3", "qwen3", ON_ALL), ("wedlm_qwen25", "qwen2", ATTENTION)]
)
def test_peft_reads_what_is_saved_and_computes_our_logits(name, arch, adapter, tmp_path):
    model = adapted(adapter, ORACLE / name / "model")
    save(load(ORACLE / name / "model", "float32"), tmp_path / "base", arch)
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    ours, theirs = logits_of_ours(model), logits_in_torch(tmp_path / "base", tmp_path / "adapter")
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(1.0, np.abs(ours).max()), rtol=0)
    assert np.abs(ours - logits_in_torch(tmp_path / "base")).max() > 0.1
    save(model, tmp_path / "merged", arch)
    np.testing.assert_allclose(
        logits_in_torch(tmp_path / "merged"), theirs, atol=1e-4 * max(1.0, np.abs(ours).max()), rtol=0
    )


@needs_peft
def test_what_peft_saves_is_read_and_comes_back_the_same(tmp_path):
    """PEFT makes an adapter, we load and save it, PEFT reads that: tensors and settings are as they were."""
    save(load(BASE, "float32"), tmp_path / "base", "qwen3")
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.1,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32), settings
    )
    theirs.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "base", "float32", adapter=tmp_path / "theirs")
    assert model.config.adapter == AdapterConfig(4, 6.0, ("q_proj", "down_proj"), "all")
    ours = logits_of_ours(model)
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4 * max(1.0, np.abs(ours).max()), rtol=0)
    save_adapter(model, tmp_path / "ours")
    before, after = (peft.load_peft_weights(str(tmp_path / folder), device="cpu") for folder in ("theirs", "ours"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again = peft.LoraConfig.from_pretrained(tmp_path / "ours")
    assert (again.r, again.lora_alpha, again.target_modules) == (4, 6, {"q_proj", "down_proj"})


@needs_peft
def test_every_field_of_pefts_lora_is_known_and_its_defaults_are_plain():
    fields = peft.LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    fields["target_modules"] = list(fields["target_modules"])
    assert fields.keys() <= of_peft.NEUTRAL.keys() | of_peft.DESCRIPTIVE | PLAIN.keys()
    assert of_peft.from_peft(fields, BASE).rank == 3


@needs_peft
def test_peft_does_not_take_an_adapter_of_mask_rows_for_one_of_all_rows(tmp_path):
    save_adapter(adapted(ON_MASKS), tmp_path)
    with pytest.raises(ValueError, match="adapter_config.json"):
        peft.PeftConfig.from_pretrained(str(tmp_path))


def test_a_directory_of_peft_alone_is_read(tmp_path):
    model = adapted(ON_ALL)
    save_adapter(model, tmp_path)
    (tmp_path / ADAPTER_FILE).unlink()
    again = load(BASE, "float32", adapter=tmp_path)
    assert again.config == model.config
    for name, x in params_of(again.transformer).items():
        np.testing.assert_array_equal(x, params_of(model.transformer)[name])
    with pytest.raises(
        UserError, match="the tensors do not fit this adapter on this base: extra .* and 12 more; misshapen .*"
    ):
        load(ORACLE / "qwen3_plain" / "model", "float32", adapter=tmp_path)


@pytest.mark.parametrize("adapter", [ON_ALL, AdapterConfig(5, 2.5, ("up_proj",), "all")])
def test_its_configuration_is_ours_both_ways(adapter):
    assert of_peft.from_peft(json.loads(json.dumps(of_peft.to_peft(adapter, "base"))), BASE) == adapter


# What PEFT can say and we cannot do; every field of NEUTRAL is here.
BEYOND = {
    "peft_type": "IA3", "task_type": "SEQ_CLS", "bias": "all", "lora_bias": True, "fan_in_fan_out": True,
    "use_rslora": True, "use_dora": True, "use_qalora": True, "use_bdlora": {}, "modules_to_save": ["lm_head"],
    "exclude_modules": ["k_proj"], "layers_to_transform": [0], "layers_pattern": ["layers"],
    "layer_replication": [[0, 2]], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2},
    "target_parameters": ["a.b"], "trainable_token_indices": [1], "alora_invocation_tokens": [1],
    "init_lora_weights": "pissa", "loftq_config": {"bits": 4}, "eva_config": {"rho": 2}, "corda_config": {"a": 1},
    "lora_ga_config": {"a": 1}, "arrow_config": {"a": 1}, "megatron_config": {"a": 1}, "ensure_weight_tying": True,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(of_peft.NEUTRAL))
def test_what_only_peft_can_do_is_refused_by_name(name, tmp_path):
    file = tmp_path / "adapter_config.json"
    with pytest.raises(UserError) as error:
        of_peft.from_peft(PLAIN | {name: BEYOND[name]}, file)
    assert str(error.value).startswith(f"{file}: {name}={BEYOND[name]!r} is not implemented (only ")
    neutral = of_peft.NEUTRAL[name]
    assert all(of_peft.from_peft(PLAIN | {name: value}, file).rank == 3 for value in neutral)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": None}, "r=None is not a whole number"),
        ({"lora_alpha": "6"}, "lora_alpha='6' is not a number"),
        ({"lora_alpha": 0}, "adapter.alpha=0.0 must be above 0"),
        ({"target_modules": None}, "target_modules=None is neither a list of names nor a pattern"),
        ({"target_modules": [3]}, "target_modules=[3] is neither a list of names nor a pattern"),
        ({"target_modules": "all-linear"}, "must name at least one projection"),
        ({"target_modules": ["model.lm_head"]}, "target_modules holds 'model.lm_head', not implemented (only q_proj"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules holds 'lm_head', not implemented (only q_proj"),
        ({"target_modules": []}, "must name at least one projection"),
        ({"use_future": 1}, "use_future is not a field of LoRA in PEFT 0.19"),
    ],
)
def test_bad_fields_are_named(fields, message, tmp_path):
    with pytest.raises(UserError) as error:
        of_peft.from_peft(PLAIN | fields, tmp_path)
    assert message in str(error.value)
    for name in PLAIN:
        with pytest.raises(UserError, match=f"missing field {name}"):
            of_peft.from_peft({field: value for field, value in PLAIN.items() if field != name}, tmp_path)


@pytest.mark.parametrize("nothing", [None, False, [], {}])
def test_an_unknown_field_that_asks_for_nothing_is_plain_lora(nothing, tmp_path):
    assert of_peft.from_peft(PLAIN | {"use_future": nothing}, tmp_path) == of_peft.from_peft(PLAIN, tmp_path)


@pytest.mark.parametrize("initial", ["gaussian", "orthogonal"])
def test_initial_values_that_leave_the_base_as_it_is_are_plain_lora(initial, tmp_path):
    assert of_peft.from_peft(PLAIN | {"init_lora_weights": initial}, tmp_path) == of_peft.from_peft(PLAIN, tmp_path)


LAYERS = [f"model.layers.{layer}" for layer in range(3)]


@pytest.mark.parametrize(
    "targets",
    [
        ["self_attn.q_proj", "mlp.up_proj"],
        [f"{layer}.{end}" for layer in LAYERS for end in ("mlp.up_proj", "self_attn.q_proj")],
        r".*\.(q|up)_proj",
    ],
)
def test_targets_may_be_named_as_peft_matches_them(targets, tmp_path):
    """By any end of their path, each in full as all-linear leaves them in a large model, or by a pattern."""
    model = adapted(AdapterConfig(3, 6.0, ("q_proj", "up_proj"), "all"))
    save_adapter(model, tmp_path)
    (tmp_path / ADAPTER_FILE).unlink()
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": targets}))
    assert load(BASE, "float32", adapter=tmp_path).config.adapter == model.config.adapter
    weights = tmp_path / "adapter_model.safetensors"
    kept = {name: x for name, x in load_file(weights).items() if "layers.2.mlp" not in name}
    save_file(kept, weights)
    with pytest.raises(UserError, match="do not fit this adapter on this base: missing .*layers.2.mlp.up_proj.lora_A"):
        load(BASE, "float32", adapter=tmp_path)


def test_a_pattern_that_matched_what_is_not_implemented_is_refused_by_the_name_of_that(tmp_path):
    pairs = [f"base_model.model.{name}.weight" for name in ("model.layers.0.mlp.up_proj.lora_A", "lm_head.lora_A")]
    with pytest.raises(UserError, match="target_modules holds 'base_model.model.lm_head', not implemented"):
        of_peft.from_peft(PLAIN | {"target_modules": "all-linear"}, tmp_path, pairs)


def test_targets_come_in_one_order(tmp_path):
    assert of_peft.from_peft(PLAIN | {"target_modules": list(reversed(TARGETS))}, tmp_path).targets == TARGETS
