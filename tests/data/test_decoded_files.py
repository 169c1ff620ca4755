"""Compressed JSON larger than memory: the records are those that memory would hold, decompressed once for all who read them."""

import gzip
import json
import pickle

import pyarrow
import pytest

from tests.bad_input import full_disk
from tests.data.tiny import chat, config_of, digest, sentence, stream, tokenizer, write_lines
from wedlm_jax.data import decoded_files, json_lines
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.json_lines import JsonLines
from wedlm_jax.data.sources import open_path
from wedlm_jax.errors import UserError

TEXTS = [{"text": sentence(number)} for number in range(300)]
CHATS = [chat(number) for number in range(300)]
IDS = [{"prompt_ids": [1, 2], "ids": [number], "finish_reason": "stop"} for number in range(300)]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of the decoded files, of which all are too large for memory; read chunk by chunk."""
    monkeypatch.setattr(decoded_files, "_HELD", 0)
    monkeypatch.setattr(json_lines, "_CHUNK", 1000)
    monkeypatch.setenv("WEDLM_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decoded"


def compress(path, text):
    data = text.encode()
    if path.suffix.lower() == ".gz":
        path.write_bytes(gzip.compress(data))
    else:
        with pyarrow.CompressedOutputStream(pyarrow.OSFile(str(path), "wb"), "zstd") as file:
            file.write(data)
    return path


def lines(records):
    return "\n".join(json.dumps(record) for record in records) + "\n"


def records(path, source="text"):
    opened = open_path(config_of(path, source), 64)
    return [(opened.where(index), opened.fetch(index)) for index in range(len(opened))]


@pytest.mark.parametrize(
    ("name", "source", "text"),
    [
        ("a.jsonl.gz", "chat", "\n" + lines(CHATS).rstrip()),
        ("a.ndjson.ZST", "chat", lines(CHATS).replace("\n", "\r\n\r\n")),
        ("a.jsonl.zst", "text", lines(TEXTS)),
        ("a.json.gz", "text", lines(TEXTS)),
        ("a.json.zst", "text", json.dumps(TEXTS, indent=1)),
        ("a.jsonl.gz", "completions", lines(IDS)),
    ],
)
def test_compressed_json_on_disk_gives_the_same_records_and_places_as_in_memory(
    tmp_path, kept, monkeypatch, name, source, text
):
    path = compress(tmp_path / name, text)
    on_disk = records(path, source)
    (copy,) = kept.glob("*.json")
    assert copy.read_text() == text.replace("\r\n", "\n") and len(on_disk) == 300
    monkeypatch.setattr(decoded_files, "_HELD", 1 << 20)
    assert on_disk == records(path, source) and on_disk[7][0].startswith(f"{path}:")


def test_a_stream_that_began_in_memory_goes_on_from_disk(tmp_path, kept, monkeypatch):
    for name, some in (("a.jsonl.gz", CHATS[:9]), ("b.jsonl.zst", CHATS[9:]), ("c.jsonl.gz", [])):
        compress(tmp_path / name, lines(some) if some else "")
    monkeypatch.setattr(decoded_files, "_HELD", 1 << 20)
    fields = dict(row_length=64, num_groups=2)
    in_memory = stream(config_of(tmp_path, **fields))
    next(in_memory)
    assert not kept.exists()
    monkeypatch.setattr(decoded_files, "_HELD", 0)
    on_disk = stream(config_of(tmp_path, **fields))
    on_disk.set_state(in_memory.get_state())
    assert len(list(kept.glob("*.json"))) == 3
    for _ in range(3):
        assert digest(next(on_disk)) == digest(next(in_memory))


def test_a_compressed_file_is_decompressed_once_for_all_splits_workers_and_runs_and_held_by_none(
    tmp_path, kept, monkeypatch
):
    path = compress(tmp_path / "a.jsonl.zst", lines(TEXTS))
    source, expected = open_path(config_of(path, "text"), 64), records(path)

    def again(*given):
        raise AssertionError("decompressed again")

    monkeypatch.setattr(JsonLines, "_decompress", again)
    worker = pickle.loads(pickle.dumps(source))
    assert [worker.fetch(index) for index in range(300)] == [line for _, line in expected]
    assert records(path) == expected and worker._decompressed is source._decompressed is None
    worker.let_go()
    assert worker.fetch(299) == expected[299][1]


def test_only_what_would_be_held_in_memory_counts_as_too_large(tmp_path, kept, monkeypatch):
    compress(tmp_path / "a.jsonl.gz", lines(TEXTS))
    write_lines(tmp_path / "b.jsonl", TEXTS * 9)
    (tmp_path / "c.txt").write_text("the cat " * 9999)
    monkeypatch.setattr(decoded_files, "_HELD", 50_000)
    assert len(records(tmp_path)) == 3001 and not kept.exists()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_large_file_that_is_cut_off_is_told_by_its_name_and_nothing_left(tmp_path, kept, name):
    path = compress(tmp_path / name, lines(TEXTS))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        UserError, match=rf"^{path}: cannot be decompressed, it is cut off or damaged .*; write it again$"
    ):
        records(path)
    assert not [file for file in kept.iterdir() if file.suffix != ".lock"]


def test_a_disk_without_room_for_decompressed_json_is_told_and_nothing_left(tmp_path, kept):
    path = compress(tmp_path / "a.jsonl.gz", lines(TEXTS))
    with full_disk(5_000), pytest.raises(UserError) as error:
        records(path)
    start, end = f"{kept}/a.jsonl.gz-", "(file too large); make room or set WEDLM_JAX_CACHE to another folder"
    assert str(error.value).startswith(start) and str(error.value).endswith(end)
    assert not [file for file in kept.iterdir() if file.suffix != ".lock"]


def test_a_bad_line_of_a_large_file_is_told_by_the_users_file_and_its_line(tmp_path, kept):
    path = compress(tmp_path / "a.jsonl.gz", "\n" + lines(TEXTS[:2]) + '{"text": \n')
    documents = Documents(config_of(path, "text"), tokenizer(), 0, "train")
    with pytest.raises(UserError, match=rf"^{path}:4: broken JSON"):
        [documents[index] for index in range(3)]


def test_how_far_a_file_is_decompressed_is_told_where_it_takes_long(tmp_path, kept, monkeypatch, capsys):
    monkeypatch.setattr(decoded_files, "_SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(json_lines, "_CHUNK", 2_000_000)
    path = compress(tmp_path / "a.jsonl.gz", lines([{"text": "a" * 999_000}] * 3))
    records(path)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"large data is decoded once to files in {kept} (WEDLM_JAX_CACHE names another place)",
        *(f"{path}: {what}" for what in ("2 MB are decompressed", "3 MB are decompressed", "1 of 1 files are open")),
    ]


def test_how_many_files_are_open_is_told_also_of_those_that_are_looked_into_to_know_their_kind(
    tmp_path, kept, monkeypatch, capsys
):
    monkeypatch.setattr(decoded_files, "_SECONDS_BETWEEN_LINES", 0.0)
    (tmp_path / "data").mkdir()
    a, b = (compress(tmp_path / "data" / f"{name}.json.gz", lines(TEXTS[:2])) for name in "ab")
    records(tmp_path / "data")
    _, *told = capsys.readouterr().err.splitlines()
    assert told == [
        f"{a}: 0 MB are decompressed",
        f"{tmp_path}/data: 1 of 2 files are open",
        f"{b}: 0 MB are decompressed",
        f"{tmp_path}/data: 2 of 2 files are open",
    ]


def test_a_file_whose_name_is_as_long_as_names_may_be_is_decoded(tmp_path, kept):
    path = compress(tmp_path / ("語" * 80 + ".jsonl.gz"), lines(TEXTS))
    assert len(records(path)) == 300
