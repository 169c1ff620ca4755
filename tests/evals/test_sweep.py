"""The sweep: fixed batches, warm clock, ratios of totals, AR of the same weights as the reference."""

import dataclasses
import itertools

import pytest

from tests.evals.models import tiny_model
from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.decode.calibration import Calibration
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import generate
from wedlm_jax.decode.loop import run
from wedlm_jax.decode.stats import Completion, Stats
from wedlm_jax.errors import UserError
from wedlm_jax.evals.config import EvaluationConfig
from wedlm_jax.evals.show import gained_and_lost
from wedlm_jax.evals.sweep import ADAPTED, BASE, Setting, generate_rows, setting_by_setting, settings_of, sweep
from wedlm_jax.evals.tasks import Task, task

AR, FAST = Setting("AR", ADAPTED, DecodeConfig(decoder="ar")), Setting("fast", ADAPTED, DecodeConfig())
PROBLEMS = [Problem("echo", f"Q: {i}", "", str(i)) for i in range(5)]
ECHO = Task("echo", lambda limit, seed: PROBLEMS[:limit], lambda problem, text: text == problem.answer)


class FakeGenerate:
    """Answers with the prompt's last word and moves the clock: 2 s a call for AR, 1 s else, 60 s more while it compiles."""

    def __init__(self, monkeypatch, wrong: tuple[str, ...] = ()):
        self.calls: list[tuple[str, int]] = []
        self.wrong = wrong
        self.now = 0.0
        monkeypatch.setattr("wedlm_jax.evals.sweep.time.perf_counter", lambda: self.now)
        monkeypatch.setattr("wedlm_jax.evals.sweep.generate_rows", self)

    def __call__(self, model, prompts, config, first_row):
        met = any(decoder == config.decoder for decoder, _ in self.calls)
        self.now += (2.0 if config.decoder == "ar" else 1.0) + (0.0 if met else 60.0)
        self.calls.append((config.decoder, len(prompts)))
        texts = [model.tokenizer.decode(prompt).split()[-1] for prompt in prompts]
        width = 1 if config.decoder == "ar" else 2
        return [
            Completion(
                ids=[int(text) if config.decoder == "ar" or text not in self.wrong else 99] * 4,
                finish_reason="stop",
                stats=Stats(4, 4 // width, 4 * width),
                text=text if text not in self.wrong else "?",
            )
            for text in texts
        ]


def run_echo(batch_size=2, settings=(AR, FAST)):
    return sweep({ADAPTED: tiny_model()}, settings, [(ECHO, PROBLEMS)], batch_size=batch_size)


def test_every_call_has_the_same_batch_and_a_warm_up_comes_before_the_clock(monkeypatch):
    fake = FakeGenerate(monkeypatch)
    (ar, fast), _ = run_echo()
    assert {size for _, size in fake.calls} == {2}
    assert [decoder for decoder, _ in fake.calls] == ["ar"] * 6 + ["streaming"] * 6  # three batches, each warmed up for
    # Three batches of two rows of four tokens; the 60 s of the first calls are not in them.
    assert (ar.tokens_per_second, fast.tokens_per_second) == (24 / 6, 24 / 3)
    assert (ar.speedup_over_ar, fast.speedup_over_ar) == (1, 2)


def test_only_the_first_four_batches_of_a_shape_are_warmed_up_for(monkeypatch):
    fake = FakeGenerate(monkeypatch)
    run_echo(batch_size=1)
    assert [decoder for decoder, _ in fake.calls] == ["ar"] * (5 + 4) + ["streaming"] * (5 + 4)


def test_every_model_is_warmed_up_for(monkeypatch):
    """Its weights are laid out in the first call; of two models of one shape that was in the time of the second one's AR."""
    fake = FakeGenerate(monkeypatch)
    settings, models = (AR, dataclasses.replace(AR, weights=BASE)), {ADAPTED: tiny_model(), BASE: tiny_model(seed=1)}
    sweep(models, settings, [(ECHO, PROBLEMS)], batch_size=2)
    assert len(fake.calls) == 12


def test_setting_by_setting_the_rows_are_those_of_the_sweep_and_no_batch_is_run_for_them_alone(monkeypatch):
    settings = (AR, FAST, Setting("faster", ADAPTED, DecodeConfig(entropy_threshold=0.9)))
    whole, tasks = FakeGenerate(monkeypatch, wrong=("3",)), [(ECHO, PROBLEMS)]
    expected, completions = run_echo(settings=settings)
    one_by_one = FakeGenerate(monkeypatch, wrong=("3",))
    found = list(setting_by_setting(tiny_model(), settings, tasks, batch_size=2))
    assert [row for of in found for row in of.rows] == expected and one_by_one.calls == whole.calls
    assert [of.completions for of in found] == [[completions["echo", s.label]] for s in settings]


def test_what_does_not_go_with_a_model_is_told_before_the_first_forward(monkeypatch):
    """Of a checkpoint without a mask token AR decoded all problems, for hours, before streaming was refused."""
    fake, tasks = FakeGenerate(monkeypatch), [(ECHO, PROBLEMS)]
    model = dataclasses.replace(tiny_model(), mask_token_id=None)
    with pytest.raises(UserError, match="no mask token"):
        sweep({ADAPTED: model}, [AR, FAST], tasks, batch_size=2)
    with pytest.raises(UserError, match="no mask token"):
        next(setting_by_setting(model, [AR, FAST], tasks, batch_size=2))
    assert fake.calls == []


def test_a_problem_that_leaves_no_room_for_its_completion_is_told_before_the_first_forward(monkeypatch):
    """It ended an evaluation when its turn came."""
    fake, long = FakeGenerate(monkeypatch), Problem("echo", "x " * 150, "", "")
    tasks = [(ECHO, PROBLEMS), (dataclasses.replace(ECHO, name="long"), [PROBLEMS[0], long])]
    said = "long, problem 2: 300 prompt tokens [+] max_new_tokens=256 exceed the model's context of 512"
    with pytest.raises(UserError, match=said):
        sweep({ADAPTED: tiny_model()}, [AR, FAST], tasks, batch_size=2)
    with pytest.raises(UserError, match=said):
        next(setting_by_setting(tiny_model(), [AR, FAST], tasks, batch_size=2))
    assert fake.calls == []


def test_rows_count_matches_tokens_and_agreement_with_ar(monkeypatch):
    FakeGenerate(monkeypatch, wrong=("3",))
    rows, completions = run_echo()
    fast = rows[1]
    assert (fast.n, fast.correct, fast.accuracy, fast.equal_to_ar) == (5, 4, 0.8, 4)
    assert (round(fast.low, 4), round(fast.high, 4)) == (0.3755, 0.9638)  # as published tables have it
    assert (fast.tokens_per_forward, fast.p_cache, fast.generated_tokens) == (2.0, 0.5, 20)
    # The row that filled up the last batch is dropped, and the order is kept.
    assert [c.text for c in completions["echo", "fast"]] == ["0", "1", "2", "?", "4"]


def test_without_ar_of_the_same_weights_nothing_is_compared(monkeypatch):
    FakeGenerate(monkeypatch)
    rows, _ = run_echo(settings=(FAST,))
    assert rows[0].speedup_over_ar is None and rows[0].equal_to_ar is None


def test_a_task_without_answers_has_no_accuracy(monkeypatch):
    silent = Task("silent", ECHO.problems, None)
    FakeGenerate(monkeypatch)
    rows, _ = sweep({ADAPTED: tiny_model()}, [AR], [(silent, PROBLEMS)], batch_size=5)
    assert rows[0].accuracy is rows[0].correct is rows[0].low is rows[0].high is None


def test_on_a_real_model_verified_equals_ar_and_no_timed_call_compiles(monkeypatch):
    config = EvaluationConfig(max_new_tokens=12, window_size=4, block_size=4)
    settings = settings_of(config, with_base=True)
    problems = task("word_problems").problems(5, 0)
    compiled = []
    run.clear_cache()  # another test may have met these shapes

    def watched(model, prompts, config, first_row):
        before = run._cache_size()
        result = generate_rows(model, prompts, config, first_row)
        compiled.append(((config, first_row), run._cache_size() - before))
        return result

    monkeypatch.setattr("wedlm_jax.evals.sweep.generate_rows", watched)
    models, tasks = {ADAPTED: tiny_model(), BASE: tiny_model(seed=1)}, [(task("word_problems"), problems)]
    done = []
    rows, _ = sweep(
        models, settings, tasks, batch_size=2, on_batch=lambda setting, task, batch: done.append(len(batch))
    )
    assert [row.label for row in rows] == [s.label for s in settings]
    assert sum(done) == 5 * len(settings)
    verified = rows[-1]
    assert verified.equal_to_ar == 5 and verified.tokens_per_forward >= 1
    assert all(row.p_cache <= 0.5 for row in rows if row.settings["decoder"] == "streaming")
    assert {row.settings["decoder"] for row in rows if row.accepted is not None} == {"lookup", "verified"}
    for row in rows:
        if row.accepted is not None:  # every forward commits one token of AR, and what it accepted before it
            assert sorted(row.accepted, reverse=True) == row.accepted
            assert 0 <= 1 + sum(row.accepted) - row.tokens_per_forward < 1
    assert all(row.p_cache == row.tokens_per_forward == 1 for row in rows if row.settings["decoder"] == "ar")
    # The three thresholds share a program, and so do base and adapted AR. A warm-up comes before the same batch with the clock.
    assert sum(n for _, n in compiled) == len({config.decoder for (config, _), _ in compiled}) == 5
    assert all(call == following for (call, n), (following, _) in itertools.pairwise(compiled) if n)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_every_problem_of_every_task_draws_noise_of_its_own(batch_size):
    same = Problem("same", "Once", "", "")
    tasks = [(Task(name, lambda limit, seed: [], None), [same] * 3) for name in ("one", "another")]
    drawn = Setting("AR", ADAPTED, DecodeConfig(decoder="ar", temperature=1.0, max_new_tokens=6))
    _, completions = sweep({ADAPTED: tiny_model()}, [drawn], tasks, batch_size=batch_size)
    ids = [tuple(c.ids) for name in ("one", "another") for c in completions[name, "AR"]]
    assert len(set(ids)) == 6
    assert ids == [tuple(c.ids) for c in generate(tiny_model(), ["Once"] * 6, drawn.config)]


def test_answers_are_gained_and_lost_beside_ar_on_the_same_questions(monkeypatch):
    right = {"ar": "012", "streaming": "03"}

    def answers(model, prompts, config, first_row):
        texts = [model.tokenizer.decode(prompt).split()[-1] for prompt in prompts]
        said = [text if text in right[config.decoder] else "?" for text in texts]
        return [Completion([1], "stop", Stats(1, 1, 1), text) for text in said]

    monkeypatch.setattr("wedlm_jax.evals.sweep.generate_rows", answers)
    rows, _ = run_echo()
    assert [(row.gained, row.lost) for row in rows] == [(None, None), (1, 2)]
    (_, of_fast) = setting_by_setting(tiny_model(), [AR, FAST], [(ECHO, PROBLEMS)], batch_size=2)
    assert (of_fast.rows[0].gained, of_fast.rows[0].lost) == (1, 2)
    assert gained_and_lost(rows) == ["echo: answers gained and lost beside AR: fast +1 -2 (p = 1)"]


def test_ar_of_adapted_weights_gains_and_loses_beside_that_of_the_base(monkeypatch):
    models = {ADAPTED: tiny_model(), BASE: tiny_model(seed=1)}

    def answers(model, prompts, config, first_row):
        text = "0" if model is models[BASE] else "1"
        return [Completion([1], "stop", Stats(1, 1, 1), text) for _ in prompts]

    monkeypatch.setattr("wedlm_jax.evals.sweep.generate_rows", answers)
    settings = [dataclasses.replace(AR, label="base", weights=BASE), AR, FAST]
    rows, _ = sweep(models, settings, [(ECHO, PROBLEMS)], batch_size=2)
    assert [(row.gained, row.lost) for row in rows] == [(None, None), (1, 1), (0, 0)]


def test_rows_hold_the_settings_that_the_model_resolves(monkeypatch):
    calibration = Calibration(0.25, 0.5, 16, 0.01, 0.005, 1000, 2.0)
    model = dataclasses.replace(tiny_model(), calibration=calibration)
    FakeGenerate(monkeypatch)
    (row,), _ = sweep({ADAPTED: model}, [FAST], [(ECHO, PROBLEMS)], batch_size=5)
    assert (row.settings["entropy_threshold"], row.settings["distance_penalty"]) == (0.25, 0.5)
    assert row.settings["stop_ids"] == model.eos_token_ids and row.settings["mask_token_id"] == model.mask_token_id


def test_the_rows_so_far_are_told_after_every_task(monkeypatch):
    told = []
    tasks = [(dataclasses.replace(ECHO, name=name), PROBLEMS) for name in ("one", "another")]
    FakeGenerate(monkeypatch)
    sweep(
        {ADAPTED: tiny_model()}, [AR, FAST], tasks, batch_size=5,
        on_task=lambda rows: told.append([(row.task, row.label) for row in rows]),
    )  # fmt: skip
    one, another = ([(name, label) for label in ("AR", "fast")] for name in ("one", "another"))
    assert told == [one, one + another]


@pytest.mark.parametrize(
    "field, value",
    [("problems_per_task", 0), ("batch_size", 0), ("held_out_files", -1), ("window_size", 0), ("distance_penalty", -1.0),
     ("entropy_thresholds", (0.1, -0.5)), ("confidence_threshold", 2.0), ("verified_windows", (8, 0))],
)  # fmt: skip
def test_bad_evaluation_settings_are_refused(field, value):
    with pytest.raises(UserError):
        EvaluationConfig(**{field: value})


def test_further_windows_of_verified_decoding_have_rows_of_their_own_before_the_main_one():
    last = settings_of(EvaluationConfig(verified_windows=(8, 4)), with_base=False)[-3:]
    assert [s.label for s in last] == ["verified, W=8", "verified, W=4", "verified"]
    assert [s.config.window_size for s in last] == [8, 4, 16]
    assert {(s.config.decoder, s.config.entropy_threshold) for s in last} == {("verified", 0.7)}


def test_in_place_measures_every_decoder_that_fills_masks_once_more_without_reordering():
    plain, both = (settings_of(EvaluationConfig(in_place=chosen), with_base=True) for chosen in (False, True))
    assert both[: len(plain)] == plain and all(s.config.reorder for s in plain)
    again = [s for s in plain if s.config.decoder in ("blockwise", "streaming", "verified")]
    assert [s.config for s in both[len(plain) :]] == [dataclasses.replace(s.config, reorder=False) for s in again]
    labels = [s.label for s in both]
    assert labels[len(plain) :] == [
        "in place, J=32",
        *(f"in place, tau={t}" for t in ("0.1", "0.4", "1")),
        "in place, verified",
    ]
    assert len(set(labels)) == len(labels)
