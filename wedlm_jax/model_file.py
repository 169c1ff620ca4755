"""`model.json` of a workdir: what `wedlm_jax.load` needs beside the parameters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import pydantic

from wedlm_jax.errors import UserError, reason
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.revision import revision

MODEL_FILE = "model.json"
TOKENIZER_FOLDER = "tokenizer"  # beside it


@dataclasses.dataclass(frozen=True)
class Base:
    """The model that an adapter was trained beside. Its parameters are read where they are, and never written."""

    path: str  # what init_from named, of a workdir with the step; absolute where that is a local directory
    revision: str

    def check(self, config: ModelConfig, params: Mapping[str, jax.Array]) -> None:
        """Raises a `UserError` where these are other parameters."""
        if (found := revision(config, params)) != self.revision:
            raise UserError(
                f"{self.path} is of revision {found}, and the adapter was trained beside it at revision {self.revision}; "
                "bring that model back, or train the adapter again"
            )


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """`model.json` of a workdir."""

    config: ModelConfig
    mask_token_id: int | None  # None: of an adapter of mask rows, beside a base that has none
    eos_token_ids: tuple[int, ...]
    base: Base | None = None  # where the config has an adapter
    init_from: str | None = None  # what its first parameters were read from, of a workdir with the step

    @property
    def named_base(self) -> str | None:
        """The base by the name that it was given; earlier files have that as the path."""
        return None if self.base is None else self.init_from or self.base.path

    def write(self, workdir: Path) -> None:
        (workdir / MODEL_FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, workdir: Path) -> ModelFile:
        path = workdir / MODEL_FILE
        try:
            return pydantic.TypeAdapter(cls).validate_json(path.read_text())
        except FileNotFoundError:
            raise UserError(f"{workdir} is no workdir of wedlm_jax.train: it has no {MODEL_FILE}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({reason(error)})") from None
