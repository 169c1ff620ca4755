"""Under load: every request is answered once, each as if it ran alone, and memory does not grow."""

from __future__ import annotations

import dataclasses
import gc
import random

import jax
import pytest

from wedlm_jax import Completion, DecodeConfig, generate
from wedlm_jax.engine import QueueFull, Ticket
from wedlm_jax.errors import UserError

from ..conftest import FULL, examples
from ..decode.models import LOOPS
from .models import SIZES, engine, same, talk, talker

DECODERS = tuple(LOOPS) if FULL else ("streaming_eager", "verified")
BAD = (dict(prompt=[]), dict(prompt=[9999]), dict(prompt=[1] * 60), dict(config=DecodeConfig(stop_ids=(9999,))))


def random_config(rng: random.Random) -> DecodeConfig:
    loop = rng.choice(DECODERS)
    warm = dict(temperature=rng.choice([0.5, 1.2]), top_k=rng.choice([0, 5]), top_p=rng.choice([1.0, 0.8]))
    return talk(
        loop,
        entropy_threshold=rng.choice([None, 2.0, 4.0, 4.6, float("inf")]),
        confidence_threshold=rng.choice([0.0, 0.05, 0.3]),
        distance_penalty=rng.choice([0.0, 0.02, 0.3]),
        max_new_tokens=rng.randint(1, 24),
        stop_ids=tuple(rng.sample(range(256), rng.choice([0, 3]))),
        seed=rng.randint(0, 3),
        stop=("never",),  # so that the single runs use one loop, the one that looks for stop strings
        **(warm if rng.random() < 0.4 else {}),
    )


def random_prompt(rng: random.Random, told: list[list[int]]) -> list[int]:
    """A new text, one behind a shared beginning, or one that goes on where an earlier answer ended."""
    new = [rng.randrange(256) for _ in range(rng.randint(1, 12))]
    kind = rng.random()
    if kind < 0.3:
        return list(range(40, 40 + 20)) + new
    if kind < 0.6 and told:
        return rng.choice(told)[:26] + new[:4]
    return new


def alone(prompt: list[int], config: DecodeConfig) -> Completion:
    return generate(talker(), [prompt], config)[0]


def with_a_stop_string(rng: random.Random, prompt: list[int], config: DecodeConfig) -> DecodeConfig:
    """A character that does come, so that the row has to end there."""
    text = (alone(prompt, config).text or "").replace("\N{REPLACEMENT CHARACTER}", "")
    return dataclasses.replace(config, stop=(rng.choice(text),)) if text else config


@pytest.mark.usefixtures("at_once")
@pytest.mark.timeout(1800 if FULL else 600)
def test_every_request_is_answered_once_as_if_it_ran_alone_and_memory_stays_flat():
    rng, served, count = random.Random(0), engine(queue=9), examples(200, 2000)
    open_tickets: list[Ticket] = []
    told: list[list[int]] = []
    seen = dict(bad=0, full=0, cancelled=0, stop=0, length=0, reused=0, stopped_by_string=0)
    arrays: list[tuple[int, int]] = []  # live arrays and their bytes, each time that the engine is idle
    submitted = 0

    def check(ticket: Ticket) -> None:
        completion, (prompt, config, _) = ticket.completion, ticket.request
        assert completion is not None
        expected = alone(prompt, config)
        if completion.finish_reason == "cancelled":
            assert completion.ids == expected.ids[: len(completion.ids)]
        else:
            assert same(completion, expected)
        commits = list(ticket)
        assert [i for commit in commits for i in commit.ids] == completion.ids
        assert "".join(commit.text or "" for commit in commits) == completion.text
        assert list(ticket) == []
        seen[completion.finish_reason] += 1
        seen["reused"] += ticket.reused_tokens
        seen["stopped_by_string"] += any(s in served.model.tokenizer.decode(completion.ids) for s in config.stop)
        told.append(prompt + completion.ids)

    for goal in (count // 4, count // 2, count):
        while submitted < goal or open_tickets:
            for _ in range(rng.choice([0, 0, 1, 1, 1, 3, 3, 16])):
                if submitted == goal:
                    break
                submitted += 1
                if rng.random() < 0.05:
                    with pytest.raises(UserError):
                        served.submit(**{"prompt": [1], **rng.choice(BAD)})
                    seen["bad"] += 1
                    continue
                prompt, config = random_prompt(rng, told), random_config(rng)
                if rng.random() < 0.1:
                    config = with_a_stop_string(rng, prompt, config)
                try:
                    open_tickets.append(served.submit(prompt, config))
                except QueueFull:
                    seen["full"] += 1
                    open_tickets.append(served.submit(prompt, config, wait=True))
            if open_tickets and rng.random() < 0.15:
                rng.choice(open_tickets).cancel()
            assert served.step() or not any(not ticket.done for ticket in open_tickets)
            for ticket in [t for t in open_tickets if t.done]:
                open_tickets.remove(ticket)
                check(ticket)
        gc.collect()
        sizes = [x.nbytes for x in jax.live_arrays() if not x.is_deleted()]
        arrays.append((len(sizes), sum(sizes)))

    answered = seen["cancelled"] + seen["stop"] + seen["length"]
    assert answered + seen["bad"] == count
    assert min(seen.values()) > 0, seen
    assert served.waiting == served.running == 0
    assert len(set(arrays[1:])) == 1, arrays  # the first quarter opens the groups
    assert served.cache_bytes == len(DECODERS) * served.bytes_for(talk("streaming_eager")), SIZES
