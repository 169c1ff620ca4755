"""A model, a batch and an experiment small enough to train in a test."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from wedlm_jax.data.packing import PackedBatch
from wedlm_jax.experiment import DataConfig, Experiment, ModelConfig, ObjectiveConfig, TokenizerConfig, TrainConfig
from wedlm_jax.optimizer import OptimizerConfig
from wedlm_jax.sharding import MeshConfig, make_mesh
from wedlm_jax.train_state import TrainState, from_seed
from wedlm_jax.train_step import StepSettings

MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)
SETTINGS = StepSettings(
    model=MODEL,
    objective=ObjectiveConfig(block_size=4),
    optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=2),
    mask_token_id=3,
    total_steps=20,
    seed=0,
)
EXPERIMENT = Experiment(
    name="tiny",
    model=MODEL,
    tokenizer=TokenizerConfig(vocab_size=300),
    data=DataConfig(row_length=192, num_problems=50),
    objective=ObjectiveConfig(block_size=16),
    train=TrainConfig(steps=6, batch_size=2, log_every=1, checkpoint_every=2, tensorboard=False),
)


def one_device_mesh() -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


@functools.cache
def _made(settings: StepSettings) -> TrainState:
    return from_seed(settings.model, settings.optimizer, one_device_mesh(), settings.seed)


def fresh_state(settings: StepSettings = SETTINGS) -> TrainState:
    """A state of its own arrays, which a step may be given to keep."""
    return jax.tree.map(lambda x: x.copy(), _made(settings))


def packed_batch(rows: int = 8, length: int = 24, block_size: int = 4, seed: int = 0) -> PackedBatch:
    """Two documents a row, of any length, the first third of each a prompt, the row's end padding."""
    random = np.random.default_rng(seed)
    shape = (rows, length)
    tokens, positions, segments, documents = (np.zeros(shape, np.int32) for _ in range(4))
    loss_mask = np.zeros(shape, bool)
    for row in range(rows):
        for document in range(2):
            start = document * length // 2
            size = random.integers(3, length // 2 + 1)
            place = row, slice(start, start + size)
            tokens[place] = random.integers(4, MODEL.vocab_size, size)
            positions[place] = np.arange(size)
            loss_mask[place] = np.arange(size) >= size // 3
            segments[place], documents[place] = document + 1, 2 * row + document
    assert length // 2 % block_size == 0
    return PackedBatch(tokens, loss_mask, positions, segments, documents)


def rows_of(batch: PackedBatch, rows: np.ndarray) -> PackedBatch:
    return PackedBatch(**{field.name: getattr(batch, field.name)[rows] for field in dataclasses.fields(batch)})
