"""The tokenizer: every text round-trips, training is deterministic, its files load anywhere."""

import concurrent.futures
import copy
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.data.tiny import config_of, sentencepiece, with_bos
from tests.data.tiny import tokenizer as tiny_tokenizer
from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.quickstart_tasks import QuickstartProblems
from wedlm_jax.data.records import BadRecord
from wedlm_jax.data.tokenizer import (
    SPECIAL_TOKENS,
    TokenizerConfig,
    decoder_behind,
    encode_text,
    encode_with_control_tokens,
    load_tokenizer,
    save_tokenizer,
    start_of_text,
    train_tokenizer,
    vocabulary_rows,
)
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.errors import UserError
from wedlm_jax.hf.tokenizer import write_chat_template

TOKENIZER = make_tokenizer(TokenizerConfig(vocab_size=576), DataConfig())


@given(st.text(max_size=40) | st.sampled_from(["<|im_end|>", " a  b ", "1234 ٣٤", "\r\n \r\x00"]))
def test_every_text_round_trips_and_never_gives_a_special_token(text):
    ids = encode_text(TOKENIZER, text)
    assert TOKENIZER.decode(ids) == text
    assert all(token >= len(SPECIAL_TOKENS) for token in ids)


def test_every_word_and_number_of_the_quickstart_tasks_is_one_token():
    for problem in QuickstartProblems("train", 1, 200):
        for piece in re.findall(r" (?:[A-Za-z]+|\d+)", problem.prompt + problem.solution):
            assert len(encode_text(TOKENIZER, piece)) == 1, piece


def test_special_tokens_have_the_first_ids_and_their_roles():
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.mask_token_id) == (0, 2, 3)


def test_training_twice_writes_the_same_files(tmp_path):
    for name in ("one", "two"):
        save_tokenizer(make_tokenizer(TokenizerConfig(vocab_size=576), DataConfig()), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["tokenizer.json", "tokenizer_config.json"]
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_saved_files_load_by_us_and_by_AutoTokenizer(tmp_path):
    save_tokenizer(TOKENIZER, tmp_path)
    text = "Q: Tom has 7 apples. A:"
    for loaded in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert encode_text(loaded, text) == encode_text(TOKENIZER, text)
        assert (loaded.eos_token_id, loaded.mask_token_id, loaded.pad_token_id) == (2, 3, 0)
        assert loaded.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
        ) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    # the name that transformers 4 knows as well
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_further_control_tokens_are_saved_by_the_name_that_older_transformers_know(tmp_path):
    """transformers 4 cannot read a tokenizer_config.json with a list of `extra_special_tokens`."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision|>"]})
    save_tokenizer(tokenizer, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["additional_special_tokens"] == ["<|vision|>"] and "extra_special_tokens" not in config
    again = load_tokenizer(tmp_path)
    assert encode_with_control_tokens(again, "<|vision|>") == [len(TOKENIZER)]
    assert len(encode_text(again, "<|vision|>")) > 1


def test_files_are_in_utf_8_whatever_the_locale_has(tmp_path, monkeypatch):
    """Control tokens of some models have letters of no other encoding."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|用户|>"]})
    monkeypatch.setattr("io.text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")
    save_tokenizer(tokenizer, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_bytes(config.read_bytes().replace(b"{", b'{"chat_template": "",', 1))
    write_chat_template(tokenizer, tmp_path)
    assert json.loads(config.read_bytes())["additional_special_tokens"] == ["<|用户|>"]


def test_make_tokenizer_loads_the_one_that_is_named(tmp_path):
    save_tokenizer(train_tokenizer(["abc abc"], 300), tmp_path)
    assert len(make_tokenizer(TokenizerConfig(path=str(tmp_path)), DataConfig())) == len(load_tokenizer(tmp_path)) < 300


def test_a_missing_broken_or_empty_directory_is_one_line(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version":')
    with pytest.raises(UserError, match="the tokenizer cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_smaller_than_the_bytes_is_an_error():
    with pytest.raises(UserError, match="tokenizer.vocab_size=100 is too small"):
        TokenizerConfig(vocab_size=100)


@pytest.fixture
def threads_switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)  # a thousandth of the default
    yield
    sys.setswitchinterval(before)


def test_threads_that_encode_text_and_prompts_do_not_change_each_others_tokens(threads_switch_often):
    """The Rust tokenizer holds "spell out control tokens" as its own state; a race there corrupts training data in silence."""
    text = "a<|im_end|>b" * 20
    encoders = (encode_text, encode_with_control_tokens)
    alone = [encode(TOKENIZER, text) for encode in encoders]
    assert alone[0] != alone[1]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(lambda e=encode: [e(TOKENIZER, text) for _ in range(1000)]) for encode in encoders]
        for run, expected in zip(runs, alone, strict=True):
            assert all(ids == expected for ids in run.result())


def test_a_table_has_rows_for_the_largest_id_whatever_ids_are_missing(tmp_path):
    gaps = copy.deepcopy(tiny_tokenizer())
    gaps.get_vocab = lambda: {"a": 0, "b": 4, "c": 330}
    assert vocabulary_rows(gaps) == 331
    np.save(tmp_path / "a.npy", np.array([0, 330, 4], np.int32))
    documents = Documents(config_of(tmp_path / "a.npy", "tokens"), gaps, 0, "train")
    assert [example.tokens.tolist() for example in documents[0].examples] == [[0, 330, 4]]
    np.save(tmp_path / "b.npy", np.array([0, 331], np.int32))
    with pytest.raises(BadRecord, match="token 331 at place 1 is none of the tokenizer's, 0 to 330"):
        Documents(config_of(tmp_path / "b.npy", "tokens"), gaps, 0, "train")[0]


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, sentencepiece])
@pytest.mark.parametrize("text", ["a rat ate", "tee:\n    return a", "  a  nut", "é世 a🙂 a"])
def test_the_text_of_a_prompt_and_the_text_behind_it_are_the_whole_text(tokenizer, text):
    """No space is lost where a text is cut, and half a character is none of either."""
    ids = encode_text(tokenizer(), text)
    assert tokenizer().decode(ids) == text
    halves = [(tokenizer().decode(ids[:cut]), decoder_behind(tokenizer())(ids[cut:])) for cut in range(1, len(ids) + 1)]
    whole = [before + behind for before, behind in halves if "\N{REPLACEMENT CHARACTER}" not in before + behind]
    assert whole == [text] * len(whole)
    assert len(whole) > 1


def test_no_space_is_taken_out_of_a_text_by_what_comes_behind_it(tmp_path):
    """Whatever its files say, which an export has as they were: a text is the pieces that were streamed, joined."""
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), (" ", -1.0), ("!", -1.0)], 0))
    pieces.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=pieces, clean_up_tokenization_spaces=True).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["clean_up_tokenization_spaces"] is True
    tokenizer = load_tokenizer(tmp_path)
    ids = encode_text(tokenizer, "a !")
    assert (
        tokenizer.decode(ids) == decoder_behind(tokenizer)(ids) == "".join(map(decoder_behind(tokenizer), ids)) == "a !"
    )


def test_the_start_of_a_text_is_what_its_tokenizer_puts_before_any_text():
    assert start_of_text(tiny_tokenizer()) == () == start_of_text(sentencepiece())
    assert start_of_text(with_bos()) == (with_bos().bos_token_id,)


@pytest.mark.parametrize("model", [models.BPE, models.WordLevel], ids=["BPE", "WordLevel"])
@pytest.mark.parametrize("begins", [True, False])
def test_of_a_vocabulary_without_the_letter_a_too(model, begins):
    """As of DNA, and as one of whole words, which raises an error of its own."""
    vocabulary = {name: number for number, name in enumerate(["<s>", "C", "G"])}
    of_dna = Tokenizer(model(vocab=vocabulary, **({"merges": []} if model is models.BPE else {})))
    if begins:
        of_dna.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_dna, bos_token="<s>")
    assert start_of_text(tokenizer) == ((0,) if begins else ())


def test_commands_start_without_torch(tmp_path):
    """Which takes seconds to import, where it is installed at all."""
    save_tokenizer(tiny_tokenizer(), tmp_path)
    script = (
        "import sys, wedlm_jax.train, wedlm_jax.serve.__main__\n"
        "from wedlm_jax.data.tokenizer import load_tokenizer\n"
        f"load_tokenizer({str(tmp_path)!r})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
