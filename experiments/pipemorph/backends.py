"""Where a case runs: in the simulator, or in real time on emulated devices; several cases side by side.

    simulate     no clock: seconds for a whole figure
    threads      emulated devices, a rank a thread; messages are handed over
    processes    emulated devices, a rank a process; messages go through the real transports

An emulated second is a real second, times `stretch`. Emulated ranks sleep through their ops, so `jobs` cases run
at once, each in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.common.measured import side_by_side
from experiments.common.results import Row
from experiments.pipemorph.setups import DEPTH
from experiments.pipemorph.systems import Setting
from penstock.control import run_once
from penstock.cost import Links

BACKENDS = ("simulate", "threads", "processes")


"""A row is one case: its keys, `simulated_ms` and `measured_ms` by iteration (the last empty where nothing was
measured), `peaks` and `caps`, and what ran."""


@dataclass(frozen=True)
class Case:
    """Something that runs some iterations, and the keys by which it is found again."""

    keys: dict[str, Any]
    setting: Setting
    conditions: Links


@dataclass(frozen=True)
class Backend:
    """Where and how: one of `BACKENDS`, seconds of the clock to one of an op, iterations, cases at once.

    Attributes:
        only: runs the cases of systems alone whose names have this in them.
    """

    name: str = "simulate"
    stretch: float = 3.0
    steps: int = 2
    jobs: int = 6
    only: str = ""

    def runs(self, keys: Mapping[str, Any]) -> bool:
        """Whether a case with these keys is to run."""
        return self.only in keys.get("system", keys.get("way", ""))

    def run(self, cases: Sequence[Case]) -> Iterator[Row]:
        """The rows, in the order of the cases."""
        yield from each(self, _row, [case for case in cases if self.runs(case.keys)])


def each(backend: Backend, function: Any, cases: Iterable[Any]) -> Iterator[Any]:
    """`function(backend, case)` for all cases, several at once where they mostly sleep."""
    if backend.name == "simulate" or backend.jobs == 1:
        for case in cases:
            yield function(backend, case)
        return
    yield from side_by_side(function, [(backend, case) for case in cases], backend.jobs)


def _row(backend: Backend, case: Case) -> Row:
    setting, configuration = case.setting, case.setting.configuration
    simulated = run_once(setting.job, configuration, case.conditions)
    row: Row = {
        **case.keys,
        "simulated_ms": [simulated.makespan],
        "measured_ms": [],
        "bubble": simulated.bubble_ratio,
        "peaks": simulated.peak_activations,
        "caps": configuration.caps,
        "schedule": configuration.schedule.name,
        "dispatch": configuration.dispatch.value,
        "delegated": [f"{a}:{b}" for a, b in configuration.delegated],
        "decisions": setting.decisions,
    }
    if backend.name == "simulate":
        return row
    return row | emulate(backend, setting, case.conditions)


def emulate(
    backend: Backend, setting: Setting, conditions: Links, steering: Any = None, transport: str = "direct"
) -> dict[str, Any]:
    """Runs a setting on emulated devices; returns the measured part of a row.

    Args:
        transport: of links that are not delegated.
    """
    from experiments.pipemorph.measured import Order, measure  # here, so that simulation starts without torch

    job, configuration = setting.job, setting.configuration
    depth = DEPTH if transport == "direct" else None
    order = Order(job.costs, configuration, conditions, transport, depth, backend.steps, backend.stretch, steering)
    return measure(order, backend.name == "processes")
