"""A run over a mesh that watches the links between its nodes, and moves nodes where a late one costs less.

    step 1 2 3 4  5 | probe | 6 .. 10 | probe | ...      the first steps say what ops take; probes lie between steps

Every process measures and decides the same, so that nobody needs to be told. Losses stay those of a run that stays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.control import Configuration, Job, Orchestrator, Reranking
from penstock.control.configuration import peaks
from penstock.cost import Costs, Mesh
from penstock.runtime import Pipeline
from penstock.runtime.execute.timeline import measured_costs
from penstock.runtime.migrate import Placed
from penstock.simulation import Timeline
from penstock.train.inputs import Inputs

LEARN, LEAST_EVERY, MOST_EVERY = 4, 5, 200
"""Steps that say what ops take; steps between probes from there on, by how long these take."""
SHARE = 0.05
"""Of the time that probes may take: each goes there and back over every link, the late one too."""
LEAST = 2.0
"""Milliseconds by which a link must be late to matter: below, a busy machine looks like a late link."""


class MeshMigration:
    """The pipeline of a run on the nodes of its mesh.

    Args:
        build: makes the pipeline of the inputs over a device mesh.

    Attributes:
        told: what was done, in words.
    """

    def __init__(self, inputs: Inputs, build: Callable[[Any], Pipeline]) -> None:
        settings = inputs.settings
        self._inputs = inputs
        self._placed = Placed(build, Mesh(settings.ranks, settings.dp, settings.tp))
        self._timelines: list[Timeline] = []
        self._next = LEAST_EVERY
        self._steps, self._since = 0, time.perf_counter()
        self._last = 0
        self._orchestrator: Orchestrator | None = None
        self.told: list[str] = []

    @property
    def pipe(self) -> Pipeline:
        """What runs now; another one after each move."""
        return self._placed.pipe

    def after_step(self, step: int) -> str | None:
        """To be called by every process after each step; what was done, in words.

        Raises:
            DeadlineExceeded, PeerLost: a process is late or gone.
        """
        self._steps += 1
        if self._orchestrator is None:
            self._timelines.append(self.pipe.timeline())
            if self._steps >= LEARN:
                self._orchestrator = Orchestrator(self._job(), self._placed.mesh)
            return None
        if self._steps < self._next:
            return None
        found = self._watch(self._orchestrator)
        if found is None:
            return None
        self.told.append(_words(step, found, self._orchestrator))
        return self.told[-1]

    def _watch(self, orchestrator: Orchestrator) -> Reranking | None:
        """Probes all links, and says when to do so again: all processes count the time that all of them took."""
        began = time.perf_counter()
        found = self._placed.watch(orchestrator, self._inputs.settings.timeout)
        ended = time.perf_counter()
        num_steps = max(1, self._steps - self._last)
        probing, stepping = self.pipe.agree([ended - began, (began - self._since) / num_steps])
        wait = LEAST_EVERY if found is not None else math.ceil(probing / (SHARE * stepping))
        self._next = self._steps + min(max(wait, LEAST_EVERY), MOST_EVERY)
        self._last, self._since = self._steps, time.perf_counter()
        return found

    def _job(self) -> Job:
        """What process 0 has measured, the same everywhere. A rank's bytes count for its stages alike."""
        schedule = self._inputs.schedule
        bytes_of_ranks = [held["parameters"] for held in self.pipe.state_bytes()]
        measured, held = self.pipe.gather((measured_costs(self._timelines[1:]), bytes_of_ranks))[0]
        hosts = [schedule.placement.hosts(0, stage)[0] for stage in range(schedule.num_stages)]
        costs: Costs = replace(
            measured,
            message_bytes=self._inputs.task.message_bytes(schedule),
            gradient_bytes=[held[rank] / hosts.count(rank) for rank in hosts],
        )
        mean = sum(costs.f) / len(costs.f)
        start = Configuration(schedule, self.pipe.dispatch, (), tuple(peaks(schedule, costs)))
        return Job(costs, start, may_delegate=False, may_replan=False, least_delay=max(LEAST, mean / 10))


def _words(step: int, found: Reranking, orchestrator: Orchestrator) -> str:
    late = ", ".join(f"{a}:{b} {ms:.0f} ms" for (a, b), ms in sorted(orchestrator.late.items())) or "none"
    moved = ", ".join(map(str, found.moved))
    done = [f"nodes {moved} have changed places"] if found.moved else []
    done += [f"dispatch is {found.configuration.dispatch.value}"]
    return (
        f"after step {step}: late links between nodes: {late}; {', '.join(done)}; by simulation "
        f"{found.ms_then:.0f} ms a step in place of {found.ms_now:.0f}"
    )
