"""decoding.json: what was measured is read back as it was written, and used where a request leaves the choice open."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.bad_input import full_disk
from wedlm_jax import DecodeConfig, generate
from wedlm_jax.decode.calibration import (
    Calibration,
    calibration_in_use,
    fingerprint,
    read_calibration,
    write_calibration,
)
from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import AdapterConfig, is_adapter_parameter
from wedlm_jax.model.handle import CALIBRATION_FILE
from wedlm_jax.model.parameters import init_params, params_of, transformer_from

from .models import config_of, tiny_model

FOUND = Calibration(
    entropy_threshold=1.6, distance_penalty=0.3, window_size=4, max_disagreement=0.5, disagreement=0.25, tokens=80,
    tokens_per_forward=1.5,
)  # fmt: skip


def test_what_is_written_is_read_back_and_nothing_is_there_without_a_file(tmp_path):
    assert read_calibration(tmp_path) is None
    assert write_calibration(tmp_path, FOUND, tiny_model()) == tmp_path / CALIBRATION_FILE
    found = read_calibration(tmp_path)
    assert found == FOUND and found.weights == fingerprint(tiny_model())


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
    (tmp_path / CALIBRATION_FILE).write_text(content)
    with pytest.raises(UserError, match=r"decoding.json: not a calibration .* delete it; python") as raised:
        read_calibration(tmp_path)
    assert "\n" not in str(raised.value)


def test_it_fills_in_what_streaming_leaves_open_and_nothing_else():
    assert FOUND.apply(DecodeConfig()) == DecodeConfig(entropy_threshold=1.6, distance_penalty=0.3)
    assert FOUND.apply(DecodeConfig(fill_rule="each")).entropy_threshold == 1.6  # streaming's own rule, said aloud
    assert FOUND.apply(DecodeConfig(distance_penalty=0.1)) == DecodeConfig(entropy_threshold=1.6, distance_penalty=0.1)
    for config in (
        DecodeConfig(entropy_threshold=0.4),
        DecodeConfig(entropy_threshold=None),
        DecodeConfig("verified"),
        DecodeConfig(verify="fallback"),
        DecodeConfig(fill_rule="sum"),
        DecodeConfig(refill="paper"),
        DecodeConfig(reorder=False),
    ):
        assert FOUND.apply(config) is config


def test_it_knows_for_what_its_disagreement_was_measured():
    measured = dict(distance_penalty=0.3, window_size=4)
    calibrated = f"streaming with {FOUND.in_words()}"
    model = dataclasses.replace(tiny_model(), calibration=FOUND)
    assert calibration_in_use(model, [DecodeConfig(**measured, max_new_tokens=7, seed=3)]) == [calibrated]
    assert calibration_in_use(model, [DecodeConfig("verified"), DecodeConfig(entropy_threshold=0.4)]) == []
    assert calibration_in_use(tiny_model(), [DecodeConfig(**measured)]) == []
    for change, named in (
        (dict(distance_penalty=0.1), "lambda 0.1, as given"),
        (dict(window_size="auto"), "window_size 16"),
        (dict(temperature=0.5), "temperature 0.5"),
        (dict(mask_token_id=7), "mask_token_id 7"),
        (dict(mask_token_id=tiny_model().mask_token_id, ban_mask=False), "ban_mask off"),
    ):
        unmeasured = f"but with {named}, for which no disagreement was measured"
        configs = DecodeConfig("verified"), DecodeConfig(**{**measured, **change})
        assert calibration_in_use(model, configs) == [calibrated, unmeasured]
    rounded = dataclasses.replace(model, config=dataclasses.replace(model.config, kernel_dtype="int8"))
    unmeasured = "but with kernels of int8, for which no disagreement was measured"
    assert calibration_in_use(rounded, [DecodeConfig(**measured)]) == [calibrated, unmeasured]


def test_a_calibrated_model_decodes_by_it():
    calibrated = dataclasses.replace(tiny_model(), calibration=FOUND)
    prompts = [[1, 2, 3], [4, 5], [6]]
    left_open = config_of("streaming_eager", entropy_threshold="auto")
    spelled_out = config_of("streaming_eager", entropy_threshold=1.6, distance_penalty=0.3)
    ours, plain = (generate(model, prompts, left_open) for model in (calibrated, tiny_model()))
    assert ours == generate(tiny_model(), prompts, spelled_out) != plain


def test_a_fingerprint_is_of_base_and_adapter():
    model = tiny_model()
    params = params_of(model.transformer)
    config = dataclasses.replace(model.config, adapter=AdapterConfig(rank=2))
    pairs = {name: x for name, x in init_params(config, 0).items() if is_adapter_parameter(name)}

    def of(config, changed: dict) -> str:
        return fingerprint(
            dataclasses.replace(model, config=config, transformer=transformer_from(config, params | changed))
        )

    one = next(iter(pairs))
    seen = [
        of(model.config, {}),
        of(model.config, {"final_norm.scale": 1.01 * params["final_norm.scale"]}),
        of(config, pairs),
        of(config, pairs | {one: pairs[one] + 1}),
    ]
    assert len(set(seen)) == 4 and seen[2].startswith(seen[0])


def test_a_calibration_that_cannot_be_written_leaves_the_one_before_it(tmp_path):
    file = write_calibration(tmp_path, FOUND, tiny_model())
    before = file.read_bytes()
    with full_disk(), pytest.raises(UserError, match="cannot be written"):
        write_calibration(tmp_path, dataclasses.replace(FOUND, tokens=9), tiny_model())
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
