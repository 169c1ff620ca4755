"""Conversation: the tokens of a dialogue, so written that each turn begins with the very tokens of the turns before it."""

from __future__ import annotations

from wedlm_jax.data.tokenizer import decoder_behind
from wedlm_jax.decode.prompts import Verbatim, encode_prompt, render_messages
from wedlm_jax.engine import Ticket
from wedlm_jax.errors import UserError
from wedlm_jax.model.handle import Model

Messages = list[dict[str, str]]


class Conversation:
    """What was said, as messages and as tokens.

    An answer keeps the tokens that the model chose: encoded from its text they might be split otherwise, and the cached
    prefix would end there. Where the chat template rewrites earlier turns, the whole is encoded anew.

    Args:
      plain: write the turns below each other, without a chat template.
      system: what the system says first.

    Raises:
      UserError: without a tokenizer; without a chat template unless `plain`; for a system message with `plain`.
    """

    def __init__(self, model: Model, *, plain: bool = False, system: str | None = None):
        if model.tokenizer is None:
            raise UserError(
                "this model has no tokenizer, so there is no text to chat in; pass ids to wedlm_jax.generate"
            )
        if not plain and not model.tokenizer.chat_template:
            raise UserError(
                "the model's tokenizer has no chat template, as that of a base model; --plain lets it continue what you write"
            )
        if plain and system is not None:
            raise UserError("--system needs the chat template; leave out --plain, or write it as your first line")
        self._model, self._plain, self._system = model, plain, system
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._messages: Messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._text = ""  # of all turns up to the end of the last answer, as the template wrote it
        self._ids: list[int] = []  # the tokens of `_text`

    def prompt(self, said: str) -> list[int]:
        """Tokens of the whole dialogue with `said` as the user's next turn, up to where the answer begins."""
        text = self._prompt_text(said)
        if self._ids and text.startswith(self._text):
            return [*self._ids, *encode_prompt(self._model, Verbatim(text[len(self._text) :], self._text))]
        return encode_prompt(self._model, text)

    def add(self, said: str, answer: Ticket) -> None:
        """Takes a turn and its finished answer in."""
        assert answer.completion is not None
        ids, reply = answer.completion.ids, answer.completion.text or ""
        if ids and ids[-1] in (answer.request.config.stop_ids or ()):
            ids = ids[:-1]  # the template writes it
        self._text, self._ids = self._prompt_text(said) + reply, [*answer.request.prompt, *ids]
        if decoder_behind(self._model.tokenizer)(ids) != reply:  # cut at a stop string: the tokens say more
            self._ids = []
        self._messages += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]

    def _prompt_text(self, said: str) -> str:
        if self._plain:
            return f"{self._text}\n{said}" if self._text else said
        return render_messages(self._model, [*self._messages, {"role": "user", "content": said}])
