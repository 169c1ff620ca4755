"""Every field of the data section changes something; a new one without a case here fails."""

import copy
import dataclasses
import itertools
import sys
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.data.test_sources import tfds_dataset
from tests.data.tiny import chat, config_of, digest, sentence, stream, tokenizer, write_lines
from tests.tiny_training import EXPERIMENT
from wedlm_jax.data.config import DataConfig, SelfGenerated, SourceConfig, WeightedSource
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.prompts import leading_prompts
from wedlm_jax.data.tokenizer import TokenizerConfig
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.errors import UserError
from wedlm_jax.experiment import Experiment

CHATS = [chat(number, 1 + number % 3) for number in range(30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One of each kind of file; the two columns of a record hold different things."""
    path = tmp_path_factory.mktemp("fields")
    write_lines(path / "chat.jsonl", CHATS)
    write_lines(path / "bad.jsonl", [*CHATS, "{"])
    write_lines(path / "other.jsonl", [chat(number + 500) for number in range(30)])
    write_lines(
        path / "two.jsonl",
        [
            record | {"messages_2": chat(n + 500)["messages"], "p": "the", "c": sentence(n)}
            for n, record in enumerate(CHATS)
        ],
    )
    write_lines(path / "text.jsonl", [{"text": sentence(n), "body": sentence(n + 50)} for n in range(30)])
    np.save(path / "tokens.npy", np.random.default_rng(0).integers(4, 40, 600))
    rows = [{"p": sentence(n, 2), "c": sentence(n + 50, 2)} for n in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path / "pairs.parquet")
    tfds_dataset(path)
    return path


PAIR = {"prompt_column": "p", "completion_column": "c"}
PART = {"source": "chat", "path": "chat.jsonl"}


def mixture(*weights, **change):
    """Of two files; `change` is of the second part."""
    paths = ("chat.jsonl", "other.jsonl")
    parts = [WeightedSource(**PART | {"path": path, "weight": w}) for path, w in zip(paths, weights, strict=True)]
    return {"source": "mixture", "path": None, "mixture": (parts[0], dataclasses.replace(parts[1], **change))}


# field -> the config without it and what is changed; the paths are in the folder above
CHANGES = {
    "source": ({"source": "text", "path": "text.jsonl"}, {"source": "chat", **PAIR, "path": "two.jsonl"}),
    "path": (PART, {"path": "other.jsonl"}),
    "dataset_split": ({"source": "tfds", "path": "pairs/1.0.0", "text_column": "q"}, {"dataset_split": "test"}),
    "text_column": ({"source": "text", "path": "text.jsonl"}, {"text_column": "body"}),
    "messages_column": (PART | {"path": "two.jsonl"}, {"messages_column": "messages_2"}),
    "prompt_column": ({"source": "parquet", "path": "pairs.parquet", **PAIR}, {"prompt_column": "c"}),
    "completion_column": ({"source": "parquet", "path": "pairs.parquet", **PAIR}, {"completion_column": "p"}),
    "plain_prompt": ({"source": "parquet", "path": "pairs.parquet", **PAIR}, {"plain_prompt": True}),
    "document_end_id": ({"source": "tokens", "path": "tokens.npy"}, {"document_end_id": 7}),
    "mixture": (mixture(1, 1), mixture(1, 1, path="chat.jsonl")),
    "weight": (mixture(1, 1), mixture(1, 3)),
    "held_out_share": (PART, {"held_out_share": 0.3}),
    "row_length": (PART, {"row_length": 256}),
    "num_problems": ({"source": "quickstart_tasks", "held_out_share": None, "row_length": 256}, {"num_problems": 20}),
    "num_end_tokens": (PART, {"num_end_tokens": 3}),
    "end_token": ({"source": "text", "path": "text.jsonl"}, {"end_token": "<|im_start|>"}),
    "loss_on_turns": (PART, {"loss_on_turns": "last"}),
    "num_groups": (PART, {"num_groups": 2}),
    "pack_together": (PART, {"pack_together": 2}),
}
ELSEWHERE = {
    "chat_template_kwargs": "test_chat_template_kwargs_reach_the_template",
    "subset": "test_subset_reaches_the_library",
    "held_out_path": "test_held_out_path_and_split_name_what_is_held_out_and_all_else_is_trained_on",
    "held_out_split": "test_held_out_path_and_split_name_what_is_held_out_and_all_else_is_trained_on",
    "on_bad_record": "test_on_bad_record_leaves_the_record_out_or_raises",
    "num_workers": "test_num_workers_make_the_batches_in_other_processes",
    "self_generated": "test_self_generated_says_how_many_prompts_are_taken",
}


def test_every_field_has_a_case():
    fields = {field.name for cls in (SourceConfig, WeightedSource, DataConfig) for field in dataclasses.fields(cls)}
    assert fields == CHANGES.keys() | ELSEWHERE.keys()
    assert set(ELSEWHERE.values()) <= globals().keys()


def placed(folder, fields):
    """The paths under `folder`; those of a mixture too."""
    fields = dict(fields)
    for name in {"path", "held_out_path"} & fields.keys():
        fields[name] = fields[name] and str(folder / fields[name])
    if "mixture" in fields:
        fields["mixture"] = tuple(dataclasses.replace(p, path=str(folder / p.path)) for p in fields["mixture"])
    return fields


@pytest.mark.parametrize("field", CHANGES)
def test_changing_a_field_changes_the_batches(folder, field):
    base, change = CHANGES[field]
    defaults = {"row_length": 128, "num_problems": 100}
    configs = [config_of(**{"path": None} | defaults | placed(folder, fields)) for fields in (base, base | change)]
    found = [[digest(batch) for batch in itertools.islice(stream(config, batch_size=2), 3)] for config in configs]
    assert found[0] != found[1]


def texts(config, split="train"):
    """The documents of a split, each as its tokens."""
    documents = Documents(config, tokenizer(), 0, split)
    return sorted(one.tokens.tolist() for i in range(documents.epoch) for one in documents[i].examples)


@pytest.mark.parametrize(
    ("trained", "held_out", "change"),
    [
        ({**PART}, {"path": "other.jsonl"}, {"held_out_path": "other.jsonl"}),
        (
            {"source": "tfds", "path": "pairs/1.0.0", "text_column": "q"},
            {"dataset_split": "test"},
            {"held_out_split": "test"},
        ),
    ],
)
def test_held_out_path_and_split_name_what_is_held_out_and_all_else_is_trained_on(folder, trained, held_out, change):
    """And the tokenizer is of all that is trained on."""
    config = config_of(**placed(folder, trained | change), held_out_share=None)
    alone, other = (config_of(**placed(folder, fields)) for fields in (trained, trained | held_out))
    assert texts(config) == texts(alone) and texts(config, "held_out") == texts(other)
    if config.source == "tfds":
        made = [make_tokenizer(TokenizerConfig(vocab_size=300), one).get_vocab() for one in (config, alone)]
        assert made[0] == made[1]


def test_a_part_of_a_mixture_has_its_held_out_documents_where_it_says(folder):
    """In its share of them, beside one whose held-out documents are told by hash."""
    fields = placed(folder, mixture(1, 3, held_out_path=str(folder / "third.jsonl")))
    write_lines(folder / "third.jsonl", [chat(number + 700) for number in range(9)])
    documents = Documents(config_of(**fields, held_out_share=0.4), tokenizer(), 0, "held_out")
    own = [document for document in (documents[index] for index in range(110)) if document.part]
    assert abs(len(own) - 60) <= 1, "3 * 0.4 to 1, for of the other part's documents 0.4 are held out"
    assert all(document.examples for document in own)
    assert len({document.examples[0].tokens.tobytes() for document in own}) == 9


def test_on_bad_record_leaves_the_record_out_or_raises(folder):
    documents = Documents(config_of(folder / "bad.jsonl", on_bad_record="skip"), tokenizer(), 0, "train")
    assert len([i for i in range(31) if documents[i].skipped]) == 1
    documents = Documents(config_of(folder / "bad.jsonl", on_bad_record="error"), tokenizer(), 0, "train")
    with pytest.raises(ValueError, match="bad.jsonl:31"):
        [documents[i] for i in range(31)]


def test_chat_template_kwargs_reach_the_template(folder):
    """What it may be is tried in tests/data/test_chat_template.py."""
    made = copy.deepcopy(tokenizer())
    made.chat_template = "{{ mood }}" + made.chat_template
    configs = [config_of(folder / "chat.jsonl", chat_template_kwargs=text) for text in (None, '{"mood": "red"}')]
    batches = [next(stream(config, tokenizer=made)) for config in configs]
    assert digest(batches[0]) != digest(batches[1])


def test_self_generated_says_how_many_prompts_are_taken(folder):
    """What they bring is tried in tests/test_self_generation.py."""
    own = config_of(folder / "chat.jsonl", self_generated=SelfGenerated(num_prompts=3))
    assert len(leading_prompts(own, tokenizer(), 0)) == 3
    assert len(leading_prompts(dataclasses.replace(own, self_generated=SelfGenerated()), tokenizer(), 0)) == len(CHATS)


def test_num_workers_make_the_batches_in_other_processes(folder, monkeypatch):
    """The batches are the same by design, so what changes is who makes them."""
    asked = []

    class Pool:
        def __init__(self, workers, **options):
            asked.append((workers, options["mp_context"].get_start_method()))
            raise RuntimeError("no more is needed")

    monkeypatch.setattr("wedlm_jax.data.reading.concurrent.futures.ProcessPoolExecutor", Pool)
    next(stream(config_of(folder / "chat.jsonl")))
    assert asked == []
    with pytest.raises(RuntimeError):
        next(stream(config_of(folder / "chat.jsonl", num_workers=3)))
    assert asked == [(3, "spawn")]


def test_subset_reaches_the_library(monkeypatch):
    """The library itself is an optional extra; here a stand-in of the same two functions."""

    class Rows(list):
        column_names = ("messages", "id")

        def with_format(self, _):
            return self

        def select_columns(self, names):
            return Rows({name: row[name] for name in names} for row in self)

    def load_dataset(path, name, split):
        assert path == "owner/name"
        return Rows(chat(n + 500 * (name == "small") + 900 * (split == "test")) | {"id": n} for n in range(10))

    made = types.SimpleNamespace(load_dataset=load_dataset, load_from_disk=None, DatasetDict=dict)
    monkeypatch.setitem(sys.modules, "datasets", made)
    base = config_of("owner/name", "hf_dataset")
    changed = [base, dataclasses.replace(base, subset="small"), dataclasses.replace(base, dataset_split="test")]
    assert len({digest(next(stream(config))) for config in changed}) == 3


@pytest.mark.parametrize("path", ["~/files", "owner/name"])
def test_files_of_hf_dataset_may_be_in_the_home_directory(tmp_path, monkeypatch, path):
    """The library expands no tilde; what is not there is an id of the hub."""
    asked = []
    made = types.SimpleNamespace(load_dataset=lambda name, *_, **__: asked.append(name) or 1 / 0)
    monkeypatch.setitem(sys.modules, "datasets", made)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "files").mkdir()
    with pytest.raises(UserError, match=f"data.path={path}"):
        Documents(config_of(path, "hf_dataset"), tokenizer(), 0, "train")
    assert asked == [path.replace("~", str(tmp_path))]


def test_a_mixture_goes_through_the_experiment_file():
    experiment = dataclasses.replace(EXPERIMENT, data=config_of(**mixture(1, 2), row_length=192))
    assert experiment.data.parts[1].weight == 2
    assert Experiment.from_json(experiment.to_json()) == experiment
