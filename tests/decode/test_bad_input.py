"""Bad input gets one clear line that names the field, the prompt or the mend."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.one_line import message_of
from wedlm_jax import DecodeConfig, Engine, Model, generate, stream
from wedlm_jax.data.tokenizer import train_tokenizer
from wedlm_jax.decode import generation
from wedlm_jax.errors import UserError

from .models import TINY, config_of, tiny_model

FIELDS = {
    "decoder": ["greedy", None],
    "refill": ["lazy"],
    "fill_rule": ["most", None],
    "verify": ["all", True],
    "window_size": [0, -1, 2.0, True, "4", "AUTO", None, 2**31],
    "block_size": [0, 1.5],
    "max_new_tokens": [0, None],
    "entropy_threshold": [-0.1, float("nan"), "0.4", -float("inf")],
    "distance_penalty": [-0.1, float("nan"), float("inf"), 1e39],
    "confidence_threshold": [-0.1, 1.1, float("nan"), None],
    "temperature": [-1.0, float("nan"), float("inf"), 1e39],
    "top_k": [-1, 2.5, 2**40],
    "top_p": [0.0, -0.5, 1.01, float("nan"), 1e-300, 10**400],
    "stop_ids": [5, "ab", (1.5,), ("a",), (2**40,), tuple(range(65))],
    "stop": ["END", ("",), (1,), None],
    "mask_token_id": ["x", 1.0, True],
    "text_drafts": [1, "no"],
    "ban_mask": [1, None],
    "reorder": [0, "none"],
    "seed": [None, 0.5, -1, 2**63],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in FIELDS.items() for v in values], ids=str)
def test_a_bad_setting_is_named(field, value):
    assert field in message_of(DecodeConfig, **{field: value})


@pytest.mark.parametrize("fields", [dict(decoder="verified"), dict(refill="paper"), dict(decoder="lookup")], ids=str)
def test_fallback_belongs_to_eager_streaming(fields):
    """`by` leaves it behind where another decoder is set beside."""
    assert DecodeConfig(verify="fallback").by("ar") == DecodeConfig(decoder="ar")
    assert DecodeConfig(verify="fallback").by("streaming", seed=3) == DecodeConfig(verify="fallback", seed=3)
    with pytest.raises(UserError, match="verify=fallback is a mode of decoder=streaming with refill=eager"):
        DecodeConfig(**fields, verify="fallback")


def test_every_setting_is_checked():
    assert set(FIELDS) == {f.name for f in dataclasses.fields(DecodeConfig)}


def test_the_edges_of_the_allowed_settings_are_allowed():
    for fields in (
        dict(entropy_threshold=None),
        dict(entropy_threshold=float("inf")),
        dict(entropy_threshold=0, distance_penalty=0, temperature=0),
        dict(top_p=1, confidence_threshold=0, top_k=0),
        dict(window_size="auto"),
        dict(window_size=1, max_new_tokens=1, block_size=1),
        dict(stop=["a"], stop_ids=[1, 2]),
    ):
        DecodeConfig(**fields)


def test_numpy_integers_are_settings_like_any_other():
    fields = dict(window_size=3, block_size=3, max_new_tokens=2, top_k=2, seed=1, mask_token_id=10, stop_ids=(3,))
    ours = DecodeConfig(**{name: np.array(value)[()] for name, value in fields.items() if name != "stop_ids"},
                        stop_ids=tuple(np.array(fields["stop_ids"])))  # fmt: skip
    assert ours == DecodeConfig(**fields)
    assert {type(getattr(ours, name)) for name in fields if name != "stop_ids"} == {int}
    assert generate(tiny_model(), [[1]], ours) == generate(tiny_model(), [[1]], DecodeConfig(**fields))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_new_tokens": 3}, "config must be a DecodeConfig, or a list of one for each prompt, not {'max_new"),
        (None, "config must be a DecodeConfig, or a list of one for each prompt, not None"),
        ([{"decoder": "ar"}], "prompt 0: config must be a DecodeConfig, not {'decoder': 'ar'}"),
    ],
)
def test_settings_of_another_kind_are_refused(config, message):
    with pytest.raises(UserError, match=re.escape(message)):
        generate(tiny_model(), [[1]], config)


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True])
def test_a_number_of_completions_that_is_none_is_refused(n):
    with pytest.raises(UserError, match="n="):
        generate(tiny_model(), [[1]], DecodeConfig(), n=n)


def test_a_block_larger_than_the_context_is_refused():
    with pytest.raises(UserError, match="block_size=65 exceeds the model's context of 64; lower it"):
        generate(tiny_model(), [[1]], DecodeConfig("blockwise", block_size=65, max_new_tokens=2))


@pytest.mark.parametrize("decoder", ["streaming", "verified", "lookup"])
def test_a_window_larger_than_the_context_is_refused(decoder):
    with pytest.raises(UserError, match="window_size=65 exceeds the model's context of 64; lower it"):
        generate(tiny_model(), [[1]], DecodeConfig(decoder, window_size=65, max_new_tokens=2))


@pytest.mark.parametrize("use", [lambda path: generate(path, [[1]]), Engine])
def test_a_path_is_no_model(use):
    with pytest.raises(UserError, match="model must be what wedlm_jax.load returns, not 'runs/sft'"):
        use("runs/sft")


def test_token_ids_may_be_arrays_and_prompts_a_generator():
    config = config_of("ar", max_new_tokens=2)
    expected = generate(tiny_model(), [[1, 2], [3, 4]], config)
    for prompts in (np.array([[1, 2], [3, 4]]), jnp.array([[1, 2], [3, 4]]), ([i, i + 1] for i in (1, 3))):
        assert generate(tiny_model(), prompts, config) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt 0 is empty"),
        ([[1], [TINY.vocab_size]], r"prompt 1: token id 11 is not in the vocabulary \[0, 11\)"),
        ([[1, -1]], "prompt 0: token id -1"),
        (["text"], "prompt 0: this model has no tokenizer, and so reads no text; .* token ids"),
        ([[{"role": "user", "content": "hi"}]], "prompt 0: this model has no tokenizer"),
        ([[1, "a"]], "prompt 0: must be text, a list of messages or a list of token ids"),
        (jnp.array([1, 2]), "prompt 0: must be text, a list of messages or a list of token ids"),
        ([b"ab"], "prompt 0: must be text, a list of messages or a list of token ids, not b'ab'"),
        ([None], "prompt 0: must be text"),
        ([[True]], "prompt 0: must be text"),
        ([1, 2], "wrap a single one in a list"),
        ("text", "wrap a single one in a list"),
        ({"a": [1]}, "prompts must be a list of prompts, not {'a': "),
        (5, "prompts must be a list of prompts, not 5"),
        ([[1] * 51], "prompt 0: 51 prompt tokens [+] max_new_tokens=14 exceed the model's context of 64"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_named(prompts, message):
    with pytest.raises(UserError, match=message):
        generate(tiny_model(), prompts, config_of("streaming_eager"))
    if isinstance(prompts, list) and isinstance(prompts[-1], list):
        with pytest.raises(UserError):
            list(stream(tiny_model(), prompts[-1], config_of("streaming_eager")))


def test_mask_slots_may_pass_the_context():
    """The window hangs over the end of a context that prompt and output fill to the last position."""
    short = dataclasses.replace(tiny_model(), config=dataclasses.replace(TINY, max_position_embeddings=30))
    prompts, config = [[1] * 16] * 3, config_of("streaming_eager")
    completions = generate(short, prompts, config)
    assert completions == generate(tiny_model(), prompts, config)
    assert len(completions[0].ids) == 14
    with pytest.raises(UserError, match="exceed the model's context of 30"):
        generate(short, [[1] * 17], config_of("streaming_eager"))


def test_counts_of_copies_and_of_configs_are_checked():
    with pytest.raises(UserError, match="n=0: must be at least 1"):
        generate(tiny_model(), [[1]], n=0)
    with pytest.raises(UserError, match="2 configs for 1 prompts"):
        generate(tiny_model(), [[1]], [DecodeConfig(), DecodeConfig()])
    assert generate(tiny_model(), []) == []


@pytest.mark.parametrize("mask_token_id", [-1, TINY.vocab_size])
def test_a_mask_id_out_of_range_is_named(mask_token_id):
    with pytest.raises(UserError, match=f"mask_token_id={mask_token_id} is not in the vocabulary"):
        generate(tiny_model(), [[1]], config_of("streaming_eager", mask_token_id=mask_token_id))


@pytest.mark.parametrize("stop_id", [-1, TINY.vocab_size])
def test_a_stop_id_out_of_range_is_named(stop_id):
    with pytest.raises(UserError, match=f"stop_ids: {stop_id} is not in the vocabulary"):
        generate(tiny_model(), [[1]], config_of("ar", stop_ids=(3, stop_id)))


def test_without_a_mask_id_decoding_by_masks_names_what_works_instead():
    model = dataclasses.replace(tiny_model(), mask_token_id=None)
    for loop in ("streaming_eager", "verified", "blockwise"):
        with pytest.raises(
            UserError, match="no mask token: --decoder ar and lookup need none.* adapter .*mask_token_id"
        ):
            generate(model, [[1]], config_of(loop))
    for loop in ("ar", "lookup"):
        assert len(generate(model, [[1]] * 3, config_of(loop))[0].ids) == 14
    assert len(generate(model, [[1]] * 3, config_of("streaming_eager", mask_token_id=10))[0].ids) == 14


def with_tokenizer(template: str | None) -> Model:
    tokenizer = train_tokenizer(["x"], 260)
    tokenizer.chat_template = template
    return dataclasses.replace(tiny_model(), tokenizer=tokenizer)


@pytest.mark.parametrize("content", [None, 5, [{"type": "image_url"}]])
def test_content_that_is_no_text_is_named_with_its_message(content):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    with pytest.raises(UserError, match="prompt 0: message 1: content (is|holds) "):
        generate(with_tokenizer("{{ messages[0].content }}"), [messages])


def test_a_chat_template_that_is_missing_or_refuses_is_named():
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(UserError, match="prompt 0: the model's tokenizer has no chat template"):
        generate(with_tokenizer(None), [messages])
    with pytest.raises(UserError, match=r"prompt 0: the chat template refuses the conversation \(no pirates\)"):
        generate(with_tokenizer("{{ raise_exception('no pirates') }}"), [messages])
    with pytest.raises(UserError, match="prompt 0 is empty"):
        generate(with_tokenizer(None), [""])


@pytest.mark.parametrize("where", ["start", "run", "run_stepwise"])
def test_out_of_memory_names_batch_and_window(monkeypatch, where):
    def exhausted(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.")

    monkeypatch.setattr(generation, where, exhausted)
    with pytest.raises(
        UserError,
        match="out of memory with a batch of 2 and a window of 4 .*: pass fewer prompts at a time, or lower window",
    ) as error:
        generate(tiny_model(), [[1], [2]], config_of("streaming_eager"), trace=where == "run_stepwise")
    assert "\n" not in str(error.value)
    if where != "run":
        with pytest.raises(UserError, match="out of memory with a batch of 1"):
            list(stream(tiny_model(), [1], config_of("streaming_eager")))


def test_out_of_memory_names_as_many_rows_as_were_decoded(monkeypatch):
    def exhausted(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(generation, "start", exhausted)
    with pytest.raises(UserError, match="out of memory with a batch of 48 "):  # 33, filled up
        generate(tiny_model(), [[1]] * 33, config_of("ar"))


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        ("streaming_eager", "a batch of 1 and a window of 4 .*: lower window_size or max_new_tokens"),
        ("blockwise", "a batch of 1 and blocks of 4 .*: lower block_size or max_new_tokens"),
        ("ar", "a batch of 1 .max_new_tokens=14.: lower max_new_tokens"),
    ],
)
def test_out_of_memory_names_what_the_decoder_is_sized_by(monkeypatch, loop, line):
    def exhausted(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(generation, "start", exhausted)
    with pytest.raises(UserError, match=line):
        generate(tiny_model(), [[1]], config_of(loop, window_size=4))


def test_other_device_errors_are_not_called_out_of_memory(monkeypatch):
    def broken(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(generation, "run", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        generate(tiny_model(), [[1]] * 3, config_of("streaming_eager"))
