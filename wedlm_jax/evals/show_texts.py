"""For the terminal: what decoders wrote, side by side, and one decode, its tokens coloured by the forward that filled them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.data.tokenizer import decoder_behind
from wedlm_jax.decode.generation import generate
from wedlm_jax.decode.prompts import encode_prompt
from wedlm_jax.decode.stats import Completion
from wedlm_jax.evals.sweep import ADAPTED, Setting
from wedlm_jax.evals.tasks import Task
from wedlm_jax.model.handle import Model


def show_continuations(
    settings: Sequence[Setting],
    of: Task,
    problems: Sequence[Problem],
    completions: Mapping[tuple[str, str], Sequence[Completion]],
    console: Console,
) -> list[dict[str, Any]]:
    """AR and streaming side by side, for every prompt; returns the continuations of all decoders.

    Args:
      completions: of each task and label of a setting, one for each problem.
    """
    adapted = [s for s in settings if s.weights == ADAPTED and s.config.reorder]
    shown = [s.label for s in adapted if s.config.decoder in ("ar", "streaming")]
    shown = list(dict.fromkeys([shown[0], shown[len(shown) // 2]]))  # AR, and streaming at the middle threshold, if any
    for i, problem in enumerate(problems):
        console.print(Panel(Text(problem.prompt.rstrip("\n")), title=f"held-out prompt {i + 1}", title_align="left"))
        texts = [(label, completions[of.name, label][i].text or "") for label in shown]
        width = (console.width - 2) // len(shown)
        console.print(Columns([Panel(Text(text), title=label, width=width) for label, text in texts], padding=(0, 1)))
    return [
        {"prompt": problem.prompt, **{s.label: completions[of.name, s.label][i].text for s in settings}}
        for i, problem in enumerate(problems)
    ]


def show_one_decode(model: Model, setting: Setting, problem: Problem, console: Console) -> None:
    """The problem again, each token coloured by the forward it comes from."""
    prompt = encode_prompt(model, problem.prompt)
    (completion,) = generate(model, [prompt], setting.config, trace=True)
    stats = completion.stats
    console.print(
        f"\none decode, {setting.label}: {stats.generated_tokens} tokens in {stats.forwards} forwards", style="bold"
    )
    console.print(Text(problem.prompt), style="dim")
    assert model.tokenizer is not None  # or its prompt could not have been encoded
    decode = decoder_behind(model.tokenizer)
    pieces = [decode([i]) for i in completion.ids]
    console.print(
        coloured_by_step(pieces, filling_steps(completion, len(prompt)), colour=console.color_system is not None)
    )


def filling_steps(completion: Completion, prompt_length: int) -> list[int]:
    """For each generated token, the number of the forward (from 1) whose logits it comes from.

    A draft that a verified decoder rejects and re-fills counts from its last filling; an AR token that replaces one counts
    from the forward that emitted it.

    Args:
      completion: one that was generated with `trace=True`.
      prompt_length: tokens of its prompt.
    """
    steps: list[int] = []
    filled: dict[int, tuple[int, int]] = {}  # position -> (token, forward)
    for forward, entry in enumerate(completion.trace or (), start=1):
        for position in entry["mask_positions"]:
            filled.pop(position, None)
        fillings = zip(entry["filled_positions"], entry["filled_tokens"], strict=True)
        filled.update({position: (token, forward) for position, token in fillings})
        # A stop string may cut a run short that was emitted whole.
        for _ in range(min(entry["emitted"], len(completion.ids) - len(steps))):
            token, origin = filled.get(prompt_length + len(steps), (None, forward))
            steps.append(origin if token == completion.ids[len(steps)] else forward)
    return steps


def coloured_by_step(pieces: Sequence[str], steps: Sequence[int], *, colour: bool) -> Text:
    """The text of a completion, each token coloured by its forward, with a legend.

    Args:
      pieces: the text of each token.
      steps: the forward that filled it, from 1.
      colour: False marks tokens by number instead: every run of one forward is written `n[...]`.
    """
    last = max(steps, default=1)
    text = Text()
    for step, run in itertools.groupby(zip(steps, pieces, strict=True), key=lambda pair: pair[0]):
        piece = "".join(piece for _, piece in run)
        if colour:
            text.append(piece, style=_style(step, last))
        else:
            text.append(f"{step}[{piece}]")
    text.append("\nforward: ")
    if not colour:
        return text.append(f"the number before each bracket, 1 to {last}")
    for step in range(1, last + 1):
        text.append(f" {step} ", style=_style(step, last))
    return text


def _style(step: int, last: int) -> str:
    """Dark violet for the first forward to yellow for the last, black or white on it, whichever reads better."""
    red, green, blue = (round(255 * x) for x in colormaps["viridis"]((step - 1) / max(last - 1, 1))[:3])
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 128
    return f"{'black' if bright else 'white'} on #{red:02x}{green:02x}{blue:02x}"
