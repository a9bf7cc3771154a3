"""The cells of the protocol: on which devices, beside what load, which fault, and which best answer an oracle gives.

    a run     |--------- healthy ---------|========= a link is late =========|---- healthy ----|
    step      0                           first                              end               num_steps

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
NUM_STEPS = {"emulated": 90, "real": 50, "ring": 120}
"""Steps of a run, by device. They stand for a run of `WHOLE` seconds."""
WARMUP = {"emulated": 0, "real": 30, "ring": 30}
"""Steps before the first that counts: a real run measures its costs then, and its controller's process starts."""
WHOLE = 60.0
"""Seconds of the run that onsets are given for: an onset at second 12 comes after 12/60 of the steps."""
HEALTHY = {"latency": "0ms", "bandwidth": "10Gbit/s"}
"""A link before and after its fault, by what the fault changes."""
OP_MS = 10.0
"""Time of each F, I and W of an emulated stage (ms)."""
STRETCH = 0.15
"""Emulated devices and links take this share of the time that their costs say, so that runs are short."""
BEGIN, END = 1e5, 2e5
"""Seconds of the conditions' time at which the late link turns late, and healthy again. No run takes so long."""
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
        """Steps of a run, with those before the first that counts."""
        return WARMUP[self.device] + NUM_STEPS[self.device]

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
        Cell("real", 0, "latency:60ms"),
        Cell("real", 1, "latency:30ms"),
        Cell("real", 0),
        Cell("real", 1),
        Cell("ring", 0, "bandwidth:20Mbit/s"),
        Cell("ring", 1, "latency:30ms"),
    )
}


class Fault(NamedTuple):
    """The fault of one run: the two ranks, or nodes of a mesh, between which messages are late, its first step, and
    the first step after it."""

    link: Link
    first: int
    end: int


def links_of(cell: Cell) -> tuple[Link, ...]:
    """The links of a cell one of which is late: the pipeline's, or those of the two gradient rings."""
    return ((0, 1), (2, 3)) if cell.device == "ring" else ((0, 1), (1, 2), (2, 3))


def fault_of(cell: Cell, seed: int) -> Fault | None:
    """The fault of a run. Seeds differ in their links and, except at second 0, by up to four steps in its begin."""
    if not cell.fault:
        return None
    links = links_of(cell)
    first = WARMUP[cell.device]
    if cell.second:
        first += round(cell.second / WHOLE * NUM_STEPS[cell.device]) + seed % 5
    end = cell.num_steps if cell.lasts is None else first + cell.lasts
    return Fault(links[seed % len(links)], first, end)


def conditions_of(cell: Cell, fault: Fault | None) -> list[str]:
    """The `--link` texts of a run. All links of a cell are observed, so none of them is without a condition.

    The late link is healthy, late from `BEGIN` on, and healthy from `END` on. A run sets its clock to these moments
    before the first step with the fault and before the first one after it, so all runs have it in the same steps.
    """
    what, _, amount = cell.fault.partition(":")
    found = []
    for link in links_of(cell):
        text = "latency:0ms"
        if fault is not None and link == fault.link:
            values = (0.0, HEALTHY[what]), (BEGIN, amount), (END, HEALTHY[what])
            text = f"{what}:steps:" + ",".join(f"{at:g}s/{value}" for at, value in values)
        found.append(f"{link[0]}:{link[1]}={text}")
    return found


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
    fault; of equally fast ones a frozen one, and that with the most delegates, since ranks that choose for themselves
    or wait for room lose a little. In a mesh these are all places of its nodes."""
    links = Links({link: fault})
    choices: Sequence[Configuration]
    if job.mesh is not None:
        choices = [replace(job.start, nodes=nodes) for nodes in sorted(permutations(job.start.nodes))]
    else:
        size = max(job.costs.message_bytes)
        typical = Links({link: links.delay_of(*link, size, 0.0, LinkQueue()).arrived})
        measured = Measured.steady(typical, late=frozenset({link}))
        choices = [each.configuration for each in candidates(job, job.start, measured)]

    def cost(each: Configuration) -> tuple[float, bool, int]:
        return round(simulated_ms(job, each, links), 3), each.dispatch.is_dynamic, -len(each.delegated)

    return min(choices, key=cost)
