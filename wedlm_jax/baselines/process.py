"""An engine in a process of its own, which decodes when it is asked to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import jax

from wedlm_jax.decode.stats import Completion, FinishReason, Stats
from wedlm_jax.errors import UserError, reason

Name = Literal["transformers", "vllm", "official"]
PAUSE = 0.3  # seconds before a turn of another process, in which threads that wait for work by spinning give up
HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Run:
    """One call of an engine."""

    seconds: float  # of the call in its process, prefill in it
    completions: list[Completion]
    decode_seconds: float | None = None  # of the steps behind prefill, where it tells them
    steps: int | None = None  # how many of them: forwards of the batch


class EngineEnded(UserError):
    """Its process is gone: whatever else it is asked, it cannot answer."""


class Baseline:
    """An engine that runs in another Python for as long as the `with` statement lasts. Where JAX is on the CPU it sees no GPU.

    Args:
      name: which one; `official` is the engine of a checkout of the WeDLM repository.
      python: an interpreter that has it.
      model: an HF directory of type qwen3 or, but for the official engine, qwen2 or llama.
      settings: further entries of the job: `dtype`; `rows`, `context` and `cache_bytes`, the most that it will hold; for the
        official engine `checkout`, `window_size`, `mask_token_id`.

    Raises:
      UserError: the interpreter cannot be run, or the engine cannot be loaded there; with what it said.
    """

    def __init__(self, name: Name, python: str, model: Path, **settings: Any) -> None:
        self.name, self.python = name, python
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - open as long as the process is
        self._kept: Path | None = None  # a copy of it
        pipe = subprocess.PIPE
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if jax.default_backend() == "cpu" else {})
        try:
            # A group of its own, so that it ends with the processes that it starts, and not by the Ctrl-C that is meant for us.
            self._process = subprocess.Popen(
                [python, str(HERE / f"{name}_engine.py")], stdin=pipe, stdout=pipe, stderr=self._said, text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"{python}: cannot be run ({reason(error).lower()}); name a Python") from None
        try:
            self.ask({"model": str(model), "platform": jax.default_backend(), **settings})
        except BaseException:  # no `with` statement has been entered that would end it
            self._end()
            raise

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int, stop_ids: Sequence[int], **settings: Any) -> Run:
        """Completes the prompts as one batch, greedily."""
        asked = {"prompts": list(prompts), "max_new_tokens": max_new_tokens, "stop_ids": list(stop_ids), **settings}
        answered = self.ask(asked)
        completions = []
        for row, ids in enumerate(answered["ids"]):
            # AR where nothing else is said: one forward a token, one token a forward.
            forwards, processed = (
                answered.get(counter, [len(ids)] * (row + 1))[row] for counter in ("forwards", "processed")
            )
            reason: FinishReason = "stop" if ids and ids[-1] in stop_ids else "length"
            completions.append(Completion(ids, reason, Stats(len(ids), forwards, processed)))
        return Run(answered["seconds"], completions, answered.get("decode_seconds"), answered.get("steps"))

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Its answer.

        Raises:
          UserError: it answers with an error, or it is gone (EngineEnded).
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):  # nothing, or what it had written of an answer
            raise EngineEnded(f"{self.name} under {self.python}: {self._last_words()}{self._kept_words()}")
        answered = json.loads(line)
        if "error" in answered:
            raise UserError(f"{self.name} under {self.python}: {answered['error']}{self._kept_words()}")
        return answered

    def _last_words(self) -> str:
        status = self._process.wait()
        ended = f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
        said = [line.strip() for line in self._words().splitlines() if line.strip()]
        return f"{ended} and said last: {said[-1]}" if said else f"{ended} and said nothing"

    def _words(self) -> str:
        self._said.seek(0)
        return self._said.read()

    def _kept_words(self) -> str:
        """Where all that it said lies: an engine of many processes names the cause there alone."""
        words = self._words()
        if not words:
            return ""
        if self._kept is None:
            descriptor, file = tempfile.mkstemp(prefix=f"{self.name}-", suffix=".log")
            os.close(descriptor)
            self._kept = Path(file)
        self._kept.write_text(words, encoding="utf-8")
        return f" (all that it said is in {self._kept})"

    def __enter__(self) -> Baseline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        """At once, also in the middle of an answer: it has nothing to save."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # a question that it did not live to read
            self._process.stdin.close()
        self._process.stdout.close()
        self._said.close()
