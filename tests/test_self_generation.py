"""Self-generated text: the base's own completions of training prompts, the same after any kill, never those of another base."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

import wedlm_jax
from tests.killed_training import Killed, train_until_killed
from tests.tiny_training import EXPERIMENT, one_device_mesh
from tests.two_capacities import with_two_capacities
from wedlm_jax import self_generation
from wedlm_jax import train as train_module
from wedlm_jax.checkpoint import load_params
from wedlm_jax.data.config import DataConfig, SelfGenerated
from wedlm_jax.data.quickstart_tasks import split_of
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.stats import Completion, Stats
from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.config import ModelOverrides
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import init_params, params_of, transformer_from
from wedlm_jax.model_file import Base, ModelFile
from wedlm_jax.self_generation import COMPLETIONS, FOLDER, MADE_FROM, self_generated_data
from wedlm_jax.train import train

TEXT = SelfGenerated(num_prompts=3, max_new_tokens=6, batch_size=2)


@pytest.fixture(autouse=True, scope="module")
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "make_mesh", lambda config: one_device_mesh())
        with_two_capacities(patch)
        yield


# Whatever a base that knows nothing writes is a token of its tokenizer.
TINY = dataclasses.replace(
    EXPERIMENT,
    tokenizer=dataclasses.replace(EXPERIMENT.tokenizer, vocab_size=320),
    data=dataclasses.replace(EXPERIMENT.data, row_length=96, on_bad_record="skip"),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a model that nobody trained."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = make_tokenizer(TINY.tokenizer, TINY.data)
    transformer = transformer_from(TINY.model, init_params(TINY.model, 1))
    wedlm_jax.save(Model(transformer, TINY.model, tokenizer, 3, (tokenizer.eos_token_id,)), folder)
    return folder


def experiment(base, settings=TEXT, **train_changes):
    return dataclasses.replace(
        TINY,
        init_from=str(base),
        model=ModelOverrides(adapter=AdapterConfig(rank=2)),
        data=dataclasses.replace(TINY.data, self_generated=settings),
        objective=dataclasses.replace(TINY.objective, ar_loss_weight=0),
        train=dataclasses.replace(TINY.train, steps=2, checkpoint_every=1, **train_changes),
    )


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    train(experiment(base), workdir)
    return workdir


def lines_of(workdir):
    return [json.loads(line) for line in (workdir / FOLDER / COMPLETIONS).read_text().splitlines()]


def test_what_is_learned_is_what_the_base_decodes_to_training_prompts(base, finished):
    model, lines = wedlm_jax.load(base), lines_of(finished)
    assert len(lines) == 3 and len({tuple(line["prompt_ids"]) for line in lines}) > 1
    for line in lines:
        (alone,) = wedlm_jax.generate(model, [line["prompt_ids"]], DecodeConfig(decoder="ar", max_new_tokens=6))
        assert (line["ids"], line["finish_reason"], line["text"]) == (alone.ids, alone.finish_reason, alone.text)
        assert split_of(model.tokenizer.decode(line["prompt_ids"])) == "train"
    made = json.loads((finished / FOLDER / MADE_FROM).read_text())
    assert made["weights"] == ModelFile.read(finished).base.revision
    assert made["finished"]["completions"] == 3


def test_a_run_killed_while_writing_and_while_training_ends_as_one_that_was_not(base, finished, tmp_path, monkeypatch):
    """Killed in the second batch, of which a line and a half are on disk; then before the second step."""
    decode, calls = self_generation.decode_batch, iter(range(9))

    def dying(*arguments, **options):
        if next(calls) == 1:
            with (tmp_path / FOLDER / COMPLETIONS).open("a") as file:
                file.write('{"prompt_ids": [1]}\n{"prompt')
            raise Killed
        return decode(*arguments, **options)

    monkeypatch.setattr(self_generation, "decode_batch", dying)
    with pytest.raises(Killed):
        train(experiment(base), tmp_path)
    train_until_killed(experiment(base), tmp_path, draws=1)
    assert next(calls) == 3, "of two batches the first was written before the kill, and not again"
    train(experiment(base), tmp_path)
    for file in (COMPLETIONS, MADE_FROM):
        assert (tmp_path / FOLDER / file).read_bytes() == (finished / FOLDER / file).read_bytes()
    for name, value in load_params(finished)[1].items():
        np.testing.assert_array_equal(load_params(tmp_path)[1][name], value, err_msg=name)


@pytest.fixture
def started(base, tmp_path, monkeypatch):
    """A workdir of a run that starts, its base, and what the decoder is asked; its answer depends on the request alone."""
    asked, writers, shapes = [], [], []

    def decode(model, requests, trace, rows):
        asked.append(requests)
        shapes.append(rows)
        writers.append(model)
        replies = ([7 + len(r.prompt) % 5] * min(r.config.max_new_tokens, 90) for r in requests)
        return [Completion(ids, "length", Stats(len(ids), len(ids), len(ids)), "said") for ids in replies]

    monkeypatch.setattr(self_generation, "decode_batch", decode)
    model = wedlm_jax.load(base)
    ModelFile(model.config, 3, model.eos_token_ids).write(tmp_path)
    return types.SimpleNamespace(workdir=tmp_path, model=model, asked=asked, writers=writers, shapes=shapes, base=base)


def written(started, settings, base="given", **changes):
    model = started.model if base == "given" else base
    changed = dataclasses.replace(experiment(started.base, settings), **changes)
    return self_generated_data(changed, started.workdir, model, started.model.tokenizer)


def test_text_is_written_in_the_dtype_of_the_run(started):
    """Though the base is held in float32, for the optimizer."""
    config = dataclasses.replace(started.model.config, dtype="bfloat16", adapter=AdapterConfig(rank=2))
    ModelFile(config, 3, started.model.eos_token_ids).write(started.workdir)
    written(started, TEXT)
    (computed,) = {(model.config, model.transformer.config) for model in started.writers}
    assert computed == (dataclasses.replace(config, adapter=None),) * 2
    made = json.loads((started.workdir / FOLDER / MADE_FROM).read_text())
    assert made["dtype"] == "float32, computed in bfloat16"


CHANGES = {"num_prompts": 2, "max_new_tokens": 5, "temperature": 0.7, "batch_size": 3}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_what_is_asked_of_the_base(started, field):
    """And text of other settings is refused."""
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(SelfGenerated)}
    written(started, TEXT)
    before, changed = list(started.asked), dataclasses.replace(TEXT, **{field: CHANGES[field]})
    with pytest.raises(UserError, match=f"made from something else .*{field}: .* or remove .*, and it is written anew"):
        written(started, changed)
    # Completions of which nobody says what they were made from do not stay.
    (started.workdir / FOLDER / MADE_FROM).unlink()
    written(started, changed)
    assert started.asked[len(before) :] != before


def test_the_data_are_the_completions_alone_and_a_reply_fits_its_row(started):
    data = written(started, dataclasses.replace(TEXT, max_new_tokens=10_000), base="given")
    assert data == DataConfig(
        source="completions", path=str(started.workdir / FOLDER / COMPLETIONS), held_out_share=0.0,
        row_length=TINY.data.row_length, num_problems=TINY.data.num_problems, on_bad_record="skip",
    )  # fmt: skip
    for request in (request for batch in started.asked for request in batch):
        assert len(request.prompt) + request.config.max_new_tokens + data.num_end_tokens - 1 == data.row_length


def test_every_batch_has_as_many_rows(started):
    """The last one too: of another number a program would be compiled for it alone."""
    written(started, dataclasses.replace(TEXT, num_prompts=5, batch_size=2))
    assert [len(batch) for batch in started.asked] == [2, 2, 1] and started.shapes == [2, 2, 2]


def change_text(folder):
    (folder / COMPLETIONS).write_text((folder / COMPLETIONS).read_text().replace("said", "told", 1))


def cut_text(folder):
    (folder / COMPLETIONS).write_text((folder / COMPLETIONS).read_text()[:-9])


def break_record(folder):
    (folder / MADE_FROM).write_text("{")


def other_weights(folder):
    made = json.loads((folder / MADE_FROM).read_text())
    (folder / MADE_FROM).write_text(json.dumps(made | {"weights": "0" * 32}))


def remove(folder):
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_text, "completions.jsonl is not what was written there; bring it back"),
        (cut_text, "completions.jsonl is not what was written there"),
        (break_record, "made_from.json: cannot be read .*; remove .*, and it is written anew"),
        (other_weights, "was written by weights of revision 000.*, and the adapter is trained beside "),
        (remove, "self_generated is gone, which this run learns from; bring it back"),
    ],
)
def test_text_that_is_not_that_of_the_run_is_refused(started, change, message):
    written(started, TEXT)
    revision = json.loads((started.workdir / FOLDER / MADE_FROM).read_text())["weights"]
    dataclasses.replace(ModelFile.read(started.workdir), base=Base(str(started.base), revision)).write(started.workdir)
    written(started, TEXT, base=None)
    change(started.workdir / FOLDER)
    with pytest.raises(UserError, match=message):
        written(started, TEXT, base=None)


def test_other_weights_at_the_same_place_do_not_go_on(started):
    written(started, TEXT)
    params = {name: 1.5 * x for name, x in params_of(started.model.transformer).items()}
    other = dataclasses.replace(started.model, transformer=transformer_from(started.model.config, params))
    with pytest.raises(UserError, match="made from something else .*weights: "):
        written(started, TEXT, base=other)


def test_several_processes_read_text_and_do_not_write_it(started, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="text is written by a single process; start the same command in one"):
        written(started, TEXT)


def test_a_run_without_a_model_to_start_from_is_refused(tmp_path):
    data = dataclasses.replace(TINY.data, self_generated=TEXT)
    with pytest.raises(UserError, match="learns from text that init_from writes; name that model as init_from"):
        train(dataclasses.replace(TINY, data=data), tmp_path / "run")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelfGenerated(num_prompts=0), "data.self_generated.num_prompts=0 must be at least 1"),
        (lambda: SelfGenerated(temperature=-1), "data.self_generated.temperature=-1 must be a number of at least 0"),
        (
            lambda: DataConfig(source="text", path="x", self_generated=SelfGenerated()).parts,
            "data.self_generated is set, but data.source=text has no prompts",
        ),
    ],
)
def test_bad_settings_are_one_line(make, message):
    with pytest.raises(UserError, match=message):
        make()
