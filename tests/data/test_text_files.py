"""Files of plain text: short ones as they are, long ones in sections."""

import gzip
import warnings
from pathlib import Path

import pytest

from tests.data.test_sources import epoch
from tests.data.tiny import config_of, sentence, stream, tokenizer, write_lines
from wedlm_jax.data import tokenizer_training
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.files import find_files
from wedlm_jax.data.sources import TextFile, open_path
from wedlm_jax.errors import UserError


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    """Of several sections, with characters of several bytes and a line that is longer than a section."""
    path = tmp_path_factory.mktemp("long") / "long.txt"
    lines = [f"{sentence(number, 12)} äöü €\n" for number in range(6000)]
    path.write_text("".join([*lines, "the cat " * 10_000, "\n", *lines[:10], "no line end"]), encoding="utf-8")
    return path


def test_a_long_text_file_is_many_documents_cut_at_line_ends(long_file):
    source, content = open_path(config_of(long_file, "text"), 64), long_file.read_bytes()
    sections = [source.fetch(index) for index in range(len(source))]
    assert b"".join(sections) == content and len(sections) > 4
    assert all(section.endswith(b"\n") and len(section) >= 1 << 16 for section in sections[:-1])
    assert sum(len(section) > 70_000 for section in sections) == 1
    records = [source.parse(index, raw) for index, raw in enumerate(sections)]
    assert [record.ends for record in records] == [False] * (len(records) - 1) + [True]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count what a process reads")
def test_opening_a_long_text_file_reads_little_of_it(tmp_path):
    (tmp_path / "long.txt").write_text("a line\n" * 300_000)

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    source, before = TextFile(tmp_path / "long.txt", 128), read()
    assert len(source) == 33 and read() - before < 300_000


def test_a_text_file_that_is_no_longer_than_a_section_is_one_document(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"a\n" * (1 << 15))
    source = open_path(config_of(path, "text"), 64)
    assert len(source) == 1 and source.fetch(0) == path.read_bytes() and source.parse(0, source.fetch(0)).ends
    path.write_bytes(b"a\n" * (1 << 15) + b"\xff")
    source = open_path(config_of(path, "text"), 64)
    with pytest.raises(UserError, match=r"not UTF-8 \(byte 65536\)"):
        source.parse(1, source.fetch(1))


def test_linked_folders_and_files_are_read_and_each_once(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a.txt").write_text("a")
    data = tmp_path / "data"
    (data / "in").mkdir(parents=True)
    (data / "in/b.txt").write_text("b")
    (data / "linked").symlink_to(tmp_path / "elsewhere")
    (data / "again").symlink_to(tmp_path / "elsewhere")
    (data / "in/circle").symlink_to(data)
    (data / "in/newest.txt").symlink_to("b.txt")
    assert [str(file.relative_to(data)) for file in find_files(str(data), (".txt",))] == ["again/a.txt", "in/b.txt"]
    assert [file.name for file in find_files(f"{data}/in/*.txt")] == ["b.txt"]


@pytest.mark.parametrize(
    ("pattern", "endings", "expected"),
    [
        ("*", (".txt",), ["README.md", "sub/a.txt"]),
        ("*", None, ["README.md", "sub/a.txt", "sub/b.JSON"]),
        ("s*", (".json",), ["sub/b.JSON"]),
        ("**", None, ["README.md", "sub/a.txt", "sub/b.JSON"]),
        ("**/*.txt", None, ["sub/a.txt"]),
    ],
)
def test_folders_that_a_pattern_names_are_read_and_no_file_twice(tmp_path, pattern, endings, expected):
    (tmp_path / "sub").mkdir()
    for name in ("README.md", "sub/a.txt", "sub/b.JSON", "sub/.hidden.txt"):
        (tmp_path / name).touch()
    (tmp_path / "too").symlink_to(tmp_path / "sub")
    found = find_files(f"{tmp_path}/{pattern}", endings)
    assert [str(file.relative_to(tmp_path)) for file in found] == expected


@pytest.mark.parametrize("name", ["a.JSONL", "a.json", "a.JSON.gz", "a.ndjson.GZ"])
def test_jsonl_is_known_by_its_ending_in_letters_of_either_case_and_by_json(tmp_path, name):
    """In a folder and by its name; beside it a text is one."""
    lines = write_lines(tmp_path / "lines", [{"body": "the cat"}, {"body": "sat"}]).read_bytes()
    (tmp_path / "lines").unlink()
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.lower().endswith(".gz") else lines)
    expected = [("", f"{text}<|im_end|>") for text in ("sat", "the cat")]
    assert epoch(config_of(tmp_path / name, "text", text_column="body")) == expected
    (tmp_path / "b.txt").write_text("a mat")
    assert epoch(config_of(tmp_path, "text", text_column="body")) == [("", "a mat<|im_end|>"), *expected]


def test_an_array_of_texts_is_read_as_such_beside_texts_and_told_where_it_is_broken(tmp_path):
    (tmp_path / "a.json").write_text('[\n  {"text": "the cat"},\n  {"text": "sat"}\n]')
    (tmp_path / "b.txt").write_text("a mat")
    (tmp_path / "c.json").write_text('["text"]')
    assert [text for _, text in epoch(config_of(tmp_path, "text"))] == [
        f"{text}<|im_end|>" for text in ('["text"]', "a mat", "sat", "the cat")
    ]
    (tmp_path / "a.json").write_text('[{"text": "the cat"}, {"te')
    with pytest.raises(UserError, match=r"a.json: record 1: broken JSON"):
        open_path(config_of(tmp_path, "text"), 64)


@pytest.mark.parametrize("text", ['{\n  "text": "the cat"\n}', '{"name": "the cat"}', "[1]"])
def test_json_that_is_no_jsonl_is_text_as_code_is(tmp_path, text):
    (tmp_path / "package.json").write_text(text)
    assert epoch(config_of(tmp_path, "text")) == [("", f"{text}<|im_end|>")]


@pytest.mark.parametrize("name", ["qa.csv", "qa.TSV", "qa.json"])
def test_a_table_or_json_that_is_named_as_text_is_told_and_read_as_such(tmp_path, name):
    path = tmp_path / name
    path.write_text('["q","a"]\n')
    with pytest.warns(UserWarning, match=f"^{path} is learned as plain text, .* data.source=csv reads the columns"):
        open_path(config_of(path, "text"), 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert epoch(config_of(tmp_path, "text")) == [("", '["q","a"]\n<|im_end|>')]
        open_path(config_of(write_lines(tmp_path / "lines.json", [{"text": "a"}]), "text"), 64)


def test_a_column_of_files_that_have_none_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("a mat")
    with pytest.raises(UserError, match=f"^{tmp_path}: no file is JSONL, so data.text_column=body has no"):
        open_path(config_of(tmp_path, "text", text_column="body"), 64)


def test_the_mark_of_utf_8_is_no_text(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_text("the cat\n", encoding="utf-8-sig")
    source = open_path(config_of(path, "text"), 64)
    assert source.parse(0, source.fetch(0)).text == "the cat\n"


def test_no_section_of_a_file_that_is_no_text_is_learned_from(tmp_path):
    """Of UTF-16 the first section alone is no UTF-8."""
    path = tmp_path / "windows.txt"
    path.write_text("hello world line\n" * 20_000, encoding="utf-16")
    source = open_path(config_of(path, "text"), 64)
    assert len(source) > 4
    for index in range(len(source)):
        with pytest.raises(UserError, match="not text|not UTF-8"):
            source.parse(index, source.fetch(index))


def test_a_tokenizer_is_trained_on_documents_from_all_over_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_training, "_DOCUMENTS", 4)
    for name in ("first", "second"):
        (tmp_path / f"{name}.txt").write_text(f"{name} words\n" * 25_000)
    config = config_of(tmp_path, "text")
    texts = list(tokenizer_training._training_texts(config.parts[0], config))
    assert {text.split()[0] for text in texts} == {"first", "second"} and len(texts) <= 4


def test_the_end_token_closes_a_long_file_once(long_file):
    documents = Documents(config_of(long_file, "text"), tokenizer(), 0, "train")
    pieces = [document.examples[-1].tokens for document in (documents[i] for i in range(documents.epoch))]
    assert sum(tokens[-1] == tokenizer().eos_token_id for tokens in pieces) == 1


def test_a_text_that_is_long_enough_fills_a_row_however_long_rows_are(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on a mat and saw one red bird in the tall tree by the lake\n" * 12_000)
    documents = Documents(config_of(tmp_path / "a.txt", "text", row_length=30_000), tokenizer(), 0, "train")
    assert max(len(one.tokens) for i in range(documents.epoch) for one in documents[i].examples) == 30_000


def test_groups_read_different_places_of_one_long_file(long_file):
    batch = next(stream(config_of(long_file, "text", num_groups=4)))
    assert len({row.tobytes() for row in batch.tokens}) == 4


def test_one_long_file_has_training_and_held_out_documents(long_file):
    for split in ("train", "held_out"):
        assert epoch(config_of(long_file, "text", held_out_share=0.5, row_length=1024), split)


def test_empty_files_of_a_folder_are_no_documents(tmp_path):
    """Python packages are full of them."""
    for name in ("a/__init__.py", "b/__init__.py", "c/__init__.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"^{tmp_path}: the text is empty$"):
        open_path(config_of(tmp_path, "text"), 64)
    for name in ("a/one.py", "b/two.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    assert [learned for _, learned in epoch(config_of(tmp_path, "text"))] == [
        "# a/one.py\n<|im_end|>",
        "# b/two.py\n<|im_end|>",
    ]
    write_lines(tmp_path / "c" / "empty.jsonl", [{"text": ""}])
    with pytest.raises(UserError, match=r"empty.jsonl:1: the text is empty"):
        epoch(config_of(tmp_path, "text"))
