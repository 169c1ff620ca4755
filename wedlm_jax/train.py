"""`python -m wedlm_jax.train --exp NAME`: trains one experiment. Read it from top to bottom, it runs in that order."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from transformers import PreTrainedTokenizerBase

from wedlm_jax.checkpoint import Checkpoints, ModelFile, differences, saved_steps
from wedlm_jax.data.pipeline import batches, make_tokenizer
from wedlm_jax.data.tokenizer import load_tokenizer, save_tokenizer
from wedlm_jax.distributed import together
from wedlm_jax.errors import UserError, entry
from wedlm_jax.experiment import FILE as EXPERIMENT_FILE
from wedlm_jax.experiment import (
    FREE_TO_CHANGE,
    Experiment,
    ModelConfig,
    ModelOverrides,
    TrainConfig,
    list_experiments,
    load_experiment,
)
from wedlm_jax.hf.tokenizer import choose_mask_token_id, copy_tokenizer_files
from wedlm_jax.hf.weights import resolve_dtype
from wedlm_jax.host_memory import keep_freed_memory
from wedlm_jax.metrics import MetricsWriter, ProgressBar, Throughput, fetch
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import params_of
from wedlm_jax.pretrained import load
from wedlm_jax.sharding import batch_sharding, make_mesh
from wedlm_jax.train_state import abstract_state, from_params, from_seed
from wedlm_jax.train_step import StepSettings, ar_step, compile_step, wedlm_step

TOKENIZER_FOLDER = "tokenizer"  # in the workdir


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
    version: bool = False
    """show the version"""


@entry
def main() -> None:
    keep_freed_memory()
    flags = tyro.cli(Flags, prog="python -m wedlm_jax.train", config=(tyro.conf.FlagCreatePairsOff,))
    if flags.version:
        from wedlm_jax.version import __version__

        print(f"wedlm_jax {__version__}")
    elif flags.list:
        for name, summary in list_experiments().items():
            print(f"{name:24} {summary}")
    elif flags.exp is None:
        raise UserError("name an experiment: --exp NAME (--list shows them) or --exp FILE.py")
    else:
        experiment = load_experiment(flags.exp, flags.overrides)
        if flags.print_config:
            print(experiment.to_json(), end="")
        else:
            with together():
                train(experiment, flags.workdir or experiment.workdir)


def train(experiment: Experiment, workdir: Path) -> None:
    """Trains `experiment` in `workdir` up to its last step.

    Raises:
      UserError: something that it needs is missing or does not fit, the workdir holds another run, or too many updates in a
        row were not finite.
    """
    config, objective = experiment.train, experiment.objective
    newest = max(saved_steps(workdir), default=None)
    if newest is not None:
        refuse_another_experiment(experiment, workdir)
        if newest >= config.steps:
            print(f"{experiment.name}: finished, all {config.steps} steps are in {workdir}")
            return

    # Devices, model, tokenizer. A resumed run reads the last two from its workdir alone.
    mesh = make_mesh(experiment.mesh)
    if config.batch_size % (config.micro_batches * mesh.shape["data"] * mesh.shape["fsdp"]):
        raise UserError(
            f"train.batch_size={config.batch_size} cannot be split over train.micro_batches={config.micro_batches} "
            f"x mesh.data={mesh.shape['data']} x mesh.fsdp={mesh.shape['fsdp']}; make it a multiple"
        )
    initial = load_initial(experiment) if newest is None and experiment.init_from else None
    if newest is None:
        prepare_workdir(experiment, initial, workdir)
    model_file = ModelFile.read(workdir)
    tokenizer = load_tokenizer(workdir / TOKENIZER_FOLDER)
    stream = batches(experiment.data, tokenizer, objective.block_size, config.batch_size, config.seed)

    settings = StepSettings(
        model=model_file.config,
        objective=objective,
        optimizer=experiment.optimizer,
        mask_token_id=model_file.mask_token_id,
        total_steps=config.steps,
        seed=config.seed,
        micro_batches=config.micro_batches,
    )
    ar_update, wedlm_update = (compile_step(step, settings, mesh) for step in (ar_step, wedlm_step))

    with Checkpoints(workdir, keep=config.keep_checkpoints) as checkpoints:
        # Where the state comes from:
        # 1. the newest checkpoint in the workdir, with the place in the data stream;
        # 2. else the model of init_from, with a fresh optimizer;
        # 3. else fresh parameters from the seed.
        if newest is not None:
            state, data_state = checkpoints.restore(abstract_state(settings.model, settings.optimizer, mesh))
            stream.set_state(data_state)
            origin = f"resumed at step {newest}"
        elif initial is not None:
            state = from_params(params_of(initial.transformer), settings.model, settings.optimizer, mesh)
            origin = f"from {experiment.init_from}{progress_of(experiment.init_from)}"
        else:
            state = from_seed(settings.model, settings.optimizer, mesh, config.seed)
            origin = "from scratch"
        del initial  # its arrays are the state's now
        size = sum(x.size for x in state.params.values()) / 1e6
        where = f"{mesh.size} {jax.default_backend()} device{'s' if mesh.size > 1 else ''}"
        print(f"{experiment.name}: {size:.2f}M parameters on {where}, {origin}, in {workdir}")

        # The loop. A step is dispatched before the numbers of the one before are fetched: the device never waits for the host.
        start = newest or 0
        throughput = Throughput()
        waiting: tuple[int, dict[str, Any]] | None = None
        with (
            MetricsWriter(workdir, start_step=start) as writer,
            ProgressBar(experiment.name, start_step=start, total_steps=config.steps) as bar,
        ):
            for step in range(start + 1, config.steps + 1):
                batch = jax.device_put(next(stream), batch_sharding(mesh))
                state, metrics = (ar_update if step <= objective.ar_steps else wedlm_update)(state, batch)
                if waiting is not None:
                    report(*waiting, config, throughput, writer, bar)
                waiting = step, metrics
                if step % config.checkpoint_every == 0 or step == config.steps:
                    # Before the next batch is drawn, so that state and data agree; after the metrics, so that none is lost.
                    report(*waiting, config, throughput, writer, bar)
                    waiting = None
                    checkpoints.save(state, step, stream.get_state())
    print(f"{experiment.name}: finished, all {config.steps} steps are in {workdir}")


def report(
    step: int,
    metrics: dict[str, Any],
    config: TrainConfig,
    throughput: Throughput,
    writer: MetricsWriter,
    bar: ProgressBar,
) -> None:
    """Fetches, logs and shows the metrics of a step; stops a run whose updates are no longer finite."""
    numbers = fetch(metrics)
    throughput.add(int(numbers["tokens"]))
    if step % config.log_every == 0 or step == config.steps:
        rate = throughput.take()
        writer.write(step, numbers | ({"tokens_per_second": round(rate, 1)} if rate else {}))
        bar.show(step, numbers["loss"], rate)
    if numbers["skipped_in_row"] >= config.max_skipped_in_row:
        raise UserError(
            f"step {step}: loss or gradient not finite {numbers['skipped_in_row']} times in a row, so the run is stopped; "
            "no such update was applied, and the checkpoints are kept; lower optimizer.learning_rate or look at the data"
        )


def refuse_another_experiment(experiment: Experiment, workdir: Path) -> None:
    """Raises a `UserError` that names the fields in which the run in `workdir` differs."""
    saved = Experiment.load(workdir)
    if changed := differences(saved.to_dict(), experiment.to_dict(), FREE_TO_CHANGE):
        raise UserError(
            f"{workdir} holds a run of another experiment ({'; '.join(changed)}); "
            f"choose another --workdir, or remove {workdir} to start again"
        )


def load_initial(experiment: Experiment) -> Model:
    """The model of `init_from`, in float32: the optimizer works on float32 parameters whatever they were stored as."""
    path = str(experiment.init_from)
    if not Path(path).exists() and Path(path).parent == Path("runs"):
        raise UserError(f"init_from={path} does not exist; python -m wedlm_jax.train --exp {Path(path).name} makes it")
    initial = load(path, dtype="float32", mask_token_id=experiment.objective.mask_token_id)
    if not isinstance(experiment.model, ModelConfig):
        chosen = {name: value for name, value in vars(experiment.model or ModelOverrides()).items() if value is not None}
        initial.config = dataclasses.replace(initial.config, **{"dtype": resolve_dtype(None), **chosen})
        return initial
    compute = [field.name for field in dataclasses.fields(ModelOverrides)]
    shape, wanted = dataclasses.asdict(initial.config), dataclasses.asdict(experiment.model)
    if changed := differences(shape, wanted, compute):
        raise UserError(f"init_from={path} is another model than model ({'; '.join(changed)}); set model to None")
    initial.config = experiment.model
    return initial


def prepare_workdir(experiment: Experiment, initial: Model | None, workdir: Path) -> None:
    """Writes what a run starts with: tokenizer, model.json, experiment.json."""
    model = initial.config if initial is not None else experiment.model
    assert isinstance(model, ModelConfig)  # Experiment sees to it
    if experiment.data.row_length > model.max_position_embeddings:
        raise UserError(
            f"data.row_length={experiment.data.row_length} is past the model's context, "
            f"max_position_embeddings={model.max_position_embeddings}"
        )
    folder = workdir / TOKENIZER_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = find_tokenizer(experiment, initial, folder)
    if len(tokenizer) > model.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model has vocab_size={model.vocab_size} rows"
        )
    mask_token_id = initial.mask_token_id if initial is not None else None
    if mask_token_id is None:
        mask_token_id = choose_mask_token_id(model, tokenizer, experiment.objective.mask_token_id)
    end_ids = initial.eos_token_ids if initial is not None else ()
    ModelFile(model, mask_token_id, end_ids or (tokenizer.eos_token_id,)).write(workdir)
    (workdir / EXPERIMENT_FILE).write_text(experiment.to_json())


def find_tokenizer(experiment: Experiment, initial: Model | None, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that tokenizer.path names, else the one of init_from, else one trained on the data; kept in `folder`."""
    if initial is None or experiment.tokenizer.path is not None:
        tokenizer = make_tokenizer(experiment.tokenizer, experiment.data)
        save_tokenizer(tokenizer, folder)
        return tokenizer
    if initial.tokenizer is None:
        raise UserError(f"init_from={experiment.init_from} has no tokenizer; name the folder of one as tokenizer.path")
    copy_tokenizer_files(initial.files, initial.tokenizer, folder)
    return initial.tokenizer


def progress_of(init_from: str | None) -> str:
    """How far the run in a workdir has come, for all to see; nothing for a directory that is none."""
    steps = saved_steps(str(init_from))
    return f" (step {steps[-1]} of {Experiment.load(str(init_from)).train.steps})" if steps else ""


if __name__ == "__main__":
    main()
