"""`python -m wedlm_jax.data`: the rows as they are, the right spans coloured, numbers that are those of the batches."""

import dataclasses
import io
import re
import sys

import numpy as np
import pytest
from rich.console import Console

from tests.data.tiny import BLOCK_SIZE, chat, config_of, digest, sentence, sentencepiece, stream, tokenizer, write_lines
from tests.tiny_training import EXPERIMENT
from wedlm_jax.data.__main__ import find_tokenizer, main
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.inspection import LEARNED, PAD, PROMPT, epochs, inspect, row_text, show
from wedlm_jax.data.tokenizer import save_tokenizer
from wedlm_jax.errors import UserError

SHAPE = {"num_rows": 2, "row_length": 128, "block_size": BLOCK_SIZE, "pad_token_id": 0}


@pytest.fixture
def path(tmp_path):
    return write_lines(tmp_path / "chat.jsonl", [*(chat(number, 1 + number % 3) for number in range(20)), "{"])


def run(monkeypatch, capsys, *arguments):
    """Exit status, and what was printed."""
    monkeypatch.setattr(sys, "argv", ["data", *map(str, arguments)])
    status = 0
    try:
        main()
    except SystemExit as exit:
        status = exit.code
    printed = capsys.readouterr()
    return status, printed.out if status == 0 else printed.err


def test_a_row_is_coloured_as_it_is_learned(path):
    batch = next(stream(config_of(path, on_bad_record="skip"), batch_size=2))
    text = row_text(batch, 0, tokenizer())
    spans = dict.fromkeys((LEARNED, PROMPT), "")
    for span in text.spans:
        spans[str(span.style)] = spans.get(str(span.style), "") + text.plain[span.start : span.end]
    for style, mask in ((LEARNED, batch.loss_mask[0]), (PROMPT, ~batch.loss_mask[0] & (batch.segment_ids[0] > 0))):
        assert spans[style] == tokenizer().decode(batch.tokens[0][mask])
    marked = row_text(batch, 0, tokenizer(), plain=True).plain
    assert marked.replace("[[", "").replace("]]", "") == text.plain
    assert "".join(re.findall(r"\[\[(.*?)\]\]", marked, re.DOTALL)) == spans[LEARNED]
    assert spans[PAD].count("|") == batch.segment_ids[0].max()
    assert f"[{(batch.segment_ids[0] == 0)[::-1].cumprod().sum()} padding]" in spans[PAD]


@pytest.mark.parametrize("completion", [" c d", "    r = a", "a"])
def test_a_row_shows_every_space_that_is_learned(tmp_path, completion):
    """Also of a tokenizer that takes the space before a text for its own."""
    path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "a e", "completion": completion}])
    batch = next(stream(config_of(path, num_end_tokens=1, plain_prompt=True), batch_size=1, tokenizer=sentencepiece()))
    shown = row_text(batch, 0, sentencepiece(), plain=True).plain
    assert shown.startswith(f"|a e[[{completion}</s>]]")


def test_the_numbers_are_those_of_the_batches(path):
    documents = Documents(config_of(path, on_bad_record="skip"), tokenizer(), 0, "train")
    found = inspect(documents, 1000, **SHAPE)
    assert (found.documents, found.seen, len(found.skipped)) == (20, 21, 1) and "chat.jsonl:21" in found.skipped[0]
    segments = np.concatenate([batch.segment_ids.ravel() for batch in found.batches])
    learned = sum(int(batch.loss_mask.sum()) for batch in found.batches)
    assert sum(found.lengths) == (segments > 0).sum() and len(found.lengths) == 20
    full = np.concatenate([batch.segment_ids.ravel() for batch in found.batches[:-1]])
    assert found.padding == pytest.approx((full == 0).mean())
    assert found.learned == pytest.approx(learned / (segments > 0).sum())
    assert inspect(documents, 5, **SHAPE).documents == 5

    console = Console(file=io.StringIO(), width=100)
    show(console, found, tokenizer(), samples=1)
    printed = console.file.getvalue()
    assert "row 0" in printed and "row 1" not in printed and "skipped records: 1" in printed
    assert f"padding: {found.padding:.1%} of the places of {len(found.batches) - 1} full batch" in printed
    assert f"{found.learned:.1%}" in printed and "[[learned]] prompt padding" in printed  # a file has no colours
    bars = [line.split() for line in printed.splitlines() if line.endswith("#") or "# " in line]
    assert sum(int(bar[1]) for bar in bars) == 20


@pytest.mark.parametrize("together", [1, 2])
def test_the_rows_are_those_of_training_where_its_batches_have_groups(together, path):
    config = config_of(path, on_bad_record="skip", num_groups=2, pack_together=together)
    documents = Documents(config, tokenizer(), 0, "train")
    found = inspect(documents, 1000, num_groups=2, together=together, **SHAPE | {"num_rows": 1})
    assert len(found.batches) > 2 and len(found.lengths) == 20
    training = stream(config, batch_size=2)
    for batch in found.batches[:-1]:
        assert digest(batch) == digest(next(training))
    assert sum(int((batch.segment_ids > 0).sum()) for batch in found.batches) == sum(found.lengths)


def test_what_the_end_of_the_reading_left_empty_is_no_padding(path):
    """Of the only batch, the rows that no document was put into."""
    documents = Documents(config_of(path, on_bad_record="skip"), tokenizer(), 0, "train")
    found = inspect(documents, 1, **SHAPE | {"num_rows": 8})
    assert found.padding == pytest.approx(1 - found.lengths[0] / 128)
    console = Console(file=io.StringIO(), width=100)
    show(console, found, tokenizer(), samples=0)
    assert "of the places of the rows begun; they fill no batch" in console.file.getvalue()


def test_the_steps_of_an_epoch_are_about_those_of_the_stream(tmp_path):
    """Also where not all records were looked at."""
    path = write_lines(tmp_path / "many.jsonl", [chat(number, 1 + number % 3) for number in range(120)])
    config = config_of(path, row_length=128)
    documents, batches, steps = Documents(config, tokenizer(), 0, "train"), stream(config, batch_size=2), 0
    while batches.epochs[0] < 1:
        next(batches)
        steps += 1
    for count in (40, 1000):
        (line,) = epochs(inspect(documents, count, **SHAPE), documents, 2 * 128, 500)
        found = re.fullmatch(
            rf"epoch of {path}: 120 records, about (\d+) steps; train.steps=500 are about (\S+) epochs", line
        )
        assert float(found[1]) == pytest.approx(steps, rel=0.15)
        assert float(found[2]) == pytest.approx(500 / steps, rel=0.15)


def test_the_command_works_before_any_training(path, tmp_path, monkeypatch, capsys):
    save_tokenizer(tokenizer(), tmp_path / "tokenizer")
    experiment = tmp_path / "tiny.py"
    experiment.write_text(
        "from wedlm_jax.experiment import *\n"
        "def tiny():\n"
        "    model = ModelConfig(vocab_size=320, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2,\n"
        "                        num_kv_heads=1, head_dim=4)\n"
        "    return Experiment(name='tiny', model=model, data=DataConfig(source='chat', row_length=128))\n"
    )
    run_with = ("--exp", experiment, f"data.path={path}", f"tokenizer.path={tmp_path / 'tokenizer'}")
    status, printed = run(monkeypatch, capsys, *run_with, "data.on_bad_record=skip", "--samples", 1)
    assert status == 0 and "skipped records: 1" in printed and "<|im_start|>assistant" in printed
    assert f"epoch of {path}: 21 records, about" in printed and "train.steps=1000 are about" in printed
    status, printed = run(monkeypatch, capsys, *run_with)
    assert status == 2 and printed.startswith(f"error: {path}:21: broken JSON")
    status, printed = run(monkeypatch, capsys, "--exp", experiment, f"data.path={path}")
    assert status == 2 and "name its folder as tokenizer.path" in printed
    text = write_lines(tmp_path / "text.jsonl", [{"text": sentence(number)} for number in range(40)])
    trained = ("--exp", experiment, "data.source=text", f"data.path={text}", "tokenizer.vocab_size=300")
    assert "learned: 100.0% of the tokens" in run(monkeypatch, capsys, *trained)[1]
    half = (*trained, "data.held_out_share=0.5")
    shares = [run(monkeypatch, capsys, *half, "--split", split)[1] for split in ("train", "held_out")]
    assert sum(int(printed.split("documents: ")[1].split()[0]) for printed in shares) == 40
    own = write_lines(tmp_path / "own.jsonl", [{"prompt_ids": [5, 6], "ids": [7, 8], "finish_reason": "length"}])
    selfgen = (*run_with, "data.self_generated.num_prompts=3")
    status, printed = run(monkeypatch, capsys, *selfgen)
    assert status == 2 and "show it with data.self_generated=none data.source=completions data.path=" in printed
    shown = (
        *selfgen,
        "data.self_generated=none",
        "data.source=completions",
        f"data.path={own}",
        "data.held_out_share=0",
    )
    assert "learned: 50.0% of the tokens" in run(monkeypatch, capsys, *shown)[1]
    for wrong, message in (([], "name an experiment"), ([*trained, "--documents", "0"], "--documents at least 1")):
        status, printed = run(monkeypatch, capsys, *wrong)
        assert status == 2 and message in printed


def test_a_model_that_the_hub_does_not_give_is_one_line(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=r"owner/name: no such directory, and not fetched .*\(no route\)"):
        find_tokenizer(dataclasses.replace(EXPERIMENT, model=None, init_from="owner/name"))


def test_the_tokenizer_is_that_of_the_model_to_start_from(path, tmp_path):
    """A workdir and a directory of a model; their weights are not read."""
    for folder, file in ((tmp_path / "run", "model.json"), (tmp_path / "model", "config.json")):
        save_tokenizer(tokenizer(), folder / "tokenizer" if file == "model.json" else folder)
        (folder / file).write_text("{}")
        experiment = dataclasses.replace(
            EXPERIMENT, model=None, init_from=str(folder), data=config_of(path, row_length=192)
        )
        assert find_tokenizer(experiment).get_vocab() == tokenizer().get_vocab()
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer; name the folder of one as tokenizer.path"):
        find_tokenizer(experiment)
    with pytest.raises(UserError, match="absent: no such directory"):
        find_tokenizer(dataclasses.replace(experiment, init_from=str(tmp_path / "absent")))
