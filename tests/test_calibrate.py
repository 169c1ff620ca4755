"""`python -m wedlm_jax.calibrate`: the fastest pair that agrees often enough is stored and used from then on."""

import dataclasses
import json
import warnings

import pytest

from tests.evals.models import tiny_model
from tests.one_line import complaint_of
from wedlm_jax import DecodeConfig, calibrate, generate, load, save
from wedlm_jax.checkpoint import Checkpoints
from wedlm_jax.data.tokenizer import save_tokenizer
from wedlm_jax.decode.calibration import Calibration, read_calibration, write_calibration
from wedlm_jax.decode.measured_windows import device_name, read_measured_windows, windows_in_use, write_measured_windows
from wedlm_jax.engine import Engine
from wedlm_jax.errors import UserError
from wedlm_jax.evals import windows
from wedlm_jax.evals.thresholds import PENALTIES, THRESHOLDS, choose
from wedlm_jax.model.handle import CALIBRATION_FILE, WINDOWS_FILE
from wedlm_jax.model.parameters import init_params
from wedlm_jax.model.window_table import AUTO_WINDOWS, WindowTable, presumed_table
from wedlm_jax.model_file import ModelFile
from wedlm_jax.optimizer import OptimizerConfig
from wedlm_jax.train_state import new_state

FLAGS = ("--max-new-tokens", "9", "--window-size", "4", "--batch-size", "8")


@pytest.fixture
def folder(tmp_path):
    """Its name reads as a style of rich's."""
    folder = tmp_path / "[v2]"
    save(tiny_model(), folder / "model")
    lines = [{"prompt": "Anna has 3 apples."}, {"prompt_ids": [5, 6, 7]}]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def call(folder, monkeypatch):
    def run(*flags):
        names = ("--model", str(folder / "model"), "--data", str(folder / "in.jsonl"))
        monkeypatch.setattr("sys.argv", ["calibrate", *names, *FLAGS, *flags])
        calibrate.main()

    return run


def measured(tau, penalty, disagreement, speed):
    return Calibration(tau, penalty, 4, 0.1, disagreement, 100, speed)


def test_the_fastest_that_agrees_often_enough_is_chosen():
    slow, fast, wrong = measured(0.1, 0.0, 0.0, 2.0), measured(0.4, 0.0, 0.1, 3.0), measured(0.8, 0.0, 0.11, 4.0)
    assert choose([slow, fast, wrong]) is fast
    exact = measured(0.4, 0.5, 0.0, 3.0)
    assert choose([slow, fast, exact]) is exact  # as fast, and it agrees more
    assert choose([wrong]) is None


def test_it_is_stored_beside_the_weights_and_used_and_named(call, folder, capsys, monkeypatch):
    call("--max-disagreement", "0.99")
    found = read_calibration(folder / "model")
    shown = capsys.readouterr().out
    assert (
        f"{folder / 'model' / CALIBRATION_FILE}, for {folder / 'model'}: " in shown
        and found.window_size == 4
        and found.max_disagreement == 0.99
    )
    assert found.entropy_threshold in THRESHOLDS and found.distance_penalty in PENALTIES
    model = load(folder / "model")
    assert model.calibration == found
    left_open = DecodeConfig(max_new_tokens=9, window_size=4)
    spelled_out = dataclasses.replace(
        left_open, entropy_threshold=found.entropy_threshold, distance_penalty=found.distance_penalty
    )
    (ours,) = generate(model, ["Anna has 3 apples."], left_open)
    assert ours == generate(tiny_model(), ["Anna has 3 apples."], spelled_out)[0]
    save(model, folder / "again")
    assert read_calibration(folder / "again") == found

    command = __import__("importlib").import_module("wedlm_jax.generate.__main__")
    flags = ["--model", str(folder / "model"), "--prompt", "Anna has 3 apples.", *FLAGS]
    monkeypatch.setattr("sys.argv", ["generate", *flags])
    command.main()
    shown = capsys.readouterr()
    assert shown.out == ours.text + "\n" and found.in_words() in shown.err and "but with" not in shown.err
    monkeypatch.setattr("sys.argv", ["generate", *flags, "--entropy-threshold", "0.4"])
    command.main()
    assert "calibrated" not in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["generate", *flags, "--distance-penalty", "0.7"])
    command.main()
    assert "but with lambda 0.7, as given, for which no disagreement was measured" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["generate", *flags, "--window-size", "3", "--temperature", "0.5"])
    command.main()
    message = "but with window_size 3, temperature 0.5, for which no disagreement was measured"
    assert message in capsys.readouterr().err


def test_a_calibration_of_other_weights_is_named_and_not_used(folder):
    found = measured(0.4, 0.0, 0.1, 3.0)
    write_calibration(folder / "model", found, tiny_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(load(folder / "model", "bfloat16"), folder / "rounded")
        for dtype in ("float32", "bfloat16"):
            assert load(folder / "rounded", dtype).calibration == found  # another dtype is no other weights
    save(tiny_model(seed=1), folder / "other")
    write_calibration(folder / "other", found, tiny_model())
    with pytest.warns(
        UserWarning, match="decoding.json was measured on other weights than these .* not used"
    ) as noticed:
        assert load(folder / "other").calibration is None
    assert len(noticed) == 1 and "python -m wedlm_jax.calibrate" in str(noticed[0].message)


def test_a_step_of_a_workdir_is_calibrated_in_the_workdir_and_named(call, tmp_path, capsys, monkeypatch):
    model, found = tiny_model(), measured(0.4, 0.0, 0.0, 3.0)
    save_tokenizer(model.tokenizer, tmp_path / "run" / "tokenizer")
    ModelFile(model.config, model.mask_token_id, model.eos_token_ids).write(tmp_path / "run")
    with Checkpoints(tmp_path / "run", keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(new_state(init_params(model.config, step), OptimizerConfig()), step, {}, {})
    monkeypatch.setattr(calibrate, "measure_thresholds", lambda *_: [found])
    monkeypatch.setenv("HOME", str(tmp_path))
    call("--model=~/run@1")
    assert f"{tmp_path / 'run' / CALIBRATION_FILE}, for ~/run@1: tau 0.4, " in capsys.readouterr().out
    assert load(tmp_path / "run@1").calibration == found
    with pytest.warns(UserWarning, match="measured on other weights than these .*another step"):
        assert load(tmp_path / "run").calibration is None


def test_where_nothing_agrees_often_enough_the_least_is_named_and_nothing_is_stored(call, folder, capsys):
    with pytest.raises(SystemExit) as exit:
        call("--max-disagreement", "0", "--limit", "1")
    assert exit.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: no tau and lambda") and "--decoder verified" in message
    assert not (folder / "model" / CALIBRATION_FILE).exists()


def test_tokens_too_few_for_the_limit_are_told(call, capsys, monkeypatch):
    """Of 18 tokens that all agreed it said 0.00 %, and stored the fastest pair."""
    monkeypatch.setattr(calibrate, "measure_thresholds", lambda *_: [measured(0.4, 0.0, 0.0, 3.0)])
    call("--max-disagreement", "0.01")
    assert capsys.readouterr().err == ""
    call("--max-disagreement", "0.009")
    assert capsys.readouterr().err.startswith("note: 100 tokens are too few for --max-disagreement 0.009, which one")


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (("--max-disagreement", "1"), "--max-disagreement 1"),
        (("--limit", "0"), "--limit 0"),
        (("--batch-size", "0"), "--batch-size 0"),
        (("--decoder", "blockwise"), "decoder=blockwise: only plain streaming and verified decoding can be calibrated"),
        (("--verify", "fallback"), "verify=fallback: only plain streaming and verified decoding can be calibrated"),
        (("--fill-rule", "sum"), "fill_rule=sum: only plain streaming and verified decoding can be calibrated"),
        (("--entropy-threshold", "0.4"), "--entropy-threshold: tau and lambda are what is chosen here; leave it out"),
        (("--entropy-threshold", "none"), "--entropy-threshold: tau and lambda are what is chosen here; leave it out"),
        (("--distance-penalty", "0.5"), "--distance-penalty: tau and lambda are what is chosen here; leave it out"),
        (("--temperature", "0.5"), "--temperature 0.5"),
        (("--mask-token-id", "7"), "--mask-token-id: what is stored is for the model's own mask, which is never drawn"),
        (("--no-ban-mask",), "--no-ban-mask: what is stored is for the model's own mask, which is never drawn"),
        (("--model", "owner/name"), "is no local directory"),
        (("--data", "nowhere.jsonl"), "--data nowhere.jsonl: cannot be read"),
    ],
)
def test_bad_flags_are_one_line(call, capsys, flags, complaint):
    assert complaint in complaint_of(capsys, call, *flags)


def test_a_prompt_that_does_not_fit_is_told_before_any_other_is_decoded(call, folder, capsys, monkeypatch):
    with (folder / "in.jsonl").open("a") as lines:
        lines.write(json.dumps({"prompt": "x " * 600}) + "\n")
    monkeypatch.setattr(Engine, "submit", lambda *_, **__: pytest.fail("a prompt was decoded"))
    assert "in.jsonl:3: 1200 prompt tokens + max_new_tokens=9" in complaint_of(capsys, call)


@pytest.fixture
def call_windows(folder, monkeypatch):
    monkeypatch.setattr(windows, "SLOTS", (8, 16))
    monkeypatch.setattr(calibrate, "ROUNDS", 1)

    def run(*flags):
        names = ("--model", str(folder / "model"), "--data", str(folder / "in.jsonl"), "--decoder", "verified")
        monkeypatch.setattr("sys.argv", ["calibrate", *names, "--max-new-tokens", "9", *flags])
        calibrate.main()
        return load(folder / "model")

    return run


def test_windows_are_measured_stored_and_used_where_they_were_measured(call_windows, folder, capsys, monkeypatch):
    model = call_windows()
    measured, here = model.measured_windows, device_name(model)
    assert f"{folder / 'model' / WINDOWS_FILE}, for {folder / 'model'} on {here}" in capsys.readouterr().out
    table = model.window_table
    assert (
        table == WindowTable(measured.costs[here], measured.accepted, measured.fed) != presumed_table(model.transformer)
    )
    assert [slots for slots, _ in table.costs] == [1, 8, 16] and table.costs[0] == (1, 1.0)

    prompts = ["Anna has 3 apples.", [5, 6, 7]]
    for window, accepted, fed in zip(AUTO_WINDOWS, measured.accepted, measured.fed, strict=True):
        found = generate(model, prompts, DecodeConfig("verified", window_size=window, max_new_tokens=9), trace=True)
        forwards = [entry for completion in found for entry in completion.trace]
        assert accepted == sum(len(c.ids) for c in found) / len(forwards)
        assert fed == sum(len(entry["window"]) for entry in forwards) / len(forwards)
    assert measured.tokens == sum(len(c.ids) for c in found)

    auto = DecodeConfig("verified", window_size="auto")
    assert (
        windows_in_use(model, [auto]) == [f"windows as measured on {here}"]
        and windows_in_use(model, [DecodeConfig()]) == []
    )
    save(model, folder / "again")
    assert load(folder / "again").measured_windows == measured

    # On another device what windows accept is known still, and what they cost there is added to what was measured here.
    monkeypatch.setattr("wedlm_jax.decode.measured_windows._processor", lambda: "another")
    elsewhere = load(folder / "model")
    presumed = presumed_table(elsewhere.transformer)
    assert elsewhere.window_table == WindowTable(presumed.costs, measured.accepted, measured.fed)
    assert (
        f"they were measured on {here}, not on {device_name(elsewhere)}; python -m"
        in windows_in_use(elsewhere, [auto])[0]
    )
    assert set(call_windows().measured_windows.costs) == {here, device_name(elsewhere)}


def test_windows_of_other_weights_are_named_and_not_used(call_windows, folder):
    measured = call_windows().measured_windows
    save(tiny_model(seed=1), folder / "other")
    write_measured_windows(folder / "other", measured, tiny_model())
    with pytest.warns(UserWarning, match="windows.json was measured on other weights than these .* not used"):
        model = load(folder / "other")
    assert model.window_table == presumed_table(model.transformer)


@pytest.mark.parametrize(
    "changed",
    [
        {"accepted": [1.0, 2.0, 3.0]},
        {"fed": [1.0, 2.0, 3.0, "4"]},
        {"fed": None},
        {"costs": {"cpu": [[1, 1.0]]}},
        {"costs": {"cpu": [[1, 1.0], [8, 0.5]]}},
        {"costs": {"cpu": [[8, 1.0], [1, 2.0]]}},
        {"costs": [[1, 1.0], [8, 2.0]]},
        {"more": 1},
        {"weights": 5},
    ],
)
def test_a_file_of_windows_that_is_not_ours_is_named_with_the_mend(folder, changed):
    whole = {
        "accepted": [1, 2, 3, 4],
        "fed": [1, 2, 3, 4],
        "tokens": 5,
        "costs": {"cpu": [[1, 1.0], [8, 2.0]]},
        "weights": "",
    }
    file = folder / "model" / WINDOWS_FILE
    file.write_text(json.dumps(whole))
    assert read_measured_windows(folder / "model").costs == {"cpu": ((1, 1.0), (8, 2.0))}
    file.write_text(json.dumps(whole | changed))
    with pytest.raises(UserError, match=r"windows.json: not a file of measured windows .* delete it; python") as raised:
        load(folder / "model")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-disagreement", "0.1"), "--max-disagreement 0.1: verified decoding never disagrees; leave it out"),
        (("--window-size", "8"), "window_size=8: windows are measured as verified decoding is by itself; leave it out"),
        (("--no-text-drafts",), "text_drafts=False: windows are measured as verified"),
    ],
)
def test_what_measured_windows_do_not_depend_on_is_refused(call_windows, folder, capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        call_windows(*flags)
    assert stopped.value.code and message in capsys.readouterr().err
    assert not (folder / "model" / WINDOWS_FILE).exists()
