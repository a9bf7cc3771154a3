"""The cells of the protocol: on which devices, beside what load, which fault, and which best answer an oracle gives.

    a run     |--------- healthy ---------|========= a link is late =========|---- healthy ----|
    step      0                           onset                              onset + lasts     NUM_STEPS

Pure: nothing here measures or starts anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

import penstock as ps
from penstock.control import Configuration, Job, Measured, candidates, run_once
from penstock.cost import Links
from penstock.cost.conditions import LinkQueue
from penstock.simulation.mesh import simulate_mesh

CALIBRATION, CONTROL, STEPS, TEXT = "calibration.json", "control.jsonl", "steps.json", "text.txt"
MODES = ("oracle", "without", "with")
"""The runs of a seed: the best change made by hand at the onset; no change; `--adapt`."""
NUM_SEEDS = 20
NUM_STEPS = {"emulated": 100, "real": 60, "ring": 60}
"""Steps of a run, by device. They stand for a run of `WHOLE` seconds."""
WHOLE = 60.0
"""Seconds of the run that onsets are given for: an onset at second 12 comes after 12/60 of the steps."""
HEALTHY = {"latency": "0ms", "bandwidth": "10Gbit/s"}
"""A link before and after its fault, by what the fault changes."""
OP_MS = 10.0
"""Time of each F, I and W of an emulated stage (ms)."""
STRETCH = 0.15
"""Emulated devices and links take this share of the time that their costs say, so that runs are short."""
BETWEEN_MS = 6.0
"""What an emulated step takes by the clock, besides its ops and messages: the conditions' time goes on meanwhile."""
MESSAGE_BYTES = {"bandwidth:20Mbit/s": 64e3}
"""Bytes of an emulated message where they are not `USUAL_BYTES`: a link is busy for 26 ms with each, either way."""
USUAL_BYTES = 16e3

Link = tuple[int, int]


@dataclass(frozen=True)
class Cell:
    """What the runs of a cell have in common.

    Attributes:
        device: "emulated" (threads, 4 ranks), "real" (4 processes, nano preset) or "ring" (2 ranks, each of 2
            replicas; the late link is one of a gradient ring).
        load: busy loops beside the runs; 0 is quiet.
        fault: the condition of the late link; empty for none.
        second: when the fault begins, in seconds of a run of `WHOLE`.
        lasts: steps until it is over; None: to the end.
    """

    device: str
    load: int
    fault: str = ""
    second: int = 12
    lasts: int | None = None

    @property
    def name(self) -> str:
        beside = ("quiet", "busy1", "busy2")[self.load]
        if not self.fault:
            return f"{self.device}-{beside}-none"
        amount = self.fault.partition(":")[2].split("/")[0]
        lasts = "end" if self.lasts is None else f"{self.lasts}steps"
        return f"{self.device}-{beside}-{amount}-from{self.second}-{lasts}"

    @property
    def num_steps(self) -> int:
        return NUM_STEPS[self.device]

    @property
    def is_to_the_end(self) -> bool:
        """Whether there is a fault that lasts to the end of the run."""
        return bool(self.fault) and self.lasts is None


CELLS = {
    cell.name: cell
    for cell in (
        Cell("emulated", 0, "latency:60ms"),
        Cell("emulated", 1, "latency:60ms"),
        Cell("emulated", 2, "latency:60ms"),
        Cell("emulated", 0, "latency:30ms", second=0),
        Cell("emulated", 0, "latency:120ms", second=40),
        Cell("emulated", 1, "latency:60ms", second=0),
        Cell("emulated", 0, "bandwidth:5Mbit/s"),
        Cell("emulated", 1, "bandwidth:20Mbit/s", second=40),
        Cell("emulated", 0, "latency:120ms", lasts=3),
        Cell("emulated", 1, "latency:60ms", lasts=20),
        Cell("emulated", 0),
        Cell("emulated", 1),
        Cell("real", 0, "latency:60ms"),
        Cell("real", 1, "latency:30ms"),
        Cell("real", 0),
        Cell("real", 1),
        Cell("ring", 0, "bandwidth:20Mbit/s"),
        Cell("ring", 1, "latency:30ms"),
    )
}


class Fault(NamedTuple):
    """The fault of one run.

    Attributes:
        link: the two ranks, or nodes of a mesh, between which messages are late.
        begin, end: ms of the conditions' time.
    """

    link: Link
    begin: float
    end: float


class StepTimes(NamedTuple):
    """How long a step takes (ms) without the fault and with it, if nothing is changed."""

    healthy: float
    late: float


def links_of(cell: Cell) -> tuple[Link, ...]:
    """The links of a cell one of which is late: the pipeline's, or those of the two gradient rings."""
    return ((0, 1), (2, 3)) if cell.device == "ring" else ((0, 1), (1, 2), (2, 3))


def late_link(cell: Cell, seed: int) -> Link:
    links = links_of(cell)
    return links[seed % len(links)]


def fault_of(cell: Cell, seed: int, times: StepTimes) -> Fault | None:
    """When the fault of a run begins and ends. Seeds begin at different points of a step, except at second 0."""
    if not cell.fault:
        return None
    begin = 0.0
    if cell.second:
        step = round(cell.second / WHOLE * cell.num_steps)
        begin = (step + seed * 7 % NUM_SEEDS / NUM_SEEDS) * times.healthy
    end = float("inf") if cell.lasts is None else begin + cell.lasts * times.late
    return Fault(late_link(cell, seed), begin, end)


def conditions_of(cell: Cell, fault: Fault | None) -> list[str]:
    """The `--link` texts of a run. All links of a cell are observed, so none of them is without a condition."""
    what, _, amount = cell.fault.partition(":")
    found = []
    for link in links_of(cell):
        text = "latency:0ms"
        if fault is not None and link == fault.link:
            times = [(0.0, HEALTHY[what])] if fault.begin > 0 else []
            times.append((fault.begin, amount))
            if fault.end < float("inf"):
                times.append((fault.end, HEALTHY[what]))
            text = f"{what}:steps:" + ",".join(f"{at:.3f}ms/{value}" for at, value in times)
        found.append(f"{link[0]}:{link[1]}={text}")
    return found


def is_due(fault: Fault, now: float, step_ms: float) -> bool:
    """Whether the oracle's answer should run in a step that begins at `now`: the fault begins in it, or has begun."""
    return now + step_ms > fault.begin and now < fault.end


def emulated_job(cell: Cell) -> Job:
    """What an emulated cell runs: `zb`, frozen, 4 ranks, 8 microbatches, and a message of 16 or 64 KB for each."""
    costs = ps.Costs.uniform(4, f=OP_MS, i=OP_MS, w=OP_MS)
    costs = replace(costs, message_bytes=(MESSAGE_BYTES.get(cell.fault, USUAL_BYTES),) * 4)
    schedule = ps.build("zb", 4, 8)
    return Job(costs, Configuration(schedule, "frozen", caps=ps.simulate(schedule, costs).peak_activations))


def simulated_ms(job: Job, configuration: Configuration, links: Links) -> float:
    """The time of a step by simulation (ms)."""
    if job.mesh is None:
        return run_once(job, configuration, links).makespan
    return simulate_mesh(
        configuration.schedule,
        job.costs,
        replace(job.mesh, nodes=configuration.nodes),
        links=links,
        ring=job.ring,
        dispatch=configuration.dispatch,
    ).iteration


def best_answer(job: Job, link: Link, fault: str) -> Configuration:
    """The oracle's answer: of all configurations that a run may change to, the fastest by simulation with the true
    fault. In a mesh these are all places of its nodes."""
    links = Links({link: fault})
    choices: Sequence[Configuration]
    if job.mesh is not None:
        choices = [replace(job.start, nodes=nodes) for nodes in sorted(permutations(job.start.nodes))]
    else:
        size = max(job.costs.message_bytes)
        typical = Links({link: links.delay_of(*link, size, 0.0, LinkQueue()).arrived})
        measured = Measured.steady(typical, late=frozenset({link}))
        choices = [each.configuration for each in candidates(job, job.start, measured)]
    return min(choices, key=lambda each: simulated_ms(job, each, links))
