"""A file of completions that is not whole yet: OUT.unfinished holds the lines that are done, whatever ends the command, and the
same command goes on behind them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from wedlm_jax.config_tree import differences
from wedlm_jax.errors import UserError, writing
from wedlm_jax.results import replacing
from wedlm_jax.sole_writer import locked


class Unfinished(NamedTuple):
    """The files of an output until it is whole."""

    lines: Path
    made_from: Path  # of what the lines are made, as JSON
    output: Path  # what `lines` becomes: the file that a link leads to

    @classmethod
    def of(cls, path: Path) -> Unfinished | None:
        """None where `path` is a device or a pipe, which gets its lines at once."""
        if path.exists() and not path.is_file():
            return None
        output = path.resolve() if path.is_symlink() else path
        lines = output.with_name(f"{path.name}.unfinished")
        return cls(lines, lines.with_name(f"{lines.name}.made_from"), output)

    def become_whole(self) -> None:
        self.lines.replace(self.output)
        self.remove()

    def remove(self) -> None:
        self.lines.unlink(missing_ok=True)
        self.made_from.unlink(missing_ok=True)


def lines_done(path: Path, made_from: Callable[[], dict[str, Any]] | None, note: bool = False) -> int:
    """How many lines of `path` an earlier run has left unfinished, behind which this one is to go on.

    Args:
      made_from: all that the lines depend on, for JSON; None where a run cannot go on behind others.
      note: whether to write it beside lines that are to come, for the run that goes on.

    Raises:
      UserError: lines of another run are there, which would be lost.
    """
    held = Unfinished.of(path)
    if held is None:
        return 0
    done = 0
    if held.lines.is_file():
        with held.lines.open("rb") as file:
            done = sum(line.endswith(b"\n") for line in file)
    if not done:
        if made_from is not None and note:
            with replacing(held.made_from) as partial:
                partial.write_text(json.dumps(made_from()), encoding="utf-8")
        return 0
    there = f"{held.lines} holds {done} lines of"
    mend = f"remove it, or name another file than {path}"
    if made_from is None:
        raise UserError(f"{there} an earlier run, and with --trace none is gone on with; {mend}")
    try:
        before = json.loads(held.made_from.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        raise UserError(f"{there} an earlier run, and {held.made_from} does not tell of which; {mend}") from None
    if changed := differences(before, json.loads(json.dumps(made_from()))):
        raise UserError(f"{there} another run ({'; '.join(changed)}); {mend}")
    print(f"going on behind the {done} lines of {held.lines}", file=sys.stderr)
    return done


class Lines:
    """The open file of an output."""

    def __init__(self, file: Any, count: int):
        self._file, self.count = file, count

    def write(self, record: dict[str, Any]) -> None:
        """Adds a line, which is in the file then, whatever comes."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.count += 1


@contextlib.contextmanager
def jsonl(path: Path, kept: int = 0) -> Iterator[Lines]:
    """Around what writes a file line by line. It becomes `path` at the end; until then, and if anything goes wrong, a file that
    was there stays as it was, and the lines are beside it.

    Args:
      kept: lines that are there already, as `lines_done` says.

    Raises:
      UserError: it cannot be written, or another process writes it.
    """
    held = Unfinished.of(path)
    if held is None:
        with writing(path), path.open("wb") as file:
            yield Lines(file, 0)
        return
    with writing(path), held.lines.open("a+b") as file:
        if not locked(file.fileno()):
            raise UserError(f"{held.lines}: another process writes it; wait for it, or name another file than {path}")
        file.seek(0)
        file.truncate(sum(len(file.readline()) for _ in range(kept)))
        lines = Lines(file, kept)
        try:
            yield lines
        except BaseException as error:
            if not lines.count:
                held.remove()
            elif isinstance(error, (KeyboardInterrupt, UserError)):
                again = "; the same command goes on behind them" if held.made_from.is_file() else ""
                print(f"the first {lines.count} lines are in {held.lines}{again}", file=sys.stderr)
            raise
        held.become_whole()
