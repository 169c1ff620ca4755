"""The stream under resume, groups, processes and workers: always the same batches."""

import concurrent.futures
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.data.tiny import BLOCK_SIZE, chat_file, config_of, digest, sentence, stream, tokenizer, write_lines
from wedlm_jax.data.config import DataConfig, WeightedSource
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.examples import from_completion
from wedlm_jax.data.packing import PackedBatch, pack
from wedlm_jax.data.pipeline import batches
from wedlm_jax.data.quickstart_tasks import QuickstartProblems
from wedlm_jax.data.reading import Reader
from wedlm_jax.data.records import BadRecord
from wedlm_jax.data.tokenizer import TokenizerConfig
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.errors import UserError

BATCHES = 12


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Conversations, and texts of which some are many rows long and some records are bad."""
    folder = tmp_path_factory.mktemp("stream")
    texts = [{"text": sentence(number, 3 + 40 * (number % 4))} for number in range(30)]
    return {
        "chat": chat_file(folder),
        "text": write_lines(folder / "text.jsonl", [*texts[:10], "{broken", *texts[10:], '{"text": 3}']),
    }


def config(files, kind, **fields):
    others = {"row_length": 32, "on_bad_record": "skip"} if kind == "text" else {}
    return config_of(files[kind], kind, **others | fields)


@pytest.fixture(scope="module")
def uninterrupted(files):
    """The first batches and the state after each, by kind and number of groups."""
    made = {}
    for kind, groups in itertools.product(("chat", "text"), (1, 4)):
        iterator = stream(config(files, kind, num_groups=groups))
        made[kind, groups] = [
            (digest(next(iterator)), iterator.get_state(), iterator.skipped_records) for _ in range(BATCHES)
        ]
    return made


@given(
    st.sampled_from(("chat", "text")),
    st.sampled_from((1, 4)),
    st.lists(st.integers(0, BATCHES - 3), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=examples(12, 100))
def test_a_resumed_stream_equals_the_uninterrupted_one(files, uninterrupted, kind, groups, stops, same_iterator):
    """State through JSON; a new iterator, or one that has already read ahead elsewhere."""
    expected = uninterrupted[kind, groups]
    iterator = stream(config(files, kind, num_groups=groups))
    for stop in stops:
        if not same_iterator:
            iterator = stream(config(files, kind, num_groups=groups))
        if stop:
            iterator.set_state(json.loads(json.dumps(expected[stop - 1][1])))
        else:
            iterator = stream(config(files, kind, num_groups=groups))
        for place in range(stop, stop + 2):
            batch = next(iterator)
            assert (digest(batch), iterator.get_state(), iterator.skipped_records) == expected[place]


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_stream_goes_on_in_the_middle_of_batches_that_are_packed_together(files, kind, groups):
    def begin(**others):
        return stream(config(files, kind, num_groups=groups, pack_together=3), **others)

    def after_a_batch(iterator):
        return digest(next(iterator)), iterator.get_state(), iterator.skipped_records, iterator.records_read

    whole = begin()
    expected = [after_a_batch(whole) for _ in range(8)]
    assert [state["handed_out"][0] for _, state, _, _ in expected] == [1, 2, 0, 1, 2, 0, 1, 2]
    read = [records for *_, records in expected]
    assert read == sorted(read)
    for place in range(1, 8):
        for resumed in (begin(), whole):
            resumed.set_state(json.loads(json.dumps(expected[place - 1][1])))
            assert after_a_batch(resumed) == expected[place]
    parts = [begin(process_index=i, process_count=2) for i in range(2)] if groups == 4 else []
    for one, _, _, _ in expected if parts else []:
        assert digest(PackedBatch.joined([next(part) for part in parts])) == one


def test_batches_that_are_packed_together_are_the_rows_of_one_and_pad_less(files):
    together = stream(config(files, "chat", pack_together=5), batch_size=2)
    at_once = stream(config(files, "chat"), batch_size=10)
    apart = stream(config(files, "chat"), batch_size=2)
    empty = {}
    for _ in range(3):
        five, (ten, two) = [next(together) for _ in range(5)], (next(at_once), [next(apart) for _ in range(5)])
        assert digest(PackedBatch.joined(five)) == digest(PackedBatch.joined(ten.dealt(5)))
        for name, parts in (("together", five), ("apart", two)):
            empty[name] = empty.get(name, 0) + sum((part.segment_ids == 0).sum() for part in parts)
    assert empty["together"] < 0.8 * empty["apart"]


def test_held_out_batches_read_no_more_than_they_hold(files):
    data = config(files, "chat", pack_together=50, held_out_share=0.5)
    alone = config(files, "chat", held_out_share=0.5)
    one, other = (stream(which, split="held_out", batch_size=1) for which in (data, alone))
    assert digest(next(one)) == digest(next(other)) and one.get_state() == other.get_state()


def test_bad_records_are_counted_and_the_count_is_part_of_the_state(uninterrupted):
    counts = [skipped for _, _, skipped in uninterrupted["text", 1]]
    assert counts == sorted(counts) and counts[-1] >= 2
    assert uninterrupted["chat", 1][-1][2] == 0


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_any_number_of_processes_gives_the_same_global_batches(files, uninterrupted, kind, processes):
    """And the states of the processes, joined in their order, are the state of one process."""
    parts = [
        stream(config(files, kind, num_groups=4), process_index=process, process_count=processes)
        for process in range(processes)
    ]
    for expected, state, skipped in uninterrupted[kind, 4][:4]:
        rows = [next(part) for part in parts]
        assert [len(batch.tokens) for batch in rows] == [4 // processes] * processes
        joined = PackedBatch(
            *(np.concatenate(arrays) for arrays in zip(*(vars(b).values() for b in rows), strict=True))
        )
        assert digest(joined) == expected
        assert {name: [value for part in parts for value in part.get_state()[name]] for name in state} == state
        assert sum(part.skipped_records for part in parts) == skipped
    for part in parts:
        part.set_state(uninterrupted[kind, 4][0][1])
    rows = [next(part) for part in parts]
    assert np.concatenate([batch.tokens for batch in rows]).shape == (4, rows[0].tokens.shape[1])


def test_workers_change_nothing_and_no_signal_for_the_whole_job_ends_them(files, uninterrupted):
    """Two processes that read, each deaf to Ctrl-C from its first moment and soon in its own group, told to end as Slurm tells
    every process of a job; a state set in between. Where one is gone the other still ends."""
    iterator = stream(config(files, "text", num_groups=4, num_workers=2))
    expected = uninterrupted["text", 4]
    for place in (*range(5), *range(2, 4)):
        if place == 2:
            iterator.set_state(expected[1][1])
        assert (digest(next(iterator)), iterator.get_state(), iterator.skipped_records) == expected[place]
        if place == 0:
            workers = list(iterator._reader._workers()._processes)
            assert len(workers) == 2
            for pid in workers:
                blocked = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
                assert all(int(blocked, 16) & 1 << number - 1 for number in (signal.SIGINT, signal.SIGTERM))
                subprocess.run(["kill", "-TERM", str(pid)], check=True)  # by another process than the one that reads
    deadline = time.monotonic() + 60  # one worker may have read all of it before the other was up
    while not all(os.getpgid(pid) == pid for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(workers[0], signal.SIGKILL)
    with pytest.raises(UserError, match=r"a worker process of the data died \(out of memory\?\); data.num_workers=0"):
        while True:
            next(iterator)
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_script_that_its_own_workers_would_run_is_told_what_it_lacks(tmp_path):
    """They import it first, and die of it: it would start workers there, too."""
    script = tmp_path / "script.py"
    script.write_text("from wedlm_jax.data.reading import Reader\nnext(Reader(range(64), 1, 1).read(0, 1))\n")
    path = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, env=path)
    assert 'or a script that trains without `if __name__ == "__main__":`?' in ended.stderr, ended.stderr


@pytest.mark.parametrize(("groups", "chunks"), [(1, 6), (2, 3), (8, 2)])
def test_groups_share_what_is_read_ahead(files, monkeypatch, groups, chunks):
    """Of two workers; each group has a chunk in use beside those ahead of it, at least one for every worker."""
    documents, submitted = Documents(config(files, "chat", num_groups=groups), tokenizer(), 0, "train"), []

    class Pool(concurrent.futures.Executor):
        def __init__(self, *args, **kwargs): ...

        def submit(self, read, start, step):
            submitted.append(start)
            done = concurrent.futures.Future()
            done.set_result(([documents[start]], None))
            return done

    monkeypatch.setattr("wedlm_jax.data.reading.concurrent.futures.ProcessPoolExecutor", Pool)
    reader = Reader(documents, 2, groups)
    iterators = [reader.read(group, groups) for group in range(groups)]
    for iterator in iterators:
        next(iterator)
    assert len(submitted) == groups * (1 + chunks)
    for _ in range(3):
        next(iterators[0])
    assert len(submitted) == groups * (1 + chunks) + 3


def test_a_bad_record_is_told_at_the_same_batch_with_workers_and_without(files):
    """And told again, with the state that was reached, when the stream is asked once more."""
    told = []
    for workers in (0, 1):
        iterator = stream(config(files, "text", on_bad_record="error", num_workers=workers), batch_size=2, seed=11)
        with pytest.raises(BadRecord) as caught:
            for _ in range(100):
                next(iterator)
        told.append((iterator.get_state(), str(caught.value)))
        with pytest.raises(BadRecord) as again:
            next(iterator)
        assert (iterator.get_state(), str(again.value)) == told[-1]
    assert told[0] == told[1] and told[0][0]["next_example"][0] > 0


def test_a_stream_that_met_a_bad_record_goes_on_under_skip_as_one_that_skips_from_the_start(files):
    met = stream(config(files, "text", on_bad_record="error"), batch_size=2, seed=11)
    skipping, resumed = (stream(config(files, "text"), batch_size=2, seed=11) for _ in range(2))
    with pytest.raises(BadRecord):
        while True:
            next(met), next(skipping)
    assert met.get_state()["next_example"][0] > 0
    resumed.set_state(met.get_state())
    for _ in range(3):
        assert (digest(next(resumed)), resumed.get_state()) == (digest(next(skipping)), skipping.get_state())


def test_a_source_whose_number_of_records_changed_is_refused_by_name_and_an_older_state_is_not(files, tmp_path):
    """In a mixture too, where the first source is as it was."""
    lines = files["chat"].read_text().splitlines()
    changed = tmp_path / "changed.jsonl"
    parts = tuple(WeightedSource("chat", str(path)) for path in (files["chat"], changed))
    mixture = DataConfig(source="mixture", mixture=parts, row_length=128, num_end_tokens=2)
    changed.write_text("\n".join(lines) + "\n")
    before = stream(mixture)
    next(before)
    state = {**before.get_state(), "records": before.records}
    expected = digest(next(before))
    changed.write_text("\n".join(lines[:7] + lines[8:]) + "\n")
    with pytest.raises(
        UserError, match="changed.jsonl had 40 records when the .* has 39 now, .*; put it back .*init_from="
    ):
        stream(mixture).set_state(state)
    stream(mixture).set_state({name: value for name, value in state.items() if name not in ("records", "handed_out")})
    changed.write_text("\n".join(lines) + "\n")
    resumed = stream(mixture)
    resumed.set_state(json.loads(json.dumps(state)))
    assert digest(next(resumed)) == expected


def test_a_batch_is_packed_while_the_last_one_is_used(files):
    iterator, asked = stream(config(files, "chat")), []
    make = iterator._make
    iterator._make = lambda: (asked.append(1), make())[1]
    next(iterator)
    deadline = time.monotonic() + 30
    while len(asked) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(asked) == 2


def test_groups_hold_the_documents_of_their_own_remainder(files):
    iterator = stream(config(files, "chat", num_groups=4), batch_size=8)
    for _ in range(3):
        batch = next(iterator)
        for group in range(4):
            rows = slice(2 * group, 2 * group + 2)
            documents = batch.document_ids[rows][batch.segment_ids[rows] > 0]
            assert set(documents % 4) == {group}


def test_quickstart_batches_are_the_shuffled_problems_packed_in_order():
    """The stream as it has been since the first release, written out."""
    data = DataConfig(row_length=256, num_problems=60, num_end_tokens=3)
    problems = grain.MapDataset.source(QuickstartProblems("held_out", 5, 60)).seed(5).shuffle().repeat()
    iterator = batches(data, tokenizer(), BLOCK_SIZE, 3, 5, "held_out")
    start = 0
    for _ in range(6):
        upcoming = (
            from_completion(problems[i].prompt, problems[i].solution, tokenizer(), num_end_tokens=3, document_id=i)
            for i in itertools.count(start)
        )
        expected, count = pack(upcoming, num_rows=3, row_length=256, block_size=BLOCK_SIZE, pad_token_id=0)
        start += count
        assert digest(next(iterator)) == digest(expected)
        assert iterator.get_state()["next_example"] == [start]


def test_stdlib_code_batches_are_those_of_the_first_release(tmp_path):
    """The hash was recorded before there were other sources."""
    for name in range(40):
        (tmp_path / f"module_{name}.py").write_text(f"def f{name}(x):\n    return x + {name}\n" * 30)
    data = DataConfig(source="stdlib_code", path=str(tmp_path), row_length=64)
    made = make_tokenizer(TokenizerConfig(vocab_size=300), data)
    found = hashlib.sha256()
    iterator = batches(data, made, 16, 2, 1, "train")
    for _ in range(20):
        for array in vars(next(iterator)).values():
            found.update(array.tobytes())
            found.update(str((array.shape, array.dtype)).encode())
    assert found.hexdigest() == "a722f7b9688ee0592ca8e86affa8af28b2e05ad605e4e2db3428bb46608259a0"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"next_example": 30}, "the saved place in the data is of an earlier version"),
        (
            [1],
            "the saved place in the data is of an earlier version or damaged .* remove that checkpoint or start a new",
        ),
        ({"next_example": ["a"], "next_piece": [0], "skipped_records": [0]}, "of an earlier version or damaged"),
        ({"next_example": [-3], "next_piece": [0], "skipped_records": [0]}, "of an earlier version or damaged"),
        ({"next_example": [3], "next_piece": [0], "skipped_records": [0], "records": [40, 1]}, "or damaged"),
        ({"next_example": [3], "next_piece": [0], "skipped_records": [0], "handed_out": [1]}, "or damaged"),
        (
            {"next_example": [3, 4], "next_piece": [0, 0], "skipped_records": [0, 0]},
            "is of 2 groups, and data.num_groups=1",
        ),
    ],
)
def test_a_state_of_another_kind_is_refused_and_the_stream_goes_on(files, state, message):
    iterator = stream(config(files, "chat"))
    with pytest.raises(UserError, match=message):
        iterator.set_state(state)
    assert digest(next(iterator)) == digest(next(stream(config(files, "chat"))))


@pytest.mark.parametrize(
    ("groups", "rows", "processes", "message"),
    [
        (1, 4, 2, "data.num_groups=1 is not a multiple of the 2 processes"),
        (4, 6, 1, "a batch of 6 rows cannot be split into data.num_groups=4 groups"),
    ],
)
def test_rows_that_cannot_be_shared_out_are_told(files, groups, rows, processes, message):
    with pytest.raises(UserError, match=message):
        stream(config(files, "chat", num_groups=groups), rows, process_count=processes)


def test_every_piece_of_a_long_text_arrives_once_and_in_order(files):
    """Over a whole epoch; each piece has an id of its own, so that it is corrupted on its own."""
    data = config(files, "text")
    documents = Documents(data, tokenizer(), 0, "train")
    expected = {}
    for index in range(documents.epoch):
        for example in documents[index].examples:
            assert example.document_id not in expected
            expected[example.document_id] = example.tokens.tolist()
    iterator, found = stream(data), {}
    while iterator.get_state()["next_example"][0] <= documents.epoch:
        batch = next(iterator)
        for row, number in {(r, batch.segment_ids[r, c]) for r, c in np.argwhere(batch.segment_ids)}:
            mine = batch.segment_ids[row] == number
            found[int(batch.document_ids[row][mine][0])] = batch.tokens[row][mine].tolist()
    assert expected.items() <= found.items()
    assert max(len(tokens) for tokens in expected.values()) == 32
