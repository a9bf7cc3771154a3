"""Replicas on emulated devices: what runs, what rings add up, and what the simulator says of the same."""

from __future__ import annotations

import threading

import pytest

import penstock as ps
from experiments.pipemorph.emulated_mesh import EmulatedMesh, EmulatedRing
from penstock.control import Configuration
from penstock.control.configuration import peaks
from penstock.cost import LinkCondition, Links
from penstock.cost.conditions import Constant
from penstock.runtime.emulation.backend import EmulatedBackend
from penstock.runtime.errors import DeadlineExceeded
from penstock.runtime.transport.link_conditions import Conditions
from waiting import PATIENCE

pytestmark = pytest.mark.unit

COSTS = ps.Costs([2, 2], [2, 2], [2, 2], other={"U": 1.0}, weight_bytes=[4e6, 6e6])
RING = ps.cost.Ring(1e6, num_chunks=2)


def configuration(name: str = "zb", dispatch: str = "frozen") -> Configuration:
    schedule = ps.build(name, 2, 4)
    return Configuration(schedule, dispatch, (), tuple(peaks(schedule, COSTS)))


def links(delays: dict[tuple[int, int], float]) -> Links:
    return Links({pair: LinkCondition(Constant(ms)) for pair, ms in delays.items()}, base=0.1)


@pytest.mark.parametrize("num_members", [2, 3])
def test_a_ring_adds_up_on_every_member(num_members: int) -> None:
    ring = EmulatedRing(RING, Conditions(links({(0, 1): 2.0})), num_members, timeout=PATIENCE)
    found = {}

    def work(member: int) -> None:
        found[member] = [ring.all_reduce(member, num_bytes, 10.0**member)[2] for num_bytes in (5e6, 1e5)]

    threads = [threading.Thread(target=work, args=(member,)) for member in range(num_members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = sum(10.0**member for member in range(num_members))
    for member in range(num_members):
        for parts, num_bytes in zip(found[member], (5e6, 1e5), strict=True):
            count, _ = RING.chunks(num_bytes, num_members)
            assert parts == [[whole] * count] * num_members


def test_a_ring_whose_members_do_not_come_says_so() -> None:
    ring = EmulatedRing(RING, Conditions(links({})), 2, timeout=0.05)
    with pytest.raises(DeadlineExceeded, match=r"member 1 of a ring waited 0\.05 s for the other members"):
        ring.all_reduce(1, 1e6, 1.0)


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_gradients_are_added_up_when_all_replicas_have_them_and_not_before(dispatch: str) -> None:
    runs = configuration(dispatch=dispatch)
    with EmulatedMesh(runs, COSTS, ps.Mesh(2, 2), links=links({(0, 2): 5.0}), ring=RING, timeout=PATIENCE) as mesh:
        found, told = mesh.step(), mesh.simulated()
    assert [(each.rank, each.stage) for each in found.reductions] == [(0, 0), (1, 1)]
    for each in found.reductions:
        assert each.ready <= each.start < each.end
        weights = [t for timeline in found.replicas for t in timeline.ops if t.op[:2] == ("W", each.stage)]
        assert len(weights) == 8
    assert found.iteration > max(each.end for each in found.reductions)
    for timeline, simulated in zip(found.replicas, told.replicas, strict=True):
        assert {t.op for t in timeline.ops} == {t.op for t in simulated.ops}
        if dispatch == "frozen":
            assert timeline.executed() == runs.schedule


def test_nodes_are_moved_between_two_steps() -> None:
    first, then = ps.Mesh(2, 2), ps.Mesh(2, 2, nodes=(0, 2, 1, 3))
    with EmulatedMesh(configuration(), COSTS, first, links=links({(0, 1): 3.0}), ring=RING, timeout=PATIENCE) as mesh:
        assert mesh.step().mesh == first
        before = mesh.simulated()
        mesh.switch(then, configuration("1f1b"))
        found, after = mesh.step(), mesh.simulated()
    assert found.mesh == then
    assert found.replicas[0].schedule.name == "1f1b"
    assert before.exposed > after.exposed, "the late link has left its ring"


def test_one_replica_has_nothing_to_add_up() -> None:
    with EmulatedMesh(configuration(), COSTS, ps.Mesh(2), timeout=PATIENCE) as mesh:
        assert mesh.step().reductions == ()


def test_a_failure_ends_the_step_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    run = EmulatedBackend.run

    def failing(self, wired, inputs):
        if wired.op == ps.Op("W", 1, 2):
            raise ZeroDivisionError("on purpose")
        return run(self, wired, inputs)

    before = set(threading.enumerate())
    monkeypatch.setattr(EmulatedBackend, "run", failing)
    with (
        EmulatedMesh(configuration(), COSTS, ps.Mesh(2, 2), ring=RING, timeout=PATIENCE) as mesh,
        pytest.raises(ZeroDivisionError, match="on purpose"),
    ):
        mesh.step()
    assert set(threading.enumerate()) <= before, "and no thread of it is left"
