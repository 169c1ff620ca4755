"""`python -m wedlm_jax.generate`: what it writes is what `wedlm_jax.generate` returns; bad input is one line and no output."""

import importlib
import io
import json
import os
import subprocess
import sys

import jax
import pytest

from tests.conftest import FULL
from tests.evals.models import tiny_model
from tests.one_line import complaint_of
from wedlm_jax import Completion, DecodeConfig, Stats, generate
from wedlm_jax.decode import batches
from wedlm_jax.errors import UserError
from wedlm_jax.flags import spell_none
from wedlm_jax.generate import unfinished
from wedlm_jax.model import window_table
from wedlm_jax.pretrained import load, save

command = importlib.import_module("wedlm_jax.generate.__main__")

LINES = [
    {"prompt": "Q: Count from 3 to 20. A:"},
    {"prompt_ids": [5, 6, 7]},
    {"messages": [{"role": "user", "content": "hello"}]},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    save(tiny_model(), path)
    return path


@pytest.fixture
def call(directory, monkeypatch):
    def run(*flags):
        monkeypatch.setattr("sys.argv", ["generate", "--model", str(directory), *map(str, flags)])
        command.main()

    return run


@pytest.fixture
def refused(call, capsys, monkeypatch):
    """Calls the command, which must fail before anything is decoded; returns its one line."""

    def run(*flags):
        for way in ("in_batches", "in_order"):
            monkeypatch.setattr(command, way, lambda *args, **kwargs: pytest.fail("decoded something"))
        return complaint_of(capsys, call, *flags)

    return run


def write(path, *lines):
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_of_prompts_gives_what_generate_returns_whatever_the_batch(call, directory, tmp_path):
    source, target, trace = write(tmp_path / "in.jsonl", *LINES), tmp_path / "out.jsonl", tmp_path / "trace.jsonl"
    call("--input", source, "--output", target, "--trace", trace, "--batch-size", 2, "--max-new-tokens", 6,
         "--decoder", "verified", "--window-size", 4, "--temperature", 0.7, "--seed", 3)  # fmt: skip
    prompts = [next(iter(line.values())) for line in LINES]
    config = DecodeConfig("verified", window_size=4, max_new_tokens=6, temperature=0.7, seed=3)
    expected = generate(load(directory), prompts, config)
    assert read(target) == [
        {"ids": c.ids, "text": c.text, "finish_reason": c.finish_reason, "stats": c.stats.as_dict()} for c in expected
    ]
    forwards = read(trace)
    assert [step["prompt"] for step in forwards] == [i for i, c in enumerate(expected) for _ in range(c.stats.forwards)]
    assert sum(step["emitted"] for step in forwards) == sum(len(c.ids) for c in expected)
    assert sorted(tmp_path.iterdir()) == [source, target, trace]  # no partial file is left


def test_prompts_begin_alike_where_most_of_their_tokens_are_those_of_the_one_before():
    one, other, third = ([number] * 9 for number in (1, 2, 3))
    assert command._begin_alike([one] * 4 + [other] * 4)  # the completions of two prompts
    assert command._begin_alike([[*one, 5], [*one, 6, 7]])
    assert not command._begin_alike([one, other, third])
    assert not command._begin_alike([one, one, other, third, one])
    assert not command._begin_alike([one])


@pytest.mark.parametrize("decoder", ["verified", "streaming"] if FULL else ["verified"])
@pytest.mark.parametrize(
    "shared, batch, cache, calls_made",
    [
        ("", 2, 2**25, ["in_batches"]),
        ("", 2, 0, ["in_order"]),
        ("", 3, 0, ["in_batches"]),
        ("Answer. " * 6, 2, 2**25, ["in_order"]),
        ("Answer. " * 6, 16, 2**25, ["in_order"]),
    ],
)
def test_prompts_of_a_file_give_what_generate_returns_in_their_order(
    call, directory, tmp_path, monkeypatch, capsys, decoder, shared, batch, cache, calls_made
):
    """Batch by batch; prompts that mostly are a beginning that all share through an engine, which prefills it once, however
    few they are; and many of a model that a processor's caches do not hold."""
    monkeypatch.setattr(command, "MANY_BATCHES", 3)
    monkeypatch.setattr(window_table, "PROCESSOR_CACHE", cache)
    calls, (way, *_) = [], calls_made
    true_way = getattr(command, way)
    monkeypatch.setattr(command, way, lambda *args, **kwargs: calls.append(way) or true_way(*args, **kwargs))
    prompts = [f"{shared}{i} Q: Count to {3 * i}. A:" for i in (9, 1, 4, 7, 2, 8, 3)]
    source, target = write(tmp_path / "in.jsonl", *({"prompt": p} for p in prompts)), tmp_path / "out.jsonl"
    call("--input", source, "--output", target, "--batch-size", batch, "--max-new-tokens", 9, "--decoder", decoder,
         "--window-size", 4, "--temperature", 0.7, "--seed", 3, "--stop", "e")  # fmt: skip
    config = DecodeConfig(decoder, window_size=4, max_new_tokens=9, temperature=0.7, seed=3, stop=("e",))
    expected = generate(load(directory), prompts, config)
    assert len({len(c.ids) for c in expected}) > 1  # some end before others
    assert read(target) == [command.as_line(c, {}) for c in expected]
    assert calls == calls_made
    tokens, forwards = (sum(getattr(c.stats, name) for c in expected) for name in ("generated_tokens", "forwards"))
    said = (
        f"wrote {target}: 7 completions; 7 decoded now: {tokens} tokens, {tokens / forwards:.2f} per forward, p_cache "
    )
    assert said in capsys.readouterr().err


def test_an_id_comes_back_and_completions_of_one_prompt_are_numbered(call, tmp_path, capsys):
    prompts = [{"id": "a/1", "prompt": "Q: Count"}, {"prompt_ids": [5, 6]}, {"id": 3, "prompt": "Q:", "answer": 1}]
    source, target = write(tmp_path / "in.jsonl", *prompts), tmp_path / "out.jsonl"
    flags = "--input", source, "--max-new-tokens", 2, "--window-size", 4, "--n", 2
    call(*flags, "--output", target)
    found = [(line.get("id"), line["completion"]) for line in read(target)]
    assert found == [("a/1", 0), ("a/1", 1), (None, 0), (None, 1), (3, 0), (3, 1)]
    capsys.readouterr()
    call(*flags)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == read(target)


def test_details_that_a_decoder_does_not_have_are_told(call, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", {"prompt": "Q:"})
    call("--input", source, "--max-new-tokens", 2, "--window-size", 4, "--decoder", "streaming", "--details")
    assert "note: --details: this decoder does not read the AR chain, as ar" in capsys.readouterr().err


@pytest.fixture
def cut_short(call, monkeypatch):
    """Calls the command, which ends by an error after two batches of one prompt; returns its exit status."""

    def run(*flags, error: type[BaseException] = KeyboardInterrupt):
        done = iter([batches.decode_batch] * 2)

        def decode_batch(*args, **kwargs):
            batch = next(done, None)
            if batch is None:
                raise error("out of memory with a batch of 1")
            return batch(*args, **kwargs)

        with monkeypatch.context() as patched, pytest.raises(SystemExit) as exit:
            patched.setattr(batches, "decode_batch", decode_batch)
            call(*flags, *SHORT)
        return exit.value.code

    return run


SHORT = ("--batch-size", 1, "--max-new-tokens", 4, "--decoder", "ar", "--temperature", 1)


def test_what_is_done_before_an_interruption_is_kept_beside_the_old_output(cut_short, tmp_path, capsys):
    source, target = write(tmp_path / "in.jsonl", *LINES), tmp_path / "out.jsonl"
    target.write_text("old")
    assert cut_short("--input", source, "--output", target) == 130
    lines, made_from = tmp_path / "out.jsonl.unfinished", tmp_path / "out.jsonl.unfinished.made_from"
    assert target.read_text() == "old" and len(read(lines)) == 2
    told = f"the first 2 lines are in {lines}; the same command goes on behind them"
    assert capsys.readouterr().err.splitlines()[-2:] == [told, "interrupted"]
    assert sorted(tmp_path.iterdir()) == [source, target, lines, made_from]


def test_the_same_command_goes_on_behind_what_is_done(call, cut_short, tmp_path, monkeypatch, capsys):
    """Also behind a line that was cut short, and where a link or another number of prompts at once leads there."""
    source, target, whole = write(tmp_path / "in.jsonl", *LINES), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    call("--input", source, "--output", whole, *SHORT)
    target.symlink_to(tmp_path / "linked.jsonl")
    cut_short("--input", source, "--output", target)
    lines = tmp_path / "out.jsonl.unfinished"
    with lines.open("a") as file:
        file.write('{"ids": [3, ')
    decoded, true_batch = [], batches.decode_batch
    monkeypatch.setattr(
        batches,
        "decode_batch",
        lambda model, of, *args, **kwargs: decoded.append(len(of)) or true_batch(model, of, *args, **kwargs),
    )
    call("--input", source, "--output", target, *SHORT, "--batch-size", 3)
    assert decoded == [1]
    assert f"going on behind the 2 lines of {lines}" in capsys.readouterr().err
    assert read(target) == read(whole) and target.is_symlink()
    assert sorted(tmp_path.iterdir()) == sorted([source, target, whole, tmp_path / "linked.jsonl"])


def test_a_command_that_has_written_all_its_lines_decodes_nothing_again(call, tmp_path, monkeypatch):
    """Also of one batch, whose lines come all at once."""
    source, target = write(tmp_path / "in.jsonl", *LINES[:2]), tmp_path / "out.jsonl"

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(unfinished.Unfinished, "become_whole", interrupted)
        call("--input", source, "--output", target, *SHORT, "--batch-size", 2)
    monkeypatch.setattr(batches, "decode_batch", lambda *args, **kwargs: pytest.fail("decoded something"))
    call("--input", source, "--output", target, *SHORT, "--batch-size", 2)
    assert len(read(target)) == 2 and sorted(tmp_path.iterdir()) == [source, target]


@pytest.mark.parametrize(
    "change, told",
    [
        (("--max-new-tokens", 5), "(max_new_tokens: 4 -> 5)"),
        (("--details",), "(details: False -> True)"),
        (("--trace",), "and with --trace none is gone on with"),
        ("another prompt", "(prompts.sha256: "),
        ("no note", "out.jsonl.unfinished.made_from does not tell of which"),
    ],
    ids=str,
)
def test_lines_of_another_run_are_neither_gone_on_with_nor_lost(cut_short, refused, tmp_path, change, told, capsys):
    source, target = write(tmp_path / "in.jsonl", *LINES), tmp_path / "out.jsonl"
    cut_short("--input", source, "--output", target)
    capsys.readouterr()
    lines = tmp_path / "out.jsonl.unfinished"
    before = lines.read_bytes()
    flags: tuple = ()
    if change == "another prompt":
        write(source, *LINES[:2], LINES[0])
    elif change == "no note":
        (tmp_path / "out.jsonl.unfinished.made_from").unlink()
    else:
        flags = (*change, tmp_path / "trace.jsonl") if change == ("--trace",) else change
    line = refused("--input", source, "--output", target, *SHORT, *flags)
    assert line.startswith(f"error: {lines} holds 2 lines of") and told in line
    assert f"remove it, or name another file than {target}" in line
    assert lines.read_bytes() == before


def test_a_note_of_a_run_that_wrote_nothing_is_not_taken_for_that_of_other_lines(cut_short, refused, tmp_path, capsys):
    """It was killed before its first line; the lines are of another one, with a trace, that was killed as well."""
    source, target = write(tmp_path / "in.jsonl", *LINES), tmp_path / "out.jsonl"
    cut_short("--input", source, "--output", target)
    (tmp_path / "out.jsonl.unfinished").write_text("")
    cut_short("--input", source, "--output", target, "--trace", tmp_path / "trace.jsonl", "--seed", 1)
    capsys.readouterr()
    line = refused("--input", source, "--output", target, *SHORT)
    assert "out.jsonl.unfinished.made_from does not tell of which" in line


def test_lines_that_a_full_disk_ended_are_told_of(tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match="cannot be written"), unfinished.jsonl(path, dict) as lines:
        lines.write({})
        raise OSError(28, "No space left on device")
    assert f"the first 1 lines are in {path}.unfinished; the same command" in capsys.readouterr().err


def test_what_the_shell_appends_to_keeps_what_was_there(directory, tmp_path):
    """/dev/stdout is open already; it is not replaced."""
    log = tmp_path / "log.jsonl"
    log.write_text("kept\n")
    flags = ["--model", str(directory), "--prompt", "a", "--max-new-tokens", "2", "--output", "/dev/stdout"]
    with log.open("a") as appended:
        subprocess.run([sys.executable, "-m", "wedlm_jax.generate", *flags], stdout=appended, check=True)
    assert log.read_text().startswith('kept\n{"ids": [') and log.read_text().count("\n") == 2


def test_a_pipe_gets_each_line_at_once(cut_short, tmp_path, capsys):
    """Also those before an interruption."""
    assert cut_short("--input", write(tmp_path / "in.jsonl", *LINES)) == 130
    assert capsys.readouterr().out.count('{"ids": [') == 2


def test_what_is_shown_at_the_end_is_shown_at_an_interruption(call, cut_short, tmp_path, capsys):
    """On a terminal nothing is printed while the bar stands there."""
    asked = ("--prompt", "Q: Count", "--n", 3, "--trace", tmp_path / "trace.jsonl")
    call(*asked, *SHORT)
    whole = capsys.readouterr().out
    assert cut_short(*asked, error=UserError) == 2
    assert whole.startswith(done := capsys.readouterr().out) and done.count("\n") == whole.count("\n") - 1


def test_a_link_that_leads_to_itself_is_refused(refused, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "is a link that leads to itself; name a file" in refused("--prompt", "a", "--output", tmp_path / "loop")


def test_two_commands_do_not_write_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    command_line = [sys.executable, "-c", hold, f"{path}.unfinished"]
    with subprocess.Popen(command_line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(UserError, match="another process writes it"), unfinished.jsonl(path):
            pytest.fail("wrote")


def test_a_trace_beside_it_loses_nothing_that_is_done_either(cut_short, tmp_path, capsys):
    source, target, trace = write(tmp_path / "in.jsonl", *LINES), tmp_path / "out.jsonl", tmp_path / "trace.jsonl"
    assert cut_short("--input", source, "--output", target, "--trace", trace, error=UserError) == 2
    kept = [path.with_name(f"{path.name}.unfinished") for path in (target, trace)]
    assert [len(read(path)) for path in kept] == [2, 8]
    assert [step["prompt"] for step in read(kept[1])] == [0] * 4 + [1] * 4
    assert capsys.readouterr().err.splitlines()[-3:] == [
        f"the first 2 lines are in {kept[0]}",
        f"the first 8 lines are in {kept[1]}",
        "error: out of memory with a batch of 1",
    ]
    assert sorted(tmp_path.iterdir()) == [source, *kept]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_lines_of_a_pipe_are_json_whatever_the_encoding_of_the_locale(encoding):
    pipe, text = io.BytesIO(), "\xe9 \u4e16 \U0001f600"
    stdout = io.TextIOWrapper(pipe, encoding, errors="backslashreplace")  # as `entry` sets it up
    command.print_line(Completion([3], "stop", Stats(1, 1, 1), text), {}, False, stdout)
    assert json.loads(pipe.getvalue().decode())["text"] == text
    assert (text in pipe.getvalue().decode()) == (encoding == "utf-8")


def test_after_an_interruption_a_pipe_stays_where_it_was(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(KeyboardInterrupt), unfinished.jsonl(tmp_path / "pipe") as lines:
        lines.write({"ids": [3]})
        raise KeyboardInterrupt
    assert os.read(reader, 100) == b'{"ids": [3]}\n'
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1
    assert "lines are in" not in capsys.readouterr().err


def test_where_an_engine_runs_out_of_memory_flags_are_named(call, tmp_path, monkeypatch, capsys):
    def runs_out(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr("wedlm_jax.engine.rows.open_rows", runs_out)
    source = write(tmp_path / "in.jsonl", *({"prompt": f"{'Answer. ' * 6} {i}"} for i in range(2)))
    with pytest.raises(SystemExit):
        call("--input", source, "--max-new-tokens", 4)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: out of memory") and ": lower rows (--batch-size) or context (" in line


def test_one_prompt_is_completed_on_the_terminal_with_its_statistics_apart(call, directory, capsys):
    call("--prompt", "Q: Count", "--decoder", "ar", "--max-new-tokens", 5)
    (expected,) = generate(load(directory), ["Q: Count"], DecodeConfig("ar", max_new_tokens=5))
    shown = capsys.readouterr()
    assert shown.out == expected.text + "\n"
    assert "generated_tokens 5" in shown.err and "p_cache 1," in shown.err


def test_every_prompt_of_a_file_is_completed_as_often_as_is_asked(call, directory, tmp_path):
    source, target = write(tmp_path / "in.jsonl", *LINES[:2]), tmp_path / "out.jsonl"
    call(
        "--input",
        source,
        "--output",
        target,
        *["--decoder", "ar", "--temperature", "1", "--max-new-tokens", "5", "--n", "3"],
    )
    prompts = [LINES[0]["prompt"], LINES[1]["prompt_ids"]]
    expected = generate(load(directory), prompts, DecodeConfig("ar", temperature=1, max_new_tokens=5), n=3)
    assert [line["ids"] for line in read(target)] == [c.ids for c in expected]
    assert len({str(c.ids) for c in expected}) > 2


def test_over_several_devices_it_completes_what_one_completes(call, capsys):
    flags = "--decoder verified --max-new-tokens 9 --prompt Anna"
    texts = []
    for mesh in ("--mesh.data 1", "--mesh.tensor 2 --mesh.data 2"):
        call(*flags.split(), *mesh.split())
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_a_message_is_answered_through_the_chat_template(call, directory, capsys):
    call("--message", "hello", "--decoder", "ar", "--max-new-tokens", 5)
    message = [{"role": "user", "content": "hello"}]
    answer, continuation = generate(load(directory), [message, "hello"], DecodeConfig("ar", max_new_tokens=5))
    assert capsys.readouterr().out == answer.text + "\n" != continuation.text + "\n"


def test_details_are_given_on_request(call, directory, tmp_path, capsys):
    source, target = write(tmp_path / "in.jsonl", LINES[0]), tmp_path / "out.jsonl"
    flags = ("--decoder", "verified", "--max-new-tokens", 6, "--window-size", 4, "--details")
    call("--input", source, "--output", target, *flags)
    config = DecodeConfig("verified", max_new_tokens=6, window_size=4)
    (expected,) = generate(load(directory), [next(iter(LINES[0].values()))], config)
    (line,) = read(target)
    assert line["log_probs"] == expected.log_probs
    assert line["acceptance"] == [list(pair) for pair in expected.acceptance]
    call("--prompt", "Q: Count", *flags)
    assert "AR log-probabilities in nats: -" in capsys.readouterr().err
    call("--prompt", "Q: Count", *flags, "--decoder", "blockwise", "--block-size", 4)
    assert "this decoder does not read the AR chain" in capsys.readouterr().err


def test_every_decode_setting_is_a_flag(call, monkeypatch):
    seen = []
    monkeypatch.setattr(command, "generate", seen.append)
    call("--prompt", "x", "--decoder", "blockwise", "--window-size", 8, "--entropy-threshold", "inf",
         "--distance-penalty", 0.5, "--fill-rule", "sum", "--no-text-drafts", "--verify", "none",
         "--refill", "paper", "--no-reorder", "--block-size", 4, "--confidence-threshold", 0,
         "--max-new-tokens", 7, "--temperature", 0.5, "--top-k", 3, "--top-p", 0.9, "--stop-ids", 1, 2,
         "--stop", "\n\n", "END", "--mask-token-id", 3, "--no-ban-mask", "--seed", 9)  # fmt: skip
    assert seen[0].decode == DecodeConfig(
        "blockwise",
        8,
        float("inf"),
        0.5,
        "sum",
        False,
        "none",
        "paper",
        False,
        4,
        0.0,
        7,
        0.5,
        3,
        0.9,
        (1, 2),
        ("\n\n", "END"),
        3,
        False,
        9,
    )
    call("--prompt", "none", "--entropy-threshold", "none")
    assert seen[1].decode == DecodeConfig(entropy_threshold=None) and seen[1].prompt == "none"


def test_none_is_understood_in_any_case_for_flags_that_may_be_none_alone():
    assert spell_none(["--stop-ids", "NONE", "--prompt", "none"]) == ["--stop-ids", "None", "--prompt", "none"]
    assert spell_none(["none", "--prompt=none", "none"]) == ["none", "--prompt=none", "none"]


@pytest.mark.parametrize("flag", ["entropy-threshold", "entropy_threshold", "stop-ids", "mask_token_id"])
@pytest.mark.parametrize("between", [" ", "="])
def test_none_is_understood_in_every_spelling_of_a_flag(call, monkeypatch, flag, between):
    seen = []
    monkeypatch.setattr(command, "generate", seen.append)
    call("--prompt", "x", *f"--{flag}{between}none".split())
    assert getattr(seen[0].decode, flag.replace("-", "_")) is None


@pytest.mark.parametrize(
    "line, complaint",
    [
        (b'{"prompt": "a"', "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b"", "the line is empty"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt_ids": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "JSON that cannot be read"),
        (b'{"prompt_ids": [' + b"1" * 5_000 + b"]}", "JSON that cannot be read"),
        (b'{"prompt": "a \\ud800"}', "'\\ud800' at character 2 is half of a character"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "is half of a character"),
        ({}, "has no key"),
        ({"text": "a"}, "unknown key 'text'"),
        ({"prompt": "a", "temperature": 1}, "unknown key 'temperature'"),
        ({"prompt": "a", "prompt_ids": [1]}, "has prompt and prompt_ids"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"messages": []}, "messages is empty"),
        ({"prompt": 3}, "prompt must be a string"),
        ({"prompt_ids": "12"}, "prompt_ids must be a list of token ids"),
        ({"prompt_ids": [1, True]}, "prompt_ids must be a list of token ids"),
        ({"messages": "Tom"}, "messages must be a list of"),
        ({"messages": [{"role": "user"}]}, "message 0: content is missing"),
        ({"messages": [{"role": "pirate", "content": "a"}]}, "message 0: the role 'pirate' is unknown"),
        ({"prompt_ids": [5, 512]}, "token id 512 is not in the vocabulary"),
        ({"prompt_ids": [5] * 510}, "exceed the model's context of 512"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_decoded_and_the_old_output_stays(refused, tmp_path, line, complaint):
    source, target = write(tmp_path / "in.jsonl", LINES[0], line, LINES[1]), tmp_path / "out.jsonl"
    target.write_text("old")
    message = refused("--input", source, "--output", target, "--max-new-tokens", 6)
    assert f"{source}:2" in message and complaint in message
    assert target.read_text() == "old"


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ((), "give one of --prompt TEXT, --message TEXT and --input IN.jsonl"),
        (("--prompt", "a", "--input", "b"), "give one of --prompt TEXT, --message TEXT and --input IN.jsonl"),
        (("--prompt", "a", "--message", "b"), "give one of --prompt TEXT, --message TEXT and --input IN.jsonl"),
        (("--prompt", "a", "--chat-template-kwargs", "{}"), "--chat-template-kwargs does nothing to --prompt"),
        (("--prompt", ""), "--prompt is empty"),
        (("--input", "nowhere.jsonl"), "nowhere.jsonl: cannot be read"),
        (("--prompt", "a", "--output", "nowhere/out.jsonl"), "the folder nowhere does not exist"),
        (("--prompt", "a", "--output", "/tmp"), "is a folder"),
        (("--prompt", "a", "--output", "x", "--trace", "x"), "is the file of --output"),
        (("--prompt", "a", "--batch-size", "0"), "--batch-size 0"),
        (("--prompt", "a", "--n", "0"), "--n 0"),
        (("--prompt", "a", "--window-size", "0"), "window_size=0"),
        (("--prompt", "a", "--entropy-threshold", "-1"), "entropy_threshold=-1"),
        (("--prompt", "a", "--top-p", "0"), "top_p=0"),
        (("--prompt", "a", "--mask-token-id", "512"), "mask_token_id=512"),
        (("--prompt", "a", "--max-new-tokens", "600"), "exceed the model's context of 512"),
    ],
)
def test_bad_flags_are_one_line(refused, flags, complaint):
    assert complaint in refused(*flags)


def test_an_empty_file_and_output_over_input_are_refused(refused, tmp_path):
    empty = write(tmp_path / "empty.jsonl")
    assert "is empty" in refused("--input", empty)
    source = write(tmp_path / "in.jsonl", LINES[0])
    assert "would overwrite" in refused("--input", source, "--output", source)


def test_a_model_without_tokenizer_takes_ids_and_writes_no_text(directory, tmp_path, monkeypatch):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((directory / name).read_bytes())
    source, target = write(tmp_path / "in.jsonl", {"prompt_ids": [5, 6]}), tmp_path / "out.jsonl"
    flags = ["--decoder", "ar", "--max-new-tokens", "3", "--input", str(source), "--output", str(target)]
    monkeypatch.setattr("sys.argv", ["generate", "--model", str(bare), *flags])
    command.main()
    (line,) = read(target)
    assert "text" not in line and len(line["ids"]) == 3


def test_version_is_told_without_any_other_flag(call, capsys):
    call("--version")
    assert capsys.readouterr().out.startswith("wedlm_jax ")


def test_what_one_process_has_compiled_the_next_one_finds(directory, tmp_path):
    """In JAX's persistent cache: a program that was not found there would be compiled, and stored beside the others."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    flags = ["--model", directory, "--decoder", "verified", "--max-new-tokens", "8", "--prompt", "Q: Count"]

    def stored() -> set[str]:
        subprocess.run([sys.executable, "-m", "wedlm_jax.generate", *flags], env=environment, check=True)
        return {file.name for file in tmp_path.iterdir()}

    first = stored()
    assert any("jit_start" in name for name in first) and any("jit_run" in name for name in first)
    assert stored() == first
