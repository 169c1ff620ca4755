"""The plot has a panel for every task with answers; no picture cuts off what it says."""

import importlib

import matplotlib
import pytest

from tests.evals.test_show import row
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.evals import cacheability_plot, mask_picture, open_ended_plot, plots, speed_plot, tradeoff_plot
from wedlm_jax.evals.cacheability_plot import plot_cacheability
from wedlm_jax.evals.open_ended import OpenEnded, TextMeasures
from wedlm_jax.evals.open_ended_plot import plot_open_ended
from wedlm_jax.evals.order import Order
from wedlm_jax.evals.plots import plot_results
from wedlm_jax.evals.speed import Speed, Work
from wedlm_jax.evals.speed_plot import plot_speeds
from wedlm_jax.evals.tradeoff import Point
from wedlm_jax.results import save_figure


def test_the_plot_is_a_png_with_two_panels_a_task_and_none_for_tasks_without_answers(tmp_path):
    streaming = [
        row(task=task, label=f"tau={tau}", settings={"decoder": "streaming", "entropy_threshold": tau}, accuracy=0.5)
        for task in ("counting", "copying") for tau in (0.1, "inf")
    ]  # fmt: skip
    text = row(task="text", accuracy=None, low=None, high=None)
    figure = plot_results([row(), *streaming, text], "title")
    save_figure(tmp_path / "results.png", figure)
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title() for axes in figure.axes] == ["counting (n = 40)", "copying (n = 40)", "", ""]
    ((x, y),) = figure.axes[0].containers[0].lines[0].get_xydata()
    assert (x, y) == (4.25, 0.9)
    assert len(figure.axes[0].containers) == 3


def test_masks_in_place_have_hollow_marks_and_reordered_ones_full_marks():
    settings = [{"decoder": "blockwise", "reorder": reorder} for reorder in (True, False)]
    for axes in plot_results([row(label=str(of), settings=of) for of in settings], "title").axes:
        reordered, in_place = (bars.lines[0].get_markerfacecolor() for bars in axes.containers)
        assert in_place == "white" != reordered


def test_a_long_title_and_task_lie_inside_the_picture_and_are_no_tex(tmp_path):
    """Both may hold what a user calls a file."""
    task = "my_questions_of_$2_and_$3_that_are_kept_in_a_file_with_a_name_$\\frac$"
    figure = plot_results(
        [row(task=task)], "/home/somebody/checkpoints/$x_^/export_step_5000 on NVIDIA H200, one device"
    )
    save_figure(tmp_path / "results.png", figure)
    for said in (figure._suptitle, figure.axes[0].title):
        extent = said.get_window_extent()
        assert figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1
    assert "$2 and $3" in figure.axes[0].get_title()


@pytest.mark.parametrize("lengths", [1, 3])
def test_title_and_legend_of_the_speeds_lie_inside_the_picture(lengths):
    speeds = [
        Speed(Work("word_problems", 1, 70, output, alone=True), decoder, 6, 1.0, 0.1, 6.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1)
        for output in (1024, 256, 512)[:lengths]
        for decoder in ("ar", "lookup", "blockwise", "streaming", "verified", "transformers", "vllm")
    ]
    figure = plot_speeds(speeds, "/somewhere/exports/quickstart_adapter on NVIDIA H100 80GB HBM3, 1 device")
    box = figure.bbox
    for said in (figure._suptitle, *figure.legends, *(axes.title for axes in figure.axes)):
        extent = said.get_window_extent()
        assert box.x0 <= extent.x0 and extent.x1 <= box.x1 and box.y0 <= extent.y0 and extent.y1 <= box.y1
    assert figure.legends[0].get_window_extent().y1 <= min(axes.get_tightbbox().y0 for axes in figure.axes)


def test_the_line_of_a_decoder_goes_from_small_to_large_batches_in_whatever_order_they_were_measured():
    speeds = [
        Speed(Work("counting", batch, 8, 6), decoder, 6, 1.0, 0.1, 6.0, 1.0, 1.0, 1.0, 0.5, 1.0 / batch, 1)
        for batch in (8, 1, 32) for decoder in ("ar", "lookup")
    ]  # fmt: skip
    line, _ = plot_speeds(speeds, "title").axes[0].lines  # and AR's
    assert line.get_xydata().tolist() == [[1, 1], [8, 1 / 8], [32, 1 / 32]]


def test_the_taus_of_streaming_can_be_told_apart_in_open_ended_generation():
    settings = {"AR": {"decoder": "ar"}} | {
        f"tau={tau}": {"decoder": "streaming", "entropy_threshold": tau} for tau in (0.1, 1.0, "inf")
    }
    rows = [row(task="low", label=label, settings=of) for label, of in settings.items()]
    measures = [TextMeasures(label, 9, {1: 1.0, 2: 1.0, 3: 1.0}, 0.0, 2.0, None, 2.0, 5.0, 1.0) for label in settings]
    figure = plot_open_ended(OpenEnded([0.5], {"low": (0.5, 0.5)}, measures, rows, []), "title")
    for axes in figure.axes:
        ar, *streaming = [line.get_alpha() for line in axes.lines]
        assert ar == 1 and streaming == sorted(set(streaming)) and len(streaming) == 3


def test_the_bars_of_p_cache_lie_inside_the_picture_however_long():
    points = {
        task: [
            Point(row(label=decoder, settings={"decoder": decoder}, p_cache=p_cache), Order(10, 5, 1))
            for decoder, p_cache in (("streaming", 0.3), ("blockwise", highest))
        ]
        for task, highest in (("counting", 0.96), ("word_problems", 0.4))
    }
    high = plot_cacheability(points, "title")
    low = plot_cacheability({"word_problems": points["word_problems"]}, "title")
    assert all(axes.get_xlim()[1] > 0.96 for axes in high.axes)
    assert low.axes[0].get_xlim()[1] == 0.6  # short bars stay comparable between pictures
    # The number behind the bar, too.
    ends = [text.get_window_extent().x1 for text in high.axes[0].texts]
    assert len(ends) == 2 and max(ends) <= high.axes[0].get_window_extent().x1


def test_a_share_of_nothing_has_no_bar_and_no_number():
    figure = plot_cacheability({"counting": [Point(row(label="verified"), Order(0, 0, 0))]}, "title")
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes][1:3] == [[""], [""]]


def test_a_long_title_with_stop_strings_lies_inside_the_picture_as_it_is():
    points = {"counting": [Point(row(label="verified"), Order(10, 5, 1))]}
    stop = DecodeConfig(stop=("$\\frac$", "$"), verify="fallback", temperature=0.5).changes(DecodeConfig())
    title = ", ".join(["/somewhere/exports/quickstart_adapter", *stop] * 3)
    figure = plot_cacheability(points, title)
    extent = figure._suptitle.get_window_extent()
    assert figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1 and extent.y1 <= figure.bbox.y1
    assert extent.y0 >= max(axes.get_tightbbox().y1 for axes in figure.axes)
    assert figure.get_suptitle().replace("\n", " ") == title


@pytest.mark.parametrize(
    "module",
    [cacheability_plot, mask_picture, open_ended_plot, plots, speed_plot, tradeoff_plot],
    ids=lambda m: m.__name__,
)
def test_a_notebook_that_imports_a_plot_keeps_its_backend(module, monkeypatch):
    monkeypatch.setattr(matplotlib, "use", lambda backend: pytest.fail(f"switches it to {backend}"))
    importlib.reload(module)
