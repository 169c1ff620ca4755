"""The prompts of the training documents, for a model to write its own replies to them."""

from __future__ import annotations

import sys

import numpy as np
from transformers import PreTrainedTokenizerBase

from wedlm_jax.data.chat import prompt_of
from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.examples import Example, encode_plain_prompt
from wedlm_jax.data.records import BadRecord, Chat, Completion, Record
from wedlm_jax.errors import UserError


class Prompts(Documents):
    """The stream of documents, but of each only its prompt, as an example of which nothing is learned."""

    def _examples(self, record: Record, index: int) -> tuple[Example, ...]:
        if isinstance(record, Chat):
            ids = prompt_of(record.messages, self._tokenizer, record.tools, record.variables)
        elif isinstance(record, Completion):
            ids = encode_plain_prompt(self._tokenizer, record.prompt)
        else:
            raise UserError("data.self_generated needs prompts, and a table of text has none; name its columns of both")
        if not ids:
            raise BadRecord("the prompt is empty")
        if room_for_reply(self._config, len(ids)) < 1:
            raise BadRecord(
                f"a prompt of {len(ids)} tokens, after which a row of data.row_length={self._config.row_length} has no room "
                f"for a reply and data.num_end_tokens={self._config.num_end_tokens}; raise data.row_length"
            )
        return (Example(np.array(ids, np.int32), np.zeros(len(ids), bool), index),)


def leading_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[np.ndarray]:
    """Token ids [T] of the prompts of `config.self_generated`, in the order of the stream: held-out documents have no part.

    Raises:
      UserError: a source cannot be opened, a bad record under `on_bad_record="error"`, or there is no prompt.
    """
    assert config.self_generated is not None
    documents = Prompts(config, tokenizer, seed, "train")
    prompts: list[np.ndarray] = []
    skipped: list[str] = []
    for index in range(documents.epoch):
        document = documents[index]
        prompts += [example.tokens for example in document.examples]
        skipped += [] if document.skipped is None else [document.skipped]
        if len(prompts) == config.self_generated.num_prompts:
            break
    if skipped:
        print(
            f"warning: data.self_generated: {len(skipped):,} prompts left out, the first: {skipped[0]}", file=sys.stderr
        )
    if not prompts:
        raise UserError("data.self_generated: the training split holds no prompt that can be read; look at data.path")
    return prompts


def room_for_reply(config: DataConfig, prompt_length: int) -> int:
    """Tokens that a row has room for after a prompt, its stop id included and the further end tokens left out."""
    return config.row_length - prompt_length - max(config.num_end_tokens - 1, 0)
