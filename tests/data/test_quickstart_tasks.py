"""The generated tasks: deterministic, right, and split so that no held-out problem is ever trained on."""

import itertools
import re
import subprocess
import sys

import pytest

from tests.conftest import FULL
from wedlm_jax.data.quickstart_tasks import (
    HELD_OUT_SHARE,
    TASKS,
    QuickstartProblems,
    extract_answer,
    is_correct,
    problems,
    split_of,
)


def first(task, split, seed, count):
    return list(itertools.islice(problems(task, split, seed), count))


@pytest.mark.parametrize("task", TASKS)
def test_held_out_problems_never_overlap_training_ones_whatever_the_seeds(task):
    training = {problem.prompt for seed in (0, 1) for problem in first(task, "train", seed, 3000)}
    held_out = {problem.prompt for seed in (0, 1, 2) for problem in first(task, "held_out", seed, 400)}
    assert len(training) > 500 and len(held_out) > 50
    assert not training & held_out


def test_the_stream_that_is_trained_on_holds_no_held_out_problem():
    stream = QuickstartProblems("train", seed=0, length=5000)
    assert {split_of(problem.prompt) for problem in stream} == {"train"}
    assert {problem.task for problem in stream} == set(TASKS)


def test_a_tenth_of_the_counting_problems_is_held_out_and_the_stream_of_them_ends():
    sizes = {split: sum(1 for _ in problems("counting", split)) for split in ("train", "held_out")}
    assert abs(sizes["held_out"] / sum(sizes.values()) - HELD_OUT_SHARE) < 0.03
    sets = [{problem.prompt for problem in problems("counting", "held_out", seed)} for seed in (0, 1)]
    assert len(sets[0] & sets[1]) > 0.95 * len(sets[0] | sets[1])


@pytest.mark.parametrize("task", TASKS)
def test_problems_are_distinct_and_depend_on_the_seed_alone(task):
    drawn = first(task, "train", 3, 300)
    assert len({problem.prompt for problem in drawn}) == 300
    assert drawn == first(task, "train", 3, 300)
    assert drawn != first(task, "train", 4, 300)


def test_another_process_draws_the_same_problems():
    script = "from wedlm_jax.data.quickstart_tasks import QuickstartProblems as Q; print([p.prompt for p in Q('train', 7, 30)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in (("1", "2") if FULL else ("1",))
    }
    assert outputs == {str([p.prompt for p in QuickstartProblems("train", 7, 30)]) + "\n"}


def test_every_equation_of_a_worked_solution_holds_and_the_last_result_is_the_answer():
    two_steps = 0
    for problem in first("word_problems", "train", 0, 2000):
        equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)\.", problem.solution)
        for a, operation, b, result in equations:
            left, right = int(a), int(b)
            assert {"+": left + right, "-": left - right, "*": left * right}[operation] == int(result)
        assert equations[-1][3] == problem.answer
        assert set(re.findall(r"\d+", problem.prompt)) <= set(re.findall(r"\d+", problem.solution))
        assert 1 <= int(problem.answer) <= 60
        two_steps += len(equations) == 2
    assert 400 < two_steps < 1600


def test_counting_runs_from_the_first_number_to_the_last_by_the_step():
    for problem in first("counting", "train", 0, 500):
        start, end = map(int, re.search(r"from (\d+) to (\d+)", problem.prompt).groups())
        by = re.search(r"by (\d+)", problem.prompt)
        step = int(by.group(1)) if by else 1
        step = -step if "down" in problem.prompt else step
        numbers = [int(number) for number in re.findall(r"\d+", problem.solution)]
        assert numbers == list(range(start, end + step // abs(step), step))
        assert 5 <= len(numbers) <= 30 and max(numbers) < 100 and min(numbers) > 0


def test_copying_repeats_the_prompt():
    for problem in first("copying", "train", 0, 100):
        assert problem.prompt == f"Q: Repeat: {problem.answer} A:"
        assert problem.solution == f" {problem.answer}"


@pytest.mark.parametrize("task", TASKS)
def test_a_solution_is_correct_and_a_changed_answer_is_not(task):
    for problem in first(task, "held_out", 0, 50):
        assert is_correct(problem, problem.solution)
        assert not is_correct(problem, problem.solution + " 1")
        assert not is_correct(problem, "")


def test_the_answer_of_a_word_problem_is_the_number_after_the_marker():
    assert extract_answer("word_problems", " 7 + 5 = 12.\n#### 12") == "12"
    assert extract_answer("word_problems", " 7 + 5 = 12.") is None
    assert extract_answer("word_problems", " 7 + 5 = 12.\n#### 12 apples") is None
