"""`python -m wedlm_jax.data --exp NAME`: shows what a run would learn from, before any training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from wedlm_jax.data.documents import Documents
from wedlm_jax.data.inspection import epochs, inspect, show
from wedlm_jax.data.split import Split
from wedlm_jax.data.tokenizer import padding_id
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.errors import UserError, entry
from wedlm_jax.experiment import Experiment, load_experiment
from wedlm_jax.flags import parse
from wedlm_jax.hf.hub import fetch_description, is_hub_id
from wedlm_jax.hf.tokenizer import tokenizer_in
from wedlm_jax.model_file import TOKENIZER_FOLDER
from wedlm_jax.pretrained import is_workdir, locate


@dataclasses.dataclass(frozen=True)
class Flags:
    """Shows packed rows with the learned tokens coloured, and how long, how padded and how much learned the data are."""

    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    """section.field=value, such as data.path=chat.jsonl"""
    exp: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.py[:FUNCTION]")] = None
    """the experiment"""
    samples: int = 2
    """rows to print"""
    documents: int = 1000
    """documents to read for the numbers, one epoch at most"""
    split: Split = "train"
    """training or held-out documents"""


@entry
def main() -> None:
    flags = parse(Flags, prog="python -m wedlm_jax.data")
    if flags.exp is None:
        raise UserError("name an experiment: --exp NAME (python -m wedlm_jax.train --list shows them) or --exp FILE.py")
    if flags.samples < 0 or flags.documents < 1:
        raise UserError("--samples must be at least 0 and --documents at least 1")
    experiment = load_experiment(flags.exp, flags.overrides)
    if experiment.data.self_generated is not None:
        raise UserError(
            "data.self_generated: its text is written when the training begins, into WORKDIR/self_generated; show it with "
            "data.self_generated=none data.source=completions data.path=WORKDIR/self_generated/completions.jsonl"
        )
    tokenizer = find_tokenizer(experiment)
    documents = Documents(experiment.data, tokenizer, experiment.train.seed, flags.split)
    inspection = inspect(
        documents,
        flags.documents,
        num_groups=experiment.data.num_groups,
        together=experiment.data.pack_together,
        num_rows=max(experiment.train.batch_size // experiment.data.num_groups, 1),
        row_length=experiment.data.row_length,
        block_size=experiment.objective.block_size,
        pad_token_id=padding_id(tokenizer),
    )
    console = Console()
    show(console, inspection, tokenizer, flags.samples)
    if flags.split == "train":
        places = experiment.train.batch_size * experiment.data.row_length
        for line in epochs(inspection, documents, places, experiment.train.steps):
            console.print(line, soft_wrap=True, markup=False, highlight=False)


def find_tokenizer(experiment: Experiment) -> PreTrainedTokenizerBase:
    """The one that training would take, without reading any weights."""
    path = experiment.init_from
    if path is None or experiment.tokenizer.path is not None:
        return make_tokenizer(experiment.tokenizer, experiment.data)
    hub = not Path(path).exists() and is_hub_id(path)
    directory = fetch_description(path) if hub else locate(path)
    tokenizer = tokenizer_in(directory / TOKENIZER_FOLDER if is_workdir(directory) else directory)
    if tokenizer is None:
        raise UserError(f"init_from={path} has no tokenizer; name the folder of one as tokenizer.path")
    return tokenizer


if __name__ == "__main__":
    main()
