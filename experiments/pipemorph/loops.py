"""Runs through a trace: iteration after iteration, with the controller in the loop or without it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import penstock as ps
from experiments.common.results import Row
from experiments.pipemorph.backends import Backend, each, emulate
from experiments.pipemorph.setups import Model
from experiments.pipemorph.systems import HOSTED, Setting, job_of
from penstock.control import Configuration, Controller, Job, rehearse, run_once
from penstock.control.configuration import peaks
from penstock.cost import Links

SYSTEMS = ("1f1b", "zb", "pipemorph-cpu", "pipemorph", "dynamic", "ours", HOSTED)


@dataclass(frozen=True)
class Loop:
    """A system on its way through a trace.

    Attributes:
        controlled: whether the controller decides; else the job's start stays.
        until: ms of the trace.
    """

    keys: dict[str, Any]
    job: Job
    controlled: bool
    conditions: Links
    until: float


def loop(system: str, model: Model, keys: dict[str, Any], conditions: Links, until: float) -> Loop:
    """A system of `SYSTEMS`.

    As in systems.py, but: what is not controlled and delegates, delegates all links; `pipemorph` is the controller
    without dynamic dispatch and without a memory cap.
    """
    schedule = ps.build("1f1b", model.num_ranks, model.num_microbatches) if system == "1f1b" else model.zb
    memory = float(model.num_microbatches)
    own = peaks(schedule, model.costs)
    if system in ("1f1b", "zb", "pipemorph-cpu"):
        start = Configuration(schedule, "frozen", model.links if system == "pipemorph-cpu" else (), own)
        return Loop(keys, job_of(model, start), False, conditions, until)
    if system == "dynamic":
        start = Configuration(schedule, "dynamic", model.links, model.caps)
        return Loop(keys, job_of(model, start), False, conditions, until)
    if system == "pipemorph":
        frozen = job_of(model, Configuration(schedule, "frozen", (), model.caps), host_memory=memory)
        return Loop(keys, replace(frozen, dispatches=("frozen",)), True, conditions, until)
    job = job_of(model, host_memory=memory if system == HOSTED else 0.0)
    return Loop(keys, job, True, conditions, until)


def run(backend: Backend, loops: Sequence[Loop]) -> Iterator[Row]:
    """A row for each: iterations, throughput by the clock of the trace, what the controller did."""
    yield from each(backend, _row, loops)


def _row(backend: Backend, loop: Loop) -> Row:
    began = time.perf_counter()
    row = _simulated(loop)
    if backend.name != "simulate":
        row |= _measured(backend, loop, len(row["simulated_ms"]))
    ran = row["measured_ms"] or row["simulated_ms"]
    return {**loop.keys, **row, "iterations_per_minute": 60e3 / fmean(ran), "seconds": time.perf_counter() - began}


def _simulated(loop: Loop) -> Row:
    job, now = loop.job, 0.0
    if not loop.controlled:
        times: list[float] = []
        while now < loop.until:
            times.append(run_once(job, job.start, loop.conditions, now).makespan)
            now += times[-1]
        return {"simulated_ms": times, "measured_ms": [], "decisions": 0}
    controller = Controller(job)
    run = rehearse(controller, loop.conditions, until=loop.until)
    caps = job.start.caps
    return {
        "simulated_ms": [each.ms for each in run.iterations],
        "measured_ms": [],
        "starts": [each.start for each in run.iterations],
        "numbers": [each.decision for each in run.iterations],
        "decisions": len(run.decisions),
        "changes_verified": len(controller.changes),
        "peak_over_cap": max(
            peak / cap for each in run.iterations for peak, cap in zip(each.peaks, caps, strict=True)
        ),
        "lost_ms": controller.lost,
        "paid_ms": controller.paid,
    }


def _measured(backend: Backend, loop: Loop, num: int) -> Row:
    job = loop.job
    steering = steering_of(job) if loop.controlled else None
    row = emulate(replace(backend, steps=num), Setting(job, job.start), loop.conditions, steering)
    row |= {"decisions": len(row["decided"])}
    if loop.controlled:
        row |= {"peak_over_cap": max(p / c for p, c in zip(row["peaks"], job.start.caps, strict=True))}
    return row


def links(job: Job) -> list[tuple[int, int]]:
    return [(rank, rank + 1) for rank in range(job.num_ranks - 1)]


def steering_of(job: Job) -> Any:
    """How the runtime is told what a job says."""
    from penstock.runtime.adapt import AdaptOptions  # here, so that simulation starts without torch

    return AdaptOptions(
        costs=job.costs,
        memory_limit=job.start.caps,
        host_memory=job.host_memory,
        dispatches=job.dispatches,
        prices=job.prices,
    )
