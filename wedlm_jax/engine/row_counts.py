"""How many rows a run computes: all of a group's, or fewer while few are in use, once a program for fewer is worth compiling.

Every number of rows is a program of its own. One for fewer rows saves a part of every run that needs no more, and costs seconds
or more to compile; how long the rows will stay few, nobody knows. So it is compiled as soon as it would have saved what
compiling costs: whatever comes then, no more than twice of what was unavoidable is spent (the ski rental problem).
"""

from __future__ import annotations

from wedlm_jax.model.window_table import WindowTable

ROUNDING = 0.25  # by which a forward may cost more than one over the rows that it needs
LEAST_SECONDS = 1.0  # of compiling; what this process or the cache on disk has compiled before is no measure of it


def row_counts(rows: int, slots: int, table: WindowTable) -> tuple[int, ...]:
    """Numbers of rows to compile for, ascending, the last one `rows`: as close as ROUNDING asks, but no closer than by half.

    Args:
      slots: of a row that a forward computes.
      table: of the model: what a forward over more slots costs.
    """
    cost = [table.cost(count * slots) for count in range(rows + 1)]
    counts = [rows]
    while too_dear := [count for count in range(1, counts[0]) if cost[counts[0]] > (1 + ROUNDING) * cost[count]]:
        counts.insert(0, min(too_dear[-1], counts[0] // 2))
    return tuple(counts)


class RowCounts:
    """The numbers of rows that a group has programs for.

    Args:
      rows, slots, table: as of `row_counts`.
      fixed: the rows lie on several devices, which have to compute them all.
    """

    def __init__(self, rows: int, slots: int, table: WindowTable, *, fixed: bool = False):
        counts = (rows,) if fixed else row_counts(rows, slots, table)
        self._cost = {count: table.cost(count * slots) for count in counts}
        self._used = {rows}
        self._price = LEAST_SECONDS
        self._saved = dict.fromkeys(counts[:-1], 0.0)  # seconds, by programs that there are not yet

    def choose(self, running: int) -> int:
        """The rows that the next run computes, where so many are in use."""
        return min(count for count in self._used if count >= running)

    def compiled(self, seconds: float) -> None:
        """Says that a program took so long to compile."""
        self._price = max(self._price, seconds)

    def ran(self, running: int, computed: int, seconds: float) -> None:
        """Says that a run of so many rows, which computed so many, took so long; nothing was compiled in it."""
        for count in self._saved:
            if running <= count < computed:
                self._saved[count] += seconds * (1 - self._cost[count] / self._cost[computed])
        worth = [count for count, saved in self._saved.items() if saved >= self._price]
        if worth:
            self._used.add(max(worth, key=self._saved.__getitem__))
            self._saved = dict.fromkeys(self._cost.keys() - self._used, 0.0)
