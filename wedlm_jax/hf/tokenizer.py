"""Tokenizer files of a directory, and the special ids that come from the caller, the configs or the tokenizer."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wedlm_jax.data.chat_template import templates_of
from wedlm_jax.data.tokenizer import load_tokenizer, save_tokenizer, vocabulary_rows
from wedlm_jax.errors import UserError
from wedlm_jax.hf.config import read_json, write_hf_json
from wedlm_jax.model.config import ModelConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",  # for other tools: nothing here reads it
    "chat_template.jinja",
    "chat_template.json",
)
CHAT_TEMPLATES = "additional_chat_templates"  # a folder of those beside the default, as NAME.jinja
GENERATION_FILE = "generation_config.json"

# What the official engine (model_runner.py) takes where a `wedlm` checkpoint names no mask id, as Tencent's need not.
OFFICIAL_MASK_TOKEN_ID = 151_665
# Tokens that are there for uses to come: Llama 3 has some 250, and no row beyond them.
_RESERVED = re.compile(r"<\|reserved_special_token_[0-9]+\|>")


def tokenizer_in(directory: Path) -> Any | None:
    """The tokenizer of local files, as a transformers fast tokenizer; None where the directory has none. With a warning where it
    has a tokenizer.model alone."""
    if not any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        if (directory / "tokenizer.model").is_file():
            warnings.warn(
                f"{directory}: no tokenizer, as tokenizer.model is not read here; write its tokenizer.json with transformers: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
                stacklevel=3,
            )
        return None
    return load_tokenizer(directory)


def copy_tokenizer_files(source: Path | None, tokenizer: Any | None, target: Path) -> None:
    """Carries the files of `source` along as they are; where it has no tokenizer.json, writes that of `tokenizer` and what
    belongs to it: a vocab.json alone can be read only beside the config.json of its model."""
    names = [name for name in TOKENIZER_FILES if source is not None and (source / name).is_file()]
    if "tokenizer.json" not in names and tokenizer is not None:
        save_tokenizer(tokenizer, target)
    for name in names:
        shutil.copyfile(Path(source or "") / name, target / name)
    if source is not None and (source / CHAT_TEMPLATES).is_dir():
        shutil.copytree(source / CHAT_TEMPLATES, target / CHAT_TEMPLATES)


def copy_generation_config(source: Path | None, target: Path) -> None:
    """How the makers of a model would sample from it, for other tools."""
    if source is not None and (source / GENERATION_FILE).is_file():
        shutil.copyfile(source / GENERATION_FILE, target / GENERATION_FILE)


def write_chat_template(tokenizer: Any, directory: Path) -> None:
    """Puts the chat template of `tokenizer` in the place of those of the tokenizer files in `directory`."""
    config_file = directory / "tokenizer_config.json"
    if config_file.is_file() and "chat_template" in (config := read_json(config_file)):
        config.pop("chat_template")
        write_hf_json(config_file, config)
    (directory / "chat_template.json").unlink(missing_ok=True)
    for name, text in templates_of(tokenizer).items():
        file = directory / ("chat_template.jinja" if name == "default" else f"{CHAT_TEMPLATES}/{name}.jinja")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")


def resolve_eos_token_ids(
    config: ModelConfig, raw_config: Mapping[str, Any], directory: Path, tokenizer: Any | None
) -> tuple[int, ...]:
    """The ids that end a text: of generation_config.json, else of config.json, else of the tokenizer, whose id joins those of a
    `wedlm` checkpoint, as in the official engine.

    Raises:
      UserError: one of them is not a row of the vocabulary.
    """
    file = directory / GENERATION_FILE
    ids = _eos_token_ids(read_json(file), file) if file.is_file() else ()
    if not ids:
        file = directory / "config.json"
        ids = _eos_token_ids(raw_config, file)
    for token_id in ids:
        _require_in_vocabulary(token_id, config, f"{file}: eos_token_id")
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is not None and (not ids or raw_config.get("model_type") == "wedlm"):
        _require_in_vocabulary(eos, config, f"{directory}: the tokenizer's end token")
        ids = tuple(dict.fromkeys((*ids, eos)))
    return ids


def _eos_token_ids(raw: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    """Those of one file, whose field holds an id, a list of ids or nothing."""
    value = raw.get("eos_token_id")
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UserError(f"{file}: eos_token_id={value!r} is neither a token id nor a list of token ids")
    return ids


def resolve_mask_token_id(
    config: ModelConfig, raw_config: Mapping[str, Any], file: Path, tokenizer: Any | None, requested: int | None
) -> int | None:
    """The mask id: the caller's, else the one that config.json declares, else the tokenizer's, else the official engine's for a
    `wedlm` checkpoint whose vocabulary has it, else None.

    A declared id that is a real token is only warned of, and so is the caller's for a `wedlm` checkpoint: the weights
    were trained that way. For an AR base the caller's choice is checked by `choose_mask_token_id`.
    """
    declared = raw_config.get("mask_token_id")
    if declared is not None:
        _require_in_vocabulary(declared, config, f"{file}: mask_token_id")
    if requested is not None and requested != declared and raw_config.get("model_type") != "wedlm":
        return choose_mask_token_id(config, tokenizer, requested)
    chosen = declared if requested is None else requested
    if chosen is None and (of_tokenizer := getattr(tokenizer, "mask_token_id", None)) is not None:
        return _require_in_vocabulary(of_tokenizer, config, f"{file.parent}: the tokenizer's mask token")
    if chosen is None and (raw_config.get("model_type") != "wedlm" or config.vocab_size <= OFFICIAL_MASK_TOKEN_ID):
        return None
    chosen = _require_in_vocabulary(OFFICIAL_MASK_TOKEN_ID if chosen is None else chosen, config, "mask_token_id")
    if token := real_token(tokenizer, chosen):
        warnings.warn(f"{file}: the mask id {chosen} is the real token {token!r} of the tokenizer", stacklevel=3)
    return chosen


def choose_mask_token_id(config: ModelConfig, tokenizer: Any | None, requested: int | None = None) -> int:
    """The mask id for an AR base that is to be adapted: `requested`, else the tokenizer's own, else the first free row, else the
    first token that is reserved for uses to come, as Llama 3's `<|reserved_special_token_0|>`.

    Raises:
      UserError: `requested` is a real token or not a row of the vocabulary; or no row is free. (Qwen2.5 and Qwen3 pad
        their vocabulary; 151665 is free in the first, and `<tool_response>` in the second.)
    """
    if requested is not None:
        requested = _require_in_vocabulary(requested, config, "mask_token_id")
        if token := real_token(tokenizer, requested):
            raise UserError(
                f"mask_token_id={requested} is the real token {token!r} of the tokenizer; choose a free row"
            )
        return requested
    if tokenizer is None:
        raise UserError("mask_token_id: without a tokenizer the free rows of the vocabulary are unknown; pass an id")
    if tokenizer.mask_token_id is not None:
        return _require_in_vocabulary(tokenizer.mask_token_id, config, "the tokenizer's mask token")
    first_free = vocabulary_rows(tokenizer)
    if first_free < config.vocab_size:
        return first_free
    reserved = [i for i, token in tokenizer.added_tokens_decoder.items() if _RESERVED.fullmatch(token.content)]
    if not reserved:
        raise UserError(
            f"no free row for a mask token: the tokenizer fills all vocab_size={config.vocab_size} rows; "
            "name a token that your text never has as the tokenizer's mask token (mask_token in tokenizer_config.json), or "
            "enlarge the vocabulary with transformers (model.resize_token_embeddings); an adapter of mask rows needs none"
        )
    return _require_in_vocabulary(min(reserved), config, "the tokenizer's first reserved token")


def real_token(tokenizer: Any | None, token_id: int) -> str | None:
    """The text of `token_id` where it is a token of the tokenizer that is neither meant as a mask nor reserved."""
    if tokenizer is None or token_id == tokenizer.mask_token_id:
        return None
    token = tokenizer.convert_ids_to_tokens(token_id)
    added = tokenizer.added_tokens_decoder.get(token_id)
    meant_as_mask = added is not None and added.special and "mask" in added.content.lower()
    return None if meant_as_mask or _RESERVED.fullmatch(token or "") else token


def _require_in_vocabulary(token_id: Any, config: ModelConfig, name: str) -> int:
    if not isinstance(token_id, (int, np.integer)) or isinstance(token_id, bool):
        raise UserError(f"{name}={token_id!r} is not a whole number")
    if not 0 <= token_id < config.vocab_size:
        raise UserError(f"{name}={token_id} is not a row of the vocabulary (0 to {config.vocab_size - 1})")
    return int(token_id)
