"""How far a run has come in its data, as it tells it."""

import json

import numpy as np
import pytest

from tests.tiny_training import EXPERIMENT
from wedlm_jax import data_progress
from wedlm_jax.data.pipeline import PackedBatches, batches
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.data_progress import DataProgress
from wedlm_jax.experiment import Experiment, override

RECORDS = 80  # every fifth of them bad


@pytest.fixture
def experiment(tmp_path) -> Experiment:
    records = [json.dumps({"text": f"{n}: Tom has three apples."}) if n % 5 else "{" for n in range(RECORDS)]
    (tmp_path / "texts.jsonl").write_text("\n".join(records) + "\n")
    return override(
        EXPERIMENT, "data.source=text", f"data.path={tmp_path}", "data.on_bad_record=skip", "data.num_groups=2"
    )


def stream(experiment: Experiment, index: int = 0, count: int = 1) -> PackedBatches:
    tokenizer = make_tokenizer(experiment.tokenizer, experiment.data)
    return batches(experiment.data, tokenizer, 16, 2, 0, process_index=index, process_count=count)


def progress_of(one: PackedBatches, shares: dict[int, int] | None = None) -> DataProgress:
    return DataProgress(one, {0: 0} if shares is None else shares, [], skips=True)


def test_skipped_records_are_those_of_all_groups(experiment, monkeypatch):
    """Streams of half the groups each, joined as `all_gather` joins them, one of them twice, count what one of all does."""
    whole, *shares = stream(experiment), stream(experiment, 0, 2), stream(experiment, 1, 2)
    for _ in range(5):
        for one in (whole, *shares):
            next(one)
        counts = np.array([[share.skipped_records, share.records_read] for share in shares])
        monkeypatch.setattr(data_progress, "all_gather", lambda own, two=counts[1]: np.stack([own, two, two]))
        counted = progress_of(shares[0], {0: 0, 1: 1, 2: 1}).numbers()
        monkeypatch.undo()
        assert counted["skipped_records"] == progress_of(whole).numbers()["skipped_records"] == counts[:, 0].sum()
        assert whole.records_read == counts[:, 1].sum()
    assert (counts > 0).all()


def test_an_epoch_is_over_when_every_record_was_read_once(experiment):
    """Also where a run goes on from a place."""
    one, other = stream(experiment), stream(experiment)
    progress = progress_of(one)
    assert progress.an_epoch == f"an epoch is {RECORDS} records of {experiment.data.path}"
    told = []
    while one.records_read < 3 * RECORDS:
        next(one)
        told.append(progress.numbers()["epoch"])
        assert told[-1] == round(one.records_read / RECORDS, 4)
        assert one.skipped_records == pytest.approx(one.records_read / 5, abs=RECORDS / 5)
        other.set_state(one.get_state())
        assert progress_of(other).numbers()["epoch"] == told[-1]
    assert told == sorted(told) and told[0] < 1 < 3 <= told[-1]


def test_the_epoch_of_a_mixture_is_that_of_the_source_that_comes_again_soonest(experiment, tmp_path):
    (tmp_path / "few.jsonl").write_text('{"text": "Ann has two pears."}\n' * 4)
    parts = [
        {"source": "text", "path": f"{tmp_path}/{name}.jsonl", "weight": w} for name, w in (("texts", 3), ("few", 1))
    ]
    mixed = stream(override(experiment, "data.source=mixture", "data.path=none", f"data.mixture={json.dumps(parts)}"))
    next(mixed)
    read = mixed.records_read
    assert mixed.epochs == [read * 0.75 / RECORDS, read * 0.25 / 4]
    assert progress_of(mixed).numbers()["epoch"] == round(read / 16, 4)


def test_what_is_left_out_is_told_once_and_at_the_end_with_its_first_reason(experiment, capsys):
    one = stream(experiment)
    progress = progress_of(one)
    next(one)
    for last in (False, False, True):
        numbers = progress.numbers(last=last)
    first, second = capsys.readouterr().err.splitlines()
    assert first == second and first.startswith(
        f"warning: {numbers['skipped_records']} of the {one.records_read} records read so far are left out, the first: "
    )
    assert "texts.jsonl:" in first and "broken JSON" in first


def test_the_first_record_that_was_left_out_is_told_where_a_run_goes_on(experiment, capsys):
    """A checkpoint of an earlier version does not say."""
    one = stream(experiment)
    for _ in range(4):
        next(one)
    assert one.first_skipped is not None
    place = json.loads(json.dumps(progress_of(one).place()))
    for known in (True, False):
        again = stream(experiment)
        again.set_state(place if known else {k: v for k, v in place.items() if k != "first_skipped"})
        progress_of(again).numbers()
        told = f", the first: {one.first_skipped}" if known else ""
        assert capsys.readouterr().err.endswith(f"records read so far are left out{told}\n")
