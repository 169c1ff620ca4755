"""Questions of a file become problems in its order, scored by the chosen part of the answer; a bad line is named."""

import codecs
import json
import re

import pytest

from tests.evals.models import tiny_model
from wedlm_jax.data.config import DataConfig
from wedlm_jax.decode.prompt_file import read_prompts
from wedlm_jax.errors import UserError
from wedlm_jax.evals.config import EvaluationConfig
from wedlm_jax.evals.problems import tasks_of
from wedlm_jax.evals.questions import EVERY, questions


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_every_line_is_a_problem_scored_by_its_number(tmp_path):
    records = [{"prompt": f"Q: {i}? A:", "answer": f"{i} + 1\n#### {i + 1}"} for i in range(5)]
    task = questions(tiny_model(), write(tmp_path / "sums.jsonl", *records), "number", 8)
    problems = task.problems(EVERY, 3)
    assert task.name == "sums" and [p.prompt for p in problems] == [r["prompt"] for r in records]
    assert task.problems(2, 0) == problems[:2]
    assert (
        task.score(problems[1], " it is 2.0") and not task.score(problems[1], " 3") and not task.score(problems[1], "")
    )


def test_a_file_as_editors_of_windows_save_it_holds_the_same_questions(tmp_path):
    path = write(tmp_path / "q.jsonl", *({"prompt": f"{i}?", "answer": f"{i}"} for i in range(2)))
    plain = questions(tiny_model(), path, "number", 8).problems(EVERY, 0)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\n", b"\r\n"))
    assert questions(tiny_model(), path, "number", 8).problems(EVERY, 0) == plain


def test_an_array_asks_the_questions_that_its_elements_ask_as_lines_and_names_a_bad_one(tmp_path):
    records = [{"prompt": f"{i}, ä?", "answer": f"{i}"} for i in range(3)]
    lines = questions(tiny_model(), write(tmp_path / "q.jsonl", *records), "number", 8)
    path = tmp_path / "q.json"
    path.write_text("\ufeff" + json.dumps(records, indent=1, ensure_ascii=False), encoding="utf-8")
    assert questions(tiny_model(), path, "number", 8).problems(EVERY, 0) == lines.problems(EVERY, 0)
    path.write_text(json.dumps([*records, {"prompt": "x"}]))
    with pytest.raises(UserError, match="q.json: record 3: answer must be a string"):
        questions(tiny_model(), path, "number", 8)
    path.write_text("[]")
    with pytest.raises(UserError, match="q.json: is empty; give a line such as"):
        questions(tiny_model(), path, "number", 8)


def test_messages_are_asked_as_the_chat_template_writes_them(tmp_path):
    model = tiny_model()
    messages = [{"role": "user", "content": "B or C?"}]
    task = questions(model, write(tmp_path / "q.jsonl", {"messages": messages, "answer": "C"}), "choice", 8)
    (problem,) = task.problems(EVERY, 0)
    assert problem.prompt == model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert task.score(problem, "The answer is C") and not task.score(problem, "B")


def test_an_id_may_stand_beside_a_question(tmp_path):
    task = questions(tiny_model(), write(tmp_path / "q.jsonl", {"id": 7, "prompt": "1?", "answer": "2"}), "number", 8)
    assert [problem.prompt for problem in task.problems(EVERY, 0)] == ["1?"]


@pytest.mark.parametrize(("prompt", "begins"), [("5 or 6? ", "<think>\n"), ("5 or 6? <think>\n", "")])
def test_what_is_thought_before_an_answer_is_not_scored(prompt, begins, tmp_path):
    task = questions(tiny_model(), write(tmp_path / "q.jsonl", {"prompt": prompt, "answer": "6"}), "number", 8)
    (problem,) = task.problems(EVERY, 0)
    assert task.score(problem, f"{begins}#### 5, no\n</think>6") and not task.score(problem, f"{begins}it is 6")


def test_the_line_that_an_empty_file_asks_for_can_be_asked_and_scored(tmp_path):
    path = tmp_path / "q.jsonl"
    path.touch()
    with pytest.raises(UserError, match="is empty; give a line such as ({.*}) for each prompt") as error:
        questions(tiny_model(), path, "number", 8)
    path.write_text(re.search("{.*}", str(error.value)).group())
    assert len(questions(tiny_model(), path, "number", 8).problems(9, 0)) == 1


@pytest.mark.parametrize(
    ("record", "match", "complaint"),
    [
        ({"prompt": "x"}, "number", "answer must be a string"),
        ({"prompt": "x", "answer": 3}, "number", "answer must be a string"),
        (
            {"prompt": "x", "answer": "three"},
            "number",
            "the answer 'three' has no number, or several; write #### before",
        ),
        ({"prompt": "x", "answer": "1/2"}, "number", "the answer '1/2' has no number, or several"),
        ({"prompt": "x", "answer": "3"}, "choice", "the answer '3' names no letter A to J"),
        ({"prompt": "x", "answer": " "}, "text", "the answer ' ' is empty"),
        ({"prompt": "x", "answer": "So\n1/2"}, "formula", "is empty or several lines; write a formula alone"),
        ({"question": "x", "answer": "3"}, "number", "unknown key 'question'; give one of prompt, messages"),
        ({"prompt_ids": [5], "answer": "3"}, "number", "prompt_ids are no text"),
        ({"prompt": "a " * 600, "answer": "3"}, "number", "exceed the model's context of 512"),
    ],
)
def test_a_line_that_cannot_be_asked_or_scored_is_named(tmp_path, record, match, complaint):
    path = write(tmp_path / "q.jsonl", {"prompt": "ok", "answer": "#### 3, that is B"}, record)
    with pytest.raises(UserError, match=f"q.jsonl:2: .*{complaint}"):
        questions(tiny_model(), path, match, 8)


@pytest.mark.parametrize("fields", [{"tasks": ("counting",)}, {"tasks": ("copying", "copying"), "questions": None}])
def test_no_two_tasks_have_one_name(tmp_path, fields):
    path = write(tmp_path / "counting.jsonl", {"prompt": "x", "answer": "3"})
    with pytest.raises(UserError, match=f"two tasks are named {fields['tasks'][0]}"):
        tasks_of(EvaluationConfig(**{"questions": str(path), **fields}), DataConfig(), tiny_model())


def test_the_answer_is_not_read_where_a_prompt_is_wanted_alone(tmp_path):
    path = write(tmp_path / "q.jsonl", {"prompt": "x", "answer": "3"})
    assert read_prompts(path) == [(f"{path}:1", "x")]
