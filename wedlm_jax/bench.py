"""Measure how fast a model decodes: AR, lookup, block-wise, streaming and verified, over batches, prompts, outputs and tasks.

python -m wedlm_jax.bench --model exports/quickstart
python -m wedlm_jax.bench --model exports/quickstart --batches 1 8 --prompts 64 --outputs 256 --out bench
python -m wedlm_jax.bench --model exports/quickstart --baseline transformers --official ~/WeDLM --python ~/torch/bin/python
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from wedlm_jax import pretrained
from wedlm_jax.baselines.process import Baseline, EngineEnded, Name
from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.data.stdlib_code import code_files
from wedlm_jax.decode.config import DecodeConfig, Decoder
from wedlm_jax.decode.measured_windows import measured_in_use
from wedlm_jax.engine.memory import cache_bytes
from wedlm_jax.errors import UserError, entry
from wedlm_jax.evals.beside_official import Beside, beside, beside_table, streaming_as_official, where_they_part
from wedlm_jax.evals.roofline import Rates
from wedlm_jax.evals.show import device, ran
from wedlm_jax.evals.speed import Speed, Work, compare, longest_prompt, own_length
from wedlm_jax.evals.speed_plot import plot_speeds
from wedlm_jax.evals.speed_table import speed_table, where_ar_wins, where_rows_ended_early
from wedlm_jax.evals.sweep import resolved, settings_as_json
from wedlm_jax.evals.tasks import task, text_pieces
from wedlm_jax.flags import each_once, parse, refuse_beside, require_positive, require_some
from wedlm_jax.hf.config import stock_arch
from wedlm_jax.model.handle import Model
from wedlm_jax.model.merging import plain
from wedlm_jax.model_flags import ModelFlags
from wedlm_jax.results import make_folder, save_figure, tell_written, write_results

TaskName = Literal["counting", "word_problems", "copying", "stdlib_code"]
PROBLEMS = 256  # drawn of a task, to make prompts of
CHARACTERS = 800  # of an excerpt of stdlib_code
SPARE_SLOTS = 256  # of a row's cache in another engine: a page of up to 128 slots to fill up, and one to spare


@dataclasses.dataclass(frozen=True)
class Bench(ModelFlags):
    tasks: tuple[TaskName, ...] = ("counting", "word_problems", "stdlib_code")
    """What is decoded; these three are of low, medium and high entropy."""
    decoders: tuple[Decoder, ...] = ("lookup", "blockwise", "streaming", "verified")
    """Set against AR, which always runs."""
    batches: tuple[int, ...] = (1, 8, 32, 64)
    prompts: tuple[int, ...] = (64, 1024, 4096)
    """Tokens of a prompt, solved problems before the one to solve; 0: one problem alone, at its own length."""
    outputs: tuple[int, ...] = (32, 256, 1024)
    """Tokens of a completion, at most."""
    repeats: int = 5
    """Timed runs of each; the figures are medians."""
    ignore_end: bool = False
    """Decode on behind an end token, so that every completion has the same length."""
    baseline: tuple[Literal["transformers", "vllm"], ...] = ()
    """Other engines, by AR on the same weights as a `qwen3`, `qwen2` or `llama` directory, prompts, lengths and dtype."""
    official: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="CHECKOUT",
            help="The official repository, checked out: its engine beside our streaming, steps and tokens. On CPUs alone, where "
            "dense code of ours stands in for its kernels; set JAX_PLATFORMS=cpu where there is a GPU.",
        ),
    ] = None
    python: Annotated[str, tyro.conf.arg(metavar="PYTHON")] = sys.executable
    """The interpreter with torch and what --baseline needs; --official needs transformers, safetensors, tqdm and xxhash."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where bench.json and bench.png go; nowhere if not given."""
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = DecodeConfig()


@dataclasses.dataclass
class Found:
    """What a run has come to so far."""

    ran: dict[str, Any]  # `show.ran`
    settings: dict[str, Any]  # of each decoder
    left_out: list[str]  # a line for each length or piece of work that is not in `speeds`
    speeds: list[Speed] = dataclasses.field(default_factory=list)
    besides: list[Beside] = dataclasses.field(default_factory=list)
    rates: Rates | None = None  # of one device


def bench(args: Bench, console: Console) -> list[Speed]:
    """Runs it, prints a table of each piece of work and where AR wins, and returns the rows.

    Raises:
      UserError: no piece of work could be measured, with the reason of the first; or another engine has ended.
    """
    if args.out is not None:  # before the first forward
        make_folder(args.out)
    model = args.load()
    decode = dataclasses.replace(args.decode, stop_ids=()) if args.ignore_end else args.decode
    configs = [decode.by(decoder) for decoder in ("ar", *args.decoders)]
    problems: dict[str, list[Problem]] = {name: problems_of(name) for name in args.tasks}
    work, left_out = works(args, model, problems)
    if not work:
        raise UserError(f"nothing to run: {left_out[0]}")
    changes = args.decode.changes(Bench.decode)
    of_kernels = "" if model.config.kernel_dtype is None else f", its kernels in {model.config.kernel_dtype},"
    heading = f"{args.model} in {model.config.dtype}{of_kernels} on {device(args.mesh)}"
    console.print(escape(", ".join([heading, f"medians of {args.repeats}", *changes])))
    most = max(piece.output_tokens for piece in work)
    named: dict[str, DecodeConfig] = {config.decoder: config for config in configs}
    if args.official is not None:
        named["official"] = streaming_as_official(decode, most)
    asked = {name: dataclasses.replace(config, max_new_tokens=most) for name, config in named.items()}
    settings = {name: settings_as_json(resolved(model, config)) for name, config in asked.items()}
    console.print("\n".join([*measured_in_use(model, list(named.values())), *left_out, ""]))
    found = Found(ran(model.config, args.mesh), settings, [*left_out])
    try:
        measure(args, model, decode, configs, work, problems, found, console)
    finally:  # of a grid that was interrupted too
        if found.speeds:
            finish(args, found, console)
    if not found.speeds:
        raise UserError(f"nothing could be run: {found.left_out[len(left_out)]}")
    return found.speeds


def measure(
    args: Bench, model: Model, decode: DecodeConfig, configs: Sequence[DecodeConfig], work: Sequence[Work],
    problems: dict[str, list[Problem]], found: Found, console: Console,
) -> None:  # fmt: skip
    """Adds to `found` one piece of work after the other. One that does not fit in memory is left out, and the next one is run."""
    with contextlib.ExitStack() as stack:
        baselines, official = started(args, work, model, decode, stack)
        found.rates = Rates.measured(model.config.dtype, model.config.precision)
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        bar = progress.add_task("", total=len(work))
        for piece in work:
            progress.update(bar, description=str(piece))
            given, what = problems[piece.task], str(piece)
            reason = None
            # A large grid takes hours: what is measured is shown and saved at once.
            try:
                of_piece = compare(model, piece, given, configs, found.rates, repeats=args.repeats, baselines=baselines)
                found.speeds += of_piece
                progress.stop()
                console.print(speed_table(of_piece))
                progress.start()
                if official is not None:
                    what = f"{piece}, beside the official engine"
                    found.besides.append(beside(model, official, piece, given, decode, args.repeats))
            except EngineEnded:
                raise
            except UserError as error:
                reason = f"Left out: {what}: {error}"
            if reason is not None:
                gc.collect()  # the error's frames hold the arrays that did not fit beside others
                found.left_out.append(reason)
                progress.stop()
                console.print(reason, markup=False)
                progress.start()
            if args.out is not None and found.speeds:
                save(args, found)
            progress.advance(bar)


def finish(args: Bench, found: Found, console: Console) -> None:
    """Prints what the measured pieces of work say together, and draws them."""
    assert found.rates is not None
    console.print(
        f"{device(args.mesh)}: {found.rates.flops / 1e9:,.0f} GFLOP/s and {found.rates.bytes / 1e9:,.1f} GB/s, as measured on "
        "one device: so a forward's roofline, which one whose weights stay in a CPU's caches can beat."
    )
    if found.besides:
        console.print(beside_table(found.besides))
    for line in [
        *where_rows_ended_early(found.speeds),
        *where_ar_wins([speed for speed in found.speeds if speed.decoder not in args.baseline]),
        *where_they_part(found.besides),
    ]:
        console.print(line)
    if args.out is not None:
        save(args, found)
        title = ", ".join([f"{args.model} on {device(args.mesh)}", *args.decode.changes(Bench.decode)])
        save_figure(args.out / "bench.png", plot_speeds(found.speeds, title))
        tell_written(console, args.out / "bench.json", args.out / "bench.png")


def started(
    args: Bench, work: Sequence[Work], model: Model, decode: DecodeConfig, stack: contextlib.ExitStack
) -> tuple[list[Baseline], Baseline | None]:
    """The other engines that are asked for, each in a process that ends with `stack`, over an export of these weights."""
    if args.official is not None and not model.config.needs_mask_token:
        raise UserError(
            "--official runs streaming, and its engine takes no adapter of mask rows; leave one of the two out"
        )
    names: list[Name] = [*args.baseline, *(() if args.official is None else ("official",))]
    if not names:
        return [], None
    export = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "export"
    arch = stock_arch(model.config)
    if args.official is not None and arch != "qwen3":
        raise UserError(f"--official has been compared on qwen3 models alone, and this one is {arch}; leave it out")
    if args.official is not None and model.config.rope_scaling is not None:
        raise UserError("--official: its engine has plain RoPE alone, and this model's is stretched; leave it out")
    pretrained.save(plain(model), export, arch)
    rows, context = max(args.batches), max(piece.prompt_tokens + piece.output_tokens for piece in work)
    job = {
        "dtype": model.config.dtype, "checkout": str(args.official), "window_size": decode.window,
        "mask_token_id": model.mask_token_id if decode.mask_token_id is None else decode.mask_token_id,
        "rows": rows, "context": context,
        "cache_bytes": cache_bytes(model.config, rows, context + SPARE_SLOTS),
    }  # fmt: skip
    engines = [stack.enter_context(Baseline(name, args.python, export, **job)) for name in names]
    return engines[: len(args.baseline)], None if args.official is None else engines[-1]


def works(args: Bench, model: Model, problems: dict[str, list[Problem]]) -> tuple[list[Work], list[str]]:
    """What fits into the model's context and can be made of the problems, and a line about each length that is left out."""
    context = model.config.max_position_embeddings
    found, left_out = [], []
    for name in args.tasks:
        own = own_length(model, problems[name]) if 0 in args.prompts else 0
        longest = longest_prompt(model, problems[name])
        for batch in args.batches:
            for prompt in args.prompts:
                for output in args.outputs:
                    work = Work(name, batch, prompt or own, output, alone=not prompt)
                    if work.prompt_tokens + output > context:
                        left_out.append(
                            f"Left out: prompts of {work.prompt_tokens} with outputs of {output}, which exceed the model's "
                            f"context of {context}."
                        )
                    elif prompt > longest:
                        left_out.append(
                            f"Left out: {name} in prompts of {prompt}, as its {len(problems[name])} problems make {longest}."
                        )
                    else:
                        found.append(work)
    return found, list(dict.fromkeys(left_out))


def problems_of(name: TaskName, limit: int = PROBLEMS, seed: int = 0) -> list[Problem]:
    chosen = text_pieces(code_files("held_out"), CHARACTERS) if name == "stdlib_code" else task(name)
    return chosen.problems(limit, seed)


def save(args: Bench, found: Found) -> None:
    assert args.out is not None and found.rates is not None
    results: dict[str, Any] = {
        "model": args.model, **found.ran,
        "repeats": args.repeats, "settings": found.settings, "rates": dataclasses.asdict(found.rates),
        "rows": [dataclasses.asdict(speed) for speed in found.speeds],
        "official": [dataclasses.asdict(row) for row in found.besides], "left_out": found.left_out,
    }  # fmt: skip
    write_results(args.out, "bench", results)


@entry
def main() -> None:
    args = each_once(parse(Bench, prog="python -m wedlm_jax.bench", description=__doc__))
    require_positive(args, "batches", "outputs", "repeats")
    if min(args.prompts, default=-1) < 0:
        raise UserError("--prompts: give lengths in tokens, or 0 for one problem alone")
    refuse_beside(args.decode, {"decoder": "--decoders", "max_new_tokens": "--outputs"})
    require_some(args, "tasks", "decoders")
    if "ar" in args.decoders:
        raise UserError("--decoders: AR always runs; name the others")
    if (args.baseline or args.official) and args.decode.temperature > 0:
        raise UserError("--temperature: --baseline and --official decode greedily; leave it at 0")
    if (args.baseline or args.official) and args.dtype == "int8":
        raise UserError("--dtype int8: --baseline and --official read an export, whose weights are not rounded")
    if args.baseline:  # it lives on the same GPU, of whose memory JAX takes three quarters at its start otherwise
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    refuse_what_others_ignore(args)
    bench(args, Console())


def refuse_what_others_ignore(args: Bench) -> None:
    """Raises a `UserError` at a flag that our engine would follow and one that it is compared with would not."""
    if args.ignore_end and (args.decode.stop or args.decode.stop_ids):
        flag = "--stop" if args.decode.stop else "--stop-ids"
        raise UserError(f"--ignore-end decodes on behind an end, and {flag} names one; drop one of the two")
    if (args.baseline or args.official) and args.decode.stop:
        raise UserError(
            "--stop: --baseline and --official read no text and would decode on; use --stop-ids, or drop it"
        )
    if args.official and not args.decode.reorder:
        raise UserError("--no-reorder: the engine of --official reorders; drop one of the two")
    if args.official and jax.default_backend() != "cpu":
        raise UserError(
            f"--official has been compared on CPUs only, and ours would run on a {jax.default_backend()}; "
            "set JAX_PLATFORMS=cpu to run both on the CPU"
        )


if __name__ == "__main__":
    main()
