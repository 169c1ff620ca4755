"""`python -m wedlm_jax.open_ended`: code or your own prompts, two tables, JSON and a plot; bad flags are one line."""

import io
import json
import sys

import pytest
from rich.console import Console

from tests.evals.models import tiny_model
from tests.one_line import complaint_of
from wedlm_jax import open_ended as command
from wedlm_jax.errors import UserError
from wedlm_jax.evals import sweep
from wedlm_jax.pretrained import save

FLAGS = ["--max-new-tokens=6", "--window-size=4", "--block-size=4", "--limit=3", "--thresholds", "inf", "inf"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("open_ended")
    save(tiny_model(), folder / "model")
    (folder / "in.jsonl").write_text("".join(json.dumps({"prompt": f"Once upon {i}"}) + "\n" for i in range(3)))
    (folder / "long.jsonl").write_text("".join(json.dumps({"prompt": "x " * n}) + "\n" for n in (1, 600, 1)))
    (folder / "empty").mkdir()
    (folder / "ids.jsonl").write_text('{"prompt_ids": [1, 2]}\n')
    return folder


def test_texts_speed_and_entropy_are_told_for_every_decoder(monkeypatch, capsys, folder, figures):
    out = folder / "out"
    flags = ("--model", folder / "model", "--input", folder / "in.jsonl", "--out", out, *FLAGS)
    monkeypatch.setattr(sys, "argv", ["open_ended", *map(str, flags)])
    command.main()
    results = json.loads((out / "open_ended.json").read_text())
    assert results["dtype"] == "float32"
    labels = ["AR", "block-wise", "streaming, tau=inf", "lookup", "verified"]
    assert [m["label"] for m in results["measures"]] == labels
    assert [set(text) for text in results["texts"]] == [{"prompt", "level", *labels}] * 3
    assert [text["prompt"] for text in results["texts"]] == [f"Once upon {i}" for i in range(3)]
    assert all(m["mauve"] is None and m["perplexity"] > 1 for m in results["measures"])
    assert len(results["rows"]) == 3 * 5 and len(results["entropies"]) == 3
    assert (out / "open_ended.png").read_bytes()[:4] == b"\x89PNG"
    said = " ".join(capsys.readouterr().out.split())
    for title in (said, figures[0].get_suptitle()):  # what is not the default
        assert "window_size=4, block_size=4" in " ".join(title.split())
    assert "repeated" in said and "By mean entropy of the prompt" in said and "…" not in said


def test_texts_too_short_for_an_n_gram_have_no_repetition(monkeypatch, capsys, folder):
    out = folder / "short"
    flags = ("--model", folder / "model", "--input", folder / "in.jsonl", "--out", out, *FLAGS, "--max-new-tokens=2")
    monkeypatch.setattr(sys, "argv", ["open_ended", *map(str, flags)])
    command.main()
    results = json.loads((out / "open_ended.json").read_text(), parse_constant=pytest.fail)
    assert {m["repetition"] for m in results["measures"]} == {m["distinct"]["3"] for m in results["measures"]} == {None}
    assert "nan" not in capsys.readouterr().out


def test_without_input_the_prompts_are_held_out_code(folder):
    (folder / "library").mkdir()
    for i in range(60):  # a twentieth is held out
        (folder / "library" / f"m{i}.py").write_text(
            "".join(f"def f{j}(x):\n    return x + {i * j}\n" for j in range(12))
        )
    args = command.OpenEndedFlags("x", code=folder / "library", characters=30, limit=4, mauve=True)
    prompts, references = command.prompts_of(args, tiny_model(), Console())
    assert len(prompts) == len(references) == 4 and all("def f" in text for text in [*prompts.values(), *references])


def test_an_excerpt_that_nothing_follows_is_left_out_of_mauve_and_said_to_be(monkeypatch, tmp_path):
    rests = iter(["", "y = 2\n", ""])
    monkeypatch.setattr(command, "code_prompts", lambda *_: [(f"x = {i}\n", rest) for i, rest in enumerate(rests)])
    monkeypatch.setattr(command, "code_files", lambda *_, **__: [])
    said = io.StringIO()
    prompts, references = command.prompts_of(
        command.OpenEndedFlags("x", mauve=True), tiny_model(), Console(file=said, width=200)
    )
    assert list(prompts.values()) == ["x = 1\n"] and references == ["y = 2\n"]
    assert said.getvalue().startswith("Left out: 2 excerpts that end their files")
    monkeypatch.setattr(command, "code_prompts", lambda *_: [("x = 1\n", "")])
    with pytest.raises(UserError, match="--mauve: every excerpt ends its file"):
        command.prompts_of(command.OpenEndedFlags("x", mauve=True), tiny_model(), Console())
    assert command.prompts_of(command.OpenEndedFlags("x"), tiny_model(), Console())[0]  # a prompt all the same


def test_what_is_measured_is_saved_and_told_before_the_next_decoder_runs(monkeypatch, capsys, folder):
    out, by_hand = folder / "interrupted", sweep.generate_rows

    def interrupted_at_streaming(model, prompts, config, first_row):
        if config.decoder == "streaming":
            raise KeyboardInterrupt
        return by_hand(model, prompts, config, first_row)

    monkeypatch.setattr(sweep, "generate_rows", interrupted_at_streaming)
    out.mkdir()
    (out / "open_ended.png").write_text("of an earlier run")
    flags = ("--model", folder / "model", "--input", folder / "in.jsonl", "--out", out, *FLAGS)
    monkeypatch.setattr(sys, "argv", ["open_ended", *map(str, flags)])
    with pytest.raises(SystemExit) as exit:
        command.main()
    results = json.loads((out / "open_ended.json").read_text())
    assert not (out / "open_ended.png").exists()
    assert exit.value.code == 130 and [m["label"] for m in results["measures"]] == ["AR", "block-wise"]
    assert [set(text) for text in results["texts"]] == [{"prompt", "level", "AR", "block-wise"}] * 3
    assert "block-wise: AR perplexity" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--limit", "0"), "--limit 0: must be at least 1"),
        (("--entropy-threshold", "1"), "--entropy-threshold does nothing here; use --thresholds"),
        (
            ("--decoder", "ar"),
            "--decoder ar: AR, block-wise, streaming, lookup and verified are compared; leave it out",
        ),
        (("--input", "ids.jsonl"), "ids.jsonl:1: prompt_ids are no text; give prompt or messages"),
        (("--input", "in.jsonl", "--code", "library"), "--code does nothing here; use it without --input"),
        (("--input", "in.jsonl", "--characters", "9"), "--characters does nothing here; use it without --input"),
        (("--code", "nowhere"), "--code=nowhere is not a folder"),
        (("--code", "empty"), "empty holds no .py file of the held_out split; name a folder with more code as --code"),
        (("--input", "long.jsonl"), "long.jsonl:2: 1200 prompt tokens"),
        (("--characters", "1200"), "of --characters 1200: "),
    ],
)
def test_a_bad_flag_is_one_line_and_status_2(monkeypatch, capsys, folder, flags, said):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["open_ended", "--model", "model", *flags])
    assert said in complaint_of(capsys, command.main)


def test_mauve_that_is_not_installed_is_said_before_anything_is_decoded(monkeypatch, capsys, folder):
    monkeypatch.setitem(sys.modules, "mauve", None)
    monkeypatch.setattr(sys, "argv", ["open_ended", "--model", str(folder / "model"), "--mauve"])
    assert "pip install mauve-text" in complaint_of(capsys, command.main)
