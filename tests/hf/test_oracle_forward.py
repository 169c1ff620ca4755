"""Forward passes of the official code (and of stock transformers) against ours, logical positions in any order."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from wedlm_jax.hf.weights import load_hf
from wedlm_jax.model.parameters import params_of, transformer_from

from .conftest import MODELS, ORACLE

CASES = [
    (model, case)
    for model in MODELS
    for case in sorted({name.rpartition(".")[0] for name in load_file(ORACLE / model / "forward.safetensors")})
]


def test_every_model_has_its_cases():
    assert len(CASES) == 3 * 5 + 2


@pytest.mark.parametrize(("name", "case"), CASES)
def test_logits_equal_the_oracle(name, case):
    model = load_hf(ORACLE / name / "model", "float32")
    config = dataclasses.replace(model.config, matmul_precision="highest")
    transformer = transformer_from(config, params_of(model.transformer))
    expected = load_file(ORACLE / name / "forward.safetensors")
    tokens, positions = (jnp.asarray(expected[f"{case}.{key}"]) for key in ("input_ids", "position_ids"))
    logits = transformer(tokens, positions=positions)
    tolerance = 2e-3 if case == "offset_and_gaps" else 5e-4
    np.testing.assert_allclose(logits, expected[f"{case}.logits"], atol=tolerance, rtol=0)
