"""Tokenizer files, the mask id and the end ids: who decides, and which collisions are errors."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from wedlm_jax.data.tokenizer import train_tokenizer
from wedlm_jax.errors import UserError
from wedlm_jax.hf.export import save_hf
from wedlm_jax.hf.tokenizer import choose_mask_token_id, copy_tokenizer_files, resolve_mask_token_id, tokenizer_in
from wedlm_jax.hf.weights import load_hf
from wedlm_jax.model.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=220, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8
)


def tokenizer(words: int = 200, **special) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with `words` ordinary tokens w0, w1, ... and further special ones."""
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_caller_then_config_then_tokenizer_then_none(copy_of):
    directory = copy_of("qwen3_plain")
    assert load_hf(directory).mask_token_id is None
    tokenizer(mask_token="<|mask|>").save_pretrained(directory)
    assert load_hf(directory).mask_token_id == 200
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"mask_token_id": 210}))
    assert load_hf(directory).mask_token_id == 210
    assert load_hf(directory, mask_token_id=211).mask_token_id == 211


def test_a_tokenizer_that_only_the_models_config_says_how_to_read_is_kept_whole(tmp_path):
    """vocab.json and merges.txt, as in the first Qwen repositories; a workdir has no config.json beside them."""
    given, kept = tmp_path / "given", tmp_path / "kept"
    given.mkdir()
    kept.mkdir()
    trained = train_tokenizer(["the cat sat on the mat"] * 3, 280)
    trained.backend_tokenizer.model.save(str(given))
    (given / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    read = tokenizer_in(given)
    copy_tokenizer_files(given, read, kept)
    assert (kept / "merges.txt").read_bytes() == (given / "merges.txt").read_bytes()
    again, text = tokenizer_in(kept), "the cat<|endoftext|> sat on a mat"
    assert again(text).input_ids == read(text).input_ids and again.eos_token_id == read.eos_token_id is not None


def test_caller_may_choose_any_row_where_there_is_no_tokenizer(copy_of):
    assert load_hf(copy_of("qwen3_plain"), mask_token_id=0).mask_token_id == 0


@pytest.mark.parametrize("mask_token_id", [True, "5", 5.0])
def test_a_mask_id_that_is_no_whole_number_is_said_to_be_none(copy_of, mask_token_id):
    with pytest.raises(UserError, match="mask_token_id=.* is not a whole number$"):
        load_hf(copy_of("qwen3_plain"), mask_token_id=mask_token_id)


@pytest.mark.parametrize("name", ["qwen3_plain", "wedlm_qwen3"])
def test_a_mask_id_of_numpy_is_taken_as_the_number_that_json_can_hold(copy_of, name):
    assert type(load_hf(copy_of(name), mask_token_id=np.int64(5)).mask_token_id) is int


@pytest.mark.parametrize("mask_token_id", [-1, 220])
def test_outside_the_vocabulary_is_refused(copy_of, mask_token_id):
    with pytest.raises(UserError, match="is not a row of the vocabulary \\(0 to 219\\)"):
        load_hf(copy_of("qwen3_plain"), mask_token_id=mask_token_id)
    with pytest.raises(UserError, match="config.json: mask_token_id=.* is not a row"):
        load_hf(copy_of("wedlm_qwen3", mask_token_id=256))


def test_a_declared_real_token_is_a_warning(copy_of):
    directory = copy_of("wedlm_qwen3", mask_token_id=7)
    tokenizer().save_pretrained(directory)
    with pytest.warns(UserWarning, match="mask id 7 is the real token 'w7'"):
        assert load_hf(directory).mask_token_id == 7


def test_a_declared_free_row_or_mask_token_is_no_warning(copy_of):
    directory = copy_of("wedlm_qwen3", mask_token_id=200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer().save_pretrained(directory)
        load_hf(directory)
        tokenizer(additional_special_tokens=["<|MASK|>"]).save_pretrained(directory)
        load_hf(directory)


def test_a_wedlm_checkpoint_that_names_no_mask_has_that_of_the_official_engine(tmp_path):
    """Tencent's config.json says null, and their engine then takes 151665, whatever their tokenizer has there."""
    padded = dataclasses.replace(CONFIG, vocab_size=151_936)

    def resolved(config, model_type, tokenizer=None):
        raw = {"model_type": model_type, "mask_token_id": None}
        return resolve_mask_token_id(config, raw, tmp_path / "config.json", tokenizer, None)

    assert resolved(padded, "wedlm") == resolved(padded, "wedlm", tokenizer()) == 151_665
    assert resolved(padded, "qwen3") is None and resolved(CONFIG, "wedlm") is None
    assert resolved(padded, "wedlm", tokenizer(mask_token="<m>")) == 200


def test_for_an_ar_base_the_callers_collision_is_an_error(copy_of):
    directory = copy_of("qwen3_plain")
    tokenizer(additional_special_tokens=["<tool_response>"]).save_pretrained(directory)
    with pytest.raises(
        UserError, match="mask_token_id=200 is the real token '<tool_response>' of the tokenizer; choose a free"
    ):
        load_hf(directory, mask_token_id=200)
    assert load_hf(directory, mask_token_id=201).mask_token_id == 201


def test_for_an_adapted_model_the_callers_collision_is_a_warning(copy_of):
    directory = copy_of("wedlm_qwen3", mask_token_id=...)
    tokenizer().save_pretrained(directory)
    with pytest.warns(UserWarning, match="real token 'w9'"):
        assert load_hf(directory, mask_token_id=9).mask_token_id == 9


def test_choosing_takes_the_tokenizers_mask_then_the_first_free_row():
    assert choose_mask_token_id(CONFIG, tokenizer()) == 200
    assert choose_mask_token_id(CONFIG, tokenizer(additional_special_tokens=["<a>", "<b>"])) == 202
    assert choose_mask_token_id(CONFIG, tokenizer(mask_token="<m>", additional_special_tokens=["<b>"])) in (200, 201)
    assert choose_mask_token_id(CONFIG, tokenizer(), 215) == 215
    assert choose_mask_token_id(CONFIG, None, 3) == 3


def test_where_no_row_is_free_a_reserved_token_is_the_mask(copy_of):
    reserved = [f"<|reserved_special_token_{i}|>" for i in (0, 1)]
    full = tokenizer(217, additional_special_tokens=["<|end|>", *reserved])
    assert choose_mask_token_id(CONFIG, full) == 218 == full.convert_tokens_to_ids(reserved[0])
    assert choose_mask_token_id(CONFIG, full, 219) == 219
    with pytest.raises(UserError, match=r"mask_token_id=217 is the real token '<\|end\|>'"):
        choose_mask_token_id(CONFIG, full, 217)
    assert choose_mask_token_id(CONFIG, tokenizer(additional_special_tokens=reserved)) == 202


def test_a_token_above_a_hole_in_the_vocabulary_is_a_real_one():
    backend = Tokenizer(models.WordLevel({"w0": 0, "far": 210}, unk_token="w0"))
    with pytest.raises(UserError, match="mask_token_id=210 is the real token 'far'"):
        choose_mask_token_id(CONFIG, PreTrainedTokenizerFast(tokenizer_object=backend), 210)


def test_choosing_refuses_collisions_full_vocabularies_and_guesses():
    with pytest.raises(UserError, match="real token 'w3'"):
        choose_mask_token_id(CONFIG, tokenizer(), 3)
    with pytest.raises(UserError, match="fills all vocab_size=220 rows"):
        choose_mask_token_id(CONFIG, tokenizer(220))
    with pytest.raises(UserError, match="without a tokenizer"):
        choose_mask_token_id(CONFIG, None)
    with pytest.raises(UserError, match="mask_token_id=220 is not a row"):
        choose_mask_token_id(CONFIG, tokenizer(), 220)


def test_end_ids_come_from_generation_config_then_config_then_tokenizer(copy_of):
    directory = copy_of("qwen3_plain")
    assert load_hf(directory).eos_token_ids == ()
    tokenizer(eos_token="<|end|>").save_pretrained(directory)
    assert load_hf(directory).eos_token_ids == (200,)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"eos_token_id": 5}))
    assert load_hf(directory).eos_token_ids == (5,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert load_hf(directory).eos_token_ids == (6, 7)


def test_the_tokenizers_end_joins_those_of_a_wedlm_checkpoint(copy_of):
    """As in the official engine: the config of an instruct model may name the end of a document alone."""
    directory = copy_of("wedlm_qwen3", eos_token_id=5)
    assert load_hf(directory).eos_token_ids == (5,)
    tokenizer(eos_token="<|end|>").save_pretrained(directory)
    assert load_hf(directory).eos_token_ids == (5, 200)
    (directory / "generation_config.json").write_text('{"eos_token_id": [6, 200]}')
    assert load_hf(directory).eos_token_ids == (6, 200)


def test_end_ids_that_are_no_ids_are_named(copy_of):
    directory = copy_of("qwen3_plain")
    (directory / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(UserError, match="generation_config.json: eos_token_id="):
        load_hf(directory)


@pytest.mark.parametrize(("stored", "outside"), [("256", 256), ("[5, -1]", -1)])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_ids_outside_the_vocabulary_are_told_by_the_file_that_has_them(copy_of, file, stored, outside):
    directory = copy_of("qwen3_plain")
    raw = json.loads((directory / "config.json").read_text()) if file == "config.json" else {}
    (directory / file).write_text(json.dumps(raw | {"eos_token_id": json.loads(stored)}))
    with pytest.raises(UserError, match=rf"/{file}: eos_token_id={outside} is not a row of the vocabulary \(0 to"):
        load_hf(directory)


def test_the_tokenizers_end_outside_the_vocabulary_is_told_as_its_own(copy_of):
    directory = copy_of("qwen3_plain")
    tokenizer(300, eos_token="<|end|>").save_pretrained(directory)
    with pytest.raises(UserError, match="the tokenizer's end token=300 is not a row of the vocabulary"):
        load_hf(directory)


def test_tokenizer_files_are_carried_along_unchanged(copy_of, tmp_path):
    directory = copy_of("qwen3_plain")
    tokenizer(eos_token="<|end|>").save_pretrained(directory)
    save_hf(load_hf(directory), tmp_path / "out", "qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (directory / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert tokenizer_in(tmp_path / "out")("w1 w2")["input_ids"] == [1, 2]


def test_a_tokenizer_model_alone_is_warned_of_and_carried_along(tmp_path, copy_of):
    directory = copy_of("qwen3_plain")
    (directory / "tokenizer.model").write_bytes(b"pieces")
    with pytest.warns(UserWarning, match="no tokenizer, as tokenizer.model is not read here; write its tokenizer.json"):
        model = load_hf(directory)
    assert model.tokenizer is None
    for _ in range(2):  # over an earlier export as well
        save_hf(model, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"pieces"


def test_a_tokenizer_without_files_is_saved(tmp_path, copy_of):
    model = load_hf(copy_of("qwen3_plain"))
    model.tokenizer, model.files = tokenizer(eos_token="<|end|>", pad_token="w1"), None
    save_hf(model, tmp_path / "out", "qwen3")
    again = load_hf(tmp_path / "out")
    assert again.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] == 1


def test_a_broken_tokenizer_is_one_line(copy_of):
    directory = copy_of("qwen3_plain")
    (directory / "tokenizer.json").write_text("{broken")
    with pytest.raises(UserError, match="the tokenizer cannot be read") as error:
        load_hf(directory)
    assert "\n" not in str(error.value)
