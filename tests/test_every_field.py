"""Every field of every config changes something: each has a probe here, or a row in a table of such tests elsewhere."""

import dataclasses
import io
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from tests.data.test_config_fields import CHANGES as DATA
from tests.data.test_config_fields import ELSEWHERE as DATA_ELSEWHERE
from tests.decode import test_stream as decode_stream
from tests.decode.test_invariants import FIELDS as DECODE
from tests.evals.models import tiny_model
from tests.model.test_adapter import CHANGES as ADAPTER
from tests.model.test_config_fields import CHANGES as MODEL
from tests.model.test_rope_scaling import CHANGES as ROPE_SCALING
from tests.test_self_generation import CHANGES as SELF_GENERATED
from tests.test_train_fields import CHANGES as TRAIN
from tests.test_train_fields import configs
from tests.test_train_step import OBJECTIVE
from tests.tiny_training import EXPERIMENT
from tests.tiny_training import MODEL as SHAPE
from wedlm_jax import evaluate, workdir
from wedlm_jax.config_tree import sections_of
from wedlm_jax.data.config import DataConfig, SelfGenerated, SourceConfig, WeightedSource
from wedlm_jax.data.tokenizer import save_tokenizer, train_tokenizer
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.evals.config import EvaluationConfig
from wedlm_jax.evals.likelihood import BitsPerByte, Recovery
from wedlm_jax.evals.problems import tasks_of
from wedlm_jax.evals.sweep import ADAPTED, settings_of
from wedlm_jax.experiment import Experiment, ModelConfig, ModelOverrides, TokenizerConfig, TrainConfig, override
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.rope_scaling import RopeScaling
from wedlm_jax.objective import ObjectiveConfig
from wedlm_jax.optimizer import OptimizerConfig, clip_by_global_norm, learning_rate, make_adamw
from wedlm_jax.sharding import MeshConfig, batch_sharding, make_mesh
from wedlm_jax.train_state import abstract_state

# Tables of tests that change one field after the other and look at what comes out.
TABLES = {
    ModelConfig: MODEL,
    AdapterConfig: ADAPTER,
    RopeScaling: ROPE_SCALING,
    SourceConfig: DATA | DATA_ELSEWHERE,
    WeightedSource: DATA | DATA_ELSEWHERE,
    DataConfig: DATA | DATA_ELSEWHERE,
    SelfGenerated: SELF_GENERATED,
    TrainConfig: TRAIN,
    DecodeConfig: DECODE | {"stop": decode_stream.test_a_stop_string_ends_the_row_and_is_dropped},
    ObjectiveConfig: OBJECTIVE,
}
# The others, with a changed value; what they change is in the probe of their config below.
CHANGED = {
    OptimizerConfig: {
        "learning_rate": 0.5, "schedule": "linear", "warmup_steps": 3, "warmup_ratio": 0.5, "final_fraction": 0.5, "b1": 0.5,
        "b2": 0.5, "eps": 1.0, "weight_decay": 0.5, "decay_mask": "official", "clip_norm": 0.01,
        "first_moment_dtype": "bfloat16",
    },
    MeshConfig: {"data": 4, "fsdp": 4, "tensor": 4},
    TokenizerConfig: {"path": "tokenizer", "vocab_size": 270},
    ModelOverrides: {
        "dtype": "bfloat16", "param_dtype": "bfloat16", "matmul_precision": "highest", "remat": "full", "scan_layers": False,
        "mlp_tile": 4, "attention": "xla",
    },
    EvaluationConfig: {
        "tasks": ("copying",), "questions": "others.jsonl", "match": "text",
        "problems_per_task": 2, "held_out_files": 2, "masked_loss_rows": 4, "text_prompts": 2,
        "text_prompt_characters": 90, "batch_size": 2, "max_new_tokens": 9, "window_size": 4, "entropy_thresholds": (0.3,),
        "verified_entropy_threshold": 0.3, "verified_windows": (3,), "text_drafts": False, "distance_penalty": 0.3,
        "block_size": 4, "confidence_threshold": 0.3, "in_place": True, "seed": 1,
    },
    Experiment: {"name": "other", "init_from": "second"},
}  # fmt: skip


def test_every_field_of_every_config_has_a_probe():
    """Those of an experiment, from the root down, and those of a decode; the section of a field is its fields."""
    missing = []
    for cls in (*configs(), DecodeConfig):
        probed = TABLES.get(cls, {}).keys() | CHANGED.get(cls, {}).keys()
        hints = typing.get_type_hints(cls)
        plain = {field.name for field in dataclasses.fields(cls) if not sections_of(hints[field.name])}
        missing += [f"{cls.__name__}.{name}" for name in plain - probed]
        assert cls not in CHANGED or CHANGED[cls].keys() == plain, cls
    assert missing == []
    in_a_tuple = {SourceConfig, WeightedSource}  # of data.mixture
    assert configs() | {DecodeConfig} | in_a_tuple == TABLES.keys() | CHANGED.keys()


@pytest.fixture(scope="module")
def optimizer():
    """Learning rates of ten steps, then two clipped updates of a kernel and a scale."""
    params = {"final_norm.scale": jnp.array([1.0]), "lm_head.kernel": jnp.array([2.0])}

    def outcome(config: OptimizerConfig):
        rates = [learning_rate(config, jnp.asarray(step), 10) for step in range(10)]
        adamw = make_adamw(config)
        state, directions = adamw.init(params), []
        for factor in (0.3, -0.1):
            gradients, _ = clip_by_global_norm({name: factor * x for name, x in params.items()}, config.clip_norm)
            direction, state = adamw.update(gradients, state, params)
            directions += [np.concatenate([direction[name] for name in params])]
        return [*map(float, rates), *np.concatenate(directions).tolist(), str(state[0].mu["lm_head.kernel"].dtype)]

    return outcome, OptimizerConfig()


@pytest.fixture(scope="module")
def mesh():
    """What lies on one device of eight: of each parameter, and of a batch."""
    if jax.device_count() < 8:
        pytest.skip("needs eight devices (tests/conftest.py asks for them)")

    def outcome(config: MeshConfig):
        mesh = make_mesh(config)
        params = abstract_state(SHAPE, OptimizerConfig(), mesh).params
        parts = {name: x.sharding.shard_shape(x.shape) for name, x in params.items()}
        return parts | {"batch": batch_sharding(mesh).shard_shape((8, 16))}

    return outcome, {"data": MeshConfig(2, -1, 1), "fsdp": MeshConfig(-1, 2, 1), "tensor": MeshConfig(-1, 1, 2)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The vocabulary."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("Tom has three apples. " * 9)
    save_tokenizer(train_tokenizer(["the cat sat on the mat"] * 3, 265), folder / "tokenizer")
    data = DataConfig(source="text", path=str(folder / "a.txt"), held_out_share=0)

    def outcome(config: TokenizerConfig):
        if config.path:
            config = dataclasses.replace(config, path=str(folder / config.path))
        return make_tokenizer(config, data).get_vocab()

    return outcome, TokenizerConfig()


def loaded(experiment: Experiment):
    """The config of the model that it starts from, and where that is looked for; no weights are read."""
    paths = []

    def load(path, **_):
        paths.append(path)
        return types.SimpleNamespace(config=SHAPE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workdir, "load", load)
        return workdir.load_initial(experiment, make_mesh(MeshConfig(), jax.devices()[:1]))[1], paths


@pytest.fixture(scope="module")
def overrides():
    """How the model of init_from is computed."""
    start = dataclasses.replace(EXPERIMENT, model=None, init_from="first")
    return (lambda config: loaded(dataclasses.replace(start, model=config))), ModelOverrides()


@pytest.fixture(scope="module")
def experiment():
    """Where it is trained, and what it starts from."""
    start = dataclasses.replace(EXPERIMENT, model=None, init_from="first")
    return (lambda config: (config.workdir, loaded(config))), start


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    """What the evaluation of a trained workdir hands to the decoders and to the two losses; nothing is decoded."""
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "library").mkdir()
    for number in range(120):  # a twentieth is held out
        lines = (f"def f{j}(x):\n    return x + {number * j}\n" for j in range(60))
        (folder / "library" / f"m{number}.py").write_text("".join(lines))
    for name in ("questions", "others"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "Q", "answer": "It is 7"}')
    model = tiny_model()
    trained = override(
        EXPERIMENT, "data.source=stdlib_code", f"data.path={folder / 'library'}", "data.num_problems=100"
    )

    def outcome(config: EvaluationConfig):
        seen: dict[str, object] = {}

        def sweep(models, settings, tasks, *, batch_size, on_batch, on_task):
            seen["sweep"] = settings, [(task.name, problems) for task, problems in tasks], batch_size
            return [], {}

        def bits_per_byte(model, texts, encode, *, before, row_length, batch_size):
            seen["texts"] = len(texts)
            return BitsPerByte(bits=1.0, bytes=1, tokens=1)

        def recovery_by_ratio(model, rows, *, block_size, reorder):
            seen["rows"] = [row.tokens.shape for row in rows], block_size
            return {0.5: Recovery(1.0, 0.5)}

        there = dataclasses.replace(config, questions=str(folder / (config.questions or "")))
        problems = tasks_of(there, trained.data, model)
        settings = settings_of(config, with_base=False)
        plan = evaluate.Plan("x", {ADAPTED: model}, settings, problems, config, trained, None)
        with pytest.MonkeyPatch.context() as patch:
            for stand_in in (sweep, bits_per_byte, recovery_by_ratio):
                patch.setattr(evaluate, stand_in.__name__, stand_in)
            for name in ("results_table", "show_continuations", "show_one_decode"):
                patch.setattr(evaluate, name, lambda *_: "")
            evaluate.evaluate(plan, Console(file=io.StringIO()))
        return seen

    return outcome, EvaluationConfig(problems_per_task=3, text_prompts=1, questions="questions.jsonl")


PROBES = {
    OptimizerConfig: "optimizer", MeshConfig: "mesh", TokenizerConfig: "tokenizer", ModelOverrides: "overrides",
    Experiment: "experiment", EvaluationConfig: "evaluation",
}  # fmt: skip


@pytest.mark.parametrize(("cls", "field"), [(cls, field) for cls, fields in CHANGED.items() for field in fields])
def test_changing_a_field_changes_what_comes_out(cls, field, request):
    outcome, base = request.getfixturevalue(PROBES[cls])
    config = base[field] if isinstance(base, dict) else base
    changed = dataclasses.replace(config, **{field: CHANGED[cls][field]})
    assert getattr(config, field) != getattr(changed, field)
    assert outcome(config) == outcome(config)
    assert outcome(changed) != outcome(config)
