"""What an iteration would have taken: any configuration, simulated under links and op times as measured in it.

    messages of iteration 17     each link's delays over the iteration     configuration
        6:7  60.1 59.8 60.3 ...  -->  latency 60 ms, or a trace of them  -->  simulate  -->  ms
    ops of iteration 17                                                        ^
        stage 3  F 10.1  W 13.0  -->  the job's costs, W of stage 3 times 1.3 -+

A delegated link is measured on its delegates' path. What they add is taken off for its own path; a link whose own
path is dead has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from penstock.control.closed_loop_simulation import run_once
from penstock.control.compute import Factors, scaled
from penstock.control.configuration import Configuration, Job
from penstock.control.events import Link, OpTimes, undirected
from penstock.control.robust_statistics import deviation
from penstock.cost import Costs, LinkCondition, Links
from penstock.cost.over_time import Constant, OverTime, Trace
from penstock.simulation import Timeline

_AS_ASSUMED = 0.005
"""Share of its assumed time that an op may differ by and still count as taking just that."""
_STEADY = 0.1
"""Share of a link's delay that its messages may differ by and still count as equally late."""


@dataclass(frozen=True)
class ObservedIteration:
    """One iteration as it was seen.

    Attributes:
        number, ms: which, and how long it took; decision: the number of the one in force.
        times: of each direction, its messages' times by themselves (ms), in order.
        busy: of each direction, how long it was busy with a message (ms), part of its times; where that is known.
        down: links (lower rank first) whose own path was dead.
        factors: how many times as long as assumed ops took.
    """

    number: int
    ms: float
    decision: int
    times: Mapping[Link, Sequence[float]]
    busy: Mapping[Link, float] = field(default_factory=dict)
    down: frozenset[Link] = frozenset()
    factors: Factors = ()

    def delay(self, link: Link) -> float | None:
        """The median time of the direction's messages (ms); None without any."""
        return median(self.times[link]) if self.times.get(link) else None


class WhatIfSimulator:
    """Simulates configurations of a job under the links of iterations, each that is the same only once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: dict[tuple[str, Links, Factors], Timeline] = {}

    def run(self, configuration: Configuration, seen: ObservedIteration, ran: Configuration) -> Timeline | None:
        """The timeline of `configuration` under the links of an iteration that ran `ran`; None where a link that it
        does not delegate was dead."""
        if not seen.down <= set(configuration.delegated):
            return None
        conditions = self._conditions(configuration, seen, ran)
        key = configuration.digest, conditions, seen.factors
        if key not in self._known:
            job = replace(self._job, costs=scaled(self._job.costs, seen.factors)) if seen.factors else self._job
            self._known[key] = run_once(job, configuration, conditions)
        return self._known[key]

    def healthy(self, configuration: Configuration) -> Timeline:
        """The timeline with no link late."""
        return run_once(self._job, configuration, Links())

    def _conditions(self, configuration: Configuration, seen: ObservedIteration, ran: Configuration) -> Links:
        found = {}
        for link, times in sorted(seen.times.items()):
            way = undirected(link)
            added = self._job.delegate_ms * ((way in configuration.delegated) - (way in ran.delegated))
            busy = _digits(seen.busy.get(link, 0.0))
            delays = tuple(_digits(max(0.0, ms + added - busy)) for ms in times)
            if delays:
                found[link] = LinkCondition(self._latency(delays, seen.ms), Constant(busy))
        return Links(found)

    def _latency(self, delays: tuple[float, ...], ms: float) -> OverTime:
        """The delays evenly laid over the iteration, or their median where they hardly differ."""
        middle = median(delays)
        step = ms / len(delays)
        if step <= 0 or deviation(delays) <= max(self._job.smallest_delay, _STEADY * middle):
            return Constant(middle)
        return Trace(tuple(step * at for at in range(len(delays))), delays)


def _digits(ms: float) -> float:
    """Three digits: what is nearer to each other than measurements are is simulated once."""
    return float(f"{ms:.3g}")


def factors_of(ops: Iterable[OpTimes], costs: Costs) -> Factors:
    """How many times as long as the costs say each kind of op took on each stage; what is as they say is left out."""
    rows = {"F": costs.f, "I": costs.i, "W": costs.w, "B": costs.b}
    found = []
    for each in ops:
        for kind, halves in each.ms:
            assumed = rows[kind][each.stage] if kind in rows and each.stage < costs.num_stages else 0.0
            factor = _digits(fmean(halves) / assumed) if assumed > 0 else 1.0
            if abs(factor - 1) > _AS_ASSUMED and factor > 0:
                found.append((each.stage, kind, factor))
    return tuple(sorted(found))


def picked(count: int, most: int) -> list[int]:
    """Places from 0 to `count` - 1: all, or `most` of them evenly picked."""
    if count <= most:
        return list(range(count))
    return sorted({(2 * place + 1) * count // (2 * most) for place in range(most)})
