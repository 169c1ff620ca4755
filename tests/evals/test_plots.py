"""The plot has a panel for every task with answers."""

from matplotlib import pyplot as plt

from tests.evals.test_show import row
from wedlm_jax.evals.plots import plot_results


def test_the_plot_is_a_png_with_two_panels_a_task_and_none_for_tasks_without_answers(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(plt, "close", seen.append)
    streaming = [
        row(task=task, label=f"tau={tau}", settings={"decoder": "streaming", "entropy_threshold": tau}, accuracy=0.5)
        for task in ("counting", "copying") for tau in (0.1, "inf")
    ]  # fmt: skip
    text = row(task="text", accuracy=None, low=None, high=None)
    plot_results([row(), *streaming, text], tmp_path / "results.png", "title")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = seen
    assert [axes.get_title() for axes in figure.axes] == ["counting (n = 40)", "copying (n = 40)", "", ""]
    ((x, y),) = figure.axes[0].containers[0].lines[0].get_xydata()
    assert (x, y) == (4.25, 0.9)
    assert len(figure.axes[0].containers) == 3
