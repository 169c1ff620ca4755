"""What the benchmarks print: means with their intervals, and the table of what an adapter adds to a forward."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import (
    admission,
    correctness,
    decode_forward,
    flash_tiles,
    idle_rows,
    prompt_file,
    quickstart_seeds,
    random_model,
    sampling,
    serving,
    shapes,
    smollm2,
    wall_clock,
)
from benchmarks.kernel_bytes import kernels
from benchmarks.quickstart_seeds import line_of, mean
from benchmarks.side_by_side import side_by_side
from tests.conftest import FULL
from tests.evals.models import tiny_model
from tests.one_line import complaint_of
from wedlm_jax.model import weights
from wedlm_jax.model.layers import Linear
from wedlm_jax.model.patterns import DualStream
from wedlm_jax.ops.attention import attend, flash_gpu
from wedlm_jax.pretrained import save


def test_a_mean_has_students_interval_cut_at_0_and_at_most():
    """By hand: Student's 0.975 quantile is 4.303 for two degrees of freedom and 3.182 for three."""
    assert mean([10, 11, 12, 13], ".1f") == "11.5 (9.4-13.6)"  # 1.291 * 3.182 / 2 on each side
    assert mean([1, 2, 3], ".2f") == "2.00 (0.00-4.48)"
    assert mean([97, 98, 99], ".0f", most=100) == "98 (96-100)"
    assert mean([7], ".1f") == mean([7, 7, 7], ".1f") == "7.0"


def test_a_line_holds_a_cell_for_each_heading_and_the_counts_of_every_seed():
    seeds = [
        dict(task="grid_paths", label="verified: an adapter", n=200, accuracy=accuracy, tokens_per_forward=3.0,
             speedup_over_ar=1.5, same_text=same, trained=120_000, training_seconds=60.0)
        for accuracy, same in ((0.5, 200), (0.5, 199))
    ]  # fmt: skip
    cells = ["grid paths", "verified: an adapter", "50", "3.00", "1.50", "200 / 199 of 200"]
    assert line_of(seeds) == f"| {' | '.join([*cells, '0.12M', '60'])} |"
    untrained = [row | dict(trained=0, training_seconds=0.0) for row in seeds]
    assert line_of(untrained) == f"| {' | '.join([*cells, '-', '-'])} |"


def test_seeds_that_were_decoded_with_another_limit_are_decoded_again(tmp_path, monkeypatch, capsys):
    decoded = []

    def decode(folder, limit):
        decoded.append((folder.name, limit))
        return [dict(task="counting", label=quickstart_seeds.AR, n=limit, accuracy=1.0, tokens_per_forward=1.0,
                     speedup_over_ar=1.0, same_text=limit, trained=0, training_seconds=0.0)]  # fmt: skip

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["quickstart_seeds", "--folder", str(tmp_path), *flags])
        quickstart_seeds.main()
        return capsys.readouterr().out

    monkeypatch.setattr(quickstart_seeds, "train", lambda seed, folder: folder.mkdir(exist_ok=True))
    monkeypatch.setattr(quickstart_seeds, "decode", decode)
    run("--seeds", "0", "--limit", "5")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "decoded.json").write_text("[]")  # as it was before a limit was kept
    assert "| 7 / 7 / 7 of 7 |" in run("--seeds", "0", "1", "2", "--limit", "7")
    assert decoded == [("0", 5), ("0", 7), ("1", 7), ("2", 7)]
    run("--seeds", "0", "1", "2", "--limit", "7")
    assert len(decoded) == 4


@pytest.mark.parametrize("missing", [True, False])
def test_rows_of_a_seed_are_kept_until_anything_of_it_is_trained(tmp_path, monkeypatch, missing):
    monkeypatch.setattr(quickstart_seeds, "finished", lambda workdir: not missing or workdir.name != "adapter")
    monkeypatch.setattr(quickstart_seeds.subprocess, "run", lambda *_, **__: None)
    (tmp_path / "decoded.json").write_text('{"limit": 7, "rows": []}')
    quickstart_seeds.train(0, tmp_path)
    assert (quickstart_seeds.kept_rows(tmp_path, 7) is None) == missing


@pytest.mark.skipif(not FULL, reason="compiles each window twice; launch/test.sh --full")
def test_decode_forward_sets_turned_kernels_against_those_that_were_trained(monkeypatch, capsys):
    turned = []
    monkeypatch.setattr(weights, "LARGE", 0)
    monkeypatch.setattr(weights, "PROCESSOR_CACHE", 0)
    turn = Linear.turn
    monkeypatch.setattr(Linear, "turn", lambda linear: (turned.append(linear), turn(linear)))
    flags = "--turned --shape tiny --dtype float32 --windows 1 4 --context 8 --slots 16 --rounds 1"
    monkeypatch.setattr(sys, "argv", ["decode_forward", *flags.split()])
    decode_forward.main()
    layers = shapes.shape("tiny").num_layers
    assert len(turned) == 7 * layers  # once: for the window of 4, in one of its two programs
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == ["1", "4"]
    assert all(float(cell) > 0 for row in rows for cell in row)


@pytest.mark.skipif(not FULL, reason="compiles each window twice; launch/test.sh --full")
def test_decode_forward_prints_what_an_adapter_adds_to_each_window(monkeypatch, capsys):
    flags = "--adapter-rank 2 --shape tiny --dtype float32 --windows 1 2 --context 8 --slots 16 --rounds 1"
    monkeypatch.setattr(sys, "argv", ["decode_forward", *flags.split()])
    decode_forward.main()
    printed = capsys.readouterr().out
    [share] = re.findall(r"rank 2: (\S+)% of the base's parameters", printed)
    assert 0 < float(share) < 100
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(float(cell) > 0 for row in rows for cell in row)
    assert [len(row) for row in rows] == [5, 5]


def test_admission_starts_the_same_requests_both_ways(tmp_path, monkeypatch, capsys):
    save(tiny_model(), tmp_path / "tiny")
    flags = f"--model {tmp_path / 'tiny'} --prompts 4 9 --requests 5 --context 64 --rounds 1"
    monkeypatch.setattr(sys, "argv", ["admission", *flags.split()])
    admission.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == ["4", "9"]
    assert all(float(cell) > 0 for row in rows for cell in row)


def test_serving_answers_the_same_requests_both_ways(tmp_path, monkeypatch, capsys):
    save(tiny_model(), tmp_path / "tiny")
    flags = (
        "--clients 1 3 --requests 4 --prompt 5 --context 64 --rounds 1 --decode.decoder ar --decode.max-new-tokens 4"
    )
    monkeypatch.setattr(sys, "argv", ["serving", "--model", str(tmp_path / "tiny"), *flags.split()])
    serving.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == ["1", "3"]
    assert [[float(cell) >= 0 for cell in row] for row in rows] == [[True] * 7] * 2


def test_sampling_times_every_way_to_draw(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sampling", "--vocab-size", "3000", "--slots", "1", "3", "--rounds", "3"])
    sampling.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == ["1"] * 4 + ["3"] * 4 and rows[0][1] == "greedy"
    assert all(float(row[3]) > 0 for row in rows)


def test_idle_rows_times_the_same_request_beside_rows_that_hold_something_and_rows_that_do_not(
    tmp_path, monkeypatch, capsys
):
    save(tiny_model(), tmp_path / "tiny")
    flags = f"--model {tmp_path / 'tiny'} --held 40 --rows 2 --tokens 4 --rounds 1"
    monkeypatch.setattr(sys, "argv", ["idle_rows", *flags.split()])
    idle_rows.main()
    rows = [
        line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if re.match(r"\| [av]", line)
    ]
    assert [row[0] for row in rows] == ["ar", "verified"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


def test_idle_rows_fits_the_context_of_the_model_that_it_says_to_make():
    assert idle_rows.Flags("").held + 32 <= random_model.Flags("", "").context


def test_prompt_file_completes_the_same_prompts_both_ways(tmp_path, monkeypatch, capsys):
    save(tiny_model(), tmp_path / "tiny")
    flags = f"--model {tmp_path / 'tiny'} --shapes tiny --decoders ar --limit 1 --rows 2 --max-new-tokens 4 --rounds 1"
    monkeypatch.setattr(sys, "argv", ["prompt_file", *flags.split()])
    prompt_file.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if " | ar | " in line]
    assert [row[:2] for row in rows] == [[str(tmp_path / "tiny"), "ar"], ["tiny", "ar"]]
    assert all(float(row[4]) > 0 for row in rows)


def test_what_a_program_is_given_for_good_is_copied_only_where_another_is_given_it_too():
    """A training state of 20 GB fits once."""
    alone, shared = jnp.zeros(3), jnp.ones(3)
    step = lambda state: (jax.tree.map(lambda x: x + 1, state),)  # noqa: E731
    programs = {"step": (step, ({"alone": alone, "shared": shared},)), "other": (jnp.sum, (shared,))}
    assert side_by_side(programs, 1, carried=("step",)).keys() == programs.keys()
    assert alone.is_deleted() and not shared.is_deleted()


def test_the_check_of_gpu_kernels_runs_those_that_it_names(monkeypatch):
    """With plain operations in the place of kernels: that they are called as the library's are is not shown by this."""
    calls = []

    def forward(q_TNH, k_SKH, v_SKH, start_T, end_T):
        calls.append("forward")
        keys_S = jnp.arange(len(k_SKH))
        visible_TS = (start_T[:, None] <= keys_S) & (keys_S < end_T[:, None])
        out, lse = attend(q_TNH[None], k_SKH[None], v_SKH[None], visible_TS[None])
        return out[0], lse[0].T

    monkeypatch.setattr(flash_gpu, "unsupported", lambda *_: None)
    paths = {"plain": correctness.by_flash(flash_gpu.Kernels(forward, forward))}
    segment_ids = jnp.ones((1, 64), int)
    q, k, v, _ = correctness.random_heads(1, 128, 16, 2, 1)
    pattern = DualStream(segment_ids, 8)
    assert jnp.allclose(paths["plain"](pattern, q, k, v), pattern.by_ranges(q, k, v), atol=1e-5) and calls


@pytest.mark.parametrize("benchmark", [admission, wall_clock])
def test_a_model_that_is_not_there_is_one_line_and_status_2(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, "--model", str(tmp_path / "nope")])
    assert f"{tmp_path / 'nope'}" in complaint_of(capsys, benchmark.main)


def test_the_tiles_of_the_flash_kernels_are_timed_one_by_one_each_way(monkeypatch, capsys):
    """With what is no kernel in their place."""
    asked = []

    def kernels(**tiles):
        asked.append(tiles)
        return flash_gpu.Kernels(lambda q, *_: (q, jnp.zeros(q.shape[1::-1])), lambda q, k, v, *_: (q, k, v))

    monkeypatch.setattr(flash_gpu, "sm90", kernels)
    monkeypatch.setattr(flash_gpu, "triton", kernels)
    flags = flash_tiles.Flags(length=64, heads=2, kv_heads=1, head_dim=16, rounds=1)
    found = [row[:2] for row in flash_tiles.rows(flags)]
    tiles = [
        ("forward", *map(str, flash_tiles.FORWARD), "triton"),
        ("backward", *map(str, flash_tiles.BACKWARD), "triton"),
    ]
    assert found == [(way, name) for way, *names in tiles for name in names]
    assert {"forward_tiles": (64, 128, 2)} in asked and {"backward_tiles": (64, 64, 2, 2)} in asked

    monkeypatch.setattr("sys.argv", ["flash_tiles"])
    with pytest.raises(SystemExit):
        flash_tiles.main()
    assert "the flash kernels run on GPUs, and this is cpu" in capsys.readouterr().err


def test_a_kernel_moves_the_slice_that_it_reads_and_the_one_that_it_writes_in_place():
    found = list(
        kernels("""
%written (stack: f32[8,16], n: s32[], x: bf16[8,16]) -> f32[8,16] {
  %stack = f32[8,16]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %x = bf16[8,16]{1,0} parameter(2)
  %slice = bf16[1,16]{1,0} dynamic-slice(%x, %n), dynamic_slice_sizes={1,16}
  %wide = f32[1,16]{1,0} convert(%slice)
  ROOT %update = f32[8,16]{1,0} dynamic-update-slice(%stack, %wide, %n)
}

%multiplied (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  ROOT %dot = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (f32[8,16], s32[])) -> (f32[8,16], s32[]) {
  %s = f32[8,16]{1,0} get-tuple-element(%p), index=0
  %i = s32[] get-tuple-element(%p), index=1
  %b = bf16[8,16]{1,0} constant({...})
  %fusion = f32[8,16]{1,0} fusion(%s, %i, %b), kind=kLoop, calls=%written
  ROOT %t = (f32[8,16]{1,0}, s32[]) tuple(%fusion, %i)
}

ENTRY %main (s: f32[8,16], a: f32[4,4]) -> f32[4,4] {
  %s = f32[8,16]{1,0} parameter(0)
  %a = f32[4,4]{1,0} parameter(1)
  %t = (f32[8,16]{1,0}, s32[]) tuple(%s)
  %w = (f32[8,16]{1,0}, s32[]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"8"}}
  %copy = f32[4,4]{1,0} copy(%a)
  %flash = f32[4,4]{1,0} custom-call(%copy), custom_call_target="mosaic_gpu"
  ROOT %gemm = f32[4,4]{1,0} fusion(%flash), kind=kCustom, calls=%multiplied
}
""")
    )
    assert sorted(found) == [
        (4 + 16 * 2 + 16 * 4, 8, False, False),
        (2 * 64, 1, False, False),
        (2 * 64, 1, False, True),
        (2 * 64, 1, True, False),
    ]


def test_smollm2_holds_out_questions_that_are_not_trained_on(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "write_model", lambda wheel, to: None)
    monkeypatch.setattr(sys, "argv", ["smollm2", "unread.whl", str(tmp_path)])
    smollm2.main()
    held_out, trained = ((tmp_path / name).read_text().splitlines() for name in ("held_out.jsonl", "prompts.jsonl"))
    assert (len(held_out), len(trained)) == (100, 1098)
    assert not {*held_out} & {*trained}
    assert json.loads(held_out[0])["messages"][0]["role"] == "user"
