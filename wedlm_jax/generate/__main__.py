"""Complete a prompt, answer a message, or do so for a file of them.

python -m wedlm_jax.generate --model DIR --prompt "Q: Count from 3 to 20. A:" --decoder verified
python -m wedlm_jax.generate --model DIR --message "How many legs has a spider?"
python -m wedlm_jax.generate --model DIR --input prompts.jsonl --output completions.jsonl
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import jax
import tyro
from rich.console import Console
from rich.progress import track

from wedlm_jax.decode.batches import in_batches
from wedlm_jax.decode.calibration import fingerprint
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import Request, make_request
from wedlm_jax.decode.measured_windows import measured_in_use
from wedlm_jax.decode.prompt_file import prompts_of, read_objects
from wedlm_jax.decode.prompts import Prompt, digest_of
from wedlm_jax.decode.stats import Completion, Stats
from wedlm_jax.engine import in_order
from wedlm_jax.engine.prefix import shared_length
from wedlm_jax.errors import UserError, entry
from wedlm_jax.flags import TextFlag, parse, require_positive
from wedlm_jax.generate.unfinished import jsonl
from wedlm_jax.model.handle import Model
from wedlm_jax.model.window_table import exceeds_processor_cache
from wedlm_jax.model_flags import ChatModelFlags

MANY_BATCHES = 16
NO_DETAILS = "this decoder does not read the AR chain, as ar, verified, lookup and --verify fallback do"

Label = dict[str, Any]  # what a line of output has of its prompt


@dataclasses.dataclass(frozen=True)
class Generate(ChatModelFlags):
    prompt: TextFlag = None
    """Text to complete, as it is."""
    message: TextFlag = None
    """A message to answer: what a user says, put through the model's chat template."""
    input: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="IN.jsonl",
            help='One JSON object a line: {"prompt": str}, {"messages": [...]} (tools and chat_template_kwargs may be beside '
            'them) or {"prompt_ids": [int, ...]}; an "id" beside it comes back with its completion.',
        ),
    ] = None
    output: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="OUT.jsonl",
            help="Where to write ids, text, finish_reason and stats, a line for each prompt in their order; the terminal if not "
            "given. Until it is whole the lines are in OUT.jsonl.unfinished, behind which the same command goes on.",
        ),
    ] = None
    trace: Annotated[Path | None, tyro.conf.arg(metavar="T.jsonl")] = None
    """Also write what every forward fed, committed and filled, a line a forward (slower)."""
    details: bool = False
    """Also give each token's AR log-probability (nats), where the decoder reads it, and how many drafts agreed, by distance."""
    n: int = 1
    """Completions of each prompt, side by side; they differ where --temperature is above 0."""
    batch_size: int = 16
    """The most prompts decoded at once."""
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = DecodeConfig()


def generate(args: Generate) -> None:
    """Validates everything, then decodes, then writes: a bad line 1,000 is reported before line 1 is decoded."""
    _check_flags(args)
    prompts, labels = _prompts(args)
    model = args.load()
    each = [(name, prompt) for name, prompt in prompts for _ in range(args.n)]
    labels = [label | ({"completion": k} if args.n > 1 else {}) for label in labels for k in range(args.n)]
    requests = [make_request(model, p, args.decode, row=row, name=name) for row, (name, p) in enumerate(each)]
    for note in measured_in_use(model, [args.decode]):
        print(note, file=sys.stderr)
    if args.details and requests and not requests[0].config.holds_back:
        print(f"note: --details: {NO_DETAILS}", file=sys.stderr)
    # While rich shows a bar on stderr it takes what is printed on a terminal, or as `sys.stdout`, for a part of it.
    stdout = sys.stdout
    at_once = args.input is not None and not stdout.isatty()
    shown: list[tuple[Completion, Label]] = []
    counted: list[Stats] = []
    with contextlib.ExitStack() as opened:
        opened.callback(show, shown, args, stdout)  # at the end, whatever brings it
        # A trace is of the forwards of one run: beside one, no lines are gone on behind.
        trace = None if args.trace is None else opened.enter_context(jsonl(args.trace))
        of_run = (lambda: made_from(model, requests, labels, args)) if trace is None else None
        output = None if args.output is None else opened.enter_context(jsonl(args.output, of_run))
        done = 0 if output is None else output.count
        left = requests[done:]
        completions: Iterable[Completion] = track(
            decoded(model, left, args) if left else (), "decoding", total=len(left), console=Console(stderr=True),
            disable=len(left) <= args.batch_size,
        )  # fmt: skip
        for number, (completion, label) in enumerate(zip(completions, labels[done:], strict=True)):
            if trace is not None:
                for line in trace_lines(number, completion):
                    trace.write(line)
            if output is not None:
                output.write(as_line(completion, label, args.details))
                counted.append(completion.stats)
            elif at_once:
                print_line(completion, label, args.details, stdout)
            else:
                shown.append((completion, label))
    if output is not None:
        print(f"wrote {args.output}: {output.count} completions{in_total(counted)}", file=sys.stderr)


def _prompts(args: Generate) -> tuple[list[tuple[str, Prompt]], list[Label]]:
    """The one that a flag gives, or those of a file, each with its name; and of each its `id`, where it has one."""
    if args.input is not None:
        objects = read_objects(args.input, "--input")
        return prompts_of(objects), [{"id": given["id"]} if "id" in given else {} for _, given in objects]
    if args.message is not None:
        return [("--message", [{"role": "user", "content": args.message}])], [{}]
    assert args.prompt is not None  # _check_flags sees to it
    return [("--prompt", args.prompt)], [{}]


def show(completions: Sequence[tuple[Completion, Label]], args: Generate, stdout: TextIO) -> None:
    for completion, label in completions:
        if args.input is not None:
            print_line(completion, label, args.details, stdout)
        else:
            print_one(completion, args.details)


def print_line(completion: Completion, label: Label, details: bool, stdout: TextIO) -> None:
    escaped = codecs.lookup(stdout.encoding).name != "utf-8"  # JSON is read as UTF-8
    print(json.dumps(as_line(completion, label, details), ensure_ascii=escaped), file=stdout, flush=True)


def print_one(completion: Completion, details: bool) -> None:
    """What is shown of --prompt and --message: the text, and its statistics apart."""
    print(completion.ids if completion.text is None else completion.text)
    stats = ", ".join(f"{name} {value:.4g}" for name, value in completion.stats.as_dict().items())
    print(f"[{completion.finish_reason}; {stats}]", file=sys.stderr)
    if details:
        print("\n".join(detail_lines(completion)), file=sys.stderr)


def in_total(counted: Sequence[Stats]) -> str:
    """What completions of this run come to together."""
    if not counted:
        return ""
    tokens, forwards, processed = (
        sum(getattr(stats, name) for stats in counted) for name in ("generated_tokens", "forwards", "tokens_processed")
    )
    together = Stats(tokens, forwards, processed)
    return (
        f"; {len(counted)} decoded now: {tokens} tokens, {together.tokens_per_forward:.2f} per forward, "
        f"p_cache {together.p_cache:.2f}"
    )


def decoded(model: Model, requests: Sequence[Request], args: Generate) -> Iterator[Completion]:
    """The completions in the order of the requests: batch by batch, or through an engine where that takes less time. A trace is
    of whole batches."""
    prompts = [request.prompt for request in requests]
    gains = _begin_alike(prompts) or _are_many(model, len(prompts), args.batch_size)
    if gains and args.trace is None and len(prompts) > 1:
        yield from in_order(model, requests, rows=min(args.batch_size, len(requests)))
        return
    yield from in_batches(model, requests, batch_size=args.batch_size, trace=args.trace is not None)


def _begin_alike(prompts: Sequence[Sequence[int]]) -> bool:
    """Whether, but for the first, more than half of their tokens are a beginning that the prompt before has too, as of the `n`
    completions of one prompt: an engine prefills it once."""
    shared = sum(shared_length(before, prompt) for before, prompt in itertools.pairwise(prompts))
    return 2 * shared * len(prompts) > sum(map(len, prompts)) * (len(prompts) - 1)


def _are_many(model: Model, count: int, batch_size: int) -> bool:
    """Whether prompts are so many that an engine, which gives a row that has finished to the next one, gains more than its
    programs take longer to compile (`python -m benchmarks.prompt_file`). Measured on a CPU alone, where it does so with weights
    that are read from memory: beside smaller ones the work of the host weighs more."""
    on_cpu = jax.default_backend() == "cpu"
    return on_cpu and count >= MANY_BATCHES * batch_size and exceeds_processor_cache(model.transformer)


def made_from(model: Model, requests: Sequence[Request], labels: Sequence[Label], args: Generate) -> dict[str, Any]:
    """All that the lines of --output depend on: what a run that goes on behind them must have in common."""
    return {
        "weights": fingerprint(model),
        "dtype": model.config.dtype,
        "kernel_dtype": model.config.kernel_dtype,
        "mesh": None if model.mesh is None else dict(model.mesh.shape),  # floats differ in their last bits
        "prompts": {"count": len(requests), "sha256": digest_of([request.prompt for request in requests])},
        **({"ids": digest_of(labels)} if any(labels) else {}),
        "details": args.details,
        **dataclasses.asdict(requests[0].config),
    }


def _check_flags(args: Generate) -> None:
    if [args.prompt, args.message, args.input].count(None) != 2:
        raise UserError("give one of --prompt TEXT, --message TEXT and --input IN.jsonl")
    if args.prompt is not None and args.chat_template_kwargs is not None:
        raise UserError(
            "--chat-template-kwargs does nothing to --prompt, which no chat template writes; give --message"
        )
    require_positive(args, "batch_size", "n")
    for flag, path in (("--output", args.output), ("--trace", args.trace)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise UserError(f"{flag} {path}: the folder {path.parent} does not exist; make it first")
        if path.is_dir():
            raise UserError(f"{flag} {path}: is a folder; name a file")
        try:
            path.resolve()
        except (RuntimeError, OSError):
            raise UserError(f"{flag} {path}: is a link that leads to itself; name a file") from None
        if args.input is not None and path.resolve() == args.input.resolve():
            raise UserError(f"{flag} {path}: would overwrite the prompts of --input; name another file")
    if args.output is not None and args.trace is not None and args.output.resolve() == args.trace.resolve():
        raise UserError(f"--trace {args.trace}: is the file of --output; name another one")


def as_line(completion: Completion, label: Label, details: bool = False) -> dict[str, Any]:
    """What is written for a completion: `text` only where there is a tokenizer, details where the decoder has them, first the
    `id` of its prompt and, of several, which it is."""
    text = {} if completion.text is None else {"text": completion.text}
    found = {"log_probs": completion.log_probs, "acceptance": completion.acceptance} if details else {}
    return {
        **label, "ids": completion.ids, **text, "finish_reason": completion.finish_reason, "stats": completion.stats.as_dict(),
        **{name: value for name, value in found.items() if value is not None},
    }  # fmt: skip


def detail_lines(completion: Completion) -> Iterable[str]:
    """For the terminal: the details that the decoder has."""
    if completion.log_probs is None:
        yield f"no details: {NO_DETAILS}"
    else:
        yield "AR log-probabilities in nats: " + " ".join(
            "-" if x is None else f"{x:.3f}" for x in completion.log_probs
        )
    for distance, (checked, agreed) in enumerate(completion.acceptance or (), 1):
        yield f"drafts {distance} slots ahead: {agreed} of {checked} agreed with AR"


def trace_lines(prompt: int, completion: Completion) -> Iterator[dict[str, Any]]:
    """A line for every forward of a completion; `prompt` numbers the completions (--n of each prompt), and both count from 0."""
    for forward, step in enumerate(completion.trace or ()):
        yield {"prompt": prompt, "forward": forward, **step}


@entry
def main() -> None:
    generate(parse(Generate, prog="python -m wedlm_jax.generate", description=__doc__))


if __name__ == "__main__":
    main()
