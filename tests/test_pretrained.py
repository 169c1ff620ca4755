"""`load` tells HF directories, hub ids and workdirs apart, and says what to do where there is nothing."""

import dataclasses
import json
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.evals.models import tiny_model
from tests.hf.adapters import BASE, ON_ALL, adapted
from wedlm_jax import pretrained
from wedlm_jax.checkpoint import Checkpoints, load_params
from wedlm_jax.convert import Convert, convert
from wedlm_jax.data.tokenizer import save_tokenizer, train_tokenizer
from wedlm_jax.decode.calibration import Calibration, write_calibration
from wedlm_jax.errors import UserError
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.int8 import in_int8, rounded
from wedlm_jax.model.parameters import init_params, params_of, transformer_from
from wedlm_jax.model_file import ModelFile
from wedlm_jax.model_flags import ModelFlags
from wedlm_jax.ops.attention.choice import PLATFORMS
from wedlm_jax.optimizer import OptimizerConfig
from wedlm_jax.pretrained import load, save, save_adapter
from wedlm_jax.sharding import MeshConfig
from wedlm_jax.train_state import new_state

ORACLE = Path(__file__).parent / "fixtures" / "oracle"


def test_an_hf_directory_loads_and_saves(tmp_path):
    model = load(ORACLE / "wedlm_qwen3" / "model")
    save(model, tmp_path / "out")
    again = load(str(tmp_path / "out"), dtype="float32", mask_token_id=17)
    assert (again.config, again.mask_token_id, again.eos_token_ids) == (model.config, 17, (251,))
    tokens, positions = jnp.arange(12)[None], jnp.arange(12)[None]
    np.testing.assert_array_equal(model(tokens, positions=positions), again(tokens, positions=positions))


def test_what_is_saved_in_the_home_directory_is_loaded_from_there(tmp_path, monkeypatch):
    """`load` takes `~/model`, which no shell writes out in Python, so `save` does."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save(load(BASE), "~/whole")
    save_adapter(adapted(ON_ALL), "~/adapter")
    assert load("~/whole", adapter="~/adapter").config.adapter == ON_ALL
    assert not [*(tmp_path / "here").iterdir()]


@pytest.mark.parametrize("given", ['{"enable_thinking": false}', [1]])
def test_variables_of_a_chat_template_that_are_no_dict_are_said_to_be_none(tmp_path, given):
    save(tiny_model(), tmp_path / "model")
    with pytest.raises(UserError, match="chat_template_kwargs=.*: must be a dict, as {.enable_thinking.: False}$"):
        load(tmp_path / "model", chat_template_kwargs=given)


def test_sizes_of_a_mesh_are_those_of_the_first_devices(tmp_path):
    save(tiny_model(), tmp_path / "model")
    alone, cut = (load(tmp_path / "model", mesh=MeshConfig(*sizes)) for sizes in ((1, 1, 1), (2, 1, 2)))
    assert alone.mesh is None
    assert cut.mesh.shape == {"data": 2, "fsdp": 1, "tensor": 2} and [*cut.mesh.devices.flat] == jax.devices()[:4]
    np.testing.assert_array_equal(*(params_of(m.transformer)["embed.embedding"] for m in (alone, cut)))
    with pytest.raises(UserError, match=r"mesh.fsdp=16 takes 16 devices, and there are 8; lower it"):
        load(tmp_path / "model", mesh=MeshConfig(data=1, fsdp=16))


@pytest.mark.parametrize("mesh", ["2", 2, {"tensor": 2}], ids=str)
def test_what_is_no_mesh_is_said_to_be_none(mesh):
    with pytest.raises(UserError, match=r"mesh=.* is no mesh; write wedlm_jax.MeshConfig\(tensor=4\) or"):
        load(ORACLE / "wedlm_qwen3" / "model", mesh=mesh)


@pytest.mark.parametrize("mesh", [None, MeshConfig(2, 1, 2)], ids=str)
def test_a_directory_loads_with_its_kernels_rounded_to_int8(tmp_path, mesh):
    save(tiny_model(), tmp_path / "model")
    write_calibration(
        tmp_path / "model", found := Calibration(0.3, 0.02, 8, 0.01, 0.005, 100, 3.0), load(tmp_path / "model")
    )
    exact, int8 = load(tmp_path / "model"), load(tmp_path / "model", jnp.int8 if mesh else "int8", mesh=mesh)
    assert (int8.config.kernel_dtype, int8.config.dtype) == ("int8", "float32")
    assert int8.calibration == exact.calibration == found and (int8.mesh is None) == (mesh is None)
    (_, expected), held = rounded(exact.config, params_of(exact.transformer)), params_of(int8.transformer)
    assert held.keys() == expected.keys()
    for name, x in held.items():
        np.testing.assert_array_equal(x, expected[name])
    with pytest.raises(UserError, match="rounded to int8 for decoding; load it without dtype=int8"):
        save(int8, tmp_path / "out")


def test_what_is_rounded_is_held_as_it_is_stored_and_given_back(tmp_path, monkeypatch):
    """In float32 it would take twice the memory of the host, where a GPU computes in float32."""
    coarse = {name: x.astype(jnp.bfloat16) for name, x in params_of(tiny_model().transformer).items()}
    config = dataclasses.replace(tiny_model().config, dtype="bfloat16", param_dtype="bfloat16")
    save(
        dataclasses.replace(tiny_model(), config=config, transformer=transformer_from(config, coarse)),
        tmp_path / "model",
    )
    exact = load(tmp_path / "model")
    rounds, given = pretrained.in_int8, []
    monkeypatch.setattr(pretrained, "in_int8", lambda model, *a, **k: given.append(model) or rounds(model, *a, **k))
    int8 = load(tmp_path / "model", "int8")
    assert given[0].config.param_dtype == "bfloat16"
    kernels = {name: x.is_deleted() for name, x in params_of(given[0].transformer).items()}
    assert kernels["layers.mlp.up_proj.kernel"] and not kernels["embed.embedding"]
    expected = in_int8(exact)
    assert int8.config == expected.config and int8.config.dtype == "float32"
    held = params_of(int8.transformer)
    for name, x in params_of(expected.transformer).items():
        assert x.dtype == held[name].dtype
        np.testing.assert_array_equal(x, held[name])


@pytest.mark.parametrize("write", [save, save_adapter])
def test_only_a_model_is_saved(write, tmp_path):
    with pytest.raises(UserError, match="model must be what wedlm_jax.load returns, not 'runs/sft'"):
        write("runs/sft", tmp_path / "out")


@pytest.mark.parametrize("write", [save, save_adapter])
@pytest.mark.parametrize("path", [None, "", 3])
def test_nothing_is_saved_where_no_path_is_named(write, path):
    with pytest.raises(UserError, match=f"^path={path!r}: name a directory$"):
        write(tiny_model(), path)


@pytest.mark.parametrize("path", ["runs/nothing", "/nowhere/at/all", "nothing"])
def test_a_missing_path_names_the_commands_that_make_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        load(path)
    message = str(error.value)
    assert message.startswith(f"{path}: no such directory; ") and "\n" not in message
    assert (
        f"wedlm_jax.train --exp NAME --workdir {path}" in message
        and f"wedlm_jax.convert --from WORKDIR --to {path}" in message
    )


@pytest.mark.parametrize(
    ("path", "why", "fetched"),
    [
        ("Qwen/Qwen3-0.6B", "beside a folder Qwen", "Qwen/Qwen3-0.6B"),
        ("owner/name@main", "with @main", "owner/name --revision main"),
        ("Qwen/Qwen3-0.6B@v1", "with @v1", "Qwen/Qwen3-0.6B --revision v1"),
    ],
)
def test_what_may_be_meant_as_a_hub_id_and_is_not_fetched_says_why_and_how_it_is(
    path, why, fetched, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    fetched = f"hf download {fetched} --local-dir DIR"
    with pytest.raises(
        UserError, match=rf"^{path}: no such directory, and no hub id {why} \(of the hub {fetched} fetches"
    ):
        load(path)
    with pytest.raises(UserError, match=f"^{path}: no such directory; .* and of the hub fetched by {fetched}$"):
        pretrained.locate_adapter(path)


def test_a_directory_that_is_neither_kind_says_so(tmp_path):
    with pytest.raises(
        UserError, match=r"neither an HF directory \(no config.json\) nor a workdir with a model \(no model.json\)"
    ):
        load(tmp_path)


@pytest.mark.parametrize("beside", [(), ("config.json",), ("config.json", "adapter_model.safetensors")])
def test_an_adapter_is_no_model(tmp_path, beside):
    """Also where the trainer wrote the config.json of its base beside it."""
    for name in ("adapter_config.json", *beside):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=f"an adapter and no model; .* --model BASE --adapter {tmp_path}"):
        load(tmp_path)


def test_an_adapter_that_lies_among_the_files_of_its_base_is_left_out_with_a_warning(tmp_path):
    """transformers would put it beside the base."""
    both = shutil.copytree(BASE, tmp_path / "both")
    save_adapter(adapted(ON_ALL), tmp_path / "adapter")
    for file in (tmp_path / "adapter").glob("adapter*"):
        shutil.copy(file, both)
    with pytest.warns(
        UserWarning, match=f"^{both}: holds an adapter too, which is left out; --adapter {both} adds it$"
    ):
        assert load(both).config.adapter is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(both, adapter=both).config.adapter == ON_ALL


def test_an_adapter_of_the_hub_says_how_it_is_fetched():
    with pytest.raises(UserError, match="^owner/name: no such directory; .* hf download owner/name --local-dir DIR$"):
        pretrained.locate_adapter("owner/name")


@pytest.mark.parametrize("path", [None, "", 3])
def test_a_path_that_names_nothing_is_refused(path):
    with pytest.raises(UserError, match="name a directory, or a hub id"):
        load(path)


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path):
    shutil.copy(ORACLE / "qwen3_plain" / "model" / "model.safetensors", tmp_path)
    with pytest.raises(UserError, match="is a file; name the directory"):
        load(tmp_path / "model.safetensors")


@pytest.fixture
def workdir(tmp_path):
    """A workdir as training leaves it, and the parameters of its newest checkpoint."""
    config = ModelConfig(300, 16, 24, 2, 4, 2, 8, matmul_precision="highest")
    tokenizer = train_tokenizer(["Tom has 17 apples and 23 pears.\n"] * 9, vocab_size=290)
    directory = tmp_path / "run"
    save_tokenizer(tokenizer, directory / "tokenizer")
    ModelFile(config, tokenizer.mask_token_id, (tokenizer.eos_token_id,)).write(directory)
    with Checkpoints(directory, keep=2) as checkpoints:
        for step in (1, 2):
            state = new_state(init_params(config, step), OptimizerConfig())
            checkpoints.save(state, step, {}, {})
    return directory, config, state.params


@pytest.mark.parametrize("attention, here", [("tokamax", "auto"), ("splash", "auto"), ("xla", "xla")])
def test_a_kernel_that_the_training_asked_for_is_chosen_anew_when_loaded(workdir, attention, here, monkeypatch):
    """Even on the same kind of device, where its rows may be too short for it."""
    monkeypatch.setitem(PLATFORMS, attention, ("cpu",))
    directory, config, _ = workdir
    tokenizer = load(directory).tokenizer
    trained = dataclasses.replace(config, attention=attention)
    ModelFile(trained, tokenizer.mask_token_id, (tokenizer.eos_token_id,)).write(directory)
    assert load(directory).config.attention == here


def test_a_workdir_loads_its_newest_checkpoint_with_tokenizer_and_ids(workdir):
    directory, config, params = workdir
    model = load(directory)
    assert model.config == config and model.tokenizer is not None
    assert (model.mask_token_id, model.eos_token_ids) == (
        model.tokenizer.mask_token_id,
        (model.tokenizer.eos_token_id,),
    )
    loaded = params_of(model.transformer)
    assert loaded.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(loaded[name], value)
    half = load(directory, "bfloat16")
    assert half.config.dtype == half.config.param_dtype == "bfloat16"
    # Each as it is read: whoever holds all of them in float32 first needs three times the memory.
    for read in (load_params(directory, dtype="bfloat16")[1], params_of(half.transformer)):
        for name, value in params.items():
            assert read[name].dtype.name == "bfloat16"
            np.testing.assert_array_equal(read[name], value.astype("bfloat16"))


@pytest.fixture
def with_best(workdir):
    """The workdir with three checkpoints, of which the first is the best: the parameters of each, by step."""
    directory, config, _ = workdir
    params = {step: init_params(config, step) for step in (3, 4, 5)}
    with Checkpoints(directory, keep=2, best_metric="validation_ar_loss") as checkpoints:
        for step, loss in ((3, 0.5), (4, 0.9), (5, 0.7)):
            state = new_state(params[step], OptimizerConfig())
            checkpoints.save(state, step, {}, {"validation_ar_loss": loss})
    return directory, {**params, "best": params[3]}


@pytest.mark.parametrize("step", ["best", 3, 4])
def test_a_workdir_with_a_step_loads_that_checkpoint_and_says_nothing(with_best, step, capsys):
    directory, params = with_best
    loaded = params_of(load(f"{directory}@{step}").transformer)
    for name, value in params[step].items():
        np.testing.assert_array_equal(loaded[name], value)
    assert capsys.readouterr().err == ""


def test_a_workdir_whose_newest_checkpoint_is_not_its_best_says_so_in_one_line(with_best, capsys):
    directory, params = with_best
    loaded = params_of(load(directory).transformer)
    np.testing.assert_array_equal(loaded["embed.embedding"], params[5]["embed.embedding"])
    assert (
        capsys.readouterr().err == f"note: {directory}: step 5, the newest, is loaded; the best one is {directory}@3\n"
    )


def test_the_step_that_is_named_is_what_convert_writes(with_best, tmp_path):
    directory, params = with_best
    convert(Convert(f"{directory}@best", tmp_path / "out", "qwen3"))
    written = params_of(load(tmp_path / "out").transformer)
    np.testing.assert_array_equal(written["embed.embedding"], params[3]["embed.embedding"])


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_convert_verifies_what_it_wrote_though_the_run_has_saved_another_step_since(workdir, tmp_path, monkeypatch):
    directory, config, _ = workdir

    def save_and_train_on(*arguments):
        save(*arguments)
        with Checkpoints(directory, keep=1) as checkpoints:
            checkpoints.save(new_state(init_params(config, 3), OptimizerConfig()), 3, {}, {})

    monkeypatch.setattr(pretrained, "save", save_and_train_on)
    convert(Convert(str(directory), tmp_path / "out", "qwen3", verify=True))


def test_a_step_that_is_not_there_is_named(workdir, monkeypatch):
    directory, _, _ = workdir
    monkeypatch.chdir(directory.parent)
    for path, message in {
        "run@7": "run holds no checkpoint of step 7; it holds 1, 2",
        "run@best": r"run keeps no best checkpoint \(train.best_metric\); it holds 1, 2",
        "runs/absent@7": "runs/absent: no such directory",
        f"{ORACLE / 'wedlm_qwen3' / 'model'}@7": "model is no workdir of wedlm_jax.train and has no steps; leave out @7",
    }.items():
        with pytest.raises(UserError, match=message):
            load(path)


@pytest.mark.parametrize("path", ["run/checkpoints/2", "run/checkpoints/2/", "run@latest", "run/checkpoints/9"])
def test_another_way_to_name_a_checkpoint_is_told_how_they_are_named(workdir, monkeypatch, path):
    monkeypatch.chdir(workdir[0].parent)
    with pytest.raises(UserError, match="names no checkpoint; those of run are run@1, run@2, and run is the newest"):
        load(path)


def test_a_workdir_is_rounded_on_the_host(workdir, monkeypatch):
    """Where else is a matter of the default device, of which this machine has several of one kind."""
    host = jax.devices()[3]
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [host])
    made = []
    monkeypatch.setattr(pretrained, "in_int8", lambda model, *_, **__: made.append(model) or model)
    load(workdir[0], "int8")
    assert all(x.devices() == {host} for x in params_of(made[0].transformer).values())


def test_a_workdir_exports_and_comes_back_the_same(workdir, tmp_path):
    directory, _, params = workdir
    model = load(directory)
    save(model, tmp_path / "out", "qwen3")
    again = load(tmp_path / "out")
    for name, value in params_of(again.transformer).items():
        np.testing.assert_array_equal(value, params[name])
    assert (again.mask_token_id, again.eos_token_ids) == (model.mask_token_id, model.eos_token_ids)
    text = "Tom has 4 pears.<|im_end|>"
    assert again.tokenizer(text)["input_ids"] == model.tokenizer(text)["input_ids"]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["pad_token_id"] == model.tokenizer.pad_token_id


def test_the_caller_may_choose_another_free_row_of_a_workdir_but_no_real_token(workdir):
    directory, _, _ = workdir
    assert load(directory, mask_token_id=299).mask_token_id == 299
    with pytest.raises(UserError, match="mask_token_id=50 is the real token"):
        load(directory, mask_token_id=50)


@pytest.mark.parametrize("text", ["{", "{}", '{"config": {"vocab_size": 3}}', '{"config": 3}'])
def test_a_broken_model_file_is_named(workdir, text):
    directory, _, _ = workdir
    (directory / "model.json").write_text(text)
    with pytest.raises(UserError, match="model.json: ") as error:
        load(directory)
    assert "\n" not in str(error.value)


def test_float32_that_is_asked_for_multiplies_in_float32_on_every_device():
    directory = str(ORACLE / "wedlm_qwen3" / "model")

    def in_full_precision(model):
        traced = jax.make_jaxpr(lambda x: model(x, positions=x))(jnp.zeros((1, 4), jnp.int32))
        return str(traced).count("precision=(Precision.HIGHEST, Precision.HIGHEST)")

    default = in_full_precision(load(directory, "float32"))  # rotations alone
    assert in_full_precision(ModelFlags(directory).load()) == default
    assert in_full_precision(ModelFlags(directory, dtype="float32").load()) > default
    assert in_full_precision(load(directory, "float32", matmul_precision="highest")) > default
