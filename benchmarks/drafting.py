"""What verified decoding gets out of its drafts: accepted tokens a forward by drafting rule, acceptance by distance, and ties.

    python -m benchmarks.drafting --model runs/quickstart
    python -m benchmarks.drafting --model runs/quickstart --rules verified lookup --limit 500 --no-bfloat16
    python -m benchmarks.drafting --model runs/quickstart --temperature 0.7 --no-bfloat16
    python -m benchmarks.drafting --model runs/stdlib_code --tasks stdlib_code --max-new-tokens 128 --no-bfloat16

Held-out problems of each task in one batch (one by one where the window is automatic), greedy unless a temperature is given,
float32 at the highest matmul precision; the last part in bfloat16, where two orders of summation may pick different tokens: AR
and verified of the same weights side by side.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from wedlm_jax import Completion, DecodeConfig, Model, load
from wedlm_jax.bench import TaskName, problems_of
from wedlm_jax.decode.batches import in_batches
from wedlm_jax.decode.generation import make_request
from wedlm_jax.errors import UserError, entry
from wedlm_jax.evaluate import load_exact

RULES = {
    "verified": DecodeConfig("verified"),
    "verified, masks alone": DecodeConfig("verified", text_drafts=False),
    "verified, tau=0.4": DecodeConfig("verified", entropy_threshold=0.4),
    "verified, tau=1": DecodeConfig("verified", entropy_threshold=1.0),
    "verified, each below 0.4": DecodeConfig("verified", fill_rule="each", entropy_threshold=0.4),
    "verified, sum below 2": DecodeConfig("verified", fill_rule="sum", entropy_threshold=2.0),
    "verified, W=8": DecodeConfig("verified", window_size=8),
    "verified, W=24": DecodeConfig("verified", window_size=24),
    "verified, W=32": DecodeConfig("verified", window_size=32),
    "verified, window auto": DecodeConfig("verified", window_size="auto"),
    "lookup": DecodeConfig("lookup"),
}


@dataclasses.dataclass(frozen=True)
class Flags:
    model: Annotated[str, tyro.conf.arg(metavar="DIR")]
    tasks: tuple[TaskName, ...] = ("word_problems", "counting", "copying")
    rules: tuple[str, ...] = tuple(RULES)
    limit: int = 100
    """Problems a task, at most."""
    max_new_tokens: int = 64
    seed: int = 0
    """Which problems."""
    temperature: float = 0.0
    """Of AR and of every rule, with the same noise."""
    bfloat16: bool = True
    """Also the last part."""


def decode(model: Model, flags: Flags, name: TaskName, config: DecodeConfig) -> list[Completion]:
    config = dataclasses.replace(config, max_new_tokens=flags.max_new_tokens, temperature=flags.temperature)
    problems = problems_of(name, flags.limit, flags.seed)
    # A row's noise goes by its number, in whatever batch it is.
    requests = [make_request(model, p.prompt, config, row=row, name=name) for row, p in enumerate(problems)]
    # Many rows beside it narrow an automatic window.
    return list(in_batches(model, requests, batch_size=1 if config.adapts else len(requests)))


def tokens_per_forward(completions: list[Completion]) -> float:
    stats = [c.stats for c in completions]
    return sum(s.generated_tokens for s in stats) / sum(s.forwards for s in stats)


def acceptance(completions: list[Completion]) -> list[float]:
    """The share of the drafts checked that agreed with AR, by their distance from the newest token."""
    longest = max(len(c.acceptance or ()) for c in completions)
    shares = []
    for slot in range(longest):
        here = [c.acceptance[slot] for c in completions if c.acceptance is not None and slot < len(c.acceptance)]
        shares.append(sum(agreed for _, agreed in here) / sum(checked for checked, _ in here))
    return shares


def gap_where_they_part(verified: Completion, alone: Completion) -> float | None:
    """How much likelier the AR token is than the verified one, in nats, at the first that differs; None if none does."""
    assert verified.log_probs is not None and alone.log_probs is not None
    pairs = zip(verified.ids, alone.ids, verified.log_probs, alone.log_probs, strict=False)
    return next((of_ar - of_verified for ours, theirs, of_verified, of_ar in pairs if ours != theirs), None)


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    if flags.temperature and flags.bfloat16:
        raise UserError("the part in bfloat16 asks which token is likeliest: --no-bfloat16 with a temperature")
    exact = load_exact(flags.model)
    autoregressive = {name: decode(exact, flags, name, DecodeConfig("ar")) for name in flags.tasks}
    print(
        f"temperature {flags.temperature:g}, at most {flags.limit} problems: tokens per forward, and how many equal AR\n"
    )
    print(f"| drafts | {' | '.join(flags.tasks)} |\n|---|{'---|' * len(flags.tasks)}")
    drafted: dict[TaskName, list[Completion]] = {}
    for label in flags.rules:
        config, cells = RULES[label], []
        for name in flags.tasks:
            completions = decode(exact, flags, name, config)
            same = sum(c.ids == a.ids for c, a in zip(completions, autoregressive[name], strict=True))
            cells.append(f"{tokens_per_forward(completions):.2f}, {same}/{len(completions)}")
            if label == "verified":
                drafted[name] = completions
        print(f"| {label} | {' | '.join(cells)} |", flush=True)
    print("\nacceptance of verified decoding by distance, 1 slot first:")
    for name, completions in drafted.items():
        print(f"{name}: {' '.join(f'{share:.2f}' for share in acceptance(completions))}")
    if not flags.bfloat16:
        return
    half = load(flags.model, "bfloat16")
    print("\nbfloat16, verified against AR of the same weights:")
    for name in flags.tasks:
        pairs = zip(*(decode(half, flags, name, DecodeConfig(d)) for d in ("verified", "ar")), strict=True)
        gaps = [gap_where_they_part(ours, alone) for ours, alone in pairs]
        parted = [f"{gap:.4f}" for gap in gaps if gap is not None]
        print(f"{name}: {len(parted)} of {len(gaps)} part; AR's token is likelier by {', '.join(parted) or '-'} nats")


if __name__ == "__main__":
    main()
