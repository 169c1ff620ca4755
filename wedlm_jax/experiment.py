"""Experiment: one run as a frozen tree of small configs; found by name, overridden field by field, kept as JSON.

An experiment is a function `NAME() -> Experiment` in `experiments/NAME.py`, and imports this module only. Another one is
derived from it by `dataclasses.replace(load_experiment("NAME"), ...)`. Several side by side are a `Study`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from wedlm_jax.config_tree import (
    fields_of,
    from_json,
    inner_section,
    is_none,
    read_value,
    sections_of,
    unknown_field,
    validated,
)
from wedlm_jax.data.config import DataConfig, SelfGenerated, WeightedSource
from wedlm_jax.data.tokenizer import TokenizerConfig
from wedlm_jax.errors import UserError, reason
from wedlm_jax.evals.config import EvaluationConfig
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.config import MEANS, ModelConfig, ModelOverrides
from wedlm_jax.model.rope_scaling import RopeScaling
from wedlm_jax.objective import ObjectiveConfig
from wedlm_jax.optimizer import OptimizerConfig
from wedlm_jax.sharding import MeshConfig
from wedlm_jax.study import Curve, Measure, Stage, Study
from wedlm_jax.train_config import LEAST_LENGTH, TrainConfig
from wedlm_jax.train_step import StepSettings

__all__ = [
    "AdapterConfig",
    "Curve",
    "DataConfig",
    "EvaluationConfig",
    "Experiment",
    "Measure",
    "MeshConfig",
    "ModelConfig",
    "ModelOverrides",
    "ObjectiveConfig",
    "OptimizerConfig",
    "RopeScaling",
    "SelfGenerated",
    "Stage",
    "Study",
    "TokenizerConfig",
    "TrainConfig",
    "WeightedSource",
    "list_experiments",
    "load_experiment",
    "load_named",
]

EXPERIMENT_FILE = "experiment.json"  # in the workdir

# A resumed run may change these: they say where and by what means it runs, what it reports and how it is judged, not what is
# learned. And what becomes of a bad record, which may be met after many steps: the places of the others do not depend on it.
FREE_TO_CHANGE = (
    "mesh", *(f"model.{name}" for name in MEANS), "evaluation", "data.num_workers", "data.on_bad_record", "train.micro_batches",
    "train.log_every", "train.checkpoint_every", "train.keep_checkpoints", "train.best_metric", "train.max_skipped_in_row",
    "train.eval_every", "train.eval_batches", "train.eval_samples", "train.profile_steps", "train.tensorboard", "train.wandb",
    "train.skip_unread",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All that a run depends on."""

    name: str
    model: ModelConfig | ModelOverrides | None = None  # None: as in init_from
    init_from: str | None = None  # a workdir (also WORKDIR@STEP), an HF directory or a hub id; None: fresh parameters
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def __post_init__(self) -> None:
        if not self.name.strip(" .") or ".." in (path := Path(self.name)).parts or path.is_absolute():
            raise UserError(f"name={self.name} is no folder below runs/; choose one, or another place as --workdir DIR")
        if self.train.best_metric == "validation_mlm_loss" and self.objective.ar_steps >= self.train.steps:
            raise UserError(
                f"train.best_metric=validation_mlm_loss is never measured: all train.steps={self.train.steps} are of "
                f"objective.ar_steps={self.objective.ar_steps}; choose validation_ar_loss"
            )
        if self.init_from is not None and not str(self.init_from).strip():
            raise UserError("init_from is empty; name the model to start from as model.path=DIR, or set init_from=None")
        if self.data.row_length % self.objective.block_size:
            raise UserError(
                f"data.row_length={self.data.row_length} is not a multiple of "
                f"objective.block_size={self.objective.block_size}; make it one"
            )
        if self.adapter is not None:
            self.objective.check_adapter(self.adapter)

    @property
    def adapter(self) -> AdapterConfig | None:
        return None if self.model is None else self.model.adapter

    def require_model(self) -> None:
        """At use, since an experiment may leave the model to the command line.

        Raises:
          UserError: neither a shape nor a model to start from is given.
        """
        if not isinstance(self.model, ModelConfig) and self.init_from is None:
            raise UserError(
                "model and init_from are both None; name a model to start from as model.path=DIR (a workdir, a Hugging "
                "Face directory or a hub id), or give the shape of one"
            )

    def check_batch(self, mesh: Mesh) -> None:
        """Raises a `UserError` where the rows of a step cannot be split evenly over the mesh and the micro-batches."""
        config, data, fsdp = self.train, mesh.shape["data"], mesh.shape["fsdp"]
        if config.batch_size % (config.micro_batches * data * fsdp):
            raise UserError(
                f"train.batch_size={config.batch_size} cannot be split over train.micro_batches={config.micro_batches} "
                f"x mesh.data={data} x mesh.fsdp={fsdp}; make it a multiple"
            )

    def step_settings(self, model: ModelConfig, mask_token_id: int | None) -> StepSettings:
        """What its training step is compiled for, with the model and the mask id that it comes to.

        Raises:
          UserError: the fields do not go together, or with this model.
        """
        config = self.train
        settings = StepSettings(
            model=model, objective=self.objective, optimizer=self.optimizer, mask_token_id=mask_token_id,
            total_steps=config.steps, seed=config.seed, micro_batches=config.micro_batches,
        )  # fmt: skip
        if config.skip_unread is not None and not settings.runs_by_blocks:
            raise UserError(
                f"train.skip_unread={config.skip_unread} is neither for an adapter with rows=mask, which skips always, nor for "
                "objective.streams=single, where a document is one block; leave it out"
            )
        unasked = settings.runs_by_blocks and self.data.has_prompts and self.data.row_length >= LEAST_LENGTH
        return dataclasses.replace(settings, skip_unread=unasked if config.skip_unread is None else config.skip_unread)

    @property
    def workdir(self) -> Path:
        """Where it is trained unless the command line says otherwise."""
        return Path("runs") / self.name

    def to_dict(self) -> dict[str, Any]:
        """The tree as JSON-able dicts."""
        return json.loads(self.to_json())

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "experiment") -> Experiment:
        """Reads what `to_json` wrote.

        Raises:
          UserError: `source` is no JSON, or a field is unknown, missing or of the wrong type.
        """
        return from_json(cls, text, source)

    @classmethod
    def load(cls, workdir: str | Path) -> Experiment:
        """The experiment that a workdir was trained as. Raises `UserError` where there is none that can be read."""
        path = Path(workdir) / EXPERIMENT_FILE
        try:
            return cls.from_json(path.read_bytes(), str(path))
        except OSError as error:
            raise UserError(
                f"{path}: {reason(error).lower()}; python -m wedlm_jax.train --exp NAME --workdir {workdir} writes it"
            ) from None


def load_experiment(spec: str, overrides: Sequence[str] = ()) -> Experiment:
    """`load_named`, where only an experiment will do.

    Raises:
      UserError: as `load_named`, or it is a study.
    """
    found = load_named(spec, overrides)
    if isinstance(found, Study):
        raise UserError(f"{spec} is a study of several runs; python -m wedlm_jax.train --exp {spec} runs them all")
    return found


def load_named(spec: str, overrides: Sequence[str] = ()) -> Experiment | Study:
    """Finds an experiment and applies overrides, or finds a study.

    Args:
      spec: `NAME` (looked up in ./experiments, the installed experiments, those beside the package) or `FILE.py`; the
        function has the name of the file unless `:function` follows.
      overrides: "section.field=value", in order.

    Raises:
      UserError: no such experiment, function or field; a value of the wrong type; an error in the file.
    """
    place, _, function = spec.partition(":")
    path = Path(os.path.expanduser(place)) if place.endswith(".py") else _find(place)
    experiment = _call(path, function or path.stem)
    if isinstance(experiment, Study):
        if overrides:
            raise UserError(f"{overrides[0]}: {spec} is a study, whose stages have their own; change {path}")
        return experiment
    experiment = validated(Experiment, dataclasses.asdict(experiment), str(path))
    return override(experiment, *overrides) if overrides else experiment


def list_experiments() -> dict[str, str]:
    """Every experiment that can be named, with the first line of its file's docstring."""
    found: dict[str, str] = {}
    for folder in _folders():
        for path in sorted(folder.glob("*.py")):
            if not path.name.startswith("_") and path.stem not in found:
                try:
                    doc = ast.get_docstring(ast.parse(path.read_bytes())) or ""
                except SyntaxError as error:
                    doc = f"(broken: {path}:{error.lineno}: {error.msg})"
                found[path.stem] = doc.partition("\n")[0]
    return found


def override(experiment: Experiment, *assignments: str) -> Experiment:
    """Each "section.field=value", read as the field's type; checked as a whole, so that their order does not matter.

    `model.path=DIR`, as most people look for it, is `init_from=DIR`.

    Raises:
      UserError: no such field, a value of the wrong type, or values that do not go together.
    """
    tree, overridable = dataclasses.asdict(experiment), dataclasses.asdict(ModelOverrides())
    fields = fields_of(Experiment)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"{assignment!r} is not an override; write section.field=value")
        name = "init_from" if name == "model.path" else name
        if name not in fields:
            raise UserError(unknown_field(name, fields))
        if (sections := sections_of(fields[name])) and not is_none(text):
            inside = ", ".join(f"{name}.{field.name}" for field in dataclasses.fields(sections[0]))
            raise UserError(f"{name} is a section; set one of its fields: {inside}")
        *path, field = name.split(".")
        place, annotation = tree[path[0]] if path else tree, fields[name]
        if path[:1] == ["model"] and (place is None or place.keys() == overridable.keys()):
            if name not in (named := fields_of(ModelOverrides, "model.")):
                raise UserError(
                    f"{name}: the model is as in init_from={tree['init_from']}; {', '.join(named)} can be set"
                )
            place = tree["model"] = place or dict(overridable)
            annotation = named[name]
        inner_section(place, path, fields)[field] = read_value(annotation, name, text)
    return validated(Experiment, tree, "")


def _folders() -> list[Path]:
    package = Path(__file__).parent
    return [Path("experiments"), package / "_experiments", package.parent / "experiments"]


def _find(name: str) -> Path:
    for folder in _folders():
        if (folder / f"{name}.py").is_file():
            return folder / f"{name}.py"
    known = list(list_experiments())
    near = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
    raise UserError(f"unknown experiment {name}; {hint} (--list shows all, --exp FILE.py takes a file)")


def _call(path: Path, function: str) -> Experiment | Study:
    """Runs the function of an experiment file; whatever fails in it is told with its file and line."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    module_name = f"wedlm_jax_experiment_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with _importable(path.parent):
            spec.loader.exec_module(module)
            make: Callable[[], Experiment | Study] | None = getattr(module, function, None)
            if not callable(make):
                raise UserError(f"{path} has no function {function}; name one as --exp {path}:FUNCTION")
            experiment = make()
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    except Exception as error:
        frames = [at for at in traceback.extract_tb(error.__traceback__) if Path(at.filename) == path.absolute()]
        line = frames[-1].lineno if frames else 1
        raise UserError(f"{path}:{line}: {type(error).__name__}: {error}") from None
    if not isinstance(experiment, (Experiment, Study)):
        raise UserError(f"{path}: {function}() returns {type(experiment).__name__}, not an Experiment or a Study")
    return experiment


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """What lies in a folder can be imported, as by a script there."""
    place = str(folder.absolute())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the file took it off itself
            sys.path.remove(place)
