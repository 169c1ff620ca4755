"""Bad data, config and files: one line that names the place and the reason; under `skip`, all the rest survives."""

import dataclasses
import gzip
import json
import os
import re
import sys
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.data.test_chat import NO_PROMPT, of_style
from tests.data.tiny import chat, config_of, stream, tokenizer, write_lines
from wedlm_jax.data import pipeline
from wedlm_jax.data.config import DataConfig, SelfGenerated, WeightedSource
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.examples import Example, check_mask
from wedlm_jax.data.json_lines import JsonLines
from wedlm_jax.data.pipeline import PackedBatches
from wedlm_jax.data.records import BadRecord
from wedlm_jax.data.split import split_by_hash
from wedlm_jax.errors import UserError

GOOD = [chat(number) for number in range(5)]
USER = {"role": "user", "content": "the cat"}


def one_line(caught):
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


def told(config, made=None):
    """The one line that reading an epoch ends with."""
    with pytest.raises(UserError) as caught:
        documents = Documents(config, made or tokenizer(), 0, "train")
        for index in range(documents.epoch):
            documents[index]
    return one_line(caught)


def conversation(*messages):
    return json.dumps({"messages": list(messages)})


BAD_LINES = {
    "broken JSON": ('{"messages": [', "broken JSON (Expecting value, column 15)"),
    "a JSON array": ("[1]", "a JSON object is expected, with keys, and this is list"),
    "a key twice": ('{"messages": [], "messages": []}', "chat.jsonl:3: the key 'messages' is there twice; take one out"),
    "a key twice in a message": (
        '{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "chat.jsonl:3: the key 'content' is there twice",
    ),
    "no object": ("3", "a JSON object is expected, with keys, and this is int"),
    "a missing key": ('{"dialog": []}', "prompt with completion, instruction with output is there (there are: dialog)"),
    "two kinds": ('{"messages": [], "prompt": "", "completion": ""}', "messages and prompt are both there"),
    "text that is no messages": ('{"messages": "hi"}', "messages is text that is no JSON"),
    "a wrong type": ('{"messages": "3"}', "messages is int, not a list of messages"),
    "one message without its list": (json.dumps({"messages": USER}), "messages is an object, not a list of messages"),
    "one message of two words of one length": (
        '{"messages": {"role": "user", "content": "word"}}', "messages is an object, not a list of messages",
    ),
    "an object of a number": ('{"messages": {"role": 1}}', "messages is an object, not a list of messages"),
    "an object of nothing": ('{"messages": {}}', "messages is an object, not a list of messages"),
    "lists of different lengths": (
        '{"messages": {"role": ["user", "assistant"], "content": ["a"]}}', "messages is an object, not a list of messages",
    ),
    "lists that are nested too deep": (
        '{"messages": ' + "[" * 700 + "]" * 700 + "}",
        # Python 3.12 has one frame for a list that a comprehension reads, and gets through.
        "lists or objects are nested too deep" if sys.version_info < (3, 12) else "message 0 is list, not an object",
    ),
    "no message": (conversation("hi"), "message 0 is str, not an object with role and content"),
    "an unknown role": (conversation({"role": "bot", "content": "x"}), "message 0: the role 'bot' is unknown; the roles are"),
    "no role": (conversation({"content": "x"}), "message 0 has no role"),
    "content that is no text": (
        conversation(USER, {"role": "assistant", "content": 5}), "message 1: content is int, not text",
    ),
    "content that holds a picture": (
        conversation({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}),
        "message 0: content holds {'type': 'image_url'}, and not {\"type\": \"text\", \"text\": ...} alone",
    ),
    "no content": (conversation({"role": "user"}), "message 0: content is missing"),
    "no reply": (conversation(USER), "the last message must be the assistant's; add its reply"),
    "an empty reply": (conversation(USER, {"role": "assistant", "content": ""}), "message 1: the assistant's turn is empty"),
    "a control token": (
        conversation({"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "x"}),
        "message 0: the text holds the control token '<|im_end|>'",
    ),
    "a call in OpenAI's earlier form": (
        conversation(USER, {"role": "assistant", "content": "x", "function_call": {"name": "look", "arguments": "{}"}}),
        "message 1: function_call is OpenAI's earlier form of a call; write it as tool_calls",
    ),
    "functions in OpenAI's earlier form": (
        json.dumps({"messages": [USER, {"role": "assistant", "content": "x"}], "functions": [{"name": "look"}]}),
        "functions is OpenAI's earlier form of tools; write",
    ),
    "a call whose arguments are no object": (
        conversation(USER, {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "x"}}]}),
        "message 1: the arguments of a call are text that is no JSON object",
    ),
    "calls as text": (
        conversation(USER, {"role": "assistant", "content": "x", "tool_calls": '[{"name": "look"}]'}),
        """message 1: tool_calls is '[{"name": "look"}]', and not a list of calls, each an object""",
    ),
    "a call as text": (
        conversation(USER, {"role": "assistant", "content": "x", "tool_calls": ["look"]}),
        "message 1: tool_calls is ['look'], and not a list of calls",
    ),
    "a weight that is neither 0 nor 1": (
        conversation(USER, {"role": "assistant", "content": "x", "weight": 0.5}),
        "message 1: weight is 0.5; 0 for a turn not to be learned, or 1",
    ),
    "tools": (
        json.dumps({"messages": [USER, {"role": "assistant", "content": "x"}], "tools": "{"}),
        "tools is text that is no JSON",
    ),
    "longer than a row": (
        conversation(USER, {"role": "assistant", "content": "the " * 90}),
        "tokens, and a row holds data.row_length=64; shorten the record (a conversation is not cut), or start a new run",
    ),
    "half a character in a key": (
        conversation(USER, {"role": "assistant", "content": "x", "\ud83d": 1}),
        "holds half a character ('\\ud83d'), which is no text",
    ),
    "half a character in tools": (
        json.dumps({"messages": [USER, {"role": "assistant", "content": "x"}], "tools": '[{"name": "\\ud83d"}]'}),
        "holds half a character ('\\ud83d'), which is no text",
    ),
    "half a character": (
        conversation(USER, {"role": "assistant", "content": "\ud83d"}), "holds half a character ('\\ud83d'), which is no text",
    ),
    "a system prompt that is no text": (
        json.dumps({"system": 3, "messages": [USER, {"role": "assistant", "content": "x"}]}), "system is int, not text",
    ),
    "not UTF-8": (b'{"messages": "\xff"}', "not UTF-8 (byte 14 of the line)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_told_with_file_line_and_reason_and_can_be_skipped(tmp_path, case):
    """Under `skip` it is counted, and every other record arrives."""
    line, reason = BAD_LINES[case]
    path = write_lines(tmp_path / "chat.jsonl", GOOD)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], line if isinstance(line, bytes) else line.encode(), *lines[2:]]))
    config = config_of(path, row_length=64)
    message = told(config)
    assert message.startswith(f"{path}:3: ") and reason in message and "data.on_bad_record=skip" in message

    skipping = dataclasses.replace(config, on_bad_record="skip")
    documents = Documents(skipping, tokenizer(), 0, "train")
    epoch = [documents[index] for index in range(6)]
    assert [d.skipped for d in epoch if d.skipped] == [message.partition(" (data.on_bad_record")[0]]
    assert sum(len(d.examples) for d in epoch) == 5
    iterator = stream(skipping, batch_size=8)
    next(iterator), next(iterator)
    assert iterator.skipped_records >= 1 and iterator.get_state()["skipped_records"] == [iterator.skipped_records]


def test_objects_of_several_lines_are_told_whichever_line_is_met_first(tmp_path):
    """The line that is told may be any, for all are shuffled; alone it says nothing of what is wrong."""
    path = tmp_path / "chat.json"
    path.write_text("".join(json.dumps(record, indent=2) + "\n" for record in GOOD))
    assert "; records are one object a line, or one array; `jq -c .` writes each object in a line" in told(
        config_of(path)
    )


def test_an_object_around_the_array_is_told_how_to_take_off(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"version": 1, "data": GOOD}))
    assert "; where 'data' holds the records, `jq .data` writes them as the array that is read" in told(config_of(path))
    path.write_text(json.dumps({"tools": [{"type": "function"}], "messages": [{"role": "bot", "content": "x"}]}))
    assert "jq" not in told(config_of(path))


@pytest.mark.parametrize(
    ("element", "reason"),
    [
        (b"3", "a JSON object is expected, with keys, and this is int"),
        (b'{"messages": [], "messages": []}', "the key 'messages' is there twice"),
        (b'{"messages": "\xff"}', "not UTF-8 (byte 14 of the record)"),
        (b'{"messages": "a\nb"}', "broken JSON (Invalid control character at, column 16)"),
        (b'{"messages": ' + b"1" * 5000 + b"}", "broken JSON (Exceeds the limit"),
    ],
)
def test_a_bad_element_of_an_array_is_told_by_its_number_and_can_be_skipped(tmp_path, element, reason):
    path = tmp_path / "chat.json"
    good = [json.dumps(record).encode() for record in GOOD]
    path.write_bytes(b"[" + b", ".join([*good[:2], element, *good[2:]]) + b"]")
    assert (message := told(config_of(path))).startswith(f"{path}: record 2: ") and reason in message
    skipping = Documents(config_of(path, on_bad_record="skip"), tokenizer(), 0, "train")
    assert sum(len(skipping[index].examples) for index in range(skipping.epoch)) == len(GOOD)


ARRAYS = {
    "cut off": (lambda text: text[:-1], "record 4: broken JSON (Expecting ',' or ']'"),
    "cut off within": (lambda text: text[:-9], "record 4: broken JSON ("),
    "a comma behind the last": (lambda text: text[:-1] + ",]", "record 5: broken JSON (Expecting value"),
    "no comma": (lambda text: text.replace("}, {", "} {"), "record 0: broken JSON ("),
    "nested too deep": (lambda text: "[" * 100_000 + text, "record 0: broken JSON ("),
    "more behind it": (lambda text: text + "\n{}", "more follows its array; JSON records are one array, or"),
    "two arrays": (lambda text: text + text, "more follows its array"),
    "an array of nothing": (lambda text: " [ ]", "the file is empty; a record is one object on a line, or of one array"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARRAYS)
def test_an_array_that_hides_its_records_is_told_and_none_to_skip(tmp_path, case):
    change, message = ARRAYS[case]
    path = tmp_path / "chat.json"
    path.write_text(change(json.dumps(GOOD)))
    assert (found := told(config_of(path, on_bad_record="skip"))).startswith(f"{path}: ") and message in found


def test_an_empty_shard_is_none_and_all_empty_are_told(tmp_path):
    """As of parquet files and of texts."""
    for name in ("a.jsonl", "c.jsonl", "e.ndjson"):
        (tmp_path / name).touch()
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(b""))
    assert told(config_of(tmp_path)).startswith(f"{tmp_path}: the file is empty")
    write_lines(tmp_path / "b.jsonl", GOOD[:3])
    write_lines(tmp_path / "d.jsonl", GOOD[3:])
    documents = Documents(config_of(tmp_path), tokenizer(), 0, "train")
    assert documents.records == [5] and all(documents[index].examples for index in range(5))
    (tmp_path / "f.jsonl.gz").write_bytes(b"")  # not what compressing nothing gives
    assert "f.jsonl.gz: cannot be decompressed, it is cut off or damaged" in told(config_of(tmp_path))


def test_an_empty_csv_file_among_others_is_none_and_all_empty_are_told(tmp_path):
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.csv").write_text("text\n")
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b""))
    assert told(config_of(tmp_path, "csv")) == f"{tmp_path}: has no rows"
    (tmp_path / "d.csv").write_text("text\nthe cat\n")
    documents = Documents(config_of(tmp_path, "csv"), tokenizer(), 0, "train")
    assert documents.records == [1] and documents[0].examples
    (tmp_path / "c.csv.gz").write_bytes(b"")  # not what compressing nothing gives
    assert "c.csv.gz: cannot be read as CSV (it holds nothing at all)" in told(config_of(tmp_path, "csv"))


@pytest.mark.parametrize("empty", [np.zeros(0, int), np.zeros((0, 3), int), np.zeros((3, 0), int)])
def test_an_empty_array_of_tokens_among_others_is_none(tmp_path, empty):
    np.save(tmp_path / "a.npy", empty)
    assert told(config_of(tmp_path, "tokens")) == f"{tmp_path}: the array is empty"
    np.save(tmp_path / "b.npy", np.array([4, 5]))
    documents = Documents(config_of(tmp_path, "tokens"), tokenizer(), 0, "train")
    assert documents.epoch == 1 and documents[0].examples[0].tokens.tolist() == [4, 5]


def test_a_stream_of_nothing_but_bad_records_ends(tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", ["{"] * 5)
    with pytest.raises(
        UserError, match="the training split holds no document but bad records, the last: .*chat.jsonl:"
    ) as caught:
        next(stream(config_of(path, on_bad_record="skip")))
    one_line(caught)


def test_a_bad_record_that_alone_is_held_out_is_not_told_of_all_records(tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", [*GOOD[:4], "{}"])
    held_out = [line for line in path.read_bytes().splitlines() if split_by_hash(line, 0.05) == "held_out"]
    assert held_out == [b"{}"]
    with pytest.raises(
        UserError, match="the held-out split holds no document but bad records, the last: .*jsonl:5: none"
    ):
        next(stream(config_of(path, on_bad_record="skip", held_out_share=0.05), split="held_out"))


@pytest.mark.parametrize(
    ("split", "share", "message"),
    [
        ("held_out", 0.0, "the held-out split holds no document; raise data.held_out_share"),
        ("train", 0.9999, "the training split holds no document; lower data.held_out_share"),
    ],
)
def test_a_split_without_documents_ends_and_says_which(tmp_path, split, share, message):
    path = write_lines(tmp_path / "chat.jsonl", GOOD)
    with pytest.raises(UserError, match=message):
        next(stream(config_of(path, held_out_share=share), split=split))


def test_many_bad_records_in_a_row_are_told_before_all_were_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "MANY_BAD", 5)
    path = write_lines(tmp_path / "chat.jsonl", ["{"] * 30)
    with pytest.raises(UserError, match="the training split holds no document but bad records"):
        next(stream(config_of(path, on_bad_record="skip", num_groups=2)))
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"warning: 5 bad records in a row, the last: .*chat.jsonl:\d+: broken JSON .*", line)


def test_where_nothing_is_held_out_that_is_told_before_a_record_is_read(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "chat.jsonl", GOOD)
    monkeypatch.setattr(JsonLines, "fetch", lambda *_: pytest.fail("read a record"))
    with pytest.raises(UserError, match="the held-out split holds no document; raise data.held_out_share"):
        Documents(config_of(path, held_out_share=0), tokenizer(), 0, "held_out")


def test_a_single_held_out_document_comes_to_every_group_however_long_it_takes(tmp_path):
    """A group meets it in some epochs alone: none in three of them is no sign that it is not there."""
    lines = [json.dumps(chat(number)) for number in range(200)]
    held_out = [line for line in lines if split_by_hash(line.encode(), 0.02) == "held_out"]
    trained = [line for line in lines if line not in held_out]
    path = write_lines(tmp_path / "chat.jsonl", [*trained[:49], held_out[0]])
    batch = next(stream(config_of(path, held_out_share=0.02, num_groups=4), split="held_out"))
    assert (batch.segment_ids.max(axis=1) > 0).all()


def test_what_was_handed_out_before_a_bad_record_stays_valid(tmp_path):
    """The state is of the last good batch; with the record mended, the stream goes on from it."""
    records = [chat(number) for number in range(24)]
    bad, mended = ([*records[:7], record, *records[8:]] for record in ("{" + " " * 80, records[7]))
    path = write_lines(tmp_path / "chat.jsonl", bad)
    iterator, count = stream(config_of(path, row_length=64), batch_size=1, seed=5), 0
    with pytest.raises(BadRecord):
        for count in range(100):  # noqa: B007
            next(iterator)
    state = iterator.get_state()
    assert count > 0
    write_lines(path, mended)
    whole, resumed = (stream(config_of(path, row_length=64), batch_size=1, seed=5) for _ in range(2))
    for _ in range(count):
        next(whole)
    resumed.set_state(state)
    np.testing.assert_array_equal(next(resumed).tokens, next(whole).tokens)


def test_a_mask_without_a_loss_or_without_a_prompt_is_an_error(tmp_path):
    tokens = np.array([5, 6], np.int32)
    with pytest.raises(BadRecord, match="its loss mask is all zero"):
        check_mask(Example(tokens, np.zeros(2, bool), 0))
    path = write_lines(tmp_path / "chat.jsonl", GOOD)
    assert f"{path}:" in (message := told(config_of(path), of_style(NO_PROMPT)))
    assert "its loss mask is all one: no token of it is prompt" in message


def gzip_cut(path):
    path.write_bytes(gzip.compress(b'{"text": "the cat"}\n' * 2000)[:-20])


def zstd_cut(path):
    with pyarrow.CompressedOutputStream(pyarrow.OSFile(str(path), "wb"), "zstd") as file:
        file.write(b'{"text": "the cat"}\n' * 2000)
    path.write_bytes(path.read_bytes()[:-8])


def saved(array):
    return lambda path: np.save(path, array)


FILES = {
    "an empty file": ("chat.jsonl", "chat", lambda path: path.touch(), "the file is empty"),
    "truncated gzip": ("a.jsonl.gz", "text", gzip_cut, "cannot be decompressed, it is cut off or damaged"),
    "no gzip": ("a.jsonl.gz", "text", lambda path: path.write_text("{}"), "cannot be decompressed"),
    "truncated zstd": ("a.jsonl.zst", "text", zstd_cut, "cannot be decompressed, it is cut off or damaged"),
    "a text file that is not UTF-8": ("a.txt", "text", lambda path: path.write_bytes(b"ab\xff"), "a.txt: not UTF-8 (byte 2)"),
    "an empty text": ("a.txt", "text", lambda path: path.touch(), "a.txt: the text is empty"),
    "bad parquet": ("a.parquet", "parquet", lambda path: path.write_text("PAR1"), "cannot be read as parquet"),
    "a row of CSV with a column less": (
        "a.csv", "csv", lambda path: path.write_text("text,b\nthe\n"), "cannot be read as CSV (CSV parse error: Expected 2",
    ),
    "CSV of other columns": ("a.csv", "csv", lambda path: path.write_text("q;a\n1;2\n"), "is there (there are: q;a); name what"),
    "CSV of names that are not UTF-8": ("a.csv", "csv", lambda path: path.write_bytes(b"\xff\na\n"), "be read as CSV ('utf-8'"),
    "CSV that is not UTF-8": ("a.csv", "csv", lambda path: path.write_bytes(b"text\n\xff\n"), "cannot be read as CSV"),
    "CSV as JSONL": ("a.csv", "chat", lambda path: path.write_text("q,a\n"), "; a table in CSV is data.source=csv"),
    "no array": ("a.npy", "tokens", lambda path: path.write_text("hello"), "no array of tokens in .npy format"),
    "a pickled array": ("a.npy", "tokens", saved(np.array([{}], object)), "no array of tokens in .npy format"),
    "floats": ("a.npy", "tokens", saved(np.ones(4)), "holds float64 (4,); whole numbers are expected"),
    "three dimensions": ("a.npy", "tokens", saved(np.ones((1, 2, 3), int)), "whole numbers are expected, as [T] or [N, T]"),
    "an empty array": ("a.npy", "tokens", saved(np.zeros(0, int)), "the array is empty"),
    "another vocabulary": (
        "a.npy", "tokens", saved(np.array([4, 151_643])),
        "tokens from 0: token 151643 at place 1 is none of the tokenizer's",
    ),
    "a token below zero": ("a.npy", "tokens", saved(np.array([[4], [-1]])), "row 1: token -1 at place 0 is none of"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_told_by_its_name(tmp_path, case):
    name, source, write, message = FILES[case]
    write(tmp_path / name)
    found = told(config_of(tmp_path / name, source))
    assert str(tmp_path / name) in found and message in found


@pytest.mark.parametrize("case", ["an empty file", "truncated gzip", "bad parquet", "floats"])
def test_a_file_that_cannot_be_read_at_all_is_no_record_to_skip(tmp_path, case):
    name, source, write, message = FILES[case]
    write(tmp_path / name)
    assert message in told(config_of(tmp_path / name, source, on_bad_record="skip"))


def test_missing_and_unreadable_places_are_told(tmp_path, monkeypatch):
    assert (
        told(config_of(tmp_path / "absent.jsonl")) == f"{tmp_path}/absent.jsonl: no such file or folder; set data.path"
    )
    assert "the folder holds no file that ends in .jsonl, .jsonl.gz" in told(config_of(tmp_path))
    assert "no file fits the pattern" in told(config_of(tmp_path / "*.jsonl"))

    def refused(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refused)
    assert told(config_of(tmp_path)) == f"{tmp_path}: the folder cannot be read (Permission denied)"


@pytest.mark.parametrize("path", ["", "*.jsonl"])
def test_a_file_that_is_held_out_and_trained_on_is_told(tmp_path, path):
    write_lines(tmp_path / "train.jsonl", GOOD)
    write_lines(tmp_path / "valid.jsonl", GOOD)
    both = config_of(tmp_path / path, held_out_share=None, held_out_path=f"{tmp_path}/../{tmp_path.name}/valid.jsonl")
    assert told(both).startswith(
        f"{tmp_path}/valid.jsonl: is of data.held_out_path={both.held_out_path} and of data.path"
    )
    Documents(dataclasses.replace(both, path=str(tmp_path / "train*")), tokenizer(), 0, "train")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_column": "body"}, "a.parquet: no column 'body' (there are: q, a)"),
        (
            {},
            "a.parquet: none of messages, conversations, text, prompt with completion, instruction with output is there "
            "(there are: q, a)",
        ),
        ({"prompt_column": "q"}, "data.prompt_column and data.completion_column belong together"),
        ({"prompt_column": "q", "completion_column": "b"}, "a.parquet: no column 'b'"),
        ({"text_column": "q", "messages_column": "a"}, "data.text_column and data.messages_column are both set"),
        ({"document_end_id": 3}, "data.document_end_id is set, but data.source=parquet does not read it"),
    ],
)
def test_columns_that_are_not_there_are_told_when_the_table_is_opened(tmp_path, fields, message):
    pyarrow.parquet.write_table(pyarrow.table({"q": ["x"], "a": ["y"]}), tmp_path / "a.parquet")
    assert message in told(config_of(tmp_path / "a.parquet", "parquet", **fields))


def test_a_column_that_is_there_twice_is_told(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "a.parquet: the column 'text' is there twice" in told(config_of(tmp_path / "a.parquet", "parquet"))


def test_a_table_with_a_missing_or_wrong_value_names_its_row(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), tmp_path / "a.parquet")
    assert "a.parquet: row 1: text is missing" in told(config_of(tmp_path / "a.parquet", "parquet"))
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "a.parquet")
    assert "a.parquet: row 0: text is int, not text" in told(config_of(tmp_path / "a.parquet", "parquet"))
    pyarrow.parquet.write_table(pyarrow.table({"messages": [USER]}), tmp_path / "a.parquet")
    found = told(config_of(tmp_path / "a.parquet", "parquet"))
    assert "a.parquet: row 0: messages is an object, not a list of messages" in found
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    assert "a.parquet: has no rows" in told(config_of(tmp_path / "a.parquet", "parquet"))


def part(**fields):
    return WeightedSource(**{"source": "chat", "path": "x"} | fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataConfig(source="mixture"), "data.source=mixture, but data.mixture is empty"),
        (lambda: DataConfig(source="mixture", mixture=(part(weight=0.0),)), "weight=0.0 of chat must be above 0"),
        (lambda: DataConfig(source="mixture", mixture=(part(weight=-1),)), "weight=-1 of chat must be above 0"),
        (lambda: DataConfig(source="mixture", mixture=(part(weight=float("nan")),)), "weight=nan of chat must be above 0"),
        (
            lambda: DataConfig(source="mixture", mixture=(part(source="mixture", path=None),)),
            "data.mixture[0] is a mixture itself",
        ),
        (
            lambda: DataConfig(source="mixture", mixture=(part(), part(weight=1e-320))),
            "data.mixture[1].weight=1e-320 is next to nothing beside 1.0; raise it, or leave the part out",
        ),
        (lambda: DataConfig(source="mixture", mixture=(part(), part(path=None))), "data.mixture[1].source=chat needs"),
        (lambda: DataConfig(source="mixture", path="x", mixture=(part(),)), "data.path is set, but data.source=mixture"),
        (lambda: DataConfig(source="chat", path="x", mixture=(part(),)), "data.mixture is set, but data.source=chat"),
        (lambda: DataConfig(source="chat"), "data.source=chat needs data.path"),
        (lambda: DataConfig(source="text", path="x", messages_column="m"), "data.messages_column is set, but data.source=text"),
        (lambda: DataConfig(source="chat", path="x", subset="m"), "data.subset is set, but data.source=chat"),
        (lambda: DataConfig(held_out_share=0.1), "data.held_out_share is set, but quickstart_tasks holds out a fixed share"),
        (
            lambda: DataConfig(source="chat", path="x", held_out_path="y", held_out_share=0.1),
            "data.held_out_share is set, but held_out_path or held_out_split says what is held out",
        ),
        (
            lambda: DataConfig(source="chat", path="x", held_out_path="x"),
            "data.held_out_path=x is what is trained on; name another place",
        ),
        (lambda: DataConfig(held_out_path="x"), "data.held_out_path is set, but data.source=quickstart_tasks does not read it"),
        (lambda: DataConfig(source="text", path="x", held_out_split="test"), "data.held_out_split is set, but data.source=text"),
        (lambda: DataConfig(held_out_share=1.0), "data.held_out_share=1.0 must be at least 0 and below 1"),
        (
            lambda: DataConfig(source="tokens", path="x", document_end_id=-1),
            "data.document_end_id=-1 is none of the tokenizer's tokens, 0 to 2",
        ),
        (
            lambda: DataConfig(source="mixture", mixture=(part(), part(source="tokens", document_end_id=320))),
            "data.mixture[1].document_end_id=320 is none of the tokenizer's tokens, 0 to 2",
        ),
        (
            lambda: DataConfig(self_generated=SelfGenerated(), loss_on_turns="each"),
            "data.self_generated is set, which answers the last prompt of a conversation alone",
        ),
        (lambda: DataConfig(num_groups=0), "data.num_groups=0 must be at least 1"),
        (lambda: DataConfig(pack_together=0), "data.pack_together=0 must be at least 1"),
        (lambda: DataConfig(num_workers=-1), "data.num_workers=-1 must be at least 0"),
    ],
)  # fmt: skip
def test_a_config_that_makes_no_sense_is_told(make, message):
    with pytest.raises(UserError) as caught:
        stream(make())
    assert message in one_line(caught)


def test_a_tfds_dataset_that_is_not_there_or_has_no_such_split(tmp_path):
    from tests.data.test_sources import tfds_dataset

    assert "no dataset of tfds, nor the directory of a prepared one" in told(config_of(tmp_path, "tfds"))
    path = tfds_dataset(tmp_path)
    message = told(config_of(path, "tfds", dataset_split="dev", text_column="q"))
    assert "no split 'dev'; there are train, test" in message
    assert "no column 'z'" in told(config_of(path, "tfds", text_column="z"))


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("state.json", {"dataset_split": "test"}),
        ("state.json", {"subset": "a"}),
        ("dataset_dict.json", {"subset": "a"}),
    ],
)
def test_what_a_saved_hf_dataset_does_not_have_is_named(tmp_path, monkeypatch, file, fields):
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    (tmp_path / file).touch()
    assert told(config_of(tmp_path, "hf_dataset", **fields)).endswith(f"leave out data.{next(iter(fields))}")


def test_the_splits_of_a_saved_hf_dataset_are_listed_where_the_usual_one_is_missing(tmp_path, monkeypatch):
    (tmp_path / "dataset_dict.json").touch()
    splits = {"train_sft": [], "test_sft": []}
    saved = types.SimpleNamespace(load_from_disk=lambda folder: splits, DatasetDict=dict)
    monkeypatch.setitem(sys.modules, "datasets", saved)
    message = told(config_of(tmp_path, "hf_dataset"))
    assert message.endswith("no split 'train'; name one as data.dataset_split: train_sft, test_sft")


def test_hf_dataset_without_its_package_says_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert told(config_of("x", "hf_dataset")).endswith("pip install datasets")


def test_a_dead_worker_is_told(tmp_path, monkeypatch):
    import concurrent.futures
    from concurrent.futures.process import BrokenProcessPool

    class Dead(concurrent.futures.Executor):
        def __init__(self, *args, **kwargs): ...

        def submit(self, *args):
            future = concurrent.futures.Future()
            future.set_exception(BrokenProcessPool())
            return future

    monkeypatch.setattr("wedlm_jax.data.reading.concurrent.futures.ProcessPoolExecutor", Dead)
    path = write_lines(tmp_path / "chat.jsonl", GOOD)
    iterator = stream(config_of(path, num_workers=1))
    assert isinstance(iterator, PackedBatches)
    with pytest.raises(UserError, match="a worker process of the data died .*data.num_workers=0") as caught:
        next(iterator)
    one_line(caught)
