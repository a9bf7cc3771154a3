"""From a link that turns slow to the new plan: how many iterations run as before, and whether training pauses.

    python -m experiments.pipemorph.reaction                        seconds
    python -m experiments.pipemorph.reaction --backend threads      a minute and a half
    python -m experiments.pipemorph.reaction --backend processes    a minute and a half, the first case alone

8 ranks, 32 microbatches, ops of 10 ms; after 5 iterations some links turn late and stay so. Nobody tells the
controller: it sees the messages' times alone. `before` counts the iterations that the links slowed down and that
still ran the old plan; `pause` is the time from the end of the last of them to the start of the first with the new
plan, and in brackets the usual one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from experiments.common.results import Row, table
from experiments.pipemorph.backends import Backend
from experiments.pipemorph.command import command
from experiments.pipemorph.loops import Loop, run
from experiments.pipemorph.setups import BASE, CHAIN_8, Link, late
from experiments.pipemorph.systems import job_of
from penstock.control import Job, run_once
from penstock.cost import LinkCondition, Links
from penstock.cost.conditions import Trace
from penstock.draw.chart import Axis, Figure, Line, Mark, line_chart

MODEL = CHAIN_8
HEALTHY, SLOW = 5, 8
CASES: Mapping[str, Mapping[Link, float]] = {
    "last link, 60 ms": {(6, 7): 60.0},
    "first link, 60 ms": {(0, 1): 60.0},
    "last link, 30 ms": {(6, 7): 30.0},
    "three links, 30 ms": {(0, 1): 30.0, (3, 4): 30.0, (6, 7): 30.0},
}
TARGET = 5
"""Iterations from the slow link to the new plan, at most: a burst of three, one more, and one while ranks agree."""


def rows(backend: Backend) -> Iterator[Row]:
    """A row for each case: frozen `zb` on direct links at the start, all remedies allowed."""
    job = job_of(MODEL, replace(job_of(MODEL).start, dispatch="frozen"))
    ideal = run_once(job, job.start, late({})).makespan
    # A little into an iteration, so that the first slow one is slow nearly from its start.
    begins = (HEALTHY + 0.05) * ideal
    loops = [
        Loop(
            {"links": name, "slow_from": begins, "undelayed_ms": ideal},
            job,
            True,
            changing(delays, begins),
            end(job, delays, begins),
        )
        for name, delays in list(CASES.items())[: 1 if backend.name == "processes" else None]
    ]
    yield from run(backend, loops)


def changing(delays: Mapping[Link, float], begins: float) -> Links:
    return Links({link: LinkCondition(Trace((0.0, begins), (0.0, ms))) for link, ms in delays.items()}, base=BASE)


def end(job: Job, delays: Mapping[Link, float], begins: float) -> float:
    """A moment by which the controller has had time enough."""
    slow = run_once(job, job.start, late(delays)).makespan
    return begins + TARGET * slow + SLOW * run_once(job, job.start, late({})).makespan


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield "iterations (ms) around the change, and how long the old plan still ran"
    body = []
    for row in rows:
        ran, starts = row["measured_ms"] or row["simulated_ms"], row["starts"]
        first = first_slow(row)
        gaps = [later - (at + ms) for at, later, ms in zip(starts, starts[1:], ran, strict=False)]
        body.append(
            [
                row["links"],
                " ".join(f"{ms:.0f}" for ms in ran[first - 1 : first + 6]),
                str(before(row)),
                f"{gaps[first + before(row) - 1]:.1f} ({median(gaps):.1f})" if row["measured_ms"] else "-",
                f"{ran[-1] / row['undelayed_ms']:.2f}",
            ]
        )
    yield from table(["", "ms", f"before (target {TARGET})", "pause, ms", "slowdown then"], body)


def first_slow(row: Row) -> int:
    """The first iteration that the links slowed down."""
    ran = row["measured_ms"] or row["simulated_ms"]
    slow = 1.1 * row["undelayed_ms"]
    return next(at for at, ms in enumerate(ran) if ms > slow and row["starts"][at] + ms > row["slow_from"])


def before(row: Row) -> int:
    """How many slow iterations ran the old plan; all that came where none other did."""
    switched = next((at for at, number in enumerate(row["numbers"]) if number > 0), len(row["numbers"]) - 1)
    return switched - first_slow(row)


def stairs(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Points of a line on which each value holds until the next."""
    return [each for each in x for _ in range(2)][1:], [each for each in y for _ in range(2)][:-1]


def chart(rows: Sequence[Row]) -> Figure:
    lines = [
        Line(row["links"], *stairs([each / 1e3 for each in row["starts"]], row["measured_ms"] or row["simulated_ms"]))
        for row in rows
    ]
    return line_chart(
        lines,
        title="From a slow link to the new plan",
        note="8 ranks, 32 microbatches, ops of 10 ms; each step is one iteration",
        x=Axis("time (s)"),
        y=Axis("iteration (ms)", low=0.0),
        marks=[Mark(rows[0]["slow_from"] / 1e3, "slow")],
    )


if __name__ == "__main__":
    command("reaction", __doc__, rows, lines, chart)
