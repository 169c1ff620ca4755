"""`python -m wedlm_jax.metrics`: the curves of one or several runs as a PNG."""

import json
import sys

import pytest

from tests.one_line import complaint_of
from wedlm_jax.metrics.__main__ import main
from wedlm_jax.metrics.curves import draw_curves, points


def logged(folder, *, validated: bool):
    folder.mkdir()
    lines = [
        {"step": step, "loss": 3.0 / step, "ar_loss": None if step == 2 else 1.0 / step, "grad_norm": 1.0}
        | ({"validation_ar_loss": 2.0 / step} if validated and step % 2 == 0 else {})
        for step in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def run(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["metrics", *map(str, arguments)])
    main()


def test_the_curves_of_two_runs_are_drawn(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        logged(tmp_path / name, validated=name == "b")
    out = tmp_path / "new" / "curves.png"
    run(monkeypatch, tmp_path / "a", tmp_path / "b", "--out", out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "loss, AR loss, held out dashed, gradient norm" in capsys.readouterr().out


def test_a_panel_that_no_run_has_is_left_out(tmp_path):
    lines = logged(tmp_path / "a", validated=False)
    assert [axes.get_title() for axes in draw_curves({"a": lines}).axes] == [
        "loss",
        "AR loss",
        "gradient norm",
    ]


def test_runs_of_which_only_the_held_out_curve_is_known_are_told_apart():
    lines = [{"step": step, "validation_ar_loss": 1.0 / step} for step in (1, 2)]
    (axes,) = draw_curves({"a": lines, "b": lines}).axes
    assert axes.get_title() == "AR loss, held out dashed"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_a_number_that_was_not_finite_is_a_gap(tmp_path):
    lines = logged(tmp_path / "a", validated=True)
    steps, values = points(lines, "ar_loss")
    assert steps == [1, 2, 3, 4, 5] and values[1] != values[1]
    assert points(lines, "validation_ar_loss") == ([2, 4], [1.0, 0.5])


def test_a_single_number_is_a_point():
    lines = [{"step": 1, "loss": 2.0, "ar_loss": 1.0}, {"step": 2, "loss": 1.0, "ar_loss": None}]
    loss, ar_loss = draw_curves({"a": lines}).axes
    assert [axes.lines[0].get_marker() for axes in (loss, ar_loss)] == ["None", "."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: name at least one workdir"),
        (["absent"], "error: absent/metrics.jsonl: no such file"),
        (["absent", "--out", "curves.txt"], "error: --out curves.txt: name a .png file"),
        (["absent", "--of", "x"], "error: Unrecognized options: --of"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, message, monkeypatch, capsys):
    assert message in complaint_of(capsys, run, monkeypatch, *arguments)
