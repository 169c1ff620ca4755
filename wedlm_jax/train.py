"""`python -m wedlm_jax.train --exp NAME`: trains one experiment. Read it from top to bottom, it runs in that order."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from wedlm_jax.ahead_of_time import compile_only
from wedlm_jax.checkpoint import Checkpoints, refuse_unfit_path
from wedlm_jax.data.pipeline import batches, require_groups
from wedlm_jax.data.tokenizer import load_tokenizer
from wedlm_jax.data_progress import DataProgress
from wedlm_jax.distributed import is_main, together
from wedlm_jax.errors import UserError, entry, out_of_memory, reason
from wedlm_jax.evals.validation import Validation
from wedlm_jax.experiment import Experiment, Study, TrainConfig, list_experiments, load_named
from wedlm_jax.flags import parse
from wedlm_jax.kept_checkpoints import MEASURED_OF, SKIPPED_IN_ROW
from wedlm_jax.metrics.profile import traced
from wedlm_jax.metrics.report import Report
from wedlm_jax.metrics.writers import require_wandb
from wedlm_jax.model.config import by_means_of
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import params_of
from wedlm_jax.model_file import TOKENIZER_FOLDER, ModelFile
from wedlm_jax.preemption import EXIT_STATUS, Termination, end_with_study, go_on_unread
from wedlm_jax.pretrained import base_params
from wedlm_jax.resuming import DIGESTS, digests_of, note_experiment, refuse_another_experiment, refuse_other_data
from wedlm_jax.same_run import require_same_data, require_same_settings
from wedlm_jax.self_generation import self_generated_data
from wedlm_jax.sharding import make_mesh, row_shares
from wedlm_jax.sole_writer import sole_writer
from wedlm_jax.study import run_study
from wedlm_jax.train_state import abstract_state, from_params, from_seed
from wedlm_jax.train_step import ar_step, compile_step, place, wedlm_step
from wedlm_jax.workdir import (
    await_prepared,
    base_of,
    checked_workdir,
    is_begun,
    load_initial,
    pinned,
    prepare_workdir,
    progress_of,
    refuse_long_rows,
    require_inputs,
)


@dataclasses.dataclass(frozen=True)
class Flags:
    """Trains an experiment, or goes on with it where its workdir holds a checkpoint."""

    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    """section.field=value, such as train.steps=100"""
    exp: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.py[:FUNCTION]")] = None
    """the experiment"""
    workdir: Path | None = None
    """where all is written; runs/NAME if not given"""
    list: bool = False
    """show the experiments that can be named"""
    print_config: bool = False
    """show the experiment with its overrides as JSON, and train nothing"""
    compile_only: Annotated[str | None, tyro.conf.arg(metavar="KIND:SHAPE")] = None
    """compile the step for TPUs (v5p:4x4x4, two slices v5e:4x4:2) or GPUs (h100:8) that need not be there: memory, least time"""


@entry
def main() -> None:
    end_with_study()
    flags = parse(Flags, prog="python -m wedlm_jax.train", config=(tyro.conf.FlagCreatePairsOff,))
    if flags.list:
        for name, summary in list_experiments().items():
            print(f"{name:26} {summary}")
    elif flags.exp is None:
        raise UserError("name an experiment: --exp NAME (--list shows them) or --exp FILE.py")
    else:
        experiment = load_named(flags.exp, flags.overrides)
        workdir = checked_workdir(flags.workdir or experiment.workdir)
        if isinstance(experiment, Study):
            if flags.print_config or flags.compile_only is not None:
                flag = "--print-config" if flags.print_config else "--compile-only"
                raise UserError(
                    f"{flag} is for one experiment; the study {flags.exp} trains {', '.join(experiment.trains)}"
                )
            run_study(experiment, workdir)
            return
        if flags.print_config:
            print(experiment.to_json(), end="")
            return
        if flags.compile_only is not None:
            for line in compile_only(experiment, flags.compile_only).lines():
                print(line)
            return
        with together():
            finished = train(experiment, workdir)
        if not finished:
            sys.exit(EXIT_STATUS)


def train(experiment: Experiment, workdir: Path) -> bool:
    """Trains `experiment` in `workdir` up to its last step, or until it is told to end.

    Returns:
      whether it came to its last step; if not, all that it did is saved, and the same call goes on from there.

    Raises:
      UserError: something that it needs is missing or does not fit, the workdir holds another run, a checkpoint cannot be
        written, a device has too little memory, or too many updates in a row were not finite; or a record of the data is bad,
        and then a single process first saves the steps before it.
    """
    with contextlib.ExitStack() as held:
        try:
            return _train(experiment, workdir, held)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                f"{experiment.name}: a device has too little memory ({reason(error)}); raise train.micro_batches, set "
                "model.remat=full, or cut the model over more devices (mesh.fsdp)"
            ) from error


def _train(experiment: Experiment, workdir: Path, held: contextlib.ExitStack) -> bool:
    """`train`; `held` is what it holds from then on to its end, the workdir's lock."""
    config, objective = experiment.train, experiment.objective
    refuse_unfit_path(workdir)
    experiment.require_model()
    experiment.data.parts  # noqa: B018  a source that misses a field is told before a model is fetched
    require_same_settings(experiment)
    resumed = is_begun(workdir)
    if resumed:
        refuse_another_experiment(experiment, workdir)
    else:
        require_inputs(experiment)
    if config.wandb is not None and is_main():
        require_wandb(config.wandb)

    # Devices, model, tokenizer, data. A resumed run reads model, tokenizer and self-generated text from its workdir alone, but
    # for the base of an adapter: that is read where it was found at first.
    mesh = make_mesh(experiment.mesh)
    experiment.check_batch(mesh)
    shares = row_shares(mesh)
    feeders = len(set(shares.values()))
    require_groups(experiment.data, config.batch_size, feeders)
    begun = experiment if resumed else pinned(experiment)
    initial: Model | None = None
    if not resumed:
        initial, model = load_initial(begun, mesh)
        base = base_of(begun, initial, model)
        refuse_long_rows(experiment, model)
        if is_main():
            held.enter_context(sole_writer(workdir))
            prepare_workdir(experiment, initial, model, workdir, base, begun.init_from)
    await_prepared(workdir)
    model_file = ModelFile.read(workdir)
    settings = experiment.step_settings(by_means_of(experiment.model, model_file.config), model_file.mask_token_id)
    if settings.only_mask_rows and config.best_metric == "validation_ar_loss":  # of equals the first would be the best
        raise UserError(
            f"train.best_metric={config.best_metric} is the base's at every step, since an adapter with rows=mask changes no "
            "other row; choose validation_mlm_loss"
        )
    tokenizer = load_tokenizer(workdir / TOKENIZER_FOLDER)
    data = experiment.data
    if data.self_generated is not None:
        if not resumed and initial is None:
            raise UserError(f"{experiment.name} learns from text that init_from writes; name that model as init_from")
        data = self_generated_data(experiment, workdir, initial, tokenizer)
    stream = batches(
        data, tokenizer, objective.block_size, config.batch_size, config.seed,
        process_index=shares[jax.process_index()], process_count=feeders,
    )  # fmt: skip
    require_same_data(stream)
    digests = digests_of(experiment.data, stream)
    progress = DataProgress(stream, shares, digests, skips=experiment.data.on_bad_record == "skip")
    ar_update, wedlm_update = (compile_step(step, settings, mesh) for step in (ar_step, wedlm_step))
    validation = None
    if config.eval_every:
        if config.eval_samples and jax.process_count() > 1:
            say(f"{experiment.name}: held-out losses alone; completions (train.eval_samples) take a single process")
        validation = Validation(
            experiment.data, experiment.evaluation, settings, tokenizer, model_file.eos_token_ids, mesh,
            rows=config.batch_size, num_batches=config.eval_batches, num_samples=config.eval_samples,
        )  # fmt: skip

    if resumed:
        held.enter_context(sole_writer(workdir))
    with Checkpoints(workdir, keep=config.keep_checkpoints, best_metric=config.best_metric) as checkpoints:
        # Where the state comes from:
        # 1. the newest checkpoint in the workdir that can be read, with the place in the data stream;
        # 2. else the model of init_from, with a fresh optimizer;
        # 3. else fresh parameters from the seed.
        start = 0
        has_base = resumed and model_file.base is not None
        frozen = base_params(workdir, settings.model.param_dtype, mesh) if has_base else None
        abstract = abstract_state(settings.model, settings.optimizer, mesh)
        restored = checkpoints.restore(abstract, frozen) if resumed else None
        if restored is not None:
            start, state, data_state = restored
            if start < config.steps:
                stream.set_state(data_state)
            refuse_other_data(experiment, workdir, digests, data_state.get(DIGESTS))
            if is_main():
                note_experiment(experiment, workdir)
            origin = f"resumed at step {start}"
        elif initial is not None:
            state = from_params(params_of(initial.transformer), settings.model, settings.optimizer, mesh, config.seed)
            origin = f"from {experiment.init_from}{progress_of(begun.init_from)}"
        else:
            state = from_seed(settings.model, settings.optimizer, mesh, config.seed)
            origin = "from scratch"
        del initial, restored, frozen  # the arrays are the state's now
        finished = f"{experiment.name}: finished, all {config.steps} steps are in {workdir}"
        if start >= config.steps:
            say(finished)
            return True
        trained, frozen_size = (sum(x.size for x in part.values()) for part in (state.params, state.frozen))
        size = f"{trained / 1e6:.2f}M parameters"
        if frozen_size:
            size += f" ({trained / frozen_size:.1%} of its base's {frozen_size / 1e6:.2f}M, which stay as they are)"
        where = f"{mesh.size} {jax.default_backend()} device{'s' if mesh.size > 1 else ''}"
        say(f"{experiment.name}: {size} on {where}, {origin}, in {workdir}")
        say(f"{experiment.name}: {progress.an_epoch}")
        if experiment.optimizer.warmup_steps >= config.steps:
            say(
                f"note: optimizer.warmup_steps={experiment.optimizer.warmup_steps} is not below train.steps={config.steps}, "
                "so no step has the whole optimizer.learning_rate"
            )

        # The loop. A step is dispatched before the numbers of the one before are fetched: the device never waits for the host.
        waiting: tuple[int, dict[str, jax.Array], dict[str, float | int]] | None = None
        saved = start  # the newest step with a checkpoint
        kept_by: dict[str, Any] = {}  # the metrics of the newest step that was reported, for its checkpoint
        with (
            Termination() as termination,
            Report(
                workdir, experiment.name, experiment.to_dict(),
                start_step=start, total_steps=config.steps, log_every=config.log_every, devices=mesh.size,
                tensorboard=config.tensorboard, wandb=config.wandb,
            ) as report,
        ):  # fmt: skip
            for step in range(start + 1, config.steps + 1):
                masks = step > objective.ar_steps
                try:
                    batch = place(next(stream), mesh)
                except UserError as error:
                    # To save takes all processes, and of several the others are on their way into this step.
                    if step - 1 == saved or jax.process_count() > 1:
                        raise
                    if waiting is not None:
                        numbers = report.step(*waiting)
                        stop_if_not_finite(numbers, config, saved)
                        kept_by = {SKIPPED_IN_ROW: numbers["skipped_in_row"]}
                    checkpoints.save(state, step - 1, progress.place(), kept_by)
                    checkpoints.wait()
                    raise UserError(f"{error}; step {step - 1} of {config.steps} is saved in {workdir}") from error
                last = step == config.steps
                measure = validation is not None and (step % config.eval_every == 0 or last)
                logged = step % config.log_every == 0 or last or measure
                counted = progress.numbers(last=last) if logged else {}
                compiles = start < objective.ar_steps == step - 1  # the second program, while the clock runs already
                if compiles or step in config.profile_steps:  # the step before ends outside what is timed or traced
                    jax.block_until_ready(state)
                clock = report.throughput.paused() if compiles else contextlib.nullcontext()
                with traced(step, config.profile_steps, workdir, report.throughput.paused) as through, clock:
                    state, metrics = through((wedlm_update if masks else ar_update)(state, batch))
                if waiting is not None:
                    stop_if_not_finite(report.step(*waiting), config, saved)
                waiting = step, metrics, counted
                checkpoints.require_written()  # or else all steps up to the next save would be for nothing

                # What ends it may leave it the time for a step and a checkpoint alone.
                told_to_end = termination.asked(step, at_once=measure)
                if not (measure or told_to_end or last or step % config.checkpoint_every == 0):
                    continue

                # Held-out losses go into the line of their step; a checkpoint comes after its line, so that none is lost,
                # and before the next batch is drawn, so that state and data agree.
                measured: dict[str, Any] = {}
                samples: list[dict[str, Any]] = []
                if measure and validation is not None and not told_to_end:
                    jax.block_until_ready(metrics)
                    with report.throughput.paused():
                        measured = validation.measure(state.all_params, masks=masks)
                        told_to_end = termination.asked(step)  # meanwhile
                        if not told_to_end:
                            samples = validation.samples(state.all_params, masks=masks)
                save = step % config.checkpoint_every == 0 or last or told_to_end
                numbers = report.step(step, metrics, counted | measured)
                waiting = None
                stop_if_not_finite(numbers, config, saved)
                if measured:
                    report.validation(step, measured, samples)
                measured_of = f"{config.eval_batches} batches, {'with' if masks else 'without'} masks"
                kept_by = {SKIPPED_IN_ROW: numbers["skipped_in_row"], MEASURED_OF: measured_of, **measured}
                if save:
                    checkpoints.save(state, step, progress.place(), kept_by)
                    saved = step
                if told_to_end and not last:
                    checkpoints.wait()
                    say(
                        f"{experiment.name}: told to end by {termination.signal or 'another process'}; step {step} of "
                        f"{config.steps} is saved in {workdir}, and the same command goes on from there"
                    )
                    return False
            checkpoints.wait()  # before a signal can end the process again
    say(finished)
    return True


def stop_if_not_finite(numbers: dict[str, Any], config: TrainConfig, saved: int) -> None:
    """Stops a run whose updates are no longer finite; what was saved while they were, up to step `saved`, is kept."""
    if numbers["skipped_in_row"] >= config.max_skipped_in_row:
        go_on = (
            " in another --workdir, where model.path=WORKDIR goes on from the checkpoint that is kept" if saved else ""
        )
        raise UserError(
            f"the loss or gradient was not finite {numbers['skipped_in_row']} times in a row, so the run is stopped; no such "
            f"update was applied; look at the data, or lower optimizer.learning_rate{go_on}"
        )


def say(line: str) -> None:
    """Prints, in the main process alone."""
    if is_main():
        try:
            print(line, flush=True)
        except BrokenPipeError:
            if not go_on_unread():
                raise


if __name__ == "__main__":
    main()
