"""Table 2's models over their meshes, with one late link: nothing done, moved, moved and absorbed, and ours.

    python -m experiments.pipemorph.table2                        simulated, a minute
    python -m experiments.pipemorph.table2 --backend threads      and on emulated devices, by the clock

Sizes are those of the paper's Table 2, and section 7.3's 7B as (TP 1, DP 2, PP 4). A node is the TP processes of one
coordinate. One link between two nodes is late, by latency. With replicas it lies in the ring that adds up the
gradients of the last stage; without, between the last two ranks. Numbers are slowdowns: an iteration (pipelines,
rings, update) as a multiple of that without delay.

    zb          nothing is done
    moved       two nodes change places, the fewest that bring the link under PP, and ZB goes on there (FALCON)
    absorbed    the same, and there Algorithm 2 with the link delegated, with as much memory as it wants (PipeMorph)
    ours        what the controller decides that trains there: it hears of the link by probes and messages alone, and
                may move, re-plan, delegate and dispatch, within the memory of `zb`

`ours` is the same `Controller` that `ps.Pipeline(..., adapt=...)` starts, rehearsed for so many iterations; what it
comes to then runs like the others. Assumed: as in `figure19.py`, whose window of the rings is calibrated on 7B alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import penstock as ps
from experiments.common.results import Row, find, table
from experiments.pipemorph.backends import Backend
from experiments.pipemorph.command import command
from experiments.pipemorph.figure19 import RING
from experiments.pipemorph.iterations import times
from experiments.pipemorph.meshes import MeshCase, costs_of, late_node, run
from experiments.pipemorph.setups import DIRECT, MODELS, Model
from penstock.control import Configuration, Controller, Job, rehearse
from penstock.control.configuration import peaks
from penstock.cost import Links, Mesh
from penstock.cost.mesh import LinkGroup
from penstock.planning import slow_link_schedule

DELAYS = (0.0, 30.0)
SYSTEMS = ("zb", "moved", "absorbed", "ours")
ITERATIONS = 40
"""That the controller is rehearsed for: it has decided, and every change has stood its trial, by then."""


@dataclass(frozen=True)
class Setup:
    """A model over a mesh."""

    model: Model
    mesh: Mesh

    @property
    def name(self) -> str:
        mesh = self.mesh
        return f"{self.model.name.removeprefix('gpt2-').upper()} ({mesh.tp}, {mesh.dp}, {mesh.pp})"

    @property
    def link(self) -> tuple[int, int]:
        """Two nodes: of the last ring, or the last two where there are no rings."""
        last = self.mesh.num_nodes - self.mesh.dp
        return (last, last + 1) if self.mesh.dp > 1 else (last - 1, last)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Where they lie at the start; none where they cannot move, as nobody else holds a rank."""
        return self.mesh.nodes if self.mesh.dp > 1 else ()


SETUPS = (
    Setup(MODELS["7B"], Mesh(4, 1, 1)),
    Setup(MODELS["14B"], Mesh(8, 1, 1)),
    Setup(MODELS["30B"], Mesh(8, 4, 2)),
    Setup(MODELS["60B"], Mesh(8, 2, 4)),
    Setup(MODELS["140B"], Mesh(8, 2, 8)),
    Setup(MODELS["7B"], Mesh(4, 2, 1)),
)
"""(TP, DP, PP) of Table 2, and of section 7.3."""


def rows(backend: Backend, setups: Sequence[Setup] = SETUPS, delays: Sequence[float] = DELAYS) -> Iterator[Row]:
    """A row for each setup, delay and system."""
    cases = []
    for setup in setups:
        costs = costs_of(setup.model)
        for ms in delays:
            for system, configuration in systems(setup, ms).items():
                keys = {"setup": setup.name, "system": system, "delay_ms": ms}
                mesh = replace(setup.mesh, nodes=configuration.nodes)
                cases.append(MeshCase(keys, costs, configuration, mesh, RING, setup.link, ms, "latency"))
    yield from run(backend, cases)


def systems(setup: Setup, ms: float) -> dict[str, Configuration]:
    """What each system runs, and where its nodes lie, when the link is so late."""
    model, mesh = setup.model, setup.mesh
    start = Configuration(model.zb, "frozen", (), model.caps, setup.nodes)
    if not ms:
        return {"zb": start}
    costs = costs_of(model)
    there = under_pp(setup)
    ranks = there.use(*setup.link).ranks
    planned = slow_link_schedule(costs, model.num_microbatches, ps.Links({(ranks[0], ranks[1]): ms}))
    nodes = there.nodes if mesh.dp > 1 else ()
    absorbs = Configuration(planned, "frozen", (ranks,), tuple(peaks(planned, costs)), nodes)
    moved = replace(start, nodes=nodes)
    return {
        "zb": start,
        "moved": moved,
        "absorbed": absorbs,
        "ours": decided(setup, start, late_node(setup.link, ms)),
    }


def under_pp(setup: Setup) -> Mesh:
    """The fewest nodes change places that bring the late link between two ranks; none where it is there."""
    mesh = setup.mesh
    swaps = (mesh.swapped(*pair) for pair in combinations(range(mesh.num_nodes), 2))
    return next(each for each in (mesh, *swaps) if each.use(*setup.link).group is LinkGroup.PP)


def decided(setup: Setup, start: Configuration, late: Links) -> Configuration:
    """What the controller comes to with the late link there from the first iteration on."""
    mesh = setup.mesh if setup.nodes else None
    controller = Controller(Job(costs_of(setup.model), start, transport=DIRECT, mesh=mesh, ring=RING))
    slowest = ps.simulation.simulate_mesh(
        start.schedule, costs_of(setup.model), setup.mesh, links=late, ring=RING, transport=DIRECT
    ).iteration
    rehearse(controller, late, until=ITERATIONS * slowest)
    return controller.now


def lines(rows: Sequence[Row]) -> Iterator[str]:
    delays = sorted({row["delay_ms"] for row in rows})[1:]
    for ms in delays:
        yield f"slowdown with a link {ms:g} ms late, simulated/measured; (TP, DP, PP)"
        body = []
        for setup in dict.fromkeys(row["setup"] for row in rows):
            base = find(rows, setup=setup, system="zb", delay_ms=0.0)
            mine = {system: find(rows, setup=setup, system=system, delay_ms=ms) for system in SYSTEMS}
            ours = mine["ours"]
            what = f"{ours['schedule']}, {ours['dispatch']}" + (
                f", {ours['delegated'][0]}" if ours["delegated"] else ""
            )
            body.append([setup, *(times(row, base) for row in mine.values()), ours["use"], what])
        yield from table(["", *SYSTEMS, "the link, ours", "what runs there, ours"], body)
        yield ""


if __name__ == "__main__":
    command("table2", __doc__, rows, lines, backends=("simulate", "threads"))
