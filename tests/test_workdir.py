"""Several processes and one workdir: what process 0 sees there is what all go by, or the run is refused."""

import pytest

from tests.bad_input import forbidden
from wedlm_jax import workdir as module
from wedlm_jax.errors import UserError
from wedlm_jax.experiment import Experiment, override
from wedlm_jax.resuming import refuse_another_experiment
from wedlm_jax.workdir import await_prepared, is_begun, pinned, progress_of


@pytest.fixture
def process_0_says(monkeypatch):
    """What `of_main` answers to this process, as one of several."""

    def says(number):
        monkeypatch.setattr(module, "of_main", lambda own: number)

    return says


@pytest.fixture
def folder(tmp_path):
    """A workdir with checkpoints of steps 2 and 4, as far as names tell."""
    for step in ("2", "4"):
        (tmp_path / "run" / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / step / "_CHECKPOINT_METADATA").write_text("{}")
    (tmp_path / "run" / "model.json").write_text("{}")
    return tmp_path / "run"


def test_a_run_is_begun_where_process_0_sees_the_same_newest_checkpoint(folder, tmp_path, process_0_says):
    process_0_says(4)
    assert is_begun(folder)
    process_0_says(0)
    assert not is_begun(tmp_path / "nothing yet")


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (0, "the newest checkpoint is of step 4 here, and for process 0 there is no checkpoint; choose a --workdir"),
        (2, "the newest checkpoint is of step 4 here, and for process 0 the newest checkpoint is of step 2; choose"),
    ],
)
def test_a_workdir_in_which_process_0_sees_another_checkpoint_is_refused(folder, process_0_says, other, told):
    process_0_says(other)
    with pytest.raises(UserError, match=told):
        is_begun(folder)


def test_the_newest_step_of_init_from_is_what_process_0_takes_it_for(folder, process_0_says):
    """It may be training still: a process that looks later would start from other parameters."""
    process_0_says(2)
    assert pinned(Experiment(name="next", init_from=str(folder))).init_from == f"{folder}@2"


def test_a_run_whose_first_model_is_gone_meanwhile_or_says_little_of_itself_tells_what_it_knows(folder):
    """It holds the parameters already: of the line that says where they come from it ended."""
    assert progress_of(f"{folder}@4") == ""  # no experiment.json: what a model is loaded from
    (folder / "experiment.json").write_text(Experiment("base", init_from="x").to_json())
    assert progress_of(f"{folder}@4") == progress_of(str(folder)) == " (step 4 of 1000)"
    assert progress_of(f"{folder}@3") == " (step 3 of 1000)"  # as of a run that trains on, and keeps its newest ones


@pytest.fixture
def process_1_of_2(monkeypatch, process_0_says):
    """Process 0 has written 77 into the workdir."""
    monkeypatch.setattr(module.jax, "process_count", lambda: 2)
    monkeypatch.setattr(module, "is_main", lambda: False)
    process_0_says(77)


@pytest.mark.parametrize("here", [None, "76"])
def test_a_workdir_that_is_another_folder_to_this_process_is_refused(folder, process_1_of_2, monkeypatch, here):
    """Nothing is there, or a copy of the same run."""
    monkeypatch.setattr(module, "_STALE_SECONDS", 0.0)
    if here is not None:
        (folder / ".start").write_text(here)
    with pytest.raises(UserError, match="run: what process 0 has written is not here; choose a --workdir that all"):
        await_prepared(folder)


def test_what_process_0_has_written_may_be_seen_a_little_later(folder, process_1_of_2, monkeypatch):
    """As on NFS, which keeps for a while that a file was not there."""
    monkeypatch.setattr(module.time, "sleep", lambda seconds: (folder / ".start").write_text("77"))
    await_prepared(folder)


def test_a_workdir_that_this_process_cannot_write_is_told_before_it_trains(folder, process_1_of_2):
    (folder / ".start").write_text("77")
    with (
        forbidden(str(folder / ".start"), 0o400),
        pytest.raises(
            UserError, match=r"\.start: cannot be written \(permission denied\); allow writing there for every process"
        ),
    ):
        await_prepared(folder)


def test_process_0_writes_another_number_at_every_start(folder, monkeypatch):
    monkeypatch.setattr(module.jax, "process_count", lambda: 2)
    numbers = []
    for _ in range(2):
        await_prepared(folder)
        numbers.append((folder / ".start").read_text())
    assert numbers[0] != numbers[1]


def refuse(folder, begun: tuple[str, ...], now: tuple[str, ...]) -> None:
    """What is said where a run that was begun with these fields is to go on with those."""
    experiment = Experiment("run", init_from="base")
    (folder / "experiment.json").write_text(override(experiment, *begun).to_json())
    refuse_another_experiment(override(experiment, *now), folder)


def test_a_run_whose_experiment_says_nothing_of_its_model_may_go_on_with_another_remat(folder):
    """As of `sft`: who ran out of memory had to begin anew."""
    refuse(folder, (), ("model.remat=full", "model.mlp_tile=64"))
    refuse(folder, ("model.remat=full",), ())
    with pytest.raises(UserError, match=r"another experiment \(model.dtype: None -> bfloat16\)"):
        refuse(folder, (), ("model.remat=full", "model.dtype=bfloat16"))


def test_held_out_documents_may_lie_in_another_place_unless_losses_of_them_are_compared(folder):
    """All of data.path is trained on either way; without such a place some of it is held out."""
    began, moved = "data.held_out_path=valid.jsonl", "data.held_out_path=elsewhere/valid.jsonl"
    mixture = 'data.mixture=[{{"source": "text", "path": "a", "held_out_path": "{0}"}}]'
    refuse(folder, (began,), (moved,))
    refuse(folder, ("data.source=mixture", mixture.format("a")), ("data.source=mixture", mixture.format("b")))
    for before, now in ((began, "name=run"), ("name=run", began)):
        with pytest.raises(UserError, match=r"another experiment \(data.held_out_path: (None -> )?a place of its own"):
            refuse(folder, (before,), (now,))
    compares = ("train.eval_every=2", "train.checkpoint_every=2", "train.best_metric=validation_ar_loss")
    refuse(folder, (began, *compares), ("data.held_out_path=./valid.jsonl", *compares))
    for now, name in ((moved, "data.held_out_path"), ("train.eval_batches=9", "train.eval_batches")):
        with pytest.raises(UserError, match=f"run: {name}: .* -> .*compares the losses .* set train.best_metric=none"):
            refuse(folder, (began, *compares), (began, *compares, now))
        refuse(folder, (began, *compares), (began, now))


def test_the_model_to_start_from_may_be_spelled_otherwise_where_a_run_goes_on(folder, monkeypatch):
    """As by a shell that completes it with a slash; it is not read again. A name on a hub is told as it is."""
    monkeypatch.chdir(folder)
    (folder / "base").mkdir()
    for now in ("base/", "./base", str(folder / "base")):
        refuse(folder, (), (f"init_from={now}",))
    with pytest.raises(UserError, match=r"another experiment \(init_from: .*/base -> .*/base@3\)"):
        refuse(folder, (), ("init_from=base@3",))
    with pytest.raises(UserError, match=r"another experiment \(init_from: Qwen/Qwen3-0.6B -> Qwen/Qwen3-8B\)"):
        refuse(folder, ("init_from=Qwen/Qwen3-0.6B",), ("init_from=Qwen/Qwen3-8B",))


def test_losses_of_other_held_out_batches_do_not_decide_which_checkpoint_is_the_best(folder):
    """The first ones over more of them would win or lose by which rows these are."""
    best = ("train.eval_every=500", "train.best_metric=validation_ar_loss")
    with pytest.raises(UserError, match=r"eval_batches: 4 -> 9, .* set train.best_metric=none"):
        refuse(folder, best, (*best, "train.eval_batches=9"))
    for begun, now in (
        (best, ("train.eval_every=500",)),
        ((), best),
    ):  # nothing is compared, or nothing to compare with
        refuse(folder, begun, (*now, "train.eval_batches=9"))
