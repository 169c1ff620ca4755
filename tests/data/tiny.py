"""Small data and a small tokenizer for the tests of the pipeline."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.packing import PackedBatch
from wedlm_jax.data.pipeline import PackedBatches, batches
from wedlm_jax.data.tokenizer import train_tokenizer

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "red", "bird", "in", "tall", "tree", "by", "lake")
BLOCK_SIZE = 4


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    """Ours, with its ChatML template."""
    return train_tokenizer([" ".join(WORDS)] * 3, 320)


@functools.cache
def sentencepiece() -> PreTrainedTokenizerBase:
    """Of the kind of Llama 2's: a text begins with a space of the tokenizer's own, which decoding drops."""
    control, pieces = ["<unk>", "<s>", "</s>"], ["▁", *"aretun", "▁a", "▁▁", "▁▁▁▁"]
    names = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [("▁", "a"), ("▁", "▁"), ("▁▁", "▁▁")]
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@functools.cache
def with_bos() -> PreTrainedTokenizerBase:
    """Ours, but that it begins every text with a token, as Llama's; its chat template writes none."""
    begins = copy.deepcopy(tokenizer())
    begins.add_special_tokens({"bos_token": "<s>"})
    special = [("<s>", begins.bos_token_id)]
    begins.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=special)
    return begins


def sentence(number: int, length: int = 6) -> str:
    """A text of its own for every number."""
    digest = hashlib.blake2b(str(number).encode()).digest()
    return f"{number}: " + " ".join(WORDS[digest[place % 64] % len(WORDS)] for place in range(length))


def chat(number: int, turns: int = 1) -> dict[str, Any]:
    """A JSONL record of `turns` questions and answers."""
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": sentence(100 * number + 2 * turn, 3)})
        messages.append({"role": "assistant", "content": sentence(100 * number + 2 * turn + 1, 1 + number % 5)})
    return {"messages": messages}


def write_lines(path: Path, records: list[Any]) -> Path:
    """Each record as a line of JSON; text as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def chat_file(folder: Path, count: int = 40) -> Path:
    return write_lines(folder / "chat.jsonl", [chat(number, 1 + number % 3) for number in range(count)])


def config_of(path: Path | str | None, source: str = "chat", **fields: Any) -> DataConfig:
    defaults = dict(
        source=source, path=path if path is None else str(path), row_length=128, num_end_tokens=2, held_out_share=0.0
    )
    return DataConfig(**defaults | fields)


def stream(config: DataConfig, batch_size: int = 4, seed: int = 0, **others: Any) -> PackedBatches:
    return batches(config, others.pop("tokenizer", tokenizer()), BLOCK_SIZE, batch_size, seed, **others)


def digest(batch: PackedBatch) -> str:
    """Equal for equal batches."""
    return hashlib.sha256(b"".join(array.tobytes() for array in dataclasses.astuple(batch))).hexdigest()
