"""The least time of a forward, counted by hand."""

import jax
import pytest

from wedlm_jax.errors import UserError
from wedlm_jax.evals import roofline
from wedlm_jax.evals.roofline import Rates, forward_seconds
from wedlm_jax.model.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
    qk_norm=False,
)  # fmt: skip
LAYER = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8  # q, k and v, o, the MLP, two norms
WEIGHTS = 2 * LAYER + 8 + 100 * 8  # the final norm and the output layer
CACHE = 2 * 2 * 4  # keys and values of a slot, both layers


def test_devices_together_do_what_each_does():
    assert Rates(2.0, 3.0).times(4) == Rates(8.0, 12.0)


def test_where_reading_takes_longer_it_is_the_weights_and_the_cache_once():
    seconds = forward_seconds(CONFIG, Rates(flops=1e30, bytes=10.0), rows=3, slots=4, read=4, context=50)
    assert seconds == pytest.approx((WEIGHTS + 3 * 50 * CACHE) * 4 / 10)


def test_where_computing_takes_longer_it_is_every_slot_through_the_weights_and_over_the_context():
    seconds = forward_seconds(CONFIG, Rates(flops=10.0, bytes=1e30), rows=3, slots=4, read=4, context=50)
    scores = 2 * 2 * 2 * 4 * 50  # two products, two layers, two heads of 4
    assert seconds == pytest.approx(2 * (WEIGHTS + scores) * 3 * 4 / 10)


def test_a_slot_that_is_not_read_leaves_keys_and_values_and_in_the_last_layer_nothing_else():
    rates = Rates(flops=10.0, bytes=1e30)
    seconds = [forward_seconds(CONFIG, rates, rows=3, slots=4, read=read, context=50) for read in (4, 3)]
    scores = 2 * 2 * 4 * 50  # two products, two heads of 4, the last layer alone
    spared = 100 * 8 + 2 * 8 * 8 + 3 * 8 * 16 + scores  # the output layer, q and o, the MLP
    assert seconds[0] - seconds[1] == pytest.approx(2 * spared * 3 / 10)


def test_rates_are_measured_on_this_machine():
    rates = Rates.measured("float32")
    assert 1e8 < rates.flops < 1e16 and 1e8 < rates.bytes < 1e14


def test_products_are_measured_in_the_precision_of_the_model(monkeypatch):
    measured = []
    monkeypatch.setattr(roofline, "_seconds", lambda run, x: measured.append(run.lower(x).as_text()) or 1.0)
    Rates.measured("float32", "highest")
    Rates.measured("float32")
    assert ["HIGHEST" in text for text in measured[::2]] == [True, False]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rate_of_reading_is_of_bytes_whatever_the_numbers_of_the_model(monkeypatch, dtype):
    timed = []

    def half_a_second(run, x):
        timed.append(x)
        return 0.5

    monkeypatch.setattr(roofline, "_seconds", half_a_second)
    rates = Rates.measured(dtype)
    matrix, long = timed
    assert (matrix.dtype, long.dtype) == (dtype, "float32")  # of bfloat16, what a CPU is slow at is the product
    assert rates == Rates(4 * len(matrix) ** 3, 2 * long.nbytes)


def test_no_room_for_the_array_that_is_read_is_one_line(monkeypatch):
    def full(run, x):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(roofline, "_seconds", full)
    with pytest.raises(UserError, match=r"takes 0\.2 GiB beside the model; take a smaller one, or --dtype bfloat16"):
        Rates.measured("float32")
