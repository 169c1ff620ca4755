"""Checkpoint or HF directory -> HF directory, and the proof that PyTorch computes the same with it.

python -m wedlm_jax.convert --from runs/quickstart --to exports/quickstart --arch qwen3 --verify
python -m wedlm_jax.convert --from runs/sft --to exports/sft --arch qwen3 --dtype bfloat16
python -m wedlm_jax.convert --from runs/sft --adapter adapters/sft --to exports/merged
python -m wedlm_jax.convert --from runs/quickstart_adapter --only-adapter --to adapters/quickstart
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from wedlm_jax import pretrained
from wedlm_jax.errors import UserError, entry
from wedlm_jax.flags import AdapterFlag, parse
from wedlm_jax.hf.config import Arch, from_hf, read_json, require_fit, stock_arch
from wedlm_jax.hf.export import arch_of, require_exportable
from wedlm_jax.model.adapter import split_adapter
from wedlm_jax.model.config import DType
from wedlm_jax.model.handle import Model
from wedlm_jax.model.merging import merged, plain, require_mergeable
from wedlm_jax.model.parameters import params_of, transformer_from
from wedlm_jax.model_path import local_target

TOLERANCE = 1e-4  # of max(1, largest logit), in float32


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write a model as a Hugging Face directory."""

    source: Annotated[str, tyro.conf.arg(name="from", metavar="SRC")]
    """Workdir of wedlm_jax.train (its newest step; SRC@500 and SRC@best name another), HF directory, or hub id."""
    target: Annotated[Path, tyro.conf.arg(name="to", metavar="DST")]
    """Directory to write; an earlier export is replaced."""
    arch: Arch | None = None
    """For stock tools qwen3 (a qk norm), qwen2 (a qkv bias) or llama (neither). Left out: SRC's; of a training wedlm or llama."""
    dtype: DType | None = None
    """Dtype of the weights that are written; if left out as they are stored, of a training in float32."""
    verify: tyro.conf.FlagCreatePairsOff[bool] = False
    """Load both sides with torch and transformers, compare logits with ours in float32."""
    adapter: AdapterFlag = None
    only_adapter: tyro.conf.FlagCreatePairsOff[bool] = False
    """Write the adapter alone, for --adapter (of all rows, for PEFT too); else one of all rows is merged into the weights."""


def convert(args: Convert) -> None:
    of_whole = {
        "--verify": args.verify,
        f"--arch {args.arch}": args.arch is not None,
        f"--dtype {args.dtype}": args.dtype is not None,
    }
    if args.only_adapter and any(of_whole.values()):
        flag = next(flag for flag, given in of_whole.items() if given)
        raise UserError(f"{flag} is for whole models and --only-adapter writes none; leave one of the two out")
    if args.verify:
        _require_torch()
    if not args.only_adapter:  # before anything is fetched or read
        require_exportable(local_target(args.target).resolve())
    directory = pretrained.locate(args.source)
    of_workdir = pretrained.is_workdir(directory)
    source = args.source if of_workdir else directory  # with the step; a hub id is fetched once
    config, stored = pretrained.config_of(source), pretrained.exact_dtype(directory)
    if args.arch is not None:
        require_fit(config, args.arch)
    if not args.only_adapter:
        require_mergeable(config.adapter if args.adapter is None else pretrained.adapter_of(args.adapter))
    dtype = args.dtype or stored
    # All is rounded once: as it is read, or where an adapter is added, in float32, the sum.
    adds = args.adapter is not None or config.adapter is not None
    model = pretrained.load(source, "float32" if adds and dtype != stored else dtype, adapter=args.adapter)
    if args.only_adapter:
        pretrained.save_adapter(model, args.target, None if of_workdir else args.source)
        print(f"wrote {args.target}: {_in_words(model)}, {_size_of(args.target) / 1e6:.1f} MB")
        return
    if args.dtype is not None:
        model = _in_dtype(model, args.dtype)
    arch = arch_of(model) if args.arch is None else args.arch
    pretrained.save(model, args.target, arch)
    print(f"wrote {args.target}: {arch}, {model.config.param_dtype}, {_size_of(args.target) / 1e6:.1f} MB")
    if args.verify:
        # The model that was written: by now a run that goes on may have saved another.
        as_stored = not of_workdir and args.adapter is None and args.dtype in (None, stored)
        verify(model, args.target, *([directory] if as_stored else []))


def verify(model: Model, *directories: Path) -> None:
    """Raises `UserError` where torch gives other logits on one of the directories than we for the model, whose adapter is merged
    there."""
    _require_torch()
    exact = _in_dtype(plain(model), "float32")
    tokens, positions = _probe(exact.config.vocab_size)
    ours = np.asarray(exact.transformer(jnp.asarray(tokens), positions=jnp.asarray(positions)))
    del exact
    tolerance = TOLERANCE * max(1.0, float(np.abs(ours).max()))
    for side in directories:
        difference = float(np.abs(_torch_logits(side, tokens, positions) - ours).max())
        line = f"{side}: logits of torch and wedlm_jax differ by at most {difference:.2e} (allowed {tolerance:.2e})"
        if not difference <= tolerance:
            raise UserError(line)
        print(f"verified {line}")


def _in_dtype(model: Model, dtype: DType) -> Model:
    """The weights in this dtype, an adapter merged, and computed with in it to its full precision.

    Raises:
      UserError: as `merged`.
    """
    config, params = merged(model.config, params_of(model.transformer))
    config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype, matmul_precision="highest")
    params = {name: jnp.asarray(x, dtype) for name, x in params.items()}
    return dataclasses.replace(model, transformer=transformer_from(config, params), config=config)


def _in_words(model: Model) -> str:
    adapter = model.config.adapter
    assert adapter is not None  # it was saved
    own = split_adapter(params_of(model.transformer))[1]
    return f"an adapter of {adapter.rows} rows, rank {adapter.rank}, {sum(x.size for x in own.values()):,} parameters"


def _probe(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and positions [2, 48]: a row in order, and one reordered as a decode window is (filled slots first)."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, (2, 48), dtype=np.int32)
    window = 32 + np.argsort(rng.random(16) < 0.5, kind="stable")
    reordered = np.concatenate([np.arange(32), window])
    return tokens, np.stack([np.arange(48), reordered]).astype(np.int32)


def _torch_logits(directory: Path, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    raw = read_json(directory / "config.json")
    arch = stock_arch(from_hf(raw, directory / "config.json"))  # a wedlm forward pass is that of one of them
    fields = {name: value for name, value in raw.items() if name not in ("model_type", "auto_map", "architectures")}
    model = AutoModelForCausalLM.from_pretrained(
        str(directory),
        config=AutoConfig.for_model(arch, **fields),
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
    ).eval()
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        # With an all-ones mask transformers does not read a jump in the positions as the start of another document.
        out = model(ids, attention_mask=torch.ones_like(ids), position_ids=torch.from_numpy(positions.astype(np.int64)))
    return out.logits.numpy()


def _require_torch() -> None:
    if find_spec("torch") is None:
        raise UserError("--verify needs torch, which is not installed: pip install torch")


def _size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


@entry
def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # float32 is float32 there, and no accelerator is needed or taken
    convert(parse(Convert, prog="python -m wedlm_jax.convert", description=__doc__))


if __name__ == "__main__":
    main()
