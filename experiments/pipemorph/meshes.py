"""Cases on a mesh: what a system runs, where its nodes lie, what links do; simulated, or on emulated devices.

A delay meets what crosses the link in one of two ways (`KINDS`):

    latency   messages of a pipeline are late once, and a direct link holds 2 of them
    queue     on a direct link one message after the other, of both directions, takes up the delay: what a spinning
              kernel before each send in one process does, as the authors' injector has it; delegates are late once

A ring's chunks are late once in both, and its window bounds how many are under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from experiments.common.results import Row
from experiments.pipemorph.backends import Backend, each
from experiments.pipemorph.setups import BASE, DEPTH, DIRECT, Model
from penstock.control import Configuration
from penstock.control.closed_loop_simulation import as_run
from penstock.cost import Costs, LinkCondition, Links, Mesh, Ring
from penstock.cost.conditions import Constant
from penstock.cost.mesh import LinkGroup
from penstock.simulation.mesh import simulate_mesh

NETWORK = 50e9
"""Bytes a second between nodes: the 400 Gbps InfiniBand of the paper's cluster."""
KINDS = ("latency", "queue")

TIMEOUT = 120.0
"""Seconds that any wait of a measured run may last."""


@dataclass(frozen=True)
class MeshCase:
    """Iterations of a mesh with one late link.

    Attributes:
        keys: by which its row is found again. costs: of the model; messages of pipelines weigh nothing.
        link: the two nodes that it joins. kind: one of `KINDS`.
    """

    keys: dict[str, Any]
    costs: Costs
    configuration: Configuration
    mesh: Mesh
    ring: Ring
    link: tuple[int, int]
    delay_ms: float
    kind: str

    @property
    def conditions(self) -> Links:
        """Of all links between nodes."""
        use = self.mesh.use(*self.link)
        direct = use.group is LinkGroup.PP and use.ranks not in self.configuration.delegated
        return late_node(self.link, self.delay_ms, self.kind if direct else "latency")


def late_node(link: tuple[int, int], delay_ms: float, kind: str = "latency") -> Links:
    """All links as fast as the network, and one late."""
    fast = LinkCondition(bandwidth=Constant(NETWORK))
    late = replace(fast, latency=Constant(delay_ms))
    if kind == "queue":
        late = replace(fast, occupancy=Constant(delay_ms), half_duplex=True)
    return Links({link: late} if delay_ms else {}, default=fast, base=BASE)


def costs_of(model: Model) -> Costs:
    """A model's costs where messages are handed over: between threads their size has no part."""
    return replace(model.costs, message_bytes=())


def run(backend: Backend, cases: Iterable[MeshCase]) -> Iterator[Row]:
    """The rows, in the order of the cases."""
    yield from each(backend, mesh_row, [case for case in cases if backend.runs(case.keys)])


def mesh_row(backend: Backend, case: MeshCase) -> Row:
    """One case, simulated and, where the backend measures, measured."""
    runs, mesh = case.configuration, case.mesh
    simulated = simulate_mesh(
        runs.schedule,
        case.costs,
        mesh,
        ring=case.ring,
        **as_run(DIRECT, runs, case.conditions),
    )
    row: Row = {
        **case.keys,
        "simulated_ms": [simulated.iteration],
        "measured_ms": [],
        "pipelines_ms": simulated.makespan,
        "exposed_ms": simulated.exposed,
        "mesh": str(mesh),
        "use": str(mesh.use(*case.link)),
        "schedule": runs.schedule.name,
        "dispatch": runs.dispatch.value,
        "delegated": [f"{a}:{b}" for a, b in runs.delegated],
        "peaks": [max(peaks) for peaks in zip(*(t.peak_activations for t in simulated.replicas), strict=True)],
        "caps": runs.caps,
    }
    return row if backend.name == "simulate" else row | _measured(backend, case)


def _measured(backend: Backend, case: MeshCase) -> Row:
    from experiments.pipemorph.emulated_mesh import EmulatedMesh  # here, so that simulation starts without torch

    with EmulatedMesh(
        case.configuration,
        case.costs,
        case.mesh,
        links=case.conditions,
        ring=case.ring,
        stretch=backend.stretch,
        depth=DEPTH,
        timeout=TIMEOUT,
    ) as mesh:
        steps = [mesh.step() for _ in range(backend.steps)]
    simulated = [mesh.simulated().iteration for _ in steps]
    return {
        "simulated_ms": simulated,
        "measured_ms": [step.iteration for step in steps],
        "measured_pipelines_ms": median(step.makespan for step in steps),
        "stretch": backend.stretch,
    }
