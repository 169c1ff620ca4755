"""Our own byte-level BPE tokenizer: trained, wrapped for transformers, loaded.

Every text round-trips, because the 256 bytes are in the vocabulary. A word carries its leading space, and a number of
one or two digits, with its space, can be one token: " 17" is looked up and not spelled, which small models learn faster.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from wedlm_jax.errors import UserError, reason

END_OF_TEXT, IM_START, IM_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, MASK)  # ids 0 to 3
_SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)

# Words with their space | one or two digits with their space | punctuation with its space | line ends | other spaces
_PIECES = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """`path` names a directory with a tokenizer; None trains one on the training split of the data."""

    path: str | None = None
    vocab_size: int = 512  # at most, special tokens included; read only when a tokenizer is trained

    def __post_init__(self) -> None:
        if self.vocab_size < _SMALLEST_VOCABULARY:
            raise UserError(
                f"tokenizer.vocab_size={self.vocab_size} is too small: bytes and special tokens need {_SMALLEST_VOCABULARY}"
            )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains BPE merges on `texts`; the same texts give the same tokenizer, byte for byte.

    Args:
      texts: the training texts, without special tokens.
      vocab_size: the most tokens that it may have; fewer when the texts have no more pairs that occur twice.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json (the chat template with it), as AutoTokenizer reads them."""
    tokenizer.save_pretrained(str(directory), save_jinja_files=False)
    path = Path(directory) / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # Two names are of transformers 5; older releases know only the others, which 5 reads too.
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """Reads the tokenizer of a directory of ours or of any HF model directory; runs no code from it. `~` is the home directory.

    Raises:
      UserError: there is no tokenizer, or it cannot be read.
    """
    directory = Path(os.path.expanduser(directory))
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; name one that holds a tokenizer.json")
    if not any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise UserError(f"{directory} holds no tokenizer.json; save a tokenizer there or name another directory")
    # tokenizer.json says it all; AutoTokenizer would look for the class in config.json, where it does not know `wedlm`.
    reader: type[Any] = PreTrainedTokenizerFast
    if not (directory / "tokenizer.json").is_file():
        from transformers import AutoTokenizer as reader  # here, because it imports torch where there is one
    try:
        tokenizer = reader.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # broken JSON arrives as many types, a bare Exception of the Rust library among them
        raise UserError(
            f"{directory}: the tokenizer cannot be read ({reason(error)}); write its files again"
        ) from error
    # It would take spaces before punctuation out of a text once both are there, by which a text is no longer its pieces joined.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


# A call sets in the tokenizer itself whether control tokens are spelled out, and then reads it. The thread that packs training
# data and one that encodes prompts share a tokenizer, so without this each may read what the other has set.
_ENCODING = threading.Lock()


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of plain text: `<|im_end|>` written inside it is spelled out and never becomes a control token."""
    with _ENCODING:
        return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def encode_with_control_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a prompt, or of what a chat template wrote: `<|im_end|>` in it is the control token."""
    with _ENCODING:
        return tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]


def encode_behind(
    tokenizer: PreTrainedTokenizerBase, before: str, text: str, *, control_tokens: bool = False
) -> list[int]:
    """Token ids of a text that stands behind another one, encoded apart from it: without the space that a tokenizer of
    SentencePiece's kind, as Llama 2's, puts before every text, and by which `decoder_behind` would read another one.

    Args:
      before: what it stands behind, whose end matters where that is a control token; "" where the text is the first.
      control_tokens: whether `<|im_end|>` in the text is the control token.
    """
    encode = encode_with_control_tokens if control_tokens else encode_text
    if not before or not _spaces_every_text(tokenizer):
        return encode(tokenizer, text)
    tail = next((token for token in tokenizer.all_special_tokens if control_tokens and before.endswith(token)), "\n")
    head, ids = encode(tokenizer, tail), encode(tokenizer, tail + text)
    return ids[len(head) :] if ids[: len(head)] == head else encode(tokenizer, text)


@functools.lru_cache(maxsize=8)
def _spaces_every_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        line, alone, both = (encode_text(tokenizer, text) for text in ("\n", "a", "\na"))
    except Exception:  # a bare one of the Rust library, of a vocabulary that cannot spell them
        return False
    return both[: len(line)] == line and both[len(line) :] != alone


@functools.lru_cache(maxsize=8)
def start_of_text(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts before every text, as Llama's its BOS; of most tokenizers nothing."""
    of_vocabulary = (t for t in range(len(tokenizer)) if t not in tokenizer.all_special_ids)
    for text in itertools.chain("a", (tokenizer.decode([token]) for token in of_vocabulary)):
        try:
            with _ENCODING:
                alone, whole = (tokenizer(text, add_special_tokens=special)["input_ids"] for special in (False, True))
        except Exception:  # a bare one of the Rust library, of a text that such a vocabulary cannot spell
            continue
        if alone:
            places = [n for n in range(len(whole)) if whole[n : n + len(alone)] == alone]
            return tuple(whole[: places[0]] if places else ())
    return ()


def begun(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """Ids of a text as a document begins, behind `start_of_text`; as they are where that stands there already, or none are."""
    start = start_of_text(tokenizer)
    return [*ids] if not ids or tuple(ids[: len(start)]) == start else [*start, *ids]


@functools.lru_cache(maxsize=8)  # to look what a tokenizer does takes longer than to decode a text
def decoder_behind(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str]:
    """What gives the text of ids that stand behind other text, of which further ids change no whole character; options as of
    `tokenizer.decode`.

    A tokenizer of SentencePiece's kind, as Llama 2's, takes the space before a text's first word for its own and drops it, by
    which an answer would be glued to its prompt, and a line of code lose one of its spaces. And where it spells characters by
    bytes, half a character would hide those right before it.
    """
    decode = _decoder_with_spaces(tokenizer)
    vocabulary = tokenizer.get_vocab()
    byte_of = {vocabulary[name]: byte for byte in range(256) if (name := f"<0x{byte:02X}>") in vocabulary}
    if "<0x41>" not in vocabulary or decode([vocabulary["<0x41>"]]) != "A":
        return decode

    def decode_bytes_apart(ids: Sequence[int], **options: Any) -> str:
        runs = itertools.groupby(ids, key=byte_of.__contains__)
        return "".join(
            bytes(byte_of[token] for token in run).decode(errors="replace") if bytes_only else decode([*run], **options)
            for bytes_only, run in runs
        )

    return decode_bytes_apart


def _decoder_with_spaces(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str]:
    """`tokenizer.decode`, but with the space that it would drop."""
    before, both = (encode_text(tokenizer, text) for text in ("a", "a a"))
    if both[: len(before)] != before or tokenizer.decode(both[len(before) :]) != "a":
        return lambda ids, **options: str(tokenizer.decode(ids, **options))
    length = len(tokenizer.decode(before))
    return lambda ids, **options: str(tokenizer.decode([*before, *ids], **options))[length:]


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills a row up: pad, else eos, else 0; no document sees it, and nothing of it is learned."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return pad or 0


def vocabulary_rows(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that a table of its tokens needs: one more than the largest id, which is more than there are tokens where ids have
    gaps. Slow of a large vocabulary."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)
