"""The data section of an experiment: which sources, in which shares, and how their documents become rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from wedlm_jax.config_tree import check_choices
from wedlm_jax.data.chat_template import NO_VARIABLES, Variables, read_variables
from wedlm_jax.data.split import Split
from wedlm_jax.errors import UserError

SourceName = Literal[
    "quickstart_tasks",
    "stdlib_code",
    "chat",
    "text",
    "tokens",
    "tfds",
    "parquet",
    "csv",
    "hf_dataset",
    "completions",
    "mixture",
]

_TABLES = ("tfds", "parquet", "csv", "hf_dataset")
# The sources that read a field; set with any other source, it is an error and not silently without effect.
_READ_BY: Mapping[str, tuple[str, ...]] = {
    "path": ("stdlib_code", "chat", "text", "tokens", "completions", *_TABLES),
    "subset": ("hf_dataset",),
    "dataset_split": ("tfds", "hf_dataset"),
    "held_out_path": ("chat", "text", "tokens", "completions", *_TABLES),
    "held_out_split": ("tfds", "hf_dataset"),
    "text_column": ("text", *_TABLES),
    "messages_column": ("chat", *_TABLES),
    "prompt_column": ("chat", *_TABLES),
    "completion_column": ("chat", *_TABLES),
    "plain_prompt": ("chat", *_TABLES),
    "document_end_id": ("tokens",),
    "mixture": ("mixture",),
}
_NEED_PATH = ("chat", "text", "tokens", "completions", *_TABLES)
_LEARNED_WHOLE = ("stdlib_code", "text", "tokens")
_HAVE_NO_PROMPTS = (*_LEARNED_WHOLE, "completions")  # that could be completed anew


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of documents. Columns are keys of a JSON record or columns of a table."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  a key that nothing reads is an error in a mixture too

    source: SourceName = "quickstart_tasks"
    # stdlib_code: a folder of .py files, of which those of tests are left out, None the standard library of this Python;
    # tfds: NAME[/CONFIG][:VERSION], or the directory of a prepared dataset; hf_dataset: a hub id or a local folder; all others:
    # a file, a folder, or a pattern with * in it, of which folders are read too. Of plain text, a file is a document; one over
    # 64 KiB is several, cut at line ends
    path: str | None = None
    subset: str | None = None  # hf_dataset: the configuration of the dataset
    dataset_split: str | None = None  # tfds, hf_dataset: the dataset's own split; None is "train"
    # Where the held-out documents lie, in place of the `held_out_share` of those that are there: all of `path` is trained on
    held_out_path: str | None = None  # None: in `path`
    held_out_split: str | None = None  # tfds, hf_dataset: None is `dataset_split`
    text_column: str | None = None  # plain text; None finds `text`
    messages_column: str | None = None  # a conversation; None finds `messages` or `conversations` (ShareGPT)
    # A question and its answer, both or neither; None finds `prompt` and `completion`, or else Alpaca's `instruction`, with its
    # `input` behind it, and `output`.
    prompt_column: str | None = None
    completion_column: str | None = None
    plain_prompt: bool = False  # prompt and completion as they are, and not as two turns of the chat template
    document_end_id: int | None = None  # tokens: documents are cut after this token; None: a piece is one document

    def check(self, name: str = "data") -> None:
        """What several fields say together; at use, so that the order of overrides does not matter.

        Raises:
          UserError: a field is set that the source does not read, or one is missing, or an unknown word.
        """
        check_choices(self, name)
        for field in dataclasses.fields(self):
            readers = _READ_BY.get(field.name)
            if readers and self.source not in readers and getattr(self, field.name) != field.default:
                raise UserError(
                    f"{name}.{field.name} is set, but {name}.source={self.source} does not read it; "
                    f"remove it or set {name}.source to {' or '.join(readers)}"
                )
        if self.source in _NEED_PATH and not self.path:
            raise UserError(f"{name}.source={self.source} needs {name}.path")
        if (self.prompt_column is None) != (self.completion_column is None):
            raise UserError(f"{name}.prompt_column and {name}.completion_column belong together; set both")
        kinds = [c for c in ("text_column", "messages_column", "prompt_column") if getattr(self, c) is not None]
        if len(kinds) > 1:
            raise UserError(f"{name}.{kinds[0]} and {name}.{kinds[1]} are both set; a document is one of them")
        apart = [c for c in ("held_out_path", "held_out_split") if getattr(self, c) is not None]
        if apart and self.of_split("held_out") == self:
            raise UserError(f"{name}.{apart[0]}={getattr(self, apart[0])} is what is trained on; name another place")

    @property
    def splits_itself(self) -> bool:
        """Whether each split is read from a place of its own, and none is told by a hash of its documents."""
        return self.source in _SPLIT_THEMSELVES or self.held_out_path is not None or self.held_out_split is not None

    def of_split(self, split: Split) -> SourceConfig:
        """As it is read for a split: of held-out documents `path` and `dataset_split` are where these lie."""
        if split == "train":
            return self
        path, dataset_split = self.held_out_path or self.path, self.held_out_split or self.dataset_split
        return dataclasses.replace(self, path=path, dataset_split=dataset_split)


@dataclasses.dataclass(frozen=True)
class WeightedSource(SourceConfig):
    """A part of a mixture."""

    # Its share of the documents of either split, relative to the other parts; bad records that are skipped count in it
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise UserError(f"data.mixture: weight={self.weight} of {self.source} must be above 0; leave the part out")


@dataclasses.dataclass(frozen=True)
class SelfGenerated:
    """Replies that the model of init_from writes by AR decoding to the prompts of the training documents, before training."""

    num_prompts: int | None = None  # the first of the stream; None, or more than there are: those of one epoch
    max_new_tokens: int = 512  # at most, and no more than its row has room for; what is cut is learned without an end
    temperature: float = 0.0  # 0 = greedy
    batch_size: int = 32  # prompts completed at once

    def __post_init__(self) -> None:
        for field in ("num_prompts", "max_new_tokens", "batch_size"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise UserError(f"data.self_generated.{field}={value} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"data.self_generated.temperature={self.temperature} must be a number of at least 0")


@dataclasses.dataclass(frozen=True)
class DataConfig(SourceConfig):
    """Where documents come from and how they fill rows.

    One source is `source` and its fields, here; several are `source="mixture"` and `mixture`.
    """

    mixture: tuple[WeightedSource, ...] = ()
    self_generated: SelfGenerated | None = None  # in place of the replies of the training documents; None: as they are
    # Of the documents, by hash; None is 0.02; the two built-in sources have their own
    held_out_share: float | None = None
    row_length: int = 256  # L: tokens of a packed row; text and tokens are cut into pieces of this length
    num_problems: int = 100_000  # quickstart_tasks: problems drawn before they come again in another order
    num_end_tokens: int = 8  # end-of-turn targets after the last turn of a conversation or completion, its own included
    end_token: str | None = None  # ends a turn, a completion, a text; None is the tokenizer's eos token
    # Which of the assistant's turns are learned; "each" is all of them, every one in an example of its own that ends with it, as
    # templates need that write a turn otherwise once others follow. What is before a turn is then read again for each
    loss_on_turns: Literal["all", "last", "each"] = "all"
    # Variables of the chat template, a JSON object such as {"enable_thinking": false}. The workdir's template and that of an
    # export have them as defaults, so that prompts are written as in training
    chat_template_kwargs: str | None = None
    on_bad_record: Literal["error", "skip"] = "error"  # skip counts what it skips (`skipped_records` in the metrics)
    num_groups: int = 1  # parts of a batch that are packed apart; the number of processes must divide it
    # Batches that are packed at once, and read before the first step. More leave less padding where a group has few rows
    # (train.batch_size / num_groups): the first document that fits none of them closes them
    pack_together: int = 1
    num_workers: int = 0  # processes that read and tokenize; 0: a thread of this one. The batches are the same

    def __post_init__(self) -> None:
        for field in ("row_length", "num_problems", "num_end_tokens", "num_groups", "pack_together", "num_workers"):
            least = 0 if field == "num_workers" else 1
            if getattr(self, field) < least:
                raise UserError(f"data.{field}={getattr(self, field)} must be at least {least}")
        self.chat_template_variables  # noqa: B018  raises where they cannot be read
        if self.held_out_share is not None and not 0 <= self.held_out_share < 1:
            raise UserError(f"data.held_out_share={self.held_out_share} must be at least 0 and below 1")

    @property
    def parts(self) -> tuple[SourceConfig, ...]:
        """The sources, checked: those of the mixture, else the one that this config names.

        Raises:
          UserError: a source misses a field or has one that it does not read, or a mixture has no sources that can be mixed.
        """
        self.check()
        if self.source != "mixture":
            parts: tuple[SourceConfig, ...] = (self,)
        else:
            if not self.mixture:
                raise UserError("data.source=mixture, but data.mixture is empty; name its sources")
            largest = max(part.weight for part in self.mixture)
            for number, part in enumerate(self.mixture):
                if part.source == "mixture":
                    raise UserError(f"data.mixture[{number}] is a mixture itself; list its sources here")
                if part.weight < _LEAST_SHARE * largest:
                    raise UserError(
                        f"data.mixture[{number}].weight={part.weight} is next to nothing beside {largest}; raise it, or leave "
                        "the part out"
                    )
                part.check(f"data.mixture[{number}]")
            parts = self.mixture
        if self.self_generated and (without := [p.source for p in parts if p.source in _HAVE_NO_PROMPTS]):
            raise UserError(
                f"data.self_generated is set, but data.source={without[0]} has no prompts; use conversations, or prompts "
                "with completions"
            )
        if self.self_generated and self.loss_on_turns == "each":
            raise UserError(
                "data.self_generated is set, which answers the last prompt of a conversation alone; leave out "
                "data.loss_on_turns=each"
            )
        if self.held_out_share is not None and (own := _with_fixed_share(parts)):
            raise UserError(f"data.held_out_share is set, but {own[0]} holds out a fixed share of its own; remove it")
        if self.held_out_share is not None and all(part.splits_itself for part in parts):
            raise UserError(
                "data.held_out_share is set, but held_out_path or held_out_split says what is held out; remove either"
            )
        return parts

    @property
    def has_prompts(self) -> bool:
        """Whether documents may hold what is not learned; of a table nobody knows unless `text_column` says what it is."""
        return any(part.source not in _LEARNED_WHOLE and part.text_column is None for part in self.mixture or (self,))

    @property
    def share_is_fixed(self) -> bool:
        """Whether `held_out_share` cannot be set, since a source has its own, or all bring their held-out documents."""
        return bool(_with_fixed_share(self.parts)) or all(part.splits_itself for part in self.parts)

    @property
    def chat_template_variables(self) -> Variables:
        """`chat_template_kwargs`, read."""
        text = self.chat_template_kwargs
        return NO_VARIABLES if text is None else read_variables(text, "data.chat_template_kwargs")

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each of `parts`."""
        return tuple(part.weight for part in self.mixture) if self.source == "mixture" else (1.0,)

    @property
    def share_held_out(self) -> float:
        return _HELD_OUT_SHARE if self.held_out_share is None else self.held_out_share


_HELD_OUT_SHARE = 0.02
_LEAST_SHARE = 1e-9  # of the part with the largest weight; a part with less would hardly come in any training
_SPLIT_THEMSELVES = ("quickstart_tasks", "stdlib_code")


def _with_fixed_share(parts: Iterable[SourceConfig]) -> list[str]:
    return [part.source for part in parts if part.source in _SPLIT_THEMSELVES]
