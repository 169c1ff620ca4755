"""`python -m wedlm_jax.chat`: several turns from a pipe, its commands, Ctrl-C, and errors in one line."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from tests.one_line import complaint_of
from wedlm_jax import DecodeConfig, Engine, generate, load, save
from wedlm_jax.chat import __main__ as command
from wedlm_jax.decode.calibration import Calibration
from wedlm_jax.decode.prompts import encode_prompt, render_messages
from wedlm_jax.engine import rows

from ..evals.models import tiny_model
from ..test_notebooks import CHATML

FLAGS = ("--decoder", "ar", "--max-new-tokens", "9", "--context", "120")
CONFIG = DecodeConfig("ar", max_new_tokens=9)
STREAMING = ("--decoder", "streaming", "--window-size", "4", "--mask-token-id", "7")
CALIBRATION = Calibration(0.4, 0.0, 4, 0.1, 0.0, 100, 3.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`chat` with a chat template, `base` without."""
    path = tmp_path_factory.mktemp("models")
    for name, template in (("chat", CHATML), ("base", None)):
        model = dataclasses.replace(tiny_model(), tokenizer=copy.deepcopy(tiny_model().tokenizer))
        model.tokenizer.chat_template = template
        save(model, path / name)
    return path


@pytest.fixture
def piped(folder, monkeypatch, capsys):
    """Runs the command on lines of a pipe; returns what it wrote to stdout and to stderr."""

    def run(*lines: str, model: str = "chat", flags: tuple[str, ...] = ()):
        monkeypatch.setattr(sys, "argv", ["chat", "--model", str(folder / model), *FLAGS, *flags])
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        command.main()
        return capsys.readouterr()

    return run


def test_a_pipe_gets_the_answers_of_generate_turn_by_turn(piped, folder):
    model = load(folder / "chat")
    turns = [{"role": "user", "content": "Anna has 3 apples."}]
    (first,) = generate(model, [turns], CONFIG)
    shown = piped(turns[0]["content"], "", "And?", "/reset", f" {turns[0]['content']} ", "/quit", "never read")
    # The second prompt holds the tokens of the first answer as they were chosen, not as its text would be split.
    later = [*turns, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
    rendered = [render_messages(model, messages) for messages in (turns, later)]
    rest = rendered[1].removeprefix(rendered[0] + first.text)
    ids = [*encode_prompt(model, turns), *first.ids, *model.tokenizer.encode(rest)]
    (second,) = generate(model, [ids], CONFIG)
    assert shown.out == f"{first.text}\n{second.text}\n{first.text}\n"
    notes = [line for line in shown.err.splitlines() if "tokens per forward" in line]
    assert len(notes) == 3 and "a new conversation" in shown.err
    cached = [int(re.search(r"(\d+) of \d+ prompt tokens cached", line).group(1)) for line in notes]
    prompt = len(model.tokenizer.encode(model.tokenizer.apply_chat_template(turns, tokenize=False)))
    assert cached[0] == 0 and cached[1] >= prompt + len(first.ids) - 1 and cached[2] >= prompt


def test_an_unknown_command_is_told_and_a_path_is_a_message(piped):
    shown = piped("/help", "/usr/bin is a folder")
    assert "/help: no such command; /reset" in shown.err
    assert shown.err.count("tokens per forward") == 1


def test_a_base_model_continues_a_line_as_it_is_written(piped, folder):
    """The indentation of code says what comes next."""
    lines = ["    Tom", "Tom"]
    indented, flush = generate(load(folder / "base"), lines, CONFIG)
    assert indented.text != flush.text
    shown = piped(lines[0], " /reset ", lines[1], model="base", flags=("--plain",))
    assert shown.out == f"{indented.text}\n{flush.text}\n"


def test_a_base_model_continues_what_begins_with_a_slash(piped, folder):
    """A path or a comment is text to it; only what is a command is obeyed."""
    (expected,) = generate(load(folder / "base"), ["//Tom"], CONFIG)
    shown = piped("//Tom", "/reset", model="base", flags=("--plain",))
    assert shown.out == f"{expected.text}\n" and "no such command" not in shown.err


def test_a_base_model_continues_text_only_when_asked(piped, folder, capsys):
    assert "--plain" in complaint_of(capsys, piped, "Tom", model="base")
    (expected,) = generate(load(folder / "base"), ["Tom"], CONFIG)
    assert piped("Tom", model="base", flags=("--plain",)).out == f"{expected.text}\n"


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (("--window-size", "0"), "window_size=0"),
        (("--context", "100000"), "context=100000: the model's is 512"),
        (("--context", "2"), "--context 2: leaves no room for a conversation"),
        (("--system", "\udcff"), "'\\udcff' at character"),
        (("--nonsense",), "nonsense"),
        (("--plain", "--system", "x"), "--system needs the chat template"),
        (("--plain", "--chat-template-kwargs", "{}"), "--chat-template-kwargs needs the chat template"),
    ],
)
def test_bad_flags_are_one_line(piped, capsys, flags, complaint):
    assert complaint in complaint_of(capsys, piped, "x", flags=flags)


def test_ctrl_c_ends_the_answer_and_not_the_program(piped, monkeypatch):
    """And it leaves the handler of the process as it was."""
    true_step, calls, before = Engine.step, [], signal.getsignal(signal.SIGINT)

    def pressed_in_the_second_step(engine):
        calls.append(engine)
        if len(calls) == 3:  # the first step belongs to the request that compiles
            os.kill(os.getpid(), signal.SIGINT)
        return true_step(engine)

    monkeypatch.setattr(Engine, "step", pressed_in_the_second_step)
    shown = piped("first", "second", flags=("--max-new-tokens", "30"))
    reasons = re.findall(r"\[(\w+); (\d+) tokens", shown.err)
    assert reasons[0] == ("cancelled", "16") and reasons[1][0] != "cancelled"
    assert signal.getsignal(signal.SIGINT) is before


def test_the_length_of_a_system_prompt_is_compiled_before_the_first_answer(piped, monkeypatch):
    prefilled, prefill = [], rows.prefill_behind
    monkeypatch.setattr(rows, "prefill_behind", lambda *a, **k: prefilled.append(k["chunk"]) or prefill(*a, **k))
    shown = piped("hi", flags=("--system", "You are an owl. " * 4, "--max-new-tokens", "2"))
    assert " 0 of " in shown.err  # prompt tokens cached: what was compiled with is no part of the answer
    assert len(prefilled) == 3 and 32 < prefilled[-1] in prefilled[:-1] and 32 in prefilled[:-1]


def test_on_a_terminal_an_error_is_shown_and_the_conversation_goes_on(folder, monkeypatch):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, legacy_windows=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 70 + "\nhi\n"))
    command.chat(command.Chat(str(folder / "chat"), context=40, decode=CONFIG), console)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert (
        "error: the conversation with this line fills the context of 40 tokens; /reset starts a new one, a shorter line"
        in shown
    )
    assert shown.count("tokens per forward") == 1


def test_calibrated_thresholds_are_named_where_they_are_used(piped, tmp_path):
    save(dataclasses.replace(tiny_model(), calibration=CALIBRATION), tmp_path / "calibrated")
    shown = [piped(model=str(tmp_path / "calibrated"), flags=("--plain", *flags)).err for flags in ((), STREAMING)]
    assert [f"streaming with {CALIBRATION.in_words()}" in err for err in shown] == [False, True]
    assert "but with mask_token_id 7, for which no disagreement was measured" in shown[1]


def test_an_answer_is_cut_to_what_the_context_leaves(piped):
    shown = piped("hi", flags=("--context", "40", "--max-new-tokens", "500"))
    assert re.search(r"\[length; \d+ tokens", shown.err)


def test_at_the_prompt_ctrl_c_is_answered_and_the_end_of_input_leaves(monkeypatch):
    keys = iter([KeyboardInterrupt, "hello ", "", EOFError])

    def typed(prompt: str) -> str:
        key = next(keys)
        if isinstance(key, str):
            return key
        raise key

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    assert list(command.spoken(Console(file=stream, force_terminal=True))) == ["hello "]
    assert "/quit leaves" in stream.getvalue()


def test_a_line_that_is_typed_may_be_long_and_is_edited():
    """A terminal by itself keeps 4,095 bytes of a line and drops the rest, and takes arrow keys for text."""
    pytest.importorskip("readline")
    spoken = (
        "from rich.console import Console; from wedlm_jax.chat.__main__ import spoken; "
        "[print('said', len(line), line[-9:], flush=True) for line in spoken(Console(force_terminal=True))]"
    )
    terminal, its_side = pty.openpty()
    ends = dict(stdin=its_side, stdout=its_side, stderr=its_side)
    process = subprocess.Popen([sys.executable, "-c", spoken], env={**os.environ, "TERM": "xterm"}, **ends)
    os.close(its_side)
    keys = [b"\x04", b"abc\x1b[D\x1b[DX\r", b"x" * 6000 + b" end\r"]
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal tells that the program has ended
        while part := os.read(terminal, 4096):
            shown += part
            if shown.endswith(b"> "):
                # It is echoed while it is typed, and that has to be read.
                threading.Thread(target=os.write, args=(terminal, keys.pop())).start()
    os.close(terminal)
    assert process.wait() == 0
    assert re.findall(rb"said (.*?)\r", shown) == [b"6004 xxxxx end", b"4 aXbc"]


def test_ctrl_c_leaves_where_nobody_reads_that_quit_does(monkeypatch):
    class Interrupted(io.StringIO):
        def readline(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        list(command.spoken(Console(file=io.StringIO())))


def test_where_only_the_input_is_a_terminal_its_end_leaves_and_an_empty_line_does_not(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("hello\n\nbye\n"))
    assert list(command.spoken(Console(file=io.StringIO()))) == ["hello", "bye"]
