"""`python -m wedlm_jax.tradeoff`: a table, what follows from it, JSON and a plot; bad flags are one line."""

import dataclasses
import json
import sys

import pytest

from tests.evals.test_tradeoff import AR, point
from tests.one_line import complaint_of
from wedlm_jax import tradeoff as command
from wedlm_jax.evals import sweep


def test_every_setting_is_in_the_json_and_the_findings_are_said(monkeypatch, capsys, model_dir, tmp_path, figures):
    flags = ("--task", "counting", "--limit", "2", "--windows", "4", "--thresholds", "0.1", "inf", "0.1", "--penalties", "0",
             "1", "--max-new-tokens", "6", "--no-reorder", "--batch-size", "2", "--out", str(tmp_path / "out"))  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["tradeoff", "--model", str(model_dir), *flags])
    command.main()
    results = json.loads((tmp_path / "out" / "tradeoff.json").read_text())
    assert results["dtype"] == "float32"
    found = [(p["settings"]["entropy_threshold"], p["settings"]["distance_penalty"]) for p in results["points"]]
    assert found == [(0.1, 0.0), (0.1, 1.0), ("inf", 0.0), ("inf", 1.0)]
    assert all(0 <= p["commit_rate"] <= 1 and 0 <= p["out_of_order"] <= 1 for p in results["points"])
    assert set(results["pareto_front"]) <= {p["label"] for p in results["points"]} and results["failed"] == []
    assert set(results["rank_correlations"]) == {"p_cache", "tokens per forward", "commit rate"}
    assert (tmp_path / "out" / "tradeoff.png").read_bytes()[:4] == b"\x89PNG"
    said = " ".join(capsys.readouterr().out.split())
    for finding in ("AR solves none of the problems", "Rank correlation of tokens/s with p_cache"):
        assert finding in said
    for title in (said, figures[0].get_suptitle()):  # what is not the default
        assert "reorder=False, max_new_tokens=6" in " ".join(title.split())
    assert "Pareto front" not in said and "No setting" not in said and "*" not in said


def test_a_setting_is_saved_and_told_before_the_next_one_is_decoded(monkeypatch, capsys, model_dir, tmp_path):
    by_hand = sweep.generate_rows

    def interrupted_at_the_second(model, prompts, config, first_row):
        if config.entropy_threshold == 0.4:
            raise KeyboardInterrupt
        return by_hand(model, prompts, config, first_row)

    monkeypatch.setattr(sweep, "generate_rows", interrupted_at_the_second)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tradeoff.png").write_text("of an earlier run")
    flags = ("--task", "counting", "--limit", "1", "--windows", "4", "--thresholds", "inf", "0.4", "--penalties", "0",
             "--max-new-tokens", "6", "--batch-size", "2", "--out", str(tmp_path / "out"))  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["tradeoff", "--model", str(model_dir), *flags])
    with pytest.raises(SystemExit) as exit:
        command.main()
    results = json.loads((tmp_path / "out" / "tradeoff.json").read_text())
    assert exit.value.code == 130 and [p["settings"]["entropy_threshold"] for p in results["points"]] == ["inf"]
    assert not (tmp_path / "out" / "tradeoff.png").exists()
    assert results["points"][0]["speedup_over_ar"] > 0 and results["points"][0]["equal_to_ar"] in (0, 1)
    assert "W=4, tau=inf, lambda=0: 0% exact, " in capsys.readouterr().err


def test_questions_of_a_file_take_the_place_of_a_task(monkeypatch, capsys, model_dir, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Q: 1 + 1? A:", "answer": "2"}\n' * 3)
    flags = ("--questions", str(tmp_path / "mine.jsonl"), "--windows", "4", "--thresholds", "0.4", "--penalties", "0",
             "--max-new-tokens", "6", "--batch-size", "2", "--out", str(tmp_path / "out"))  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["tradeoff", "--model", str(model_dir), *flags])
    command.main()
    results = json.loads((tmp_path / "out" / "tradeoff.json").read_text())
    assert (results["ar"]["task"], results["ar"]["n"], results["points"][0]["n"]) == ("mine", 3, 3)
    assert (results["questions"], results["match"]) == (str(tmp_path / "mine.jsonl"), "number")
    assert "streaming on mine" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--questions", "q.jsonl", "--task", "counting"), "--task does nothing here; use it without --questions"),
        (("--match", "text"), "--match does nothing here; use it with --questions"),
        (("--limit", "0"), "--limit 0: must be at least 1"),
        (("--windows", "0"), "--windows 0: must be at least 1"),
        (("--entropy-threshold", "1"), "--entropy-threshold does nothing here; use --thresholds"),
        (("--decoder", "ar"), "--decoder ar: has no tau and lambda; choose streaming or verified"),
        (("--thresholds", "-1"), "entropy_threshold=-1.0: must be at least 0"),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(monkeypatch, capsys, model_dir, flags, said):
    monkeypatch.setattr(sys, "argv", ["tradeoff", "--model", str(model_dir), *flags])
    assert said in complaint_of(capsys, command.main)


def test_where_no_setting_comes_near_ar_they_are_held_against_the_best_of_them():
    points = [point("a", 0.4, 10), point("b", 0.5, 20)]
    settings = [{"window_size": 8, "entropy_threshold": tau, "distance_penalty": 0.0} for tau in (0.1, "inf")]
    points = [
        dataclasses.replace(p, row=dataclasses.replace(p.row, settings=s))
        for p, s in zip(points, settings, strict=True)
    ]
    lines = command.findings(AR, points)
    assert lines[0].startswith("* Pareto front, from fast to exact: ")
    assert lines[1] == "2 of 2 settings are under 90% of AR's exact match of 100%: W = 8: every tau and lambda."
    assert (
        lines[2]
        == "1 of 2 settings are under 90% of the best setting's (b) exact match of 50%: W = 8: tau = 0.1 at lambda 0."
    )
    assert len(command.findings(dataclasses.replace(AR, accuracy=0.5), points)) == 3
    assert (
        len(
            command.findings(AR, [dataclasses.replace(p, row=dataclasses.replace(p.row, accuracy=0.0)) for p in points])
        )
        == 3
    )


def test_where_ar_solves_nothing_no_setting_is_held_against_it():
    points = [point(str(i), accuracy, 10 + i, per_forward=i) for i, accuracy in enumerate((0.0, 0.0, 0.1))]
    lines = command.findings(dataclasses.replace(AR, accuracy=0.0), points)
    assert lines[0].startswith("AR solves none of the problems") and len(lines) == 2
    assert lines[1].startswith("Rank correlation of tokens/s with p_cache (does not vary), tokens per forward +1.00")


@pytest.mark.parametrize("count", [1, 2])
def test_few_settings_have_no_rank_correlation(count):
    points = [point(str(i), 0.0, 10 + i, per_forward=i) for i in range(count)]
    assert (
        command.findings(dataclasses.replace(AR, accuracy=0.0), points)[-1]
        == f"Settings: {count}, too few for a rank correlation of tokens/s."
    )
