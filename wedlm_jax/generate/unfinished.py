"""A file of completions that is not whole yet: OUT.unfinished holds the lines that are done, whatever ends the command, and the
same command goes on behind them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from wedlm_jax.config_tree import differences
from wedlm_jax.errors import UserError, writing
from wedlm_jax.sole_writer import locked


class Unfinished(NamedTuple):
    """The files of an output until it is whole."""

    lines: Path
    made_from: Path  # of what the lines are made, as JSON
    output: Path  # what `lines` becomes: the file that a link leads to

    @classmethod
    def of(cls, path: Path) -> Unfinished | None:
        """None where `path` is a device or a pipe, or one that this process holds open, such as /dev/stdout: it gets its lines
        at once."""
        held_open = path.is_symlink() and path.parts[:2] in (("/", "dev"), ("/", "proc"))
        if held_open or (path.exists() and not path.is_file()):
            return None
        output = path.resolve() if path.is_symlink() else path
        lines = output.with_name(f"{path.name}.unfinished")
        return cls(lines, lines.with_name(f"{lines.name}.made_from"), output)

    def differs(self, made_from: Callable[[], dict[str, Any]] | None) -> str | None:
        """Of what run the lines are, where it is not one that was made from the same."""
        if made_from is None:
            return "an earlier run, and with --trace none is gone on with"
        try:
            before = json.loads(self.made_from.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return f"an earlier run, and {self.made_from} does not tell of which"
        changed = differences(before, json.loads(json.dumps(made_from())))
        return f"another run ({'; '.join(changed)})" if changed else None

    def become_whole(self) -> None:
        self.lines.replace(self.output)
        self.remove()

    def remove(self) -> None:
        self.lines.unlink(missing_ok=True)
        self.made_from.unlink(missing_ok=True)


class Lines:
    """The open file of an output."""

    def __init__(self, file: BinaryIO, count: int):
        self._file, self.count = file, count

    def write(self, record: dict[str, Any]) -> None:
        """Adds a line, which is in the file then, whatever comes."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.count += 1


@contextlib.contextmanager
def jsonl(path: Path, made_from: Callable[[], dict[str, Any]] | None = None) -> Iterator[Lines]:
    """Around what writes a file line by line. It becomes `path` at the end; until then, and if anything goes wrong, a file that
    was there stays as it was, and the lines are beside it.

    Args:
      made_from: all that the lines depend on, for JSON, noted beside them: where an earlier run was made from the same, its lines
        are there already, and `count` says how many. None for lines that no run goes on behind.

    Raises:
      UserError: it cannot be written, another process writes it, or lines of another run would be lost.
    """
    held = Unfinished.of(path)
    if held is None:
        with writing(path), path.open("ab") as file:
            yield Lines(file, 0)
        return
    with writing(path), held.lines.open("a+b") as file:
        if not locked(file.fileno()):
            raise UserError(f"{held.lines}: another process writes it; wait for it, or name another file than {path}")
        file.seek(0)
        sizes = [len(line) for line in file if line.endswith(b"\n")]
        if sizes and (why := held.differs(made_from)):
            raise UserError(
                f"{held.lines} holds {len(sizes)} lines of {why}; remove it, or name another file than {path}"
            )
        if sizes:
            print(f"going on behind the {len(sizes)} lines of {held.lines}", file=sys.stderr)
        lines = Lines(file, len(sizes))
        try:
            file.truncate(sum(sizes))
            if not sizes:
                held.made_from.unlink(missing_ok=True)  # of a run that wrote no line
                if made_from is not None:
                    held.made_from.write_text(json.dumps(made_from()), encoding="utf-8")
            yield lines
        except BaseException as error:
            if not lines.count:
                held.remove()
            elif isinstance(error, (KeyboardInterrupt, UserError, OSError)):
                again = "" if made_from is None else "; the same command goes on behind them"
                print(f"the first {lines.count} lines are in {held.lines}{again}", file=sys.stderr)
            raise
        held.become_whole()
