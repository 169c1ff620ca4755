"""Distinct-n, repetition, perplexity and entropy by hand; thirds of the prompts; what each decoder wrote is what is measured."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.evals.models import tiny_model
from wedlm_jax.data.stdlib_code import CodeFile
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import generate
from wedlm_jax.errors import UserError
from wedlm_jax.evals import open_ended
from wedlm_jax.evals.open_ended import by_level, code_prompts, distinct, judge, mauve_score, measure, repetition
from wedlm_jax.evals.sweep import ADAPTED, Setting

FILES = [CodeFile(f"{i}.py", "".join(f"x{i} = {j}\n" for j in range(60))) for i in range(3)]


def test_distinct_counts_over_all_texts_and_repetition_inside_each():
    texts = [[1, 2, 1, 2, 1], [1, 2, 3]]
    assert distinct(texts, 1) == 3 / 8 and distinct(texts, 2) == 3 / 6
    assert repetition(texts, 2) == pytest.approx((1 - 2 / 4 + 0) / 2)
    assert repetition([[1, 2]], 4) is not None and math.isnan(repetition([[1, 2]], 4)) and math.isnan(distinct([[]], 1))


@pytest.mark.parametrize("lengths", [(3, 4), (290, 60)])  # one chunk of positions, and two
def test_the_judge_is_one_plain_forward(lengths):
    model, random = tiny_model(), np.random.default_rng(0)
    prompt, ids = (random.integers(1, 500, n).tolist() for n in lengths)
    tokens, n = jnp.asarray([prompt + ids]), len(prompt)
    positions = jnp.arange(sum(lengths))[None]
    log_p = np.asarray(jax.nn.log_softmax(model(tokens, positions=positions)))[0]
    found = judge(model, prompt, ids)
    assert found.nats == pytest.approx(-sum(log_p[n - 1 + i, token] for i, token in enumerate(ids)), rel=1e-5)
    assert found.prompt_entropy == pytest.approx(-(np.exp(log_p[:n]) * log_p[:n]).sum(-1).mean(), rel=1e-5)
    hidden = model.hidden(tokens, positions=positions)[0, -1]
    np.testing.assert_allclose(found.feature, hidden, rtol=1e-5, atol=1e-5)
    assert judge(model, prompt, []).nats == 0


def test_an_empty_reference_is_told_before_anything_is_decoded(monkeypatch):
    monkeypatch.setattr(open_ended, "setting_by_setting", lambda *_, **__: pytest.fail("a prompt was decoded"))
    settings = [Setting("ar", ADAPTED, DecodeConfig(decoder="ar"))]
    with pytest.raises(UserError, match="what follows prompt 1 is empty"):
        measure(tiny_model(), settings, ["x = 1\n"] * 2, ["y = 2\n", ""], batch_size=1)


def test_prompts_fall_into_thirds_by_entropy():
    assert by_level([0.5, 0.1, 0.9, 0.3, 0.7, 0.2]) == {"low": [1, 5], "medium": [0, 3], "high": [2, 4]}
    assert by_level([0.5]) == {"low": [0]}


def test_code_prompts_take_turns_among_the_files_and_know_what_follows():
    found = code_prompts(FILES, 40, 7, 0)
    assert len(found) == 7 and len({prompt.split()[0] for prompt, _ in found[:3]}) == 3
    for prompt, following in found:
        assert any(prompt + following in file.text for file in FILES) and len(prompt) >= 40
    assert found != code_prompts(FILES, 40, 7, 1)
    with pytest.raises(UserError, match="no held-out file holds 4000 characters; lower --characters"):
        code_prompts(FILES, 1000, 1, 0)


def test_every_decoder_is_measured_on_every_prompt_and_verified_writes_what_ar_writes(monkeypatch):
    model, prompts = tiny_model(), [prompt for prompt, _ in code_prompts(FILES, 20, 4, 0)]
    limits = dict(max_new_tokens=8, window_size=4, entropy_threshold=math.inf)
    settings = [Setting(d, ADAPTED, DecodeConfig(decoder=d, **limits)) for d in ("ar", "streaming", "verified")]
    features = []

    def compute_mauve(*, p_features, q_features, seed, verbose):
        features.append((p_features.shape, q_features.shape))
        return type("Result", (), {"mauve": 0.5})

    monkeypatch.setattr(open_ended, "load_mauve", lambda: compute_mauve)
    found = measure(model, settings, prompts, ["x = 1\n"] * 4, batch_size=2)
    ar, streaming, verified = found.measures
    by_hand = [generate(model, [prompt], settings[0].config)[0] for prompt in prompts]
    assert (
        [text["ar"] for text in found.texts] == [c.text for c in by_hand] == [text["verified"] for text in found.texts]
    )
    nats = sum(judge(model, model.tokenizer(p)["input_ids"], c.ids).nats for p, c in zip(prompts, by_hand, strict=True))
    assert ar.perplexity == pytest.approx(math.exp(nats / ar.tokens)) == verified.perplexity
    assert ar.distinct == verified.distinct and ar.repetition == verified.repetition and ar.speedup_over_ar == 1
    assert ar.tokens_per_forward == 1 < streaming.tokens_per_forward and streaming.perplexity > ar.perplexity
    assert {row.task for row in found.rows} == set(found.bounds) == {"low", "medium", "high"}
    assert len(found.rows) == 9 and features == [((4, 16), (4, 16))] * 3 and ar.mauve == 0.5
    assert all(
        low <= found.entropies[i] <= high for i, t in enumerate(found.texts) for low, high in [found.bounds[t["level"]]]
    )


def test_mauve_of_a_text_with_itself_is_one_where_the_package_is():
    pytest.importorskip("mauve")
    features = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    assert mauve_score(features, features) > 0.95 > mauve_score(features + 9, features)
