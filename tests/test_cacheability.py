"""`python -m wedlm_jax.cacheability`: streaming beside block-wise on the same prompts, what follows, JSON and a plot."""

import dataclasses
import json
import sys

import pytest

from tests.evals.test_tradeoff import point
from tests.one_line import complaint_of
from wedlm_jax import cacheability as command
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.evals import sweep
from wedlm_jax.evals.order import Order


def test_every_decoder_is_measured_on_the_same_prompts(monkeypatch, capsys, model_dir, tmp_path, figures):
    flags = ("--tasks", "counting", "--limit", "2", "--thresholds", "inf", "--fill-rules", "each", "each", "--confidences", "0.5",
             "--window-size", "4", "--block-size", "4", "--max-new-tokens", "6", "--batch-size", "2", "--out",
             str(tmp_path / "out"))  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["cacheability", "--model", str(model_dir), *flags])
    command.main()
    points = json.loads((tmp_path / "out" / "cacheability.json").read_text())["tasks"]["counting"]["points"]
    assert [p["settings"]["decoder"] for p in points] == ["streaming", "blockwise", "verified"]
    assert points[0]["commit_rate"] == 1 and points[0]["out_of_order"] == 0  # tau = inf fills the whole window
    assert points[0]["p_cache"] <= 0.5
    assert (tmp_path / "out" / "cacheability.png").read_bytes()[:4] == b"\x89PNG"
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "counting: streaming commits 95% of the filled tokens by the next forward with streaming, each, tau=inf" in said
    )
    assert "best p_cache among settings at least" in said
    assert "counting: of 2 completions 2 (AR) were cut at max_new_tokens=6" in said
    for title in (said, figures[0].get_suptitle()):  # what is not the default
        assert "window_size=4, block_size=4, max_new_tokens=6" in " ".join(title.split())


def test_a_setting_is_saved_and_told_before_the_next_one_is_decoded(monkeypatch, capsys, model_dir, tmp_path):
    by_hand = sweep.generate_rows

    def interrupted_at_blockwise(model, prompts, config, first_row):
        if config.decoder == "blockwise":
            raise KeyboardInterrupt
        return by_hand(model, prompts, config, first_row)

    monkeypatch.setattr(sweep, "generate_rows", interrupted_at_blockwise)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "cacheability.png").write_text("of an earlier run")
    flags = ("--tasks", "counting", "copying", "--limit", "1", "--thresholds", "inf", "--fill-rules", "each", "--window-size",
             "4", "--max-new-tokens", "6", "--batch-size", "2", "--out", str(tmp_path / "out"))  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["cacheability", "--model", str(model_dir), *flags])
    with pytest.raises(SystemExit) as exit:
        command.main()
    tasks = json.loads((tmp_path / "out" / "cacheability.json").read_text())["tasks"]
    assert exit.value.code == 130 and list(tasks) == ["counting"]
    assert not (tmp_path / "out" / "cacheability.png").exists()
    assert [p["settings"]["decoder"] for p in tasks["counting"]["points"]] == ["streaming"]
    assert "counting: streaming, each, tau=inf: 0% exact, " in capsys.readouterr().err


def of(decoder, label, accuracy, p_cache, committed):
    made = point(label, accuracy, 10)
    row = dataclasses.replace(made.row, settings={"decoder": decoder}, p_cache=p_cache)
    return dataclasses.replace(made, row=row, order=Order(100, committed, 1))


def test_the_goal_is_named_where_it_is_missed_and_p_cache_is_compared_at_equal_accuracy():
    points = [
        of("streaming", "a", 0.9, 0.2, 94),
        of("streaming", "b", 0.5, 0.4, 60),
        of("blockwise", "c", 0.8, 0.3, 90),
        of("blockwise", "d", 0.1, 0.5, 99),
    ]
    missed, compared = command.findings("counting", points)
    assert "no setting of streaming commits 95%" in missed and "the most is 0.94 (a)" in missed
    assert "at least 80% exact: 0.20 (a, 90%) against 0.30 (c, 80%)" in compared
    reached = command.findings("counting", [of("streaming", "a", 0.9, 0.2, 95), *points[2:]])[0]
    assert "with a (0.95, 90% exact, p_cache 0.20)" in reached


def test_a_setting_that_fills_no_mask_is_none_that_commits_few():
    none = dataclasses.replace(of("streaming", "a", 0.9, 1.0, 0), order=Order(0, 0, 0))
    some = of("streaming", "b", 0.5, 0.4, 60)
    blockwise = of("blockwise", "c", 0.8, 0.3, 90)
    assert "the most is 0.60 (b)" in command.findings("counting", [none, some, blockwise])[0]
    assert command.findings("counting", [none, blockwise])[0] == "counting: no setting of streaming fills a mask."


def test_the_settings_are_every_rule_with_every_threshold():
    args = command.Cacheability("x", decode=DecodeConfig(window_size=7, block_size=5))
    found = [(s.config.decoder, s.config.fill_rule, s.config.entropy_threshold) for s in command.settings_of(args)]
    assert found[:6] == [("streaming", rule, tau) for rule in ("each", "run") for tau in (0.1, 0.4, 1.0)]
    assert [s.config.confidence_threshold for s in command.settings_of(args)[6:9]] == [0.5, 0.9, 0.99]
    assert all((s.config.window_size, s.config.block_size) == (7, 5) for s in command.settings_of(args))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--limit", "0"), "--limit 0: must be at least 1"),
        (("--entropy-threshold", "1"), "--entropy-threshold does nothing here; use --thresholds"),
        (("--decoder", "ar"), "--decoder ar: streaming, block-wise and verified are compared"),
        (("--thresholds", "-1"), "entropy_threshold=-1.0: must be at least 0"),
        (("--tasks",), "--tasks: give at least one"),
        (("--tasks", "copying", "--questions", "q.jsonl"), "--tasks does nothing here; use it without --questions"),
        (("--questions", "q.jsonl"), "--questions q.jsonl: cannot be read (No such file or directory)"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(monkeypatch, capsys, model_dir, flags, said):
    monkeypatch.setattr(sys, "argv", ["cacheability", "--model", str(model_dir), *flags])
    assert said in complaint_of(capsys, command.main)
