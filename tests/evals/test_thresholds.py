"""Agreement with AR is counted token by token, each behind the completion's own beginning."""

import numpy as np

from wedlm_jax import DecodeConfig, generate
from wedlm_jax.evals.thresholds import disagreements

from ..decode.models import MASK, TINY, config_of, tiny_model

PROMPT = [1, 2, 3]


def test_ar_decoding_agrees_with_itself():
    config = config_of("ar")
    assert disagreements(tiny_model(), PROMPT, generate(tiny_model(), [PROMPT], config)[0].ids, MASK) == 0


def test_every_token_that_ar_would_not_have_chosen_is_counted_once():
    rng = np.random.default_rng(0)
    for ids in (rng.integers(0, TINY.vocab_size - 1, 9).tolist() for _ in range(3)):
        one = DecodeConfig("ar", max_new_tokens=1, stop_ids=())
        chosen = generate(tiny_model(), [PROMPT + ids[:i] for i in range(len(ids))], one)
        expected = sum(c.ids[0] != token for c, token in zip(chosen, ids, strict=True))
        assert disagreements(tiny_model(), PROMPT, ids, MASK) == expected > 0


def test_the_mask_is_not_what_ar_would_have_chosen_unless_it_may_be():
    def count(banned):
        return sum(disagreements(tiny_model(), [i % 11, i // 11], [MASK], banned) for i in range(33))

    assert count(MASK) == 33 and 0 < count(None) < 33
