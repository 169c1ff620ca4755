"""Continue text that has no right answer, by AR, block-wise, streaming, lookup and verified decoding: what the texts are worth,
and how fast they come by the entropy of their prompts.

python -m wedlm_jax.open_ended --model runs/stdlib_code --out open_ended
python -m wedlm_jax.open_ended --model DIR --input stories.jsonl --temperature 0.8 --top-p 0.95
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wedlm_jax.data.stdlib_code import code_files
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import make_request
from wedlm_jax.decode.prompt_file import read_prompts
from wedlm_jax.decode.prompts import prompt_text
from wedlm_jax.errors import UserError, entry
from wedlm_jax.evals.open_ended import OpenEnded, code_prompts, load_mauve, measure
from wedlm_jax.evals.open_ended_plot import plot_open_ended
from wedlm_jax.evals.show import bar_of, device, ran
from wedlm_jax.evals.sweep import ADAPTED, Setting
from wedlm_jax.flags import each_once, parse, refuse_beside, require_positive
from wedlm_jax.model.handle import Model
from wedlm_jax.model_flags import ChatModelFlags
from wedlm_jax.results import make_folder, save_figure, tell_written, write_results


@dataclasses.dataclass(frozen=True)
class OpenEndedFlags(ChatModelFlags):
    input: Annotated[Path | None, tyro.conf.arg(metavar="IN.jsonl")] = None
    """Your prompts, {"prompt": str} or {"messages": [...]} a line; if not given, excerpts of held-out code."""
    code: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A folder of .py files instead of the Python standard library, of which a twentieth is held out."""
    characters: int = 240
    """Length of an excerpt; whole lines, so at least this."""
    limit: Annotated[int, tyro.conf.arg(metavar="N")] = 60
    """Prompts at most."""
    thresholds: tuple[float, ...] = (0.1, 0.4, 1.0)
    """tau of streaming, in nats."""
    mauve: bool = False
    """Also score the continuations of code against what the files go on with (pip install mauve-text)."""
    batch_size: int = 1
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where open_ended.json, written anew after every decoder, and open_ended.png go; nowhere if not given."""
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = DecodeConfig(max_new_tokens=64, block_size=16)


def settings_of(args: OpenEndedFlags) -> list[Setting]:
    """AR, block-wise, streaming at every tau, lookup, verified."""
    streaming = [(f"streaming, tau={tau:g}", "streaming", dict(entropy_threshold=tau)) for tau in args.thresholds]
    rows = [("AR", "ar", {}), ("block-wise", "blockwise", {}), *streaming]
    rows += [("lookup", "lookup", {}), ("verified", "verified", {})]
    return [
        Setting(label, ADAPTED, args.decode.by(decoder, **changes))  # type: ignore[arg-type]
        for label, decoder, changes in rows
    ]


def prompts_of(args: OpenEndedFlags, model: Model, console: Console) -> tuple[dict[str, str], list[str] | None]:
    """The prompts as text by the names that messages give them, and, of code, what follows each where MAUVE asks for it: an
    excerpt that nothing follows is then left out, and said to be."""
    if args.input is None:
        files = code_files("held_out", args.code, field="--code")
        drawn = code_prompts(files, args.characters, args.limit, args.decode.seed)
        pairs = [(prompt, rest) for prompt, rest in drawn if rest or not args.mauve]
        if not pairs:
            raise UserError(
                "--mauve: every excerpt ends its file, with no text to score against; name more code as --code"
            )
        if left_out := len(drawn) - len(pairs):
            console.print(
                f"Left out: {left_out} excerpts that end their files, with no text for --mauve to score against."
            )
        texts = {f"excerpt {i} of --characters {args.characters}": prompt for i, (prompt, _) in enumerate(pairs, 1)}
        return texts, [rest for _, rest in pairs] if args.mauve else None
    return {name: prompt_text(model, prompt, name) for name, prompt in read_prompts(args.input)[: args.limit]}, None


def open_ended(args: OpenEndedFlags, console: Console) -> OpenEnded:
    """Runs it, prints both tables, and returns what was measured."""
    if args.out is not None:  # before the first forward
        make_folder(args.out)
    settings, model = settings_of(args), args.load()
    named, references = prompts_of(args, model, console)
    for row, (name, prompt) in enumerate(named.items()):  # before any is decoded
        for setting in settings:
            make_request(model, prompt, setting.config, row=row, name=name)
    prompts = list(named.values())
    with bar_of(len(settings) * len(prompts)) as (on_batch, above):

        def on_decoder(found: OpenEnded) -> None:
            above.print(found.measures[-1].in_words(), highlight=False, soft_wrap=True)
            if args.out is not None:
                save(args, ran(model.config, args.mesh), found)

        found = measure(
            model, settings, prompts, references,
            batch_size=args.batch_size, on_batch=on_batch, on_decoder=on_decoder,
        )  # fmt: skip
    length = args.decode.max_new_tokens
    changes = args.decode.changes(dataclasses.replace(OpenEndedFlags.decode, max_new_tokens=length))
    title = ", ".join(
        [f"{args.model}: {len(prompts)} prompts", f"{length} tokens at most", device(args.mesh), *changes]
    )
    console.print(texts_table(found, title))
    console.print(levels_table(found))
    if args.out is not None:
        save_figure(args.out / "open_ended.png", plot_open_ended(found, title))
        tell_written(console, args.out / "open_ended.json", args.out / "open_ended.png")
    return found


def save(args: OpenEndedFlags, how: dict[str, Any], found: OpenEnded) -> None:
    assert args.out is not None
    results = {
        "model": args.model, **how, "prompts": args.input and str(args.input), **dataclasses.asdict(found),
    }  # fmt: skip
    write_results(args.out, "open_ended", results)


def texts_table(found: OpenEnded, title: str) -> Table:
    """One line a decoder: the texts and the speed over all prompts."""
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("decoder", no_wrap=True)
    for name in (
        "distinct\n1, 2, 3",
        "repeated\n4-grams",
        "AR per-\nplexity",
        "tokens/\nforward",
        "speed\nvs AR",
        "MAUVE",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for m in found.measures:
        table.add_row(
            m.label, " ".join(_shown(x, ".2f") for x in m.distinct.values()), _shown(m.repetition, ".0%"),
            f"{m.perplexity:.2f}", f"{m.tokens_per_forward:.2f}", f"{m.speedup_over_ar:.2f}x", _shown(m.mauve, ".2f"),
        )  # fmt: skip
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


def levels_table(found: OpenEnded) -> Table:
    """Tokens per forward and tokens/s by the entropy of the prompt."""
    title = "By mean entropy of the prompt: tokens per forward (tokens/s)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("decoder", no_wrap=True)
    for level, (low, high) in found.bounds.items():
        table.add_column(f"{level}\n{low:.2f}-{high:.2f} nats", justify="right", no_wrap=True)
    for m in found.measures:
        rows = {row.task: row for row in found.rows if row.label == m.label}
        cells = [f"{rows[x].tokens_per_forward:.2f} ({rows[x].tokens_per_second:,.0f})" for x in found.bounds]
        table.add_row(m.label, *cells)
    return table


@entry
def main() -> None:
    args = each_once(parse(OpenEndedFlags, prog="python -m wedlm_jax.open_ended", description=__doc__))
    require_positive(args, "characters", "limit", "batch_size")
    refuse_beside(args.decode, {"entropy_threshold": "--thresholds"})
    if args.decode.decoder != DecodeConfig.decoder:
        raise UserError(
            f"--decoder {args.decode.decoder}: AR, block-wise, streaming, lookup and verified are compared; leave it out"
        )
    if args.input is not None:
        refuse_beside(args, dict.fromkeys(("mauve", "code", "characters"), "it without --input"))
    if args.mauve:
        load_mauve()  # before anything is decoded
    open_ended(args, Console())


if __name__ == "__main__":
    main()
