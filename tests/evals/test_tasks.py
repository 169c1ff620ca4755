"""Tasks give held-out problems and score them; the interval is Wilson's."""

import dataclasses
import json

import pytest

from tests.data.tiny import sentence, with_bos, write_lines
from tests.evals.models import tiny_model
from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.quickstart_tasks import TASKS, split_of
from wedlm_jax.data.stdlib_code import CodeFile
from wedlm_jax.decode.prompts import encode_prompt
from wedlm_jax.errors import UserError
from wedlm_jax.evals.tasks import document_continuation, prompt_of, task, text_continuation, text_pieces


@pytest.mark.parametrize("name", TASKS)
def test_a_task_gives_exactly_the_problems_asked_for_all_held_out_and_distinct(name):
    problems = task(name).problems(20, 0)
    assert len(problems) == 20 == len({problem.prompt for problem in problems})
    assert all(split_of(problem.prompt) == "held_out" and problem.task == name for problem in problems)
    assert task(name).problems(20, 0) == problems != task(name).problems(20, 1)


@pytest.mark.parametrize("name", TASKS)
def test_the_solution_scores_and_another_problem_s_does_not(name):
    of = task(name)
    first, second = of.problems(2, 0)
    assert of.score(first, first.solution)
    assert not of.score(first, "") and not of.score(first, first.solution + " 7")
    assert of.score(first, second.solution) == (first.answer == second.answer)


def test_an_unknown_task_names_the_known_ones():
    with pytest.raises(UserError, match="'count' does not exist; choose one of word_problems, counting, copying"):
        task("count")


def test_prompts_of_held_out_chats_are_distinct_and_end_where_the_answer_begins(tmp_path):
    questions = [f"Say {i}" for i in range(8)] * 2
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": "No"}] for q in questions]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": of}) + "\n" for of in turns))
    data = DataConfig(source="chat", path=str(tmp_path / "chat.jsonl"), held_out_share=0.999)
    of = document_continuation(data, tiny_model().tokenizer, 100)
    prompts = [problem.prompt for problem in of.problems(100, 0)]
    wanted = {f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in questions}
    assert of.score is None and set(prompts) == wanted and len(prompts) == 8
    assert [problem.prompt for problem in of.problems(3, 0)] == prompts[:3]
    with pytest.raises(
        UserError, match=r"evaluation.text_prompts=2: data.source=chat holds out no prompt of 1 to 3 tok"
    ):
        document_continuation(data, tiny_model().tokenizer, 3).problems(2, 0)


@pytest.mark.parametrize("source", ["chat", "text", "plain prompts"])
def test_prompts_of_held_out_documents_are_encoded_as_in_training(tmp_path, source):
    """Of a tokenizer that begins texts, and whose chat template does not; none longer than asked."""
    turns = [[{"role": "user", "content": "Say " * i}, {"role": "assistant", "content": "No"}] for i in range(1, 9)]
    records = {
        "chat": [{"messages": of} for of in turns],
        "text": [{"text": sentence(i, 12 + 4 * i)} for i in range(8)],
        "plain prompts": [{"prompt": sentence(i), "completion": " No"} for i in range(8)],
    }[source]
    path = write_lines(tmp_path / "held_out.jsonl", records)
    data = DataConfig(
        source="text" if source == "text" else "chat", path=str(path), held_out_share=0.999,
        plain_prompt=source == "plain prompts",
    )  # fmt: skip
    tokenizer = with_bos()
    model = dataclasses.replace(tiny_model(), tokenizer=tokenizer)
    documents = Documents(data, tokenizer, 0, "held_out")
    trained = [e for i in range(documents.epoch) for e in documents[i].examples[:1]]
    wanted = {tuple(prompt_of(e.tokens, e.loss_mask)) for e in trained}
    longest = max(map(len, wanted))
    problems = document_continuation(data, tokenizer, longest).problems(100, 0)
    assert {tuple(encode_prompt(model, problem.prompt)) for problem in problems} == wanted
    shorter = document_continuation(data, tokenizer, longest - 1).problems(100, 0)
    assert all(len(encode_prompt(model, problem.prompt)) < longest for problem in shorter)


def test_prompts_of_held_out_plain_text_are_the_first_quarter_in_whole_characters(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "\u00e4\u20ac" * n}) + "\n" for n in range(9, 20)))
    data = DataConfig(source="text", path=str(tmp_path / "text.jsonl"), held_out_share=0.999)
    for problem in document_continuation(data, tiny_model().tokenizer, 100).problems(100, 0):
        assert 4 <= len(problem.prompt) <= 10 and ("\u00e4\u20ac" * 5).startswith(problem.prompt)


def test_text_prompts_are_whole_lines_of_distinct_files():
    files = [CodeFile(f"{i}.py", "".join(f"line {i} {j}\n" for j in range(100))) for i in range(6)]
    of = text_continuation(files, 50)
    problems = of.problems(6, 0)
    assert of.score is None
    assert {problem.prompt.split()[1] for problem in problems} == set("012345")
    for problem in problems:
        assert len(problem.prompt) >= 50 and problem.prompt.endswith("\n") and problem.prompt.startswith("line")
    assert len(of.problems(7, 0)) == 6  # all there are
    assert text_continuation(files, 10_000).problems(1, 0) == []


def test_text_pieces_are_whole_lines_of_which_none_comes_twice():
    files = [CodeFile(f"{i}.py", "".join(f"line {i} {j}\n" for j in range(100))) for i in range(3)]
    pieces = [problem.prompt for problem in text_pieces(files, 50).problems(1000, 0)]
    lines = [line for piece in pieces for line in piece.splitlines()]
    assert len(lines) == len(set(lines)) > 280
    assert all(len(piece) >= 50 and any(f"\n{piece}" in f"\n{file.text}" for file in files) for piece in pieces)
    some = text_pieces(files, 50).problems(5, 0)
    assert [problem.prompt for problem in some] == pieces[:5] and some != text_pieces(files, 50).problems(5, 1)
    assert text_pieces(files, 10_000).problems(1, 0) == []
