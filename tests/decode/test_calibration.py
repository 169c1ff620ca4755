"""decoding.json: what was measured is read back as it was written, and used where a request leaves the choice open."""

from __future__ import annotations

import dataclasses
import json

import pytest

from wedlm_jax import DecodeConfig, generate
from wedlm_jax.decode.calibration import FILE, Calibration, fingerprint, read_calibration, write_calibration
from wedlm_jax.errors import UserError
from wedlm_jax.model.parameters import params_of, transformer_from

from .models import config_of, tiny_model

FOUND = Calibration(
    entropy_threshold=1.6, distance_penalty=0.3, window_size=4, max_disagreement=0.5, disagreement=0.25, tokens=80,
    tokens_per_forward=1.5, weights="0123",
)  # fmt: skip


def test_what_is_written_is_read_back_and_nothing_is_there_without_a_file(tmp_path):
    assert read_calibration(tmp_path) is None
    assert write_calibration(tmp_path, FOUND) == tmp_path / FILE
    assert read_calibration(tmp_path) == FOUND


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[1]",
        "{}",
        json.dumps({**dataclasses.asdict(FOUND), "more": 1}),
        json.dumps({**dataclasses.asdict(FOUND), "entropy_threshold": "low"}),
        json.dumps({**dataclasses.asdict(FOUND), "entropy_threshold": float("nan")}),
        json.dumps({**dataclasses.asdict(FOUND), "tokens": 1.5}),
        json.dumps({**dataclasses.asdict(FOUND), "distance_penalty": -1}),
        json.dumps({**dataclasses.asdict(FOUND), "weights": 7}),
    ],
)
def test_a_file_that_is_not_ours_is_named_with_the_mend(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(UserError, match=r"decoding.json: not a calibration .* delete it, or write it anew") as raised:
        read_calibration(tmp_path)
    assert "\n" not in str(raised.value)


def test_it_fills_in_what_streaming_leaves_open_and_nothing_else():
    assert FOUND.apply(DecodeConfig()) == DecodeConfig(entropy_threshold=1.6, distance_penalty=0.3)
    assert FOUND.apply(DecodeConfig(distance_penalty=0.1)) == DecodeConfig(entropy_threshold=1.6, distance_penalty=0.1)
    for config in (
        DecodeConfig(entropy_threshold=0.4),
        DecodeConfig(entropy_threshold=None),
        DecodeConfig("verified"),
        DecodeConfig(verify="fallback"),
    ):
        assert FOUND.apply(config) is config


def test_a_calibrated_model_decodes_by_it():
    calibrated = dataclasses.replace(tiny_model(), calibration=FOUND)
    prompts = [[1, 2, 3], [4, 5], [6]]
    left_open = config_of("streaming_eager", entropy_threshold="auto")
    spelled_out = config_of("streaming_eager", entropy_threshold=1.6, distance_penalty=0.3)
    ours, plain = (generate(model, prompts, left_open) for model in (calibrated, tiny_model()))
    assert ours == generate(tiny_model(), prompts, spelled_out) != plain


def test_a_fingerprint_is_of_the_weights_and_of_every_parameter():
    model = tiny_model()
    params = params_of(model.transformer)

    def of(changed: dict) -> str:
        return fingerprint(dataclasses.replace(model, transformer=transformer_from(model.config, params | changed)))

    assert of({}) == fingerprint(model) != fingerprint(tiny_model(1))
    changed = [of({name: 1.01 * value}) for name, value in params.items()]
    assert len({fingerprint(model), *changed}) == 1 + len(params)
    rounded = {name: value.astype("bfloat16").astype("float32") for name, value in params.items()}
    assert of(rounded) == fingerprint(model)
