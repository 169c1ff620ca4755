"""Tables larger than memory: the records are those that memory would hold, decoded once for all who read them."""

import concurrent.futures
import os
import pickle
import threading

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from tests.bad_input import forbidden, full_disk
from tests.data.tiny import chat, config_of, digest, sentence, stream
from wedlm_jax.data import decoded_files, tables
from wedlm_jax.data.mapped_tables import rows_on_disk
from wedlm_jax.data.sources import open_path
from wedlm_jax.errors import UserError


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of the decoded tables, of which all are too large for memory."""
    monkeypatch.setattr(decoded_files, "_HELD", 0)
    monkeypatch.setenv("WEDLM_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decoded"


@pytest.fixture
def folder(tmp_path):
    """Two tables of conversations with system prompts, which are categories in one of them, and one without rows."""
    made = tmp_path / "data"
    made.mkdir()
    for name, numbers in (("a", range(7)), ("b", range(7, 600))):
        rows = [chat(number) | {"system": f"system {number % 3}", "other": 1} for number in numbers]
        table = pyarrow.Table.from_pylist(rows)
        if name == "a":
            table = table.set_column(1, "system", table["system"].dictionary_encode())
        pyarrow.parquet.write_table(table, made / f"{name}.parquet", row_group_size=200 if name == "b" else 3)
    pyarrow.parquet.write_table(table.slice(0, 0), made / "c.parquet")
    return made


def texts(path, count=300):
    pyarrow.parquet.write_table(pyarrow.table({"text": [sentence(number) for number in range(count)]}), path)
    return path


def records(path, source="parquet"):
    opened = open_path(config_of(path, source), 128)
    return [opened.fetch(index) for index in range(len(opened))]


def test_a_table_on_disk_gives_the_same_batches_as_one_in_memory(folder, kept, monkeypatch):
    on_disk = [digest(next(stream(config_of(folder, "parquet", num_groups=2)))) for _ in range(2)]
    assert sorted(file.name[:9] for file in kept.glob("*.arrow")) == ["a.parquet", "b.parquet", "c.parquet"]
    monkeypatch.setattr(decoded_files, "_HELD", 1 << 20)
    assert [digest(next(stream(config_of(folder, "parquet", num_groups=2)))) for _ in range(2)] == on_disk


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_csv_file_on_disk_gives_the_same_records_as_one_in_memory(tmp_path, kept, monkeypatch, name):
    table = pyarrow.table({"text": ["one, red", 'a "tall"\ntree', "", "007"] * 99, "n": list(range(396))})
    options = pyarrow.csv.WriteOptions(delimiter="\t" if name == "a.tsv" else ",")
    pyarrow.csv.write_csv(table, tmp_path / name, options)
    monkeypatch.setattr(tables, "_CSV_BLOCK", 1000)
    on_disk = records(tmp_path / name, "csv")
    assert len(list(kept.glob("*.arrow"))) == 1
    monkeypatch.setattr(decoded_files, "_HELD", 1 << 20)
    assert on_disk == records(tmp_path / name, "csv") == table.select(["text"]).to_pylist()


def test_a_table_on_disk_takes_no_memory(tmp_path, kept):
    text = "the cat sat on a mat " * 500
    pyarrow.parquet.write_table(pyarrow.table({"text": [text] * 1000}), tmp_path / "a.parquet")
    before, source = pyarrow.total_allocated_bytes(), open_path(config_of(tmp_path / "a.parquet", "parquet"), 128)
    assert [source.fetch(index)["text"] for index in (0, 256, len(source) - 1)] == [text] * 3
    assert pyarrow.total_allocated_bytes() - before < 100_000
    assert next(kept.glob("*.arrow")).stat().st_size > 10_000_000


def test_a_table_is_decoded_once_for_all_splits_workers_and_runs(tmp_path, kept, monkeypatch):
    path = texts(tmp_path / "a.parquet")
    source = open_path(config_of(path, "parquet"), 128)
    expected = [source.fetch(index) for index in range(len(source))]

    def again(*given):
        raise AssertionError("decoded again")

    monkeypatch.setattr(decoded_files, "_write", again)
    worker = pickle.loads(pickle.dumps(source))
    assert [worker.fetch(index) for index in range(300)] == records(path) == expected
    source.let_go()
    assert source.fetch(299) == expected[299]


def test_processes_that_open_a_table_at_once_decode_it_once(tmp_path, kept):
    """Threads stand for them: the lock keeps out whoever opens its file, too."""
    path, began, decoded = texts(tmp_path / "a.parquet"), threading.Barrier(4), []

    def batches():
        decoded.append(1)
        yield from pyarrow.parquet.read_table(path).to_batches()

    def open_it(_):
        began.wait()
        return len(rows_on_disk(str(path), ["text"], batches))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(open_it, range(4))) == [300] * 4
    assert len(decoded) == 1


def test_a_table_that_has_changed_or_whose_copy_is_damaged_is_decoded_anew(tmp_path, kept):
    path = texts(tmp_path / "a.parquet")
    before, (copy,) = records(path), kept.glob("*.arrow")
    for damaged in (b"", copy.read_bytes()[:-20], b"ARROW1"):
        copy.write_bytes(damaged)
        assert records(path) == before
    os.utime(path, ns=(0, 0))
    assert records(texts(path, 301)) != before
    assert len(records(path)) == 301


def test_what_a_killed_process_left_half_decoded_is_written_over(tmp_path, kept):
    path = texts(tmp_path / "a.parquet")
    before, (copy,) = records(path), kept.glob("*.arrow")
    copy.unlink()
    copy.with_suffix(".unfinished").write_bytes(b"x" * 1_000_000)
    assert records(path) == before and not list(kept.glob("*.unfinished"))


def test_a_disk_without_room_for_a_decoded_table_is_told_and_nothing_left(tmp_path, kept):
    path = texts(tmp_path / "a.parquet", 3000)
    with full_disk(20_000), pytest.raises(UserError) as error:
        records(path)
    start, end = f"{kept}/a.parquet-", "(file too large); make room or set WEDLM_JAX_CACHE to another folder"
    assert str(error.value).startswith(start) and str(error.value).endswith(end)
    assert not [file for file in kept.iterdir() if file.suffix != ".lock"]


def test_a_folder_that_may_not_be_written_is_told_and_one_that_is_complete_is_read(tmp_path, kept):
    path, other = texts(tmp_path / "a.parquet"), texts(tmp_path / "b.parquet")
    before = records(path)
    with forbidden(str(kept), 0o500):
        assert records(path) == before
        with pytest.raises(
            UserError, match=r"cannot be written \(permission denied\); allow writing there or set WEDLM"
        ):
            records(other)


def test_a_table_that_breaks_off_is_told_by_its_name_and_nothing_left(tmp_path, kept):
    path = texts(tmp_path / "a.parquet", 3000)
    data = bytearray(path.read_bytes())
    data[100:-2000] = bytes(len(data) - 2100)
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"^{path}: cannot be read as parquet .*; write it again$"):
        records(path)
    assert not [file for file in kept.iterdir() if file.suffix != ".lock"]


def test_where_tables_are_decoded_to_is_told_once(tmp_path, kept, capsys):
    for name in ("a", "b"):
        records(texts(tmp_path / f"{name}.parquet"))
    assert capsys.readouterr().err == (
        f"large data is decoded once to files in {kept} (WEDLM_JAX_CACHE names another place)\n"
    )


def test_how_far_a_table_is_decoded_is_told_where_it_takes_long(tmp_path, kept, monkeypatch, capsys):
    monkeypatch.setattr(decoded_files, "_SECONDS_BETWEEN_LINES", 0.0)
    path = texts(tmp_path / "a.parquet")
    records(path)
    told = capsys.readouterr().err.splitlines()
    assert told[1:] == [
        f"{path}: {what}" for what in ("256 rows are decoded", "300 rows are decoded", "1 of 1 files are open")
    ]
