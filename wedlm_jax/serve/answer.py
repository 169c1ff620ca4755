"""An answer in OpenAI's words: whole, or as the events of a stream."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from wedlm_jax.data.tokenizer import decoder_behind
from wedlm_jax.decode.scores import Scores, score
from wedlm_jax.decode.stats import Completion, Stats
from wedlm_jax.decode.text import Commit
from wedlm_jax.engine import Engine, Ticket
from wedlm_jax.results import finite
from wedlm_jax.serve.asked import Asked

Json = dict[str, Any]

# One prompt at a time is scored beside the engine: the forwards of many clients at once would take the memory of all.
_scoring = threading.Lock()


class Answer:
    """To one request, whose completions are its choices: those of a prompt side by side.

    Beside OpenAI's fields a choice holds `stats` (the counters of `Stats`), and the answer the `seed` that draws it again.

    Args:
      engine, name: of the model that answers, and how clients call it.
      asked: the request.
      tickets: one for each choice.
      chat: whether in the words of `chat/completions`.
    """

    def __init__(self, engine: Engine, name: str, asked: Asked, tickets: Sequence[Ticket], *, chat: bool):
        self._engine, self._asked, self._tickets, self._chat = engine, asked, tickets, chat
        self._model = model = engine.model
        self._sent = [0] * len(tickets)  # tokens of each choice that events have brought
        self._behind = None if model.tokenizer is None else decoder_behind(model.tokenizer)
        self._kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
            "seed": asked.config.seed,
        }

    def whole(self) -> Json:
        """Once all tickets are done."""
        prompts = [self._scores(ticket.request.prompt) for ticket in self._of_prompts]
        choices = [
            self._whole_choice(index, ticket, prompts[index // self._asked.n])
            for index, ticket in enumerate(self._tickets)
        ]
        return {**self._head, "object": self._kind, "choices": choices, "usage": self._usage()}

    def began(self) -> list[Json]:
        """The events before the first piece."""
        if not self._chat:
            return []
        return [self._event(i, {"delta": {"role": "assistant", "content": ""}}) for i in range(len(self._tickets))]

    def piece(self, index: int, commit: Commit) -> Json:
        """The event of what choice `index` has committed."""
        self._sent[index] += len(commit.ids)
        text = commit.text or ""
        said: Json = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._event(index, said | ({"token_ids": commit.ids} if self._asked.token_ids else {}))

    def ended(self, index: int) -> Json:
        """The event behind the last piece of choice `index`."""
        said: Json = {"delta": {}} if self._chat else {"text": ""}
        return self._event(index, said | _end(self._tickets[index].result()))

    def counted(self) -> list[Json]:
        """The event behind all others, where the client asks for it."""
        if not self._asked.counts_usage:
            return []
        return [{**self._head, "object": self._event_kind, "choices": [], "usage": self._usage()}]

    @property
    def _event_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _event(self, index: int, said: Json) -> Json:
        choice = {"index": index, "finish_reason": None, "logprobs": None, **said}
        usage = {"usage": self._usage_so_far(index)} if self._asked.counts_pieces else {}
        return {**self._head, "object": self._event_kind, "choices": [choice], **usage}

    @property
    def _of_prompts(self) -> Sequence[Ticket]:
        """One ticket of each prompt, however often it is completed."""
        return self._tickets[:: self._asked.n]

    def _scores(self, prompt: Sequence[int]) -> Scores | None:
        if not (self._asked.echo and self._asked.log_probs):
            return None
        # Devices to which two threads give programs may take them in different orders, and then each waits for the others.
        over_a_mesh = self._model.weights.mesh is not None
        with self._engine.turns if over_a_mesh else _scoring:
            return score(self._model, prompt)

    def _whole_choice(self, index: int, ticket: Ticket, scores: Scores | None) -> Json:
        completion = ticket.result()
        if self._asked.echo_alone:
            completion = Completion([], "length", Stats(0, 0, 0))
        text = completion.text or ""
        if self._asked.echo:
            asked = self._asked.prompts[index // self._asked.n]  # as it was written, without a BOS of the tokenizer's
            text = (asked if isinstance(asked, str) else self._name(ticket.request.prompt)) + text
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        log_probs = None
        if self._asked.log_probs:  # where activations are NaN, those of a prompt are too, and JSON has no NaN
            log_probs = finite(self._log_probs(completion, ticket.request.prompt, scores))
        ids = {"token_ids": completion.ids} if self._asked.token_ids else {}
        return {"index": index, **said, "logprobs": log_probs, **_end(completion), **ids}

    def _log_probs(self, completion: Completion, prompt: Sequence[int], scores: Scores | None) -> Json:
        """One entry for each token, a stop id too, in nats; behind those of an echoed prompt, which `scores` are of."""
        ids, log_probs = completion.ids, completion.log_probs or [None] * len(completion.ids)
        likeliest: list[Json | None] = [None] * len(ids)
        if scores is not None:
            pairs = zip(scores.likeliest[:-1].tolist(), scores.largest[:-1].tolist(), strict=True)
            ids = [*prompt, *ids]
            log_probs = [None, *scores.log_probs.tolist(), *log_probs]  # of the first token nothing is said
            likeliest = [None, *({self._token_name(token): p} for token, p in pairs), *likeliest]
        names = [self._token_name(i) for i in ids]
        if not self._chat:
            return {"tokens": names, "token_logprobs": log_probs, "top_logprobs": likeliest, "text_offset": None}
        entries = zip(names, log_probs, strict=True)
        return {"content": [{"token": n, "logprob": p, "bytes": None, "top_logprobs": []} for n, p in entries]}

    def _name(self, ids: Sequence[int]) -> str:
        tokenizer = self._model.tokenizer
        return str(ids) if tokenizer is None else tokenizer.decode(ids)

    def _token_name(self, token: int) -> str:
        """Clients compare tokens by name, and every half of a character would have the same: those go by their ids."""
        name = str([token]) if self._behind is None else self._behind([token])
        return f"token_id:{token}" if "\N{REPLACEMENT CHARACTER}" in name else name

    def _usage(self) -> Json:
        prompt = sum(len(ticket.request.prompt) for ticket in self._of_prompts)
        completed = 0 if self._asked.echo_alone else sum(len(ticket.ids) for ticket in self._tickets)
        reused = sum(ticket.reused_tokens for ticket in self._of_prompts)
        return {**_counts(prompt, completed), "prompt_tokens_details": {"cached_tokens": reused}}

    def _usage_so_far(self, index: int) -> Json:
        """Of one choice, up to the piece that is being sent: the engine may be ahead."""
        return _counts(len(self._tickets[index].request.prompt), self._sent[index])


def _counts(prompt: int, completed: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}


def _end(completion: Completion) -> Json:
    return {"finish_reason": completion.finish_reason, "stats": completion.stats.as_dict()}
