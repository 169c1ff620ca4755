"""The flags of a command that loads a model, and that model."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import tyro

from wedlm_jax import pretrained
from wedlm_jax.data.chat_template import read_variables
from wedlm_jax.flags import AdapterFlag, ChatTemplateFlag, DTypeFlag
from wedlm_jax.model.handle import Model
from wedlm_jax.sharding import ONE_DEVICE


@dataclasses.dataclass(frozen=True)
class ModelFlags:
    model: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """HF directory, hub id, or workdir of wedlm_jax.train (its newest step; DIR@500 and DIR@best name another)."""
    adapter: AdapterFlag = None
    mesh: pretrained.MeshFlag = ONE_DEVICE
    dtype: DTypeFlag = None

    def load(self) -> Model:
        """Raises a `UserError` as `pretrained.load`."""
        return self._load(None)

    def _load(self, variables: dict[str, Any] | None) -> Model:
        # Who asks for float32 on an accelerator asks for the tokens of a CPU.
        precision: Literal["highest"] | None = "highest" if self.dtype == "float32" else None
        return pretrained.load(
            self.model, self.dtype, mesh=self.mesh, adapter=self.adapter, chat_template_kwargs=variables,
            matmul_precision=precision,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ChatModelFlags(ModelFlags):
    """Of a command that puts messages through the model's chat template."""

    chat_template_kwargs: ChatTemplateFlag = None

    def load(self) -> Model:
        return self._load(variables_of(self.chat_template_kwargs))


def variables_of(flag: str | None) -> dict[str, Any] | None:
    """What --chat-template-kwargs says."""
    return None if flag is None else read_variables(flag, "--chat-template-kwargs")
