"""How fast a decoder is: the same prompts, lengths and batch for each, beside AR of the same weights and the roofline."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from wedlm_jax.baselines.process import PAUSE, Baseline
from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.data.tokenizer import encode_with_control_tokens, start_of_text
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.first_drafts import masks_in_prefill
from wedlm_jax.decode.prompts import encode_prompt
from wedlm_jax.decode.stats import Completion
from wedlm_jax.errors import UserError
from wedlm_jax.evals.roofline import Rates, forward_seconds
from wedlm_jax.evals.sweep import generate_rows
from wedlm_jax.model.handle import Model
from wedlm_jax.sharding import batch_parts


@dataclasses.dataclass(frozen=True)
class Work:
    """What is decoded."""

    task: str
    batch: int
    prompt_tokens: int
    output_tokens: int  # at most, of each row: an end token ends it sooner
    alone: bool = False  # prompts are single problems of that length, with none solved before them

    def __str__(self) -> str:
        prompt = f"{self.prompt_tokens} (one problem)" if self.alone else f"{self.prompt_tokens}"
        return f"{self.task}, batch {self.batch}, {prompt} + {self.output_tokens} tokens"


@dataclasses.dataclass(frozen=True)
class Speed:
    """One decoder on one piece of work. Times are medians of the repeats; ratios are of totals over the rows."""

    work: Work
    decoder: str
    generated_tokens: int  # of all rows
    seconds: float  # of the whole call, prefill in it
    first_token_seconds: float  # of a call that ends as soon as every row has a token
    tokens_per_second: float
    tokens_per_forward: float  # of a row
    p_cache: float
    # One forward of the batch, prefill not in it; NaN where none lies behind the first token, or the clock failed.
    forward_milliseconds: float
    roofline_milliseconds: float  # the least for a forward over as many slots, by this machine's measured rates
    speedup_over_ar: float
    equal_to_ar: int  # rows whose tokens are those of AR


def prompts_of(model: Model, problems: Sequence[Problem], work: Work) -> list[list[int]]:
    """One prompt of exactly `prompt_tokens` tokens a row: problems with their solutions, and last, or alone, one without.

    Raises:
      UserError: the problems do not make that many tokens, or the model has no tokenizer.
    """
    if work.alone:
        fitting = [ids for ids in map(_encoder(model), problems) if len(ids) == work.prompt_tokens]
        return [fitting[row % len(fitting)] for row in range(work.batch)]
    encode, prompts, start = _encoder(model), [], start_of_text(model.tokenizer)
    for row in range(work.batch):
        ids = encode(problems[row % len(problems)])
        for before in _others(problems, row):
            if len(ids) >= work.prompt_tokens:
                break
            ids = [*start, *_solved(model, before), *ids[len(start) :]]
        if len(ids) < work.prompt_tokens:
            raise UserError(
                f"{len(problems)} problems of {work.task} make {len(ids)} tokens, and prompts of {work.prompt_tokens} are "
                "wanted; lower --prompts"
            )
        prompts.append([*start, *ids[len(ids) - work.prompt_tokens + len(start) :]])
    return prompts


def own_length(model: Model, problems: Sequence[Problem]) -> int:
    """The commonest length of a problem's prompt by itself, in tokens."""
    return statistics.mode(len(ids) for ids in map(_encoder(model), problems))


def longest_prompt(model: Model, problems: Sequence[Problem]) -> int:
    """Tokens of the prompt that every problem can have, with all the others solved before it."""
    encode = _encoder(model)
    solved = [len(_solved(model, problem)) for problem in problems]
    return sum(solved) - max(own - len(encode(problem)) for own, problem in zip(solved, problems, strict=True))


def _solved(model: Model, problem: Problem) -> list[int]:
    return encode_with_control_tokens(model.tokenizer, f"{problem.prompt}{problem.solution}\n")


def _encoder(model: Model) -> Callable[[Problem], list[int]]:
    if model.tokenizer is None:
        raise UserError("the model has no tokenizer, so no task can be put to it")
    return lambda problem: encode_prompt(model, problem.prompt)


def _others(problems: Sequence[Problem], row: int) -> Iterator[Problem]:
    """All other problems, from the one after this row's on, and around."""
    for offset in range(1, len(problems)):
        yield problems[(row + offset) % len(problems)]


def compare(
    model: Model,
    work: Work,
    problems: Sequence[Problem],
    configs: Sequence[DecodeConfig],
    rates: Rates,
    *,
    repeats: int,
    baselines: Sequence[Baseline] = (),
) -> list[Speed]:
    """Every decoder, and then every baseline, in turns on the same prompts.

    Args:
      model: whose weights they share.
      work: what is decoded.
      problems: of the task.
      configs: of the decoders; the first one is AR, that the others are set against.
      rates: of one device.
      repeats: timed calls of each, after one that compiles.
      baselines: other engines, which decode by AR; they time themselves.
    """
    assert configs[0].decoder == "ar"
    prompts = prompts_of(model, problems, work)
    stop_ids = model.eos_token_ids if configs[0].stop_ids is None else configs[0].stop_ids

    def ours(config: DecodeConfig, most: int) -> tuple[float, list[Completion]]:
        start = time.perf_counter()
        completed = generate_rows(model, prompts, dataclasses.replace(config, max_new_tokens=most))
        return time.perf_counter() - start, completed

    def theirs(baseline: Baseline, most: int) -> tuple[float, list[Completion]]:
        run = baseline.run(prompts, most, stop_ids)
        return run.seconds, run.completions

    calls: dict[tuple[str, bool], Callable[[], tuple[float, list[Completion]]]] = {}
    for config in configs:
        # A block is handed out whole, and one that max_new_tokens cuts would be there sooner.
        soonest = min(config.block_size, work.output_tokens) if config.decoder == "blockwise" else 1
        calls[config.decoder, True] = functools.partial(ours, config, soonest)
    calls |= {(baseline.name, True): functools.partial(theirs, baseline, 1) for baseline in baselines}
    calls |= {(config.decoder, False): functools.partial(ours, config, work.output_tokens) for config in configs}
    calls |= {(baseline.name, False): functools.partial(theirs, baseline, work.output_tokens) for baseline in baselines}
    completions = {name: call()[1] for name, call in calls.items()}
    seconds: dict[tuple[str, bool], list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            if baselines:
                time.sleep(PAUSE)
            seconds[name].append(call()[0])
    median = {name: statistics.median(times) for name, times in seconds.items()}

    in_prefill: dict[str, int] = {
        config.decoder: masks_in_prefill(config, work.batch, model.window_table) for config in configs
    }

    # Streaming and block-wise feed what they have filled as well, but ask for the logits of masks alone.
    most_read: dict[str, int] = {
        config.decoder: config.block_size if config.decoder == "blockwise" else config.window
        for config in configs
        if config.decoder in ("streaming", "blockwise")
    }

    # Each part of a batch reads all of the weights, which the devices of the tensor axis alone share; what fsdp cuts is gathered.
    part, sharing = -(-work.batch // batch_parts(model.mesh)), 1 if model.mesh is None else model.mesh.shape["tensor"]

    def speed(decoder: str) -> Speed:
        whole, first = (decoder, False), (decoder, True)
        stats = [completion.stats for completion in completions[whole]]
        generated, ar_generated = _generated(completions[whole]), _generated(completions["ar", False])
        forwards, processed = sum(s.forwards for s in stats), sum(s.tokens_processed for s in stats)
        later = _longest(completions[whole]) - _longest(completions[first])
        behind = median[whole] - median[first]  # below 0 only where other work disturbs the clock
        slots = sum(s.tokens_processed - in_prefill.get(decoder, 0) for s in stats) / forwards
        roofline = forward_seconds(
            model.config,
            rates.times(sharing),
            rows=part,
            slots=slots,
            read=min(slots, most_read.get(decoder, slots)),
            context=work.prompt_tokens + generated / len(stats) / 2,
        )
        return Speed(
            work=work,
            decoder=decoder,
            generated_tokens=generated,
            seconds=median[whole],
            first_token_seconds=median[first],
            tokens_per_second=generated / median[whole],
            tokens_per_forward=generated / forwards,
            p_cache=generated / processed,
            forward_milliseconds=1e3 * behind / later if later > 0 and behind > 0 else float("nan"),
            roofline_milliseconds=1e3 * roofline,
            speedup_over_ar=median["ar", False] / median[whole] * generated / ar_generated,
            equal_to_ar=sum(
                c.ids == ar.ids for c, ar in zip(completions[whole], completions["ar", False], strict=True)
            ),
        )

    return [speed(name) for name in (*(config.decoder for config in configs), *(b.name for b in baselines))]


def _longest(completions: Sequence[Completion]) -> int:
    return max(completion.stats.forwards for completion in completions)


def _generated(completions: Sequence[Completion]) -> int:
    return sum(completion.stats.generated_tokens for completion in completions)
