"""Every source on a small fixture: what it gives is what was written, with its place."""

import collections
import copy
import csv
import dataclasses
import datetime
import decimal
import errno
import gzip
import importlib.util
import json
import os
import pickle

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from tests.data.tiny import BLOCK_SIZE, WORDS, chat, config_of, digest, sentence, stream, tokenizer, write_lines
from wedlm_jax.data import decoded_files, files
from wedlm_jax.data.config import DataConfig, WeightedSource
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.pipeline import batches
from wedlm_jax.data.records import BadRecord
from wedlm_jax.data.sources import open_path
from wedlm_jax.data.tokenizer import TokenizerConfig, encode_text
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.errors import UserError

END = "<|im_end|>"


def epoch(config, split="train", made=None):
    """The documents of one epoch as (prompt, learned) texts, in the order of the source."""
    documents = Documents(config, made or tokenizer(), 0, split)
    texts = []
    for index in range(documents.epoch):
        for example in documents[index].examples:
            parts = (example.tokens[~example.loss_mask], example.tokens[example.loss_mask])
            texts.append(tuple(tokenizer().decode(part) for part in parts))
    return sorted(texts)


def chat_texts(records):
    """What `epoch` gives for one-turn conversations through our ChatML."""
    pairs = [[message["content"] for message in record["messages"]] for record in records]
    return sorted(
        (f"<|im_start|>user\n{question}{END}\n<|im_start|>assistant\n", f"{answer}{END * 2}")
        for question, answer in pairs
    )


CHATS = [chat(number) for number in range(7)]


def as_sharegpt(record):
    names = {"user": "human", "assistant": "gpt"}
    return {
        "conversations": [{"from": names[m["role"]], "value": m["content"]} for m in record["messages"]],
        "id": "x",
    }


def as_pair(record):
    question, answer = (message["content"] for message in record["messages"])
    return {"q": question, "a": answer}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (dict, {}),
        (as_sharegpt, {}),
        (lambda record: {"dialog": record["messages"], "messages": 3}, {"messages_column": "dialog"}),
        (as_pair, {"prompt_column": "q", "completion_column": "a"}),
        (lambda record: dict(zip(("prompt", "completion"), as_pair(record).values(), strict=True)), {}),
        (lambda record: {"prompt": record["messages"][:1], "completion": record["messages"][1:]}, {}),
    ],
)
def test_a_chat_file_of_any_usual_shape_gives_the_same_conversations(tmp_path, change, fields):
    path = write_lines(tmp_path / "chat.jsonl", [change(record) for record in CHATS])
    assert epoch(config_of(path, **fields)) == chat_texts(CHATS)


def test_a_system_prompt_beside_the_messages_is_the_first_message(tmp_path):
    pair = dict(zip(("prompt", "completion"), as_pair(CHATS[0]).values(), strict=True))
    path = write_lines(tmp_path / "chat.jsonl", [as_sharegpt(CHATS[0]) | {"system": "on a mat"}])
    ((prompt, learned),) = epoch(config_of(path))
    ((plain, same),) = chat_texts(CHATS[:1])
    assert (prompt, learned) == (f"<|im_start|>system\non a mat{END}\n{plain}", same)
    for record in (CHATS[0], pair):
        table = pyarrow.Table.from_pylist([record | {"system": "on a mat"}])
        pyarrow.parquet.write_table(table, tmp_path / "chat.parquet")
        assert epoch(config_of(tmp_path / "chat.parquet", "parquet")) == [(prompt, learned)]


def test_of_a_prompt_and_a_completion_of_messages_the_completion_alone_is_learned(tmp_path):
    """In lines and in a table, with the tools and the variables of the template beside them."""
    made = copy.deepcopy(tokenizer())
    made.chat_template = "{{ mood }}" + WITH_TOOLS
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, WORDS, strict=False)]
    record = {
        "prompt": turns[:3],
        "completion": turns[3:],
        "tools": [{"name": "look"}],
        "chat_template_kwargs": {"mood": "red"},
    }
    ((prompt, learned),) = epoch(config_of(write_lines(tmp_path / "chat.jsonl", [record])), made=made)
    assert (
        learned == f"on{END * 2}"
        and prompt.startswith('red{"name": "look"}<|im_start|>userthe')
        and "assistantcat" in prompt
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "chat.parquet")
    assert epoch(config_of(tmp_path / "chat.parquet", "parquet"), made=made) == [(prompt, learned)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"completion": "cat"}, "completion is str, not a list of messages"),
        ({"completion": [{"role": "user", "content": "cat"}]}, "the last message must be the assistant's"),
        ({"prompt": 3}, "prompt is int, not a list of messages"),
    ],
)
def test_a_prompt_of_messages_without_a_completion_of_messages_is_bad(tmp_path, change, message):
    turns = CHATS[0]["messages"]
    path = write_lines(tmp_path / "chat.jsonl", [{"prompt": turns[:1], "completion": turns[1:]} | change])
    with pytest.raises(BadRecord, match=f"chat.jsonl:1: {message}"):
        epoch(config_of(path))


ALPACA = [
    {"instruction": "the cat", "input": "", "output": "sat"},
    {"instruction": "on", "input": "a mat", "output": "saw"},
    {"instruction": "red", "input": None, "output": "bird"},
]


@pytest.mark.parametrize("source", ["json", "parquet", "csv"])
def test_a_question_of_alpaca_s_goes_on_in_its_input(tmp_path, source):
    """Unless columns are named, or there is another text to learn."""
    path = tmp_path / f"alpaca.{source}"
    if source == "json":
        path.write_text(json.dumps(ALPACA))
    else:
        write = pyarrow.parquet.write_table if source == "parquet" else pyarrow.csv.write_csv
        write(pyarrow.Table.from_pylist(ALPACA), path)
    config = config_of(path, "chat" if source == "json" else source)
    asked = [("the cat", "sat"), ("on\na mat", "saw"), ("red", "bird")]
    assert epoch(config) == chat_texts([{"messages": [{"content": q}, {"content": a}]} for q, a in asked])
    named = dataclasses.replace(config, prompt_column="instruction", completion_column="output", plain_prompt=True)
    assert epoch(named) == sorted((one["instruction"], one["output"] + 2 * END) for one in ALPACA)
    plain = dataclasses.replace(config, plain_prompt=True)
    assert epoch(plain) == sorted((question, answer + 2 * END) for question, answer in asked)
    if source == "parquet":
        write(pyarrow.Table.from_pylist([{**ALPACA[0], "history": [["a", "b"]]}]), path)
        with pytest.raises(BadRecord, match="history holds earlier turns, which are not read beside instruction"):
            epoch(config)
        write(pyarrow.Table.from_pylist([{**ALPACA[0], "text": "the lake"}]), path)
        assert epoch(config) == [("", f"the lake{END}")]


def test_messages_are_never_written_plainly(tmp_path):
    """The chat template would write them all the same, whatever data.plain_prompt says."""
    turns = CHATS[0]["messages"]
    for record in ({"prompt": turns[:1], "completion": turns[1:]}, {"messages": turns}):
        path = write_lines(tmp_path / "chat.jsonl", [record])
        message = f"{next(iter(record))} is messages, which the chat template writes; leave out data.plain_prompt"
        with pytest.raises(BadRecord, match=message):
            epoch(config_of(path, plain_prompt=True))


@pytest.mark.parametrize("beside", [{"system": "be short"}, {"tools": [{"type": "function"}]}])
def test_what_only_a_template_writes_is_not_dropped_from_plain_prompts(tmp_path, beside):
    path = write_lines(tmp_path / "chat.jsonl", [{"prompt": "a", "completion": "b"} | beside])
    with pytest.raises(
        BadRecord, match=f"{next(iter(beside))} is for the chat template; leave it out, or data.plain_prompt"
    ):
        epoch(config_of(path, plain_prompt=True))


def test_plain_gzip_and_zstd_files_in_a_folder_are_one_source(tmp_path):
    text = [write_lines(tmp_path / f"{n}.jsonl", CHATS[n : n + 2]).read_bytes() for n in (0, 2, 4)]
    # Empty lines; no last line end.
    (tmp_path / "0.jsonl").write_bytes(b"\n" + text[0].replace(b"\n", b"\r\n\r\n").rstrip())
    (tmp_path / "2.jsonl").unlink(), (tmp_path / "4.jsonl").unlink()
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress(text[1]))
    (tmp_path / "deep").mkdir()
    with pyarrow.CompressedOutputStream(pyarrow.OSFile(str(tmp_path / "deep" / "4.jsonl.zst"), "wb"), "zstd") as file:
        file.write(text[2])
    (tmp_path / "notes.txt").write_text("not JSON")
    (tmp_path / ".hidden.jsonl").write_text("not JSON")
    assert epoch(config_of(tmp_path)) == chat_texts(CHATS[:6])
    source = open_path(config_of(tmp_path), 64)
    assert [source.where(index).removeprefix(f"{tmp_path}/") for index in (0, 1, 3, 5)] == [
        "0.jsonl:2", "0.jsonl:4", "2.jsonl.gz:2", "deep/4.jsonl.zst:2",
    ]  # fmt: skip
    assert epoch(config_of(tmp_path / "*.jsonl")) == chat_texts(CHATS[:2])


def test_a_plain_file_is_read_at_its_lines_alone(tmp_path):
    """The index holds offsets, and no text of the file."""
    path = write_lines(tmp_path / "chat.jsonl", CHATS)
    source = open_path(config_of(path), 64)
    assert len(source) == 7 and source._decompressed is None
    assert max(array.nbytes for array in (source._offsets, source._records)) == 8 * 8
    content = path.read_bytes()
    os.truncate(path, len(content) - 10)
    assert source.fetch(0) == content.split(b"\n")[0]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["chat.json", "chat.jsonl", "chat.json.gz"])
def test_an_array_gives_the_records_that_its_elements_are_as_lines(tmp_path, name, indent):
    """Whatever its name and its spaces, in the same order; a worker process is told its places and no text."""
    texts = [
        json.dumps(record, indent=indent, ensure_ascii=False)
        for record in [*CHATS, {"prompt": "ä, ]", "completion": "]"}]
    ]
    content = ("\ufeff\n[ " + " ,\n".join(texts) + "\n]\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    lines = write_lines(tmp_path / "lines.jsonl", [*CHATS, {"prompt": "ä, ]", "completion": "]"}])
    source, by_lines = (open_path(config_of(path), 64) for path in (tmp_path / name, lines))
    assert len(source) == len(by_lines) == 8 and source.where(3) == f"{tmp_path / name}: record 3"
    source = pickle.loads(pickle.dumps(source))
    for index, text in enumerate(texts):
        assert source.fetch(index) == text.encode()
        assert source.parse(index, source.fetch(index)) == by_lines.parse(index, by_lines.fetch(index))


def test_a_stream_of_an_array_goes_on_where_it_was_and_is_that_of_its_lines(tmp_path):
    """Also of an array that is one of several files, and in groups."""
    (tmp_path / "a.json").write_text(json.dumps(CHATS))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(chat(number)) + "\n" for number in range(7, 12)))
    lines = write_lines(tmp_path / "all", [chat(number) for number in range(12)])
    fields = dict(row_length=64, num_groups=2)
    one, whole = stream(config_of(tmp_path / "[ab].json*", **fields)), stream(config_of(lines, **fields))
    for _ in range(3):
        assert digest(next(one)) == digest(next(whole))
    again = stream(config_of(tmp_path / "[ab].json*", **fields))
    again.set_state(one.get_state())
    assert digest(next(again)) == digest(next(whole))


def test_a_line_that_the_system_does_not_read_any_more_is_an_error_that_names_its_file(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "chat.jsonl", CHATS)
    documents = Documents(config_of(path), tokenizer(), 0, "train")
    documents[0]

    def disk_fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", disk_fails)
    with pytest.raises(UserError, match=r"chat\.jsonl: cannot be read \(Input/output error\)"):
        documents[1]


def test_a_file_that_another_thread_lets_go_of_is_read_to_the_end(tmp_path, monkeypatch):
    source = open_path(config_of(write_lines(tmp_path / "chat.jsonl", CHATS)), 64)
    before, pread = source.fetch(1), os.pread
    monkeypatch.setattr(os, "pread", lambda *given: (source.let_go(), pread(*given))[1])
    assert source.fetch(1) == before


@pytest.mark.parametrize("source", ["chat", "tokens", "parquet"])
def test_a_folder_of_more_shards_than_files_may_be_open_is_read(tmp_path, monkeypatch, source):
    """As systems are set up a process may have 1,024 open; also those of which it reads again in another epoch."""
    monkeypatch.setattr(files, "_MOST_OPEN", 4)
    monkeypatch.setattr(files, "_open", collections.deque())
    monkeypatch.setattr(decoded_files, "_HELD", 0)
    monkeypatch.setenv("WEDLM_JAX_CACHE", str(tmp_path / "cache"))
    for number in range(12):
        if source == "chat":
            write_lines(tmp_path / f"{number}.jsonl", [chat(number)])
        elif source == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([chat(number)]), tmp_path / f"{number}.parquet")
        else:
            np.save(tmp_path / f"{number}.npy", np.array([[number]]))
    documents = Documents(config_of(tmp_path, source), tokenizer(), 0, "train")
    read = [documents[index].examples[0].tokens.tolist() for index in range(2 * documents.epoch)]
    assert sorted(read[:12]) == sorted(read[12:]) and len({str(one) for one in read}) == 12
    held = {"chat": "_file", "tokens": "_array", "parquet": "_rows"}[source]
    assert sum(getattr(one, held) is not None for one in documents._sources[0]._sources) == 4


def test_how_many_of_many_files_are_open_is_told_where_it_takes_long(tmp_path, monkeypatch, capsys):
    for number in range(3):
        write_lines(tmp_path / f"{number}.jsonl", [chat(number)])
    open_path(config_of(tmp_path), 64)
    assert not capsys.readouterr().err
    monkeypatch.setattr(decoded_files, "_SECONDS_BETWEEN_LINES", 0.0)
    open_path(config_of(tmp_path), 64)
    assert capsys.readouterr().err.splitlines() == [f"{tmp_path}: {n} of 3 files are open" for n in (1, 2, 3)]


def test_text_of_files_and_of_jsonl(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "one.py").write_text("x = 1\n")
    (tmp_path / "two.txt").write_text("  the cat ")
    write_lines(tmp_path / "many.jsonl", [{"text": "sat"}, {"text": "on"}])
    write_lines(tmp_path / "other.jsonl", [{"body": "a mat", "text": 3}])
    expected = [("", f"{text}{END}") for text in ("x = 1\n", "  the cat ", "sat", "on")]
    config = config_of(tmp_path, "text")
    (tmp_path / "other.jsonl").rename(tmp_path / ".other")
    assert epoch(config) == sorted(expected)
    (tmp_path / ".other").rename(tmp_path / "other.jsonl")
    assert epoch(config_of(tmp_path / "other.jsonl", "text", text_column="body")) == [("", f"a mat{END}")]


def test_a_long_text_is_cut_into_consecutive_pieces_without_loss(tmp_path):
    (tmp_path / "long.txt").write_text(sentence(1, 64))
    (document,) = [Documents(config_of(tmp_path, "text", row_length=16), tokenizer(), 0, "train")[0]]
    whole = [*encode_text(tokenizer(), sentence(1, 64)), tokenizer().eos_token_id]
    assert np.concatenate([example.tokens for example in document.examples]).tolist() == whole
    assert {len(example.tokens) for example in document.examples[:-1]} == {16}


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_token_arrays_of_rows_and_of_one_stream(tmp_path, dtype):
    tokens = np.random.default_rng(0).integers(4, 290, 90).astype(dtype)
    np.save(tmp_path / "rows.npy", tokens.reshape(9, 10))
    np.save(tmp_path / "stream.npy", tokens)

    def pieces(name, **fields):
        config = config_of(tmp_path / name, "tokens", **{"row_length": 16} | fields)
        documents = Documents(config, tokenizer(), 0, "train")
        return sorted(example.tokens.tolist() for i in range(documents.epoch) for example in documents[i].examples)

    assert pieces("rows.npy") == sorted(tokens.reshape(9, 10).tolist())
    assert pieces("stream.npy") == sorted(tokens[start : start + 16].tolist() for start in range(0, 90, 16))
    assert pieces("rows.npy", row_length=8) == sorted(
        part for row in tokens.reshape(9, 10).tolist() for part in (row[:8], row[8:])
    )
    cut = pieces("stream.npy", document_end_id=int(tokens[20]))
    assert sum(map(len, cut)) == 90 and tokens[16:21].tolist() in cut


WITH_TOOLS = """{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""


def test_calls_are_learned_the_same_from_lines_from_tables_and_with_arguments_as_text(tmp_path):
    """A table fills in, as null, what other rows' calls and tools have; OpenAI writes arguments as text."""
    made = copy.deepcopy(tokenizer())
    made.chat_template = WITH_TOOLS
    called = {"look": {"at": "lake"}, "add": {"x": 1, "y": [2, 3]}}

    def record(name, arguments):
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        }
        tool = {"name": name, "properties": {key: {"type": "any"} for key in called[name]}}
        return {"messages": [{"role": "user", "content": name}, call], "tools": [tool]}

    rows = [record(name, arguments) for name, arguments in called.items()]
    lines = epoch(config_of(write_lines(tmp_path / "chat.jsonl", rows), row_length=256), made=made)
    assert len(lines) == 2 and all("null" not in text and "None" not in text for pair in lines for text in pair)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    assert epoch(config_of(tmp_path / "chat.parquet", "parquet", row_length=256), made=made) == lines
    as_text = [record(name, json.dumps(arguments)) for name, arguments in called.items()]
    assert epoch(config_of(write_lines(tmp_path / "text.jsonl", as_text), row_length=256), made=made) == lines


def test_a_table_whose_messages_hold_dates_and_decimals_is_read(tmp_path):
    when, cost = datetime.datetime(2026, 1, 2), decimal.Decimal("1.5")
    rows = [{"messages": [{**message, "when": when, "cost": cost} for message in row["messages"]]} for row in CHATS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    assert epoch(config_of(tmp_path, "parquet")) == chat_texts(CHATS)


def test_a_parquet_file_gives_what_its_rows_would_as_jsonl(tmp_path):
    table = pyarrow.Table.from_pylist([{"messages": record["messages"], "other": 1} for record in CHATS])
    pyarrow.parquet.write_table(table, tmp_path / "chat.parquet", row_group_size=2)
    assert epoch(config_of(tmp_path, "parquet")) == chat_texts(CHATS)
    pyarrow.parquet.write_table(table.slice(0, 0), tmp_path / "a_part_without_rows.parquet")
    assert epoch(config_of(tmp_path, "parquet")) == chat_texts(CHATS)
    pairs = pyarrow.Table.from_pylist([as_pair(record) for record in CHATS])
    pyarrow.parquet.write_table(pairs, tmp_path / "pairs.parquet")
    columns = {"prompt_column": "q", "completion_column": "a"}
    assert epoch(config_of(tmp_path / "pairs.parquet", "parquet", **columns)) == chat_texts(CHATS)
    plain = epoch(config_of(tmp_path / "pairs.parquet", "parquet", plain_prompt=True, **columns))
    assert plain == sorted((pair["q"], f"{pair['a']}{END * 2}") for pair in map(as_pair, CHATS))
    texts = epoch(config_of(tmp_path / "pairs.parquet", "parquet", text_column="q"))
    assert texts == sorted(("", f"{as_pair(record)['q']}{END}") for record in CHATS)


@pytest.mark.parametrize("name", ["chat.csv", "chat.tsv", "chat.csv.gz"])
def test_a_csv_file_gives_what_its_rows_would_as_jsonl(tmp_path, name):
    """Every value as the text that it is, with commas, quotes and line ends; messages and tools as JSON, or none."""
    made = copy.deepcopy(tokenizer())
    made.chat_template = WITH_TOOLS
    pairs = [{"q": 'one, "red"\n bird', "a": "007"}, {"q": "1.50", "a": "true"}]
    chats = [CHATS[0] | {"tools": [{"name": "look"}]}, CHATS[1]]
    texts = [
        {"messages": json.dumps(one["messages"]), "tools": json.dumps(one["tools"]) if "tools" in one else ""}
        for one in chats
    ]
    columns = {"prompt_column": "q", "completion_column": "a"}
    for records, rows, fields in ((pairs, pairs, columns), (chats, texts, {})):
        with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wt", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writeheader(), writer.writerows(rows)
        lines = write_lines(tmp_path / "chat.jsonl", records)
        assert epoch(config_of(tmp_path, "csv", **fields), made=made) == epoch(config_of(lines, **fields), made=made)


def tfds_dataset(folder, name="pairs", file_format="array_record"):
    """Prepared by the library's own writer, which needs neither TensorFlow nor the network."""
    import tensorflow_datasets as tfds

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        code_path = None  # of a test, where there are no checksums of downloads

        def _info(self):
            text = tfds.features.Text()
            turns = tfds.features.Sequence({"role": text, "content": text})
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict({"q": text, "a": text, "turns": turns})
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(0, 5), "test": self._generate_examples(5, 7)}

        def _generate_examples(self, start, end):
            for number in range(start, end):
                yield number, as_pair(CHATS[number]) | {"turns": CHATS[number]["messages"]}

    Builder.name = name
    builder = Builder(data_dir=str(folder), file_format=file_format)
    builder.download_and_prepare()
    return folder / name / "1.0.0"


def test_a_prepared_tfds_dataset_by_directory_and_by_name_without_tensorflow(tmp_path):
    import tensorflow_datasets as tfds

    path = tfds_dataset(tmp_path)
    pair = {"prompt_column": "q", "completion_column": "a"}
    assert epoch(config_of(path, "tfds", **pair)) == chat_texts(CHATS[:5])
    assert epoch(config_of(path, "tfds", messages_column="turns")) == chat_texts(CHATS[:5])
    assert epoch(config_of(path, "tfds", dataset_split="test", **pair)) == chat_texts(CHATS[5:])
    tfds.core.add_data_dir(tmp_path)
    assert epoch(config_of("pairs:1.0.0", "tfds", **pair)) == chat_texts(CHATS[:5])
    assert importlib.util.find_spec("tensorflow") is None


def test_hf_dataset_from_disk_and_by_split(tmp_path):
    datasets = pytest.importorskip("datasets", reason="an optional extra: pip install datasets")
    made = datasets.DatasetDict(
        train=datasets.Dataset.from_list(CHATS[:5]), test=datasets.Dataset.from_list([as_pair(c) for c in CHATS[5:]])
    )
    made.save_to_disk(str(tmp_path / "saved"))
    assert epoch(config_of(tmp_path / "saved", "hf_dataset")) == chat_texts(CHATS[:5])
    columns = {"prompt_column": "q", "completion_column": "a"}
    assert epoch(config_of(tmp_path / "saved", "hf_dataset", dataset_split="test", **columns)) == chat_texts(CHATS[5:])
    made["train"].save_to_disk(str(tmp_path / "one"))
    assert epoch(config_of(tmp_path / "one", "hf_dataset")) == chat_texts(CHATS[:5])
    (tmp_path / "files").mkdir()
    write_lines(tmp_path / "files" / "train.jsonl", CHATS)
    assert epoch(config_of(tmp_path / "files", "hf_dataset")) == chat_texts(CHATS)


def test_a_worker_process_does_not_ask_the_hub_for_an_hf_dataset_again(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="an optional extra: pip install datasets")
    (tmp_path / "files").mkdir()
    write_lines(tmp_path / "files" / "train.jsonl", CHATS)
    documents = Documents(config_of(tmp_path / "files", "hf_dataset"), tokenizer(), 0, "train")
    sent = pickle.dumps(documents)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("opened again"))
    received = pickle.loads(sent)
    assert [received[i].examples[0].tokens.tolist() for i in range(3)] == [
        documents[i].examples[0].tokens.tolist() for i in range(3)
    ]


@pytest.mark.parametrize("form", [("arrow", None), ("numpy", None), ("python", ["number"])])
def test_an_hf_dataset_is_read_as_it_is_whatever_format_it_was_saved_in(tmp_path, form):
    datasets = pytest.importorskip("datasets", reason="an optional extra: pip install datasets")
    rows = datasets.Dataset.from_list([{**one, "number": number} for number, one in enumerate(CHATS)])
    rows.with_format(form[0], columns=form[1]).save_to_disk(str(tmp_path))
    assert epoch(config_of(tmp_path, "hf_dataset")) == chat_texts(CHATS)


@pytest.mark.parametrize("weights", [(0.75, 0.25), (1.0, 9.0)])
def test_a_mixture_has_its_shares_and_every_part_its_own_epochs(tmp_path, weights):
    one = write_lines(tmp_path / "one.jsonl", [chat(number) for number in range(30)])
    (tmp_path / "two").mkdir()
    for number in range(8):
        (tmp_path / "two" / f"{number}.txt").write_text(sentence(number))
    config = DataConfig(
        source="mixture",
        mixture=(
            WeightedSource(source="chat", path=str(one), weight=weights[0]),
            WeightedSource(source="text", path=str(tmp_path / "two"), weight=weights[1]),
        ),
        held_out_share=0.0,
    )
    documents = Documents(config, tokenizer(), 0, "train")
    count = 200
    drawn = [documents[index].examples[0] for index in range(count)]
    kinds = {True: [], False: []}
    for example in drawn:
        kinds[bool(example.loss_mask.all())].append(example.tokens.tobytes())
    share = len(kinds[False]) / count
    assert abs(share - weights[0] / sum(weights)) < 1 / 100
    for texts, size in ((kinds[False], 30), (kinds[True], 8)):
        assert len(set(texts[:size])) == min(size, len(texts))  # an epoch holds each once
    assert [example.document_id for example in drawn] == list(range(count))


def test_the_split_depends_on_the_content_alone_and_shares_no_document(tmp_path):
    """Another order, another file, a duplicate, a compressed file: the same documents are held out."""
    records = [chat(number) for number in range(120)]
    write_lines(tmp_path / "chat.jsonl", records)
    config = config_of(tmp_path / "chat.jsonl", held_out_share=0.2)
    train, held_out = epoch(config), epoch(config, "held_out")
    assert 10 < len(held_out) < 40 and not set(train) & set(held_out)
    assert sorted(train + held_out) == chat_texts(records)

    lines = (tmp_path / "chat.jsonl").read_text().splitlines()
    (tmp_path / "again.jsonl.gz").write_bytes(gzip.compress("\n".join([lines[5], *reversed(lines)]).encode()))
    again = config_of(tmp_path / "again.jsonl.gz", held_out_share=0.2)
    assert set(epoch(again, "held_out")) == set(held_out) and set(epoch(again)) == set(train)
    fewer = config_of(tmp_path / "chat.jsonl", held_out_share=0.05)
    assert set(epoch(fewer, "held_out")) < set(held_out)


def test_the_held_out_stream_repeats_and_is_not_shuffled_away_by_the_seed(tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", [chat(number) for number in range(60)])
    config = config_of(path, held_out_share=0.2)
    found = []
    for seed in (0, 1):
        iterator, ids = batches(config, tokenizer(), BLOCK_SIZE, 2, seed, "held_out"), set()
        for _ in range(12):
            batch = next(iterator)
            for row, number in {(r, batch.segment_ids[r, c]) for r, c in np.argwhere(batch.segment_ids)}:
                ids.add(batch.tokens[row][batch.segment_ids[row] == number].tobytes())
        found.append(ids)
    assert found[0] == found[1]


def test_a_tokenizer_is_trained_on_the_training_texts_and_never_for_chat(tmp_path):
    paths = write_lines(tmp_path / "text.jsonl", [{"text": sentence(number, 12)} for number in range(40)])
    config = config_of(paths, "text", held_out_share=0.3)
    one, two = (make_tokenizer(TokenizerConfig(vocab_size=300), config) for _ in range(2))
    assert one.get_vocab() == two.get_vocab() and 260 < len(one) <= 300
    held_out = {learned for _, learned in epoch(config, "held_out")}
    write_lines(
        tmp_path / "training.jsonl",
        [{"text": sentence(n, 12)} for n in range(40) if f"{sentence(n, 12)}{END}" not in held_out],
    )
    same = make_tokenizer(TokenizerConfig(vocab_size=300), config_of(tmp_path / "training.jsonl", "text"))
    assert same.get_vocab() == one.get_vocab()
    for source, what in (("chat", "chat template"), ("tokens", "made the tokens")):
        with pytest.raises(UserError, match=f"data.source={source} needs .*{what}.*tokenizer.path"):
            make_tokenizer(TokenizerConfig(), config_of("x", source))


def test_the_end_token_closes_turns_and_texts(tmp_path):
    made = copy.deepcopy(tokenizer())
    made.eos_token = "<|endoftext|>"
    path = write_lines(tmp_path / "chat.jsonl", CHATS)
    assert epoch(config_of(path, end_token=END), made=made) == chat_texts(CHATS)
    assert made.eos_token == "<|endoftext|>"
    with pytest.raises(UserError, match="does not end the assistant's turn with '<|endoftext|>'"):
        epoch(config_of(path), made=made)
    with pytest.raises(UserError, match="data.end_token='<|stop|>' is no token"):
        epoch(config_of(path, end_token="<|stop|>"))


def test_one_seed_gives_one_stream_and_another_seed_another(tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", [chat(number) for number in range(40)])
    one, two, other = (digest(next(stream(config_of(path), seed=seed))) for seed in (0, 0, 1))
    assert one == two != other
