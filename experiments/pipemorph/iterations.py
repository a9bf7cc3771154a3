"""What a row says of its iterations, as times and as multiples of another row's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from experiments.common.results import Row


def simulated(row: Row) -> float:
    """The simulated time of an iteration (ms)."""
    return fmean(row["simulated_ms"])


def measured(row: Row) -> float | None:
    """The measured time of an iteration (ms), None where nothing was measured."""
    return median(row["measured_ms"]) if row["measured_ms"] else None


def pair(row: Row) -> str:
    """`simulated/measured` in ms; the first alone where nothing was measured."""
    found = measured(row)
    return f"{simulated(row):.0f}" + ("" if found is None else f"/{found:.0f}")


def times(row: Row, base: Row) -> str:
    """The same as multiples of another row, simulated of simulated and measured of measured."""
    found, unit = measured(row), measured(base)
    text = f"{simulated(row) / simulated(base):.2f}"
    return text if found is None or unit is None else f"{text}/{found / unit:.2f}"


def best_known(row: Row) -> float:
    """What was measured where something was, else what was simulated (ms)."""
    found = measured(row)
    return simulated(row) if found is None else found


def behind(rows: Sequence[Row], ours: str = "ours", least: float = 0.01) -> Iterator[str]:
    """Which systems are faster than ours in rows of one case, each with how many times as long ours takes."""
    mine = next(row for row in rows if row["system"] == ours)
    for row in rows:
        if best_known(mine) > best_known(row) * (1 + least):
            yield f"{row['system']} {times(mine, row)}"
