"""Runs on emulated devices: what a setting's iterations take by the clock, steered or not.

The ranks are threads of this process, or processes that this file starts and that run it again:
`python -m experiments.pipemorph.measured FOLDER` is a rank, in a folder that `measure` made and filled.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from penstock.control import Configuration
from penstock.cost import Costs, Links
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.emulation.pipeline import EmulatedPipeline
from penstock.runtime.launch import init_process, launch
from penstock.runtime.transport.choose import DelegateOptions, TransportOptions

TOLD = ("number", "iteration", "action", "reason", "ms_now", "ms_then")
"""What is kept of a decision."""

TIMEOUT = 120.0
"""Seconds that any wait may last."""


@dataclass(frozen=True)
class Order:
    """What is to run.

    Attributes:
        configuration: what runs, or, where it is steered, what runs first.
        transport: of links that are not delegated. depth: of direct links. steps: iterations.
        stretch: seconds of the clock to one of an op.
    """

    costs: Costs
    configuration: Configuration
    conditions: Links
    transport: str
    depth: int | None
    steps: int
    stretch: float
    steering: AdaptOptions | None = None


def measure(order: Order, processes: bool = False) -> dict[str, Any]:
    """Runs it; returns the measured part of a row."""
    if not processes:
        return _run(order, processes=False)
    with tempfile.TemporaryDirectory(prefix="penstock-figure-") as name:
        folder = Path(name)
        (folder / "order").write_bytes(pickle.dumps(order))
        code = launch(["-m", "experiments.pipemorph.measured", name], order.configuration.schedule.num_ranks)
        if code != 0:
            raise SystemExit(f"a rank ended with exit code {code}; the messages above say why")
        found: dict[str, Any] = pickle.loads((folder / "result").read_bytes())
        return found


def _run(order: Order, processes: bool) -> dict[str, Any]:
    first = order.configuration
    # Threads hand messages over, so that their size has no part in it.
    costs = order.costs if processes else replace(order.costs, message_bytes=())
    with EmulatedPipeline(
        first.schedule,
        costs,
        links=order.conditions,
        dispatch=first.dispatch,
        memory_limit=first.caps,
        stretch=order.stretch,
        timeout=TIMEOUT,
        adapt=order.steering,
        transport=TransportOptions(
            order.transport, depth=order.depth, delegates=DelegateOptions() if first.delegated else None
        ),
    ) as pipe:
        if first.delegated:
            pipe.reconfigure(first)
        steps = [pipe.step() for _ in range(order.steps)]
        return {
            "measured_ms": [step.timeline.makespan for step in steps],
            "simulated_ms": [timeline.makespan for timeline in pipe.simulated(steps)],
            "measured_bubble": median(step.timeline.bubble_ratio for step in steps),
            "peaks": [max(column) for column in zip(*(s.timeline.peak_activations for s in steps), strict=True)],
            "starts": [step.start for step in steps],
            "numbers": [step.number for step in steps],
            "decided": [{name: each[name] for name in TOLD if name in each} for each in pipe.decisions],
            "notices": pipe.notices,
            "stretch": order.stretch,
        }


def main(folder: Path) -> None:
    """One rank."""
    order = pickle.loads((folder / "order").read_bytes())
    rank, _ = init_process(TIMEOUT)
    found = _run(order, processes=True)
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
