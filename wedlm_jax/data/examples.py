"""From a completion or a plain text to one training example: tokens, and which of them are learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from wedlm_jax.data.records import BadRecord, UnfitTokenizer
from wedlm_jax.data.tokenizer import begun, encode_behind, encode_text, encode_with_control_tokens, start_of_text


@dataclasses.dataclass(frozen=True)
class Example:
    """One document. Its tokens are never cut: what does not fit a row is an error of the packing."""

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]: True on the tokens to be learned, False on the prompt
    document_id: int  # of its document, or its piece of one, in the stream; it keys the corruption

    def __post_init__(self) -> None:
        if self.tokens.shape != self.loss_mask.shape or self.tokens.ndim != 1:
            raise ValueError(
                f"tokens {self.tokens.shape} and loss_mask {self.loss_mask.shape} must be of one shape [T]"
            )


def label_completion(
    tokens: Sequence[int], prompt_length: int, *, num_end_tokens: int, end_token_id: int, document_id: int = 0
) -> Example:
    """A completed conversation in which the tokens after the prompt are learned, and extra end tokens after them.

    A decoder that fills a window runs past the end of the turn, so the model learns to go on with end tokens there. As in
    the official code, `num_end_tokens` counts the end token of the turn itself, so `num_end_tokens - 1` are appended, and
    these are learned even where all else is prompt. Unlike it, nothing is cut to a maximal length.

    Args:
      tokens: the whole conversation, the end token of its last turn included.
      prompt_length: how many of `tokens` are prompt.
      num_end_tokens: end-of-turn targets, 8 in the official fine-tuning; 0 and 1 both append nothing.
      end_token_id: the token that ends a turn.
      document_id: as of an `Example`.
    """
    extra = max(num_end_tokens - 1, 0)
    loss_mask = np.ones(len(tokens) + extra, bool)
    loss_mask[:prompt_length] = False
    return Example(np.array([*tokens, *[end_token_id] * extra], np.int32), loss_mask, document_id)


def encode_plain_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a prompt that no chat template writes: as it begins a document (`start_of_text`), control tokens in it read as
    such."""
    return begun(tokenizer, encode_with_control_tokens(tokenizer, text))


def from_completion(
    prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase, *, num_end_tokens: int, document_id: int = 0
) -> Example:
    """A plain prompt and its completion. The two are encoded apart, and the prompt as a decoder does that is given it, so that
    sees the very same tokens."""
    end = end_token_id(tokenizer)
    prompt_ids = encode_plain_prompt(tokenizer, prompt)
    tokens = [*prompt_ids, *encode_behind(tokenizer, prompt, completion), end]
    return label_completion(
        tokens, len(prompt_ids), num_end_tokens=num_end_tokens, end_token_id=end, document_id=document_id
    )


def pieces_of_text(
    text: str, tokenizer: PreTrainedTokenizerBase, row_length: int, *, ends: bool = True
) -> list[np.ndarray]:
    """A plain text as token ids, its end token behind it if it `ends`, in pieces that fill a row, each of which begins as a
    document does (`start_of_text`)."""
    tokens = [*encode_text(tokenizer, text), *([end_token_id(tokenizer)] if ends else [])]
    size = max(row_length - len(start_of_text(tokenizer)), 1)
    pieces = (tokens[at : at + size] for at in range(0, len(tokens), size))
    return [np.array(begun(tokenizer, piece), np.int32) for piece in pieces]


def from_tokens(tokens: Sequence[int] | np.ndarray, document_id: int = 0) -> Example:
    """Plain text that is already tokens, such as a piece of a long file: every token is learned."""
    return Example(np.array(tokens, np.int32), np.ones(len(tokens), bool), document_id)


def check_mask(example: Example) -> Example:
    """Raises `BadRecord`: nothing of a conversation or completion is learned, or all is, and so nothing is asked."""
    if not example.loss_mask.any():
        raise BadRecord("its loss mask is all zero: nothing of it is learned")
    if example.loss_mask.all():
        raise BadRecord("its loss mask is all one: no token of it is prompt")
    return example


def end_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a turn, a completion or a text. Raises `UnfitTokenizer` where the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise UnfitTokenizer("the tokenizer has no eos token; name the token that ends a turn as data.end_token")
    return tokenizer.eos_token_id
