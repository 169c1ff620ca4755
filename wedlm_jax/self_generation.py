"""Self-generated text: the base's own completions of the training prompts, written before training into the workdir, with
what they were made from.

What an adapter drafts is accepted where it says what its base would say after the base's own text, so that is the text to learn
from. Completions are kept as tokens: text, encoded again, may be other tokens than the base wrote.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from wedlm_jax.config_tree import differences
from wedlm_jax.data.config import DataConfig, SourceConfig
from wedlm_jax.data.prompts import leading_prompts, room_for_reply
from wedlm_jax.decode.calibration import fingerprint
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import Request, decode_batch, make_request
from wedlm_jax.decode.prompts import digest_of
from wedlm_jax.errors import UserError, writing
from wedlm_jax.experiment import Experiment
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import params_of, transformer_from
from wedlm_jax.model_file import ModelFile
from wedlm_jax.results import digest_of_file, write_json

FOLDER = "self_generated"  # in the workdir
COMPLETIONS = "completions.jsonl"  # in it: prompt_ids, ids, finish_reason and text, a line for each prompt
MADE_FROM = "made_from.json"  # beside it: the weights, the prompts, the settings; and, once all are there, their digest


def self_generated_data(
    experiment: Experiment, workdir: Path, base: Model | None, tokenizer: PreTrainedTokenizerBase
) -> DataConfig:
    """The data section that reads the completions in `workdir`; of a run that starts, they are written first. What was written
    before a kill is kept, in whole batches, so it ends as if there had been none.

    Args:
      experiment: with `data.self_generated`.
      workdir: with its model.json.
      base: what a run that starts was given to start from; None of one that resumes.
      tokenizer: of the run.

    Raises:
      UserError: what is there was made from other weights, prompts or settings, or is not what was written; a document has no
        prompt, or no room for a reply.
    """
    folder = workdir / FOLDER
    made, declared = _made_from(folder), ModelFile.read(workdir)
    if base is not None:
        # Computed as the run computes: the optimizer has float32, in which it was loaded.
        config = dataclasses.replace(declared.config, adapter=base.config.adapter)
        model = dataclasses.replace(
            base, transformer=transformer_from(config, params_of(base.transformer)), config=config, tokenizer=tokenizer,
            eos_token_ids=declared.eos_token_ids, mask_token_id=declared.mask_token_id,
        )  # fmt: skip
        made = _write(experiment, model, folder, made)
    elif made is None:
        raise UserError(
            f"{folder} is gone, which this run learns from; bring it back, or start again in another --workdir"
        )
    elif declared.base is not None and made.get("weights") != declared.base.revision:
        raise UserError(
            f"{folder} was written by weights of revision {made.get('weights')}, and the adapter is trained beside "
            f"{declared.base.revision}; bring back the text that the run began with"
        )
    finished = made.get("finished")
    if not isinstance(finished, dict) or digest_of_file(folder / COMPLETIONS) != finished.get("sha256"):
        raise UserError(
            f"{folder / COMPLETIONS} is not what was written there; bring it back, or remove {folder} and start again"
        )
    as_they_are: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SourceConfig)}
    return dataclasses.replace(
        experiment.data,
        **as_they_are | {"source": "completions", "path": str(folder / COMPLETIONS)},
        mixture=(), self_generated=None, held_out_share=0.0,
    )  # fmt: skip


def _write(experiment: Experiment, model: Model, folder: Path, before: dict[str, Any] | None) -> dict[str, Any]:
    """Writes what is missing, and returns what MADE_FROM holds then."""
    settings = experiment.data.self_generated
    assert settings is not None
    prompts = leading_prompts(experiment.data, model.tokenizer, experiment.train.seed)
    made = {
        "init_from": experiment.init_from,
        "weights": fingerprint(model),
        "dtype": _dtype(model),
        "prompts": {"count": len(prompts), "sha256": digest_of([prompt.tolist() for prompt in prompts])},
        "row_length": experiment.data.row_length,
        "num_end_tokens": experiment.data.num_end_tokens,
        "end_ids": list(model.eos_token_ids),
        "seed": experiment.train.seed,
        **dataclasses.asdict(settings),
    }
    if before is not None and (changed := differences(before, made, ("finished", "init_from"))):
        raise UserError(
            f"{folder} holds text that was made from something else ({'; '.join(changed)}); choose another --workdir, or remove "
            f"{folder}, and it is written anew"
        )
    if before is not None and "finished" in before:
        return before
    if jax.process_count() > 1:
        raise UserError(
            f"data.self_generated: text is written by a single process; start the same command in one, and go on with all "
            f"{jax.process_count()} once {folder / MADE_FROM} says that it is finished"
        )
    file = folder / COMPLETIONS
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if before is None:
            file.unlink(missing_ok=True)  # nobody says what it was made from
    write_json(folder / MADE_FROM, made)
    _complete(_requests(experiment, model, prompts), model, file, settings.batch_size, f"{experiment.init_from} writes")
    written = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
    tokens, cut = sum(len(line["ids"]) for line in written), sum(line["finish_reason"] == "length" for line in written)
    made["finished"] = {"completions": len(written), "tokens": tokens, "cut": cut, "sha256": digest_of_file(file)}
    write_json(folder / MADE_FROM, made)
    print(
        f"{experiment.name}: {experiment.init_from} wrote {len(written):,} completions, {tokens:,} tokens, "
        f"{cut:,} of them cut by their length, in {file}",
        flush=True,
    )
    return made


def _dtype(model: Model) -> str:
    """That of the parameters; and, if another, that in which they are computed with."""
    stored, computed = str(next(iter(params_of(model.transformer).values())).dtype), model.config.dtype
    return stored if stored == computed else f"{stored}, computed in {computed}"


def _requests(experiment: Experiment, model: Model, prompts: Sequence[np.ndarray]) -> list[Request]:
    data, seed = experiment.data, experiment.train.seed
    settings = data.self_generated
    assert settings is not None
    requests = []
    for row, prompt in enumerate(prompts):
        most = min(settings.max_new_tokens, room_for_reply(data, len(prompt)))
        config = DecodeConfig(decoder="ar", max_new_tokens=most, temperature=settings.temperature, seed=seed)
        requests.append(make_request(model, prompt.tolist(), config, row=row, name=f"prompt {row}"))
    return requests


def _complete(requests: Sequence[Request], model: Model, file: Path, batch_size: int, title: str) -> None:
    """Appends the completions of the requests that the file does not hold, a batch at a time."""
    rows = min(batch_size, len(requests))  # of the last batch too, or it would be a program to compile
    starts = range(_whole_batches(file, batch_size), len(requests), batch_size)
    for start in track(starts, title, console=Console(stderr=True), disable=len(starts) < 2):
        batch = list(requests[start : start + batch_size])
        lines = [
            {"prompt_ids": request.prompt, "ids": done.ids, "finish_reason": done.finish_reason, "text": done.text}
            for request, done in zip(batch, decode_batch(model, batch, trace=False, rows=rows), strict=True)
        ]
        with writing(file), file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _whole_batches(file: Path, batch_size: int) -> int:
    """Completions in the file, which is cut after its last whole batch: so every batch is the same, whatever was cut short."""
    with writing(file), file.open("a+b") as out:
        out.seek(0)
        lines = out.read().split(b"\n")[:-1]
        kept = lines[: len(lines) - len(lines) % batch_size]
        out.truncate(sum(len(line) + 1 for line in kept))
    return len(kept)


def _made_from(folder: Path) -> dict[str, Any] | None:
    file = folder / MADE_FROM
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{file}: cannot be read ({error}); remove {folder}, and it is written anew") from None
    if not isinstance(made, dict):
        raise UserError(f"{file}: holds no JSON object; remove {folder}, and it is written anew")
    return made
