"""The grid, the Pareto front, what fails, and the rank correlations."""

import dataclasses
import io
import math
import re

import pytest
from rich.console import Console

from tests.evals.models import tiny_model
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import generate
from wedlm_jax.evals.order import Order
from wedlm_jax.evals.show import points_table
from wedlm_jax.evals.sweep import ADAPTED, Row, Setting, generate_rows, settings_as_json
from wedlm_jax.evals.tasks import task
from wedlm_jax.evals.tradeoff import Point, failed, failure_region, grid, measure, pareto_front, rank_correlations

AR = Row(
    "t", "AR", "adapted", {"decoder": "ar"}, n=10, batch_size=1, correct=10, accuracy=1.0, low=0.7, high=1.0,
    generated_tokens=40, tokens_per_forward=1.0, p_cache=1.0, tokens_per_second=10.0, speedup_over_ar=1.0, equal_to_ar=10,
    unfinished=0,
)  # fmt: skip


def point(label, accuracy, speed, per_forward=2.0, committed=5):
    row = dataclasses.replace(
        AR, label=label, accuracy=accuracy, tokens_per_second=speed, tokens_per_forward=per_forward
    )
    return Point(row, Order(10, committed, 1))


def test_the_grid_is_every_window_with_every_threshold_and_penalty():
    settings = grid(DecodeConfig(max_new_tokens=8), (4, 8), (0.1, math.inf), (0.0, 1.0))
    found = [
        (s.config.window_size, s.config.entropy_threshold, s.config.distance_penalty, s.config.max_new_tokens) for s in settings
    ]  # fmt: skip
    assert found == [(w, t, p, 8) for w in (4, 8) for t in (0.1, math.inf) for p in (0.0, 1.0)]
    assert settings[2].label == "W=4, tau=inf, lambda=0"


def test_what_is_not_the_default_is_told_by_name():
    defaults = DecodeConfig(max_new_tokens=64)
    assert defaults.changes(defaults) == []
    fallback = dataclasses.replace(defaults, verify="fallback", top_k=5)
    assert fallback.changes(defaults) == ["verify=fallback", "top_k=5"]
    assert dataclasses.replace(defaults, decoder="verified").changes(defaults.by("verified")) == []


def test_the_title_of_the_table_may_hold_what_looks_like_markup():
    console = Console(file=io.StringIO(), width=120)
    console.print(points_table(AR, [point("a", 0.9, 10)], "stop=('[/x]',)"))
    assert "stop=('[/x]',)" in console.file.getvalue()


def test_the_front_holds_what_nothing_beats_in_both():
    points = [
        point("a", 0.9, 10),
        point("b", 0.8, 30),
        point("c", 0.85, 20),
        point("beaten", 0.8, 15),
        point("same", 0.9, 9),
    ]
    assert [p.row.label for p in pareto_front(points)] == ["b", "c", "a"]


def test_a_setting_fails_below_nine_tenths_of_ar():
    assert [p.row.label for p in failed([point("a", 0.9, 10), point("b", 0.89, 30)], 1.0)] == ["b"]


def test_exactly_nine_tenths_of_ar_have_not_failed():
    for n in (50, 100, 1000):
        assert not [ar for ar in range(10, n + 1, 10) if failed([point("", 9 * ar // 10 / n, 1)], ar / n)]
        assert all(failed([point("", (9 * ar // 10 - 1) / n, 1)], ar / n) for ar in range(10, n + 1, 10))


def test_the_region_of_failure_is_named_by_window_threshold_and_penalty():
    accuracies = {  # by lambda: at tau 0.1, 0.4 and infinity
        0.0: (0.8, 0.7, 0.0), 0.02: (1.0, 0.8, 0.0), 0.5: (1.0, 0.8, 0.1), 1.0: (0.8, 1.0, 1.0), 10.0: (1.0, 1.0, 1.0),
    }  # fmt: skip
    points = []
    for window, shift in ((8, 1.0), (16, 0.0)):
        for setting in grid(DecodeConfig(), (window,), (0.1, 0.4, math.inf), tuple(accuracies)):
            place = (0.1, 0.4, math.inf).index(setting.config.entropy_threshold)
            accuracy = shift or accuracies[setting.config.distance_penalty][place]
            made = point(setting.label, accuracy, 10)
            points.append(Point(dataclasses.replace(made.row, settings=settings_as_json(setting.config)), made.order))
    assert failure_region(points, 1.0) == [
        "W = 16: every tau at lambda 0; tau >= 0.4 at lambda 0.02, 0.5; tau = 0.1 at lambda 1"
    ]
    assert failure_region(points[: len(points) // 2], 1.0) == []
    assert failure_region(points[: len(points) // 2], 2.0) == ["W = 8: every tau and lambda"]


def test_rank_correlation_is_of_ranks_with_their_sign():
    points = [point(str(i), 0.9, 10.0**i, per_forward=i, committed=10 - i) for i in range(1, 5)]
    found = rank_correlations(points)
    assert found["tokens per forward"] == pytest.approx(1) and found["commit rate"] == pytest.approx(-1)


def test_where_no_mask_is_filled_no_share_of_them_is_told_nor_correlated():
    points = [point(str(i), 0.9, 10.0**i, committed=10 - i) for i in range(1, 5)]
    points.insert(2, Point(points[1].row, Order(0, 0, 0)))
    assert rank_correlations(points)["commit rate"] == pytest.approx(-1)
    console = Console(file=io.StringIO(), width=120)
    console.print(points_table(AR, [points[2]], ""))
    assert re.search(r" 2 .* - +- *$", console.file.getvalue(), re.MULTILINE) and "nan" not in console.file.getvalue()


def test_a_real_model_is_measured_on_every_setting():
    settings = grid(DecodeConfig(max_new_tokens=6), (4,), (0.1, math.inf), (0.02,))
    chosen = task("counting")
    ar, points = measure(tiny_model(), settings, chosen, chosen.problems(2, 0), batch_size=2)
    assert ar.settings["decoder"] == "ar" and [p.row.n for p in points] == [2, 2]
    one_a_step, all_at_once = points
    # A random model is unsure of everything: one token a forward, from the left by lambda or not; tau = inf fills the window.
    assert one_a_step.row.tokens_per_forward < all_at_once.row.tokens_per_forward
    assert all_at_once.order.commit_rate == 1 and all_at_once.order.out_of_order == 0


def test_the_order_is_traced_on_the_noise_that_the_speed_was_timed_on_a_row_of_its_own_for_each_problem(monkeypatch):
    config = DecodeConfig(max_new_tokens=6, window_size=4, temperature=1.0)
    problem, traced = task("counting").problems(1, 0)[0], []

    def watched(*args, **flags):
        traced.extend(generate_rows(*args, **flags))
        return traced[-1:]

    monkeypatch.setattr("wedlm_jax.evals.tradeoff.generate_rows", watched)
    measure(tiny_model(), [Setting("s", ADAPTED, config)], task("counting"), [problem] * 3, batch_size=1)
    ids = [tuple(completion.ids) for completion in traced]
    assert ids == [tuple(c.ids) for c in generate(tiny_model(), [problem.prompt] * 3, config)] and len(set(ids)) == 3
