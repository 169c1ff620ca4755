"""Measure what a model's decoding is best set to, on your own prompts, and store it beside the weights.

python -m wedlm_jax.calibrate --model DIR --data prompts.jsonl --max-disagreement 0.005   tau and lambda of streaming decoding,
    by the model's own AR agreement: decoding.json
python -m wedlm_jax.calibrate --model DIR --data prompts.jsonl --decoder verified   what window_size=auto goes by: what each
    window accepts, and what a forward costs on this device: windows.json
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from wedlm_jax import pretrained
from wedlm_jax.decode.calibration import Calibration, not_plain, write_calibration
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import make_request
from wedlm_jax.decode.measured_windows import MeasuredWindows, device_name, write_measured_windows
from wedlm_jax.decode.prompt_file import read_prompts
from wedlm_jax.errors import UserError, entry
from wedlm_jax.evals.thresholds import choose, measure_thresholds
from wedlm_jax.evals.windows import acceptance, forward_costs, mean_context
from wedlm_jax.flags import parse, require_positive
from wedlm_jax.model.window_table import AUTO_WINDOWS, WindowTable
from wedlm_jax.model_flags import ChatModelFlags

ROUNDS = 5  # in which forwards are timed
ROWS_SHOWN = (1, 4, 16)  # prompts decoded at once
# Settings of the user's own that windows may be measured with.
FREE = ("max_new_tokens", "stop", "stop_ids", "temperature", "top_k", "top_p", "seed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate(ChatModelFlags):
    model: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """HF directory or workdir of wedlm_jax.train; decoding.json or windows.json is written there, or beside its adapter."""
    data: Annotated[Path, tyro.conf.arg(metavar="IN.jsonl")]
    """Prompts such as the model will get, a line each, as for wedlm_jax.generate --input."""
    max_disagreement: float = 0.005
    """Of streaming: the largest share of tokens that AR decoding of the same weights would not have chosen."""
    limit: int = 50
    """Prompts at most."""
    batch_size: int = 16
    """Requests decoded at once."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Parameters and compute; None is bfloat16 on accelerators, float32 on CPUs and GPUs before Ampere."""
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = DecodeConfig()


def calibrate_windows(args: Calibrate, console: Console) -> MeasuredWindows:
    """Measures every automatic window on the prompts, and forwards on this device; shows the table, and stores both. What is
    stored already of forwards on other devices stays."""
    _check_flags(args)
    named_prompts = read_prompts(args.data, "--data")[: args.limit]
    model = args.load()
    # Every prompt is checked before any is decoded.
    prompts = [make_request(model, p, args.decode, row=0, name=name).prompt for name, p in named_prompts]
    found = [
        acceptance(model, prompts, args.decode, window, args.batch_size)
        for window in track(AUTO_WINDOWS, "decoding", console=Console(stderr=True))
    ]
    context = mean_context(prompts, args.decode)
    with Console(stderr=True).status("timing forwards") as status:
        costs = forward_costs(model, context, ROUNDS, status.update)
    before = {} if model.measured_windows is None else model.measured_windows.costs
    accepted, fed = tuple(a.accepted for a in found), tuple(a.fed for a in found)
    measured = MeasuredWindows(accepted, fed, found[0].tokens, before | {device_name(model): costs})
    console.print(windows_as_table(WindowTable(costs, accepted, fed)))
    named = args.adapter or args.model
    file = write_measured_windows(_folder(named), measured, model)
    console.print(f"{file}, for {named} on {device_name(model)}", highlight=False, soft_wrap=True, markup=False)
    return measured


def windows_as_table(table: WindowTable) -> Table:
    """The widest window that "auto" takes is bold."""
    shown = Table(
        "window",
        "tokens per forward",
        "slots per forward",
        *(f"of AR's speed, {rows} row{'s'[: rows > 1]}" for rows in ROWS_SHOWN),
    )
    for i, window in enumerate(AUTO_WINDOWS):
        gains = [
            f"[bold green]{gain:.2f}[/]" if table.widest(rows) == window else f"{gain:.2f}"
            for rows in ROWS_SHOWN
            for gain in [table.gains(rows)[i] * table.cost(rows)]
        ]
        shown.add_row(str(window), f"{table.accepted[i]:.2f}", f"{table.fed[i]:.1f}", *gains)
    return shown


def calibrate(args: Calibrate, console: Console) -> Calibration:
    """Measures every pair, shows the table, and stores the fastest pair that agrees often enough."""
    _check_flags(args)
    prompts = read_prompts(args.data, "--data")[: args.limit]
    model = args.load()
    measured = measure_thresholds(model, prompts, args.decode, args.max_disagreement, args.batch_size)
    chosen = choose(measured)
    console.print(as_table(measured, chosen))
    if chosen is None:
        best = min(measured, key=lambda m: m.disagreement)
        raise UserError(
            f"no tau and lambda keep disagreement at or below {args.max_disagreement:g}; the least is {best.disagreement:.4f} "
            f"at tau {best.entropy_threshold:g}, lambda {best.distance_penalty:g}: raise --max-disagreement, or use "
            "--decoder verified, which never disagrees"
        )
    named = args.adapter or args.model
    file = write_calibration(_folder(named), chosen, model)
    console.print(f"{file}, for {named}: {chosen.in_words()}", highlight=False, soft_wrap=True, markup=False)
    if 0 < chosen.tokens * args.max_disagreement < 1:
        print(
            f"note: {chosen.tokens} tokens are too few for --max-disagreement {args.max_disagreement:g}, which one that is not "
            "AR's would exceed; give more prompts",
            file=sys.stderr,
        )
    return chosen


def as_table(measured: Sequence[Calibration], chosen: Calibration | None) -> Table:
    table = Table("tau", "lambda", "not AR's, %", "tokens", "tokens per forward")
    for m in measured:
        cells = (f"{m.entropy_threshold:g}", f"{m.distance_penalty:g}", f"{100 * m.disagreement:.2f}", f"{m.tokens}")
        table.add_row(*cells, f"{m.tokens_per_forward:.2f}", style="bold green" if m is chosen else None)
    return table


def _check_flags(args: Calibrate) -> None:
    if not 0 <= args.max_disagreement < 1:
        raise UserError(f"--max-disagreement {args.max_disagreement:g}: must lie in [0, 1)")
    require_positive(args, "limit", "batch_size")
    if args.decode.decoder == "verified":
        _check_flags_of_windows(args)
        return
    if name := not_plain(args.decode):
        raise UserError(
            f"{name}={getattr(args.decode, name)}: only plain streaming and verified decoding can be calibrated; leave it out"
        )
    for name in ("entropy_threshold", "distance_penalty"):
        if getattr(args.decode, name) != getattr(DecodeConfig(), name):
            raise UserError(f"--{name.replace('_', '-')}: tau and lambda are what is chosen here; leave it out")
    for name, flag in (("mask_token_id", "--mask-token-id"), ("ban_mask", "--no-ban-mask")):
        if getattr(args.decode, name) != getattr(DecodeConfig(), name):
            raise UserError(f"{flag}: what is stored is for the model's own mask, which is never drawn; leave it out")
    if args.decode.temperature > 0:
        raise UserError(
            f"--temperature {args.decode.temperature:g}: agreement is with greedy AR decoding; leave it at 0"
        )
    _check_folder(args)


def _check_flags_of_windows(args: Calibrate) -> None:
    if args.max_disagreement != Calibrate.max_disagreement:
        raise UserError(
            f"--max-disagreement {args.max_disagreement:g}: verified decoding never disagrees; leave it out"
        )
    plain = DecodeConfig("verified")
    for field in dataclasses.fields(plain):
        if field.name not in FREE and getattr(args.decode, field.name) != getattr(plain, field.name):
            raise UserError(
                f"{field.name}={getattr(args.decode, field.name)}: windows are measured as verified decoding is by itself; "
                "leave it out"
            )
    _check_folder(args)


def _check_folder(args: Calibrate) -> None:
    flag, path = ("model", args.model) if args.adapter is None else ("adapter", args.adapter)
    if not _folder(path).is_dir():
        raise UserError(f"--{flag} {path}: is no local directory, so nothing can be stored there")


def _folder(named: str) -> Path:
    """Where decoding.json or windows.json goes: one for a workdir, whose steps are told apart by the fingerprint in it."""
    return Path(pretrained.split_step(named)[0])


@entry
def main() -> None:
    args = parse(Calibrate, prog="python -m wedlm_jax.calibrate", description=__doc__)
    measure_and_store = calibrate_windows if args.decode.decoder == "verified" else calibrate
    measure_and_store(args, Console())


if __name__ == "__main__":
    main()
