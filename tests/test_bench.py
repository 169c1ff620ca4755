"""`python -m wedlm_jax.bench`: every decoder on every piece of work, a table, JSON and a plot, and where AR wins."""

import dataclasses
import json
import os
import sys
import weakref
from pathlib import Path

import pytest
from flax import nnx

from tests.bad_input import full_disk
from tests.baselines.engines import with_fake_engines
from tests.decode.test_calibration import FOUND
from tests.evals.models import tiny_model
from wedlm_jax import bench as command
from wedlm_jax.baselines.process import EngineEnded
from wedlm_jax.errors import UserError
from wedlm_jax.evals.roofline import Rates
from wedlm_jax.evals.speed import Speed, Work
from wedlm_jax.model.rope_scaling import RopeScaling
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.pretrained import save


def run(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, args)])
    status = 0
    try:
        command.main()
    except SystemExit as exit:
        status = exit.code or 0
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_table_json_and_plot_hold_every_decoder_on_every_piece_of_work(
    monkeypatch, capsys, model_dir, tmp_path, figures
):
    status, out, err = run(
        monkeypatch, capsys, "--model", model_dir, "--tasks", "counting", "--decoders", "verified", "lookup",
        "--batches", 1, 2, 1, "--prompts", 0, 4096, "--outputs", 6, "--repeats", 1, "--window-size", 4, "--out", tmp_path / "out",
    )  # fmt: skip
    assert status == 0, err
    results = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [(row["work"]["batch"], row["decoder"]) for row in results["rows"]] == [
        (batch, decoder) for batch in (1, 2) for decoder in ("ar", "verified", "lookup")
    ]
    assert all(row["equal_to_ar"] == row["work"]["batch"] for row in results["rows"])
    assert (results["dtype"], results["kernel_dtype"]) == ("float32", "float32")
    assert (tmp_path / "out" / "bench.png").read_bytes()[:4] == b"\x89PNG"
    said = " ".join(out.split())
    assert "medians of 1, window_size=4" in said and figures[0].get_suptitle().split()[-1] == "window_size=4"
    assert "exceed the model's context of 512" in said  # not skipped in silence
    [prompt] = {row["work"]["prompt_tokens"] for row in results["rows"]}
    assert "GFLOP/s" in said and f"counting, batch 2, {prompt} (one problem) + 6 tokens" in said


@pytest.mark.parametrize(("flags", "preallocates"), [((), None), (("--baseline", "vllm"), "false")])
def test_beside_another_engine_jax_leaves_it_memory(flags, preallocates, monkeypatch, capsys):
    said = []
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.setenv(name, "")  # so that it is as before afterwards
    monkeypatch.delenv(name)
    monkeypatch.setattr(command, "bench", lambda *_: said.append(os.environ.get(name)))
    assert run(monkeypatch, capsys, "--model", "x", *flags)[0] == 0 and said == [preallocates]


def test_prompts_longer_than_what_a_task_can_make_are_left_out_before_anything_is_decoded(monkeypatch):
    drawn = {"counting": command.problems_of("counting")[:3], "word_problems": command.problems_of("word_problems")}
    args = command.Bench("x", tasks=("counting", "word_problems"), batches=(1, 8), prompts=(300,), outputs=(6, 8))
    found, left_out = command.works(args, tiny_model(), drawn)
    assert {work.task for work in found} == {"word_problems"} and len(found) == 4
    [line] = left_out
    assert line.startswith("Left out: counting in prompts of 300, as its 3 problems make ")


def test_the_default_prompts_can_be_made_with_a_tokenizer_of_a_large_vocabulary():
    defaults = command.Bench("x")
    for name in defaults.tasks:
        characters = sum(len(f"{problem.prompt}{problem.solution}") for problem in command.problems_of(name))
        assert characters / 4.5 > 1.3 * max(defaults.prompts)  # 4.5 characters a token is much, of digits above all


def test_other_engines_decode_the_same_work(monkeypatch, capsys, model_dir, tmp_path):
    with_fake_engines(monkeypatch, tmp_path)
    for module in ("speed", "beside_official"):
        monkeypatch.setattr(f"wedlm_jax.evals.{module}.PAUSE", 0)
    status, out, err = run(
        monkeypatch, capsys, "--model", model_dir, "--tasks", "counting", "--decoders", "lookup", "--batches", 2, "--prompts",
        8, "--outputs", 6, "--repeats", 1, "--baseline", "transformers", "vllm", "--official", tmp_path,
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert status == 0, err
    results = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [row["decoder"] for row in results["rows"]] == ["ar", "lookup", "transformers", "vllm"]
    assert [row["tokens_per_forward"] for row in results["rows"]][2:] == [1, 1]
    assert [row["work"]["batch"] for row in results["official"]] == [2] and results["official"][0]["same_rows"] == 0
    assert "Streaming beside the official engine" in out and "2 rows part" in " ".join(out.split())


def test_other_engines_read_a_model_of_any_family_and_the_official_one_qwen3_alone(monkeypatch, capsys, tmp_path):
    config = dataclasses.replace(tiny_model().config, qkv_bias=True, qk_norm=False)
    save(
        dataclasses.replace(tiny_model(), config=config, transformer=Transformer(config, rngs=nnx.Rngs(0))),
        tmp_path / "m",
    )
    with_fake_engines(monkeypatch, tmp_path)
    Cells(monkeypatch)
    read = []

    def answer(engine, message):
        read.append(json.loads((Path(message["model"]) / "config.json").read_text())["model_type"])
        return {}

    monkeypatch.setattr("wedlm_jax.baselines.process.Baseline.ask", answer)
    flags = grid(tmp_path / "m", tmp_path, "--baseline", "transformers")
    assert run(monkeypatch, capsys, *flags)[0] == 0 and read == ["qwen2"]
    status, _, err = run(monkeypatch, capsys, *flags, "--official", tmp_path)
    assert status == 2 and "--official has been compared on qwen3 models alone" in err

    config = dataclasses.replace(tiny_model().config, rope_scaling=RopeScaling("yarn", 2.0, 64))
    save(dataclasses.replace(tiny_model(), config=config), tmp_path / "stretched")
    status, _, err = run(monkeypatch, capsys, *grid(tmp_path / "stretched", tmp_path, "--official", tmp_path))
    assert status == 2 and "--official: its engine has plain RoPE alone" in err


def speed(decoder, batch, over_ar, tokens=6):
    return Speed(Work("counting", batch, 8, 6), decoder, tokens, 1.0, 0.1, 6.0, 1.0, 1.0, 1.0, 0.5, over_ar, 1)


def test_what_cannot_be_saved_leaves_the_results_before_it(tmp_path):
    args = command.Bench("x", out=tmp_path)
    found = command.Found({}, {}, [], [speed("ar", 1, 1.0)], rates=Rates(1e9, 1e9))
    command.save(args, found)
    before = (tmp_path / "bench.json").read_bytes()
    with pytest.raises(UserError, match=r"bench.json: cannot be written \(file too large\)"), full_disk():
        found.speeds.append(speed("lookup", 1, 2.0))
        command.save(args, found)
    assert (tmp_path / "bench.json").read_bytes() == before


def test_a_picture_of_earlier_speeds_goes_as_soon_as_there_are_others(tmp_path):
    (tmp_path / "bench.png").write_text("of an earlier run")
    command.save(
        command.Bench("x", out=tmp_path), command.Found({}, {}, [], [speed("ar", 1, 1.0)], rates=Rates(1e9, 1e9))
    )
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


class Cells:
    """In place of `compare`, in main: a batch is an error to raise, or None for rows by AR and lookup."""

    def __init__(self, monkeypatch, **of_batch):
        self.met, self.configs, self.of_batch = [], [], {int(name[1:]): error for name, error in of_batch.items()}
        monkeypatch.setattr(command, "compare", self)
        monkeypatch.setattr(command.Rates, "measured", lambda *_: Rates(1e9, 1e9))

    def __call__(self, model, work, problems=(), configs=(), *_, **__):
        self.met.append(work.batch)
        self.configs += configs
        if error := self.of_batch.get(work.batch):
            raise error
        return [dataclasses.replace(speed(name, work.batch, 0.5), work=work) for name in ("ar", "lookup")]


def grid(model_dir, out, *flags, decoders=("lookup",)):
    return (
        "--model", model_dir, "--tasks", "counting", "--decoders", *decoders, "--batches", 1, 2, 4, "--prompts", 8,
        "--outputs", 6, "--out", out, *flags,
    )  # fmt: skip


def test_work_that_does_not_fit_in_memory_is_named_and_what_follows_is_run(monkeypatch, capsys, model_dir, tmp_path):
    cells = Cells(monkeypatch, b1=UserError("out of memory [1]"), b2=None)
    status, out, err = run(monkeypatch, capsys, *grid(model_dir, tmp_path))
    assert status == 0 and cells.met == [1, 2, 4], err
    line = "Left out: counting, batch 1, 8 + 6 tokens: out of memory [1]"
    results = json.loads((tmp_path / "bench.json").read_text())
    assert line in " ".join(out.split()) and results["left_out"] == [line]
    assert [row["work"]["batch"] for row in results["rows"]] == [2, 2, 4, 4] and (tmp_path / "bench.png").exists()
    assert "AR is faster than lookup on: counting, batch 2" in " ".join(out.split())


def test_work_that_does_not_fit_in_memory_leaves_no_array_behind(monkeypatch, capsys, model_dir, tmp_path):
    class Cache:
        pass

    caches = []

    class Hungry(Cells):
        def __call__(self, model, work, *_, **__):
            assert [cache() for cache in caches] == [None] * len(caches)
            cache = Cache()
            cache.itself = cache
            caches.append(weakref.ref(cache))
            if work.batch < 4:
                raise UserError("out of memory")
            return super().__call__(model, work)

    Hungry(monkeypatch)
    status, _, err = run(monkeypatch, capsys, *grid(model_dir, tmp_path))
    assert status == 0 and len(caches) == 3, err


def test_where_nothing_fits_the_first_reason_is_the_error_and_older_results_stay(
    monkeypatch, capsys, model_dir, tmp_path
):
    Cells(monkeypatch, b1=UserError("too large"), b2=UserError("larger"), b4=UserError("largest"))
    (tmp_path / "bench.json").write_text("older")
    status, _, err = run(monkeypatch, capsys, *grid(model_dir, tmp_path))
    assert status == 2 and err.strip().endswith("batch 1, 8 + 6 tokens: too large")
    assert (tmp_path / "bench.json").read_text() == "older"


@pytest.mark.parametrize(
    ("error", "left", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (EngineEnded("vllm ended with status 1"), 2, "vllm ended with status 1"),
    ],
)
def test_a_grid_that_is_cut_short_sums_up_and_draws_what_there_is(
    error, left, said, monkeypatch, capsys, model_dir, tmp_path
):
    cells = Cells(monkeypatch, b2=error)
    status, out, err = run(monkeypatch, capsys, *grid(model_dir, tmp_path))
    assert status == left and said in err and cells.met == [1, 2]
    assert "AR is faster than lookup on: counting, batch 1" in " ".join(out.split())
    assert {row["work"]["batch"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]} == {1}
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"


def test_work_that_the_official_engine_cannot_do_keeps_our_rows(monkeypatch, capsys, model_dir, tmp_path):
    (tmp_path / "engines").mkdir()
    with_fake_engines(monkeypatch, tmp_path / "engines")
    Cells(monkeypatch)

    def fails(*_):
        raise UserError("official: out of memory")

    monkeypatch.setattr(command, "beside", fails)
    status, _, err = run(monkeypatch, capsys, *grid(model_dir, tmp_path, "--official", tmp_path))
    results = json.loads((tmp_path / "bench.json").read_text())
    assert status == 0 and len(results["rows"]) == 6 and results["official"] == [], err
    assert results["left_out"][0] == (
        "Left out: counting, batch 1, 8 + 6 tokens, beside the official engine: official: out of memory"
    )


def test_settings_are_recorded_as_the_model_resolves_them_and_a_calibration_is_said(monkeypatch, capsys, tmp_path):
    save(dataclasses.replace(tiny_model(), calibration=FOUND), tmp_path / "model")
    Cells(monkeypatch)

    def settings(*flags):
        status, out, err = run(
            monkeypatch, capsys, *grid(tmp_path / "model", tmp_path, *flags, decoders=("streaming", "verified"))
        )
        assert status == 0, err
        return json.loads((tmp_path / "bench.json").read_text())["settings"], " ".join(out.split())

    found, out = settings()
    assert [found[name]["entropy_threshold"] for name in ("streaming", "verified")] == [1.6, 0.7]
    assert [found[name]["distance_penalty"] for name in ("streaming", "verified")] == [0.3, 0.02]
    assert found["ar"]["stop_ids"] == list(tiny_model().eos_token_ids) and found["ar"]["max_new_tokens"] == 6
    assert out.count("streaming with tau 1.6, lambda 0.3 (calibrated") == 1 and "as given" not in out
    found, out = settings("--distance-penalty", 0.1)
    assert found["streaming"]["distance_penalty"] == 0.1
    assert "but with lambda 0.1, as given, window_size 16, for which no disagreement was measured" in out
    found, out = settings("--entropy-threshold", "none")
    assert found["streaming"]["entropy_threshold"] is None and "calibrated" not in out


def test_the_official_engine_is_refused_where_ours_would_run_on_a_gpu(monkeypatch, capsys, model_dir, tmp_path):
    monkeypatch.setattr(command.jax, "default_backend", lambda: "gpu")
    status, _, err = run(monkeypatch, capsys, "--model", model_dir, "--official", tmp_path)
    assert status == 2 and "compared on CPUs only" in err and "set JAX_PLATFORMS=cpu" in err
    assert len(err.strip().splitlines()) == 1


def test_it_says_which_completions_are_shorter_than_what_was_asked_for():
    whole = [speed("ar", 1, 1.0), speed("streaming", 1, 2.0), speed("ar", 8, 1.0, tokens=48)]
    assert command.where_rows_ended_early(whole) == []
    [line] = command.where_rows_ended_early([*whole, speed("streaming", 8, 2.0, tokens=12)])
    assert line == (
        "Ended sooner: counting, batch 8, 8 + 6 tokens (down to 1.5 a row). --ignore-end decodes on behind an end token."
    )


def test_every_decoder_goes_on_behind_an_end_where_that_is_asked_for(monkeypatch, capsys, model_dir, tmp_path):
    for flags, stop_ids in (((), None), (("--ignore-end",), ())):
        cells = Cells(monkeypatch)
        status, _, err = run(monkeypatch, capsys, *grid(model_dir, tmp_path, *flags))
        assert status == 0, err
        assert [(c.decoder, c.stop_ids) for c in cells.configs] == [("ar", stop_ids), ("lookup", stop_ids)] * 3


def test_it_says_where_ar_wins():
    speeds = [speed("ar", 1, 1.0), speed("verified", 1, 2.0), speed("verified", 64, 0.7), speed("lookup", 1, 1.1)]
    assert command.where_ar_wins(speeds) == ["AR is faster than verified on: counting, batch 64, 8 + 6 tokens (0.70x)."]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--batches", 0), "--batches 0: must be at least 1"),
        (("--prompts", -1), "--prompts: give lengths in tokens, or 0"),
        (("--repeats", 0), "--repeats 0: must be at least 1"),
        (("--decoder", "ar"), "--decoder does nothing here; use --decoders"),
        (("--decoders", "ar"), "AR always runs"),
        (("--prompts", 4096, "--outputs", 6), "exceed the model's context of 512"),
        (("--tasks", "poetry"), "poetry"),
        (("--baseline", "vllm", "--temperature", 1), "--temperature: --baseline and --official decode greedily"),
        (("--baseline", "vllm", "--dtype", "int8"), "--dtype int8: --baseline and --official read an export"),
        (("--baseline", "vllm", "--python", "/no/python"), "/no/python: cannot be run"),
        (("--baseline", "vllm", "--stop", "x"), "--stop: --baseline and --official read no text"),
        (("--official", ".", "--stop", "x"), "--stop: --baseline and --official read no text"),
        (("--official", ".", "--no-reorder"), "--no-reorder: the engine of --official reorders"),
        (("--ignore-end", "--stop", "x"), "--ignore-end decodes on behind an end, and --stop names one; drop one"),
        (
            ("--ignore-end", "--stop-ids", 7),
            "--ignore-end decodes on behind an end, and --stop-ids names one; drop one",
        ),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(monkeypatch, capsys, model_dir, flags, said):
    status, _, err = run(monkeypatch, capsys, "--model", model_dir, *flags)
    assert status == 2 and said in err and len(err.strip().splitlines()) == 1
