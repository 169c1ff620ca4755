"""Experiment: one run as a frozen tree of small configs; found by name, overridden field by field, kept as JSON.

An experiment is a function `NAME() -> Experiment` in `experiments/NAME.py`, and imports this module only. Another one is
derived from it by `dataclasses.replace(load_experiment("NAME"), ...)`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import json
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from wedlm_jax.data.pipeline import DataConfig
from wedlm_jax.data.tokenizer import TokenizerConfig
from wedlm_jax.errors import UserError
from wedlm_jax.evals.config import EvaluationConfig
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.optimizer import OptimizerConfig
from wedlm_jax.sharding import MeshConfig
from wedlm_jax.train_step import ObjectiveConfig

__all__ = [
    "DataConfig",
    "EvaluationConfig",
    "Experiment",
    "MeshConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "TokenizerConfig",
    "TrainConfig",
    "list_experiments",
    "load_experiment",
]

FILE = "experiment.json"  # in the workdir

# A resumed run may change these: they say where it runs, what it reports and how it is judged, not what is learned.
FREE_TO_CHANGE = (
    "mesh",
    "evaluation",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.max_skipped_in_row",
)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    batch_size: int = 16  # rows of a step, over all devices
    micro_batches: int = 1  # gradient accumulation: the rows of a step are run in this many parts
    seed: int = 0  # of the parameters, the order of the data and the corruption
    log_every: int = 10  # steps
    checkpoint_every: int = 500  # steps; the last step is always saved
    keep_checkpoints: int = 2  # the newest ones
    max_skipped_in_row: int = 10  # stop after so many steps with a loss or gradient that is not finite

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 0 if field.name == "seed" else 1
            if getattr(self, field.name) < least:
                raise UserError(f"train.{field.name}={getattr(self, field.name)} must be at least {least}")
        if self.batch_size % self.micro_batches:
            raise UserError(
                f"train.batch_size={self.batch_size} is not a multiple of train.micro_batches={self.micro_batches}"
            )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All that a run depends on."""

    name: str
    model: ModelConfig | None = None  # None: as in init_from
    init_from: str | None = None  # a workdir, an HF directory or a hub id; None: fresh parameters
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def __post_init__(self) -> None:
        if self.model is None and self.init_from is None:
            raise UserError("model and init_from are both None; give the shape of a model, or a model to start from")
        if self.data.row_length % self.objective.block_size:
            raise UserError(
                f"data.row_length={self.data.row_length} is not a multiple of "
                f"objective.block_size={self.objective.block_size}; make it one"
            )

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
    def from_json(cls, text: str, source: str = "experiment") -> Experiment:
        """Reads what `to_json` wrote.

        Raises:
          UserError: `source` is no JSON, or a field is unknown, missing or of the wrong type.
        """
        try:
            tree = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{source}:{error.lineno}: no JSON ({error.msg})") from None
        if not isinstance(tree, dict):
            raise UserError(f"{source}: holds no experiment")
        known = _fields(cls)
        for name in _names(tree):
            if name not in known:
                raise UserError(f"{source}: {_unknown(name, known)}")
        return _validated(cls, tree, source)

    @classmethod
    def load(cls, workdir: str | Path) -> Experiment:
        """The experiment that a workdir was trained as."""
        path = Path(workdir) / FILE
        try:
            return cls.from_json(path.read_text(), str(path))
        except OSError as error:
            raise UserError(
                f"{path}: {(error.strerror or 'unreadable').lower()}; "
                f"python -m wedlm_jax.train --exp NAME --workdir {workdir} writes it"
            ) from None


def load_experiment(spec: str, overrides: Sequence[str] = ()) -> Experiment:
    """Finds an experiment and applies overrides.

    Args:
      spec: `NAME` (looked up in ./experiments, the installed experiments, those beside the package) or `FILE.py`; the
        function has the name of the file unless `:function` follows.
      overrides: "section.field=value", in order.

    Raises:
      UserError: no such experiment, function or field; a value of the wrong type; an error in the file.
    """
    place, _, function = spec.partition(":")
    path = Path(place) if place.endswith(".py") else _find(place)
    experiment = _call(path, function or path.stem)
    experiment = _validated(Experiment, dataclasses.asdict(experiment), str(path))
    for assignment in overrides:
        experiment = override(experiment, assignment)
    return experiment


def list_experiments() -> dict[str, str]:
    """Every experiment that can be named, with the first line of its file's docstring."""
    found: dict[str, str] = {}
    for folder in _folders():
        for path in sorted(folder.glob("*.py")):
            if not path.name.startswith("_") and path.stem not in found:
                try:
                    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
                except SyntaxError as error:
                    doc = f"(broken: {path}:{error.lineno}: {error.msg})"
                found[path.stem] = doc.partition("\n")[0]
    return found


def override(experiment: Experiment, assignment: str) -> Experiment:
    """One "section.field=value": the value is read as the field's type; `none` and comma-separated tuples are understood."""
    name, equals, text = assignment.partition("=")
    if not equals:
        raise UserError(f"{assignment!r} is not an override; write section.field=value")
    fields = _fields(Experiment)
    if name not in fields:
        raise UserError(_unknown(name, fields))
    if (section := _section(fields[name])) and text.lower() != "none":
        inside = ", ".join(f"{name}.{field.name}" for field in dataclasses.fields(section))
        raise UserError(f"{name} is a section; set one of its fields: {inside}")
    return _replaced(experiment, name.split("."), name, _parse(fields[name], text))


def _replaced(node: Any, path: list[str], name: str, value: Any) -> Any:
    if len(path) > 1:
        child = getattr(node, path[0])
        if child is None:
            raise UserError(f"{name}: {path[0]} is None here (as in init_from), so it has no field to set")
        value = _replaced(child, path[1:], name, value)
        return dataclasses.replace(node, **{path[0]: value})
    annotation = typing.get_type_hints(type(node))[path[0]]
    try:
        value = pydantic.TypeAdapter(annotation).validate_python(value)
    except pydantic.ValidationError as error:
        raise UserError(f"{name}={value!r}: {_first_line(error)}") from None
    return dataclasses.replace(node, **{path[0]: value})


def _parse(annotation: Any, text: str) -> Any:
    """What pydantic is to convert: None, a list for a tuple, else the text itself."""
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    if text.lower() in ("none", "null") and type(None) in options:
        return None
    if any(typing.get_origin(option) is tuple for option in options):
        return [part.strip() for part in text.strip("[]()").split(",") if part.strip()]
    return text


def _validated(cls: type[Experiment], tree: Mapping[str, Any], source: str) -> Experiment:
    try:
        return pydantic.TypeAdapter(cls).validate_python(tree)
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(part for part in map(str, wrong["loc"]) if not part[0].isupper())  # classes: choices of a union
        raise UserError(f"{source}: {f'{name}: ' if name else ''}{_first_line(error)}") from None


def _first_line(error: pydantic.ValidationError) -> str:
    wrong = error.errors()[0]
    own = wrong.get("ctx", {}).get("error")  # a UserError of a config's own check
    return str(own) if isinstance(own, UserError) else wrong["msg"][0].lower() + wrong["msg"][1:]


def _fields(cls: type, prefix: str = "") -> dict[str, Any]:
    """Every field of a tree of configs by dotted name, sections included, with its annotation."""
    fields: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(cls).items():
        fields[prefix + name] = annotation
        if section := _section(annotation):
            fields |= _fields(section, f"{prefix}{name}.")
    return fields


def _section(annotation: Any) -> type | None:
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)  # type: ignore[return-value]


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _names(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")


def _unknown(name: str, known: Mapping[str, Any]) -> str:
    last = name.rpartition(".")[2]
    near = [field for field in known if field.rpartition(".")[2] == last] or difflib.get_close_matches(
        name, known, 1, 0.5
    )
    hint = (
        f"did you mean {near[0]}?" if near else f"the sections are {', '.join(n for n in known if _section(known[n]))}"
    )
    return f"unknown field {name}; {hint}"


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


def _call(path: Path, function: str) -> Experiment:
    """Runs the function of an experiment file; whatever fails in it is told with its file and line."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    module_name = f"wedlm_jax_experiment_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
        make: Callable[[], Experiment] | None = getattr(module, function, None)
        if not callable(make):
            raise UserError(f"{path} has no function {function}; name one as --exp {path}:FUNCTION")
        experiment = make()
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    except Exception as error:
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.absolute()
        ]
        line = frames[-1].lineno if frames else 1
        raise UserError(f"{path}:{line}: {type(error).__name__}: {error}") from None
    if not isinstance(experiment, Experiment):
        raise UserError(f"{path}: {function}() returns {type(experiment).__name__}, not an Experiment")
    return experiment
