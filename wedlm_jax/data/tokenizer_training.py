"""The tokenizer of a run that starts from no model: loaded, or trained on the training documents."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from wedlm_jax.data.config import DataConfig, SourceConfig
from wedlm_jax.data.quickstart_tasks import QuickstartProblems
from wedlm_jax.data.records import BadRecord, Completion, Text
from wedlm_jax.data.sources import open_path
from wedlm_jax.data.split import content_of, split_by_hash
from wedlm_jax.data.stdlib_code import code_files
from wedlm_jax.data.tokenizer import TokenizerConfig, load_tokenizer, train_tokenizer
from wedlm_jax.errors import UserError

_PROBLEMS = 4_000  # enough for every word and number of the quickstart tasks
_DOCUMENTS = 20_000  # of each source of the user's own, from all over it


def make_tokenizer(config: TokenizerConfig, data: DataConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that `config.path` names, else trains one on the training split. The seed of a run has no part.

    Raises:
      UserError: it cannot be loaded; or the data are conversations or tokens, which need the tokenizer that they are for.
    """
    if config.path is not None:
        return load_tokenizer(config.path)
    return train_tokenizer((text for part in data.parts for text in _texts(part, data)), config.vocab_size)


def _texts(part: SourceConfig, data: DataConfig) -> Iterator[str]:
    if part.source == "quickstart_tasks":
        for problem in QuickstartProblems("train", seed=0, length=_PROBLEMS):
            yield problem.prompt + problem.solution
    elif part.source == "stdlib_code":
        yield from (file.text for file in code_files("train", part.path))
    elif part.source in ("chat", "tokens", "completions"):
        what = "a tokenizer with a chat template" if part.source == "chat" else "the tokenizer that made the tokens"
        raise UserError(
            f"data.source={part.source} needs {what}; name its folder as tokenizer.path, or a model as model.path"
        )
    else:
        yield from _training_texts(part, data)


def _training_texts(part: SourceConfig, data: DataConfig) -> Iterator[str]:
    source = open_path(part, data.row_length)
    for index in range(0, len(source), max(-(-len(source) // _DOCUMENTS), 1)):
        raw = source.fetch(index)
        if not part.splits_itself and split_by_hash(content_of(raw), data.share_held_out) != "train":
            continue
        try:
            record = source.parse(index, raw)
        except BadRecord as error:
            if data.on_bad_record == "skip":
                continue  # the stream of batches counts it
            raise BadRecord(f"{source.where(index)}: {error}") from None
        if isinstance(record, Text):
            yield record.text
        elif isinstance(record, Completion):
            yield record.prompt + record.completion
        else:
            raise UserError(
                f"{part.path}: conversations need a tokenizer with a chat template; name its folder as tokenizer.path, "
                "or a model as model.path"
            )
