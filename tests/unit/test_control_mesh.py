"""The controller over a mesh, fed by simulated iterations: nodes move, what runs there absorbs, all on trial."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

import penstock as ps
from penstock.control import (
    Action,
    Configuration,
    ControlError,
    Controller,
    IterationEnded,
    Job,
    Switched,
    rehearse,
    replay,
)
from penstock.control.advice import Obstacle
from penstock.control.closed_loop_simulation import probes
from penstock.control.configuration import job_from_json, job_to_json, peaks
from penstock.control.events import (
    LinkTime,
    OpTimes,
    Probed,
    Transfers,
    event_from_json,
    event_to_json,
    slowest_of,
)
from penstock.control.orchestrator import Orchestrator
from penstock.control.steps import CLOSELY
from penstock.cost import Links, Ring
from penstock.cost.mesh import LinkGroup

pytestmark = pytest.mark.unit

MESH = ps.Mesh(2, 2)
COSTS = ps.Costs([10] * 2, [10] * 2, [10] * 2, gradient_bytes=[40e6] * 2)
ZB = ps.build("zb-h1", 2, 8)
CORNER = "0:1=latency:40ms 0:2=latency:40ms 2:3=latency:40ms"


def job(ring: Ring = Ring(window=10e6)) -> Job:  # noqa: B008, a value
    start = Configuration(ZB, "frozen", caps=[4 * cap for cap in peaks(ZB, COSTS)], nodes=MESH.nodes)
    return Job(COSTS, start, mesh=MESH, ring=ring)


@pytest.mark.parametrize("late", [CORNER, CORNER.replace("latency:40ms", "latency:steps:0ms/0ms,9000ms/40ms")])
def test_a_late_ring_link_is_moved_under_pp_and_absorbed_there(late: str) -> None:
    lines: list[str] = []
    controller = Controller(job(), log=lines.append)
    run = rehearse(controller, Links.parse(late), until=40_000)
    assert replay(lines) == run.decisions
    move = next(each for each in run.decisions if each.action is Action.MOVE)
    mesh = replace(MESH, nodes=move.configuration.nodes)
    uses = [mesh.use(*link).group for link in ((0, 1), (0, 2), (2, 3))]
    assert LinkGroup.PP in uses
    assert LinkGroup.DP not in uses
    assert (move.configuration.schedule, move.configuration.dispatch) != (ZB, "frozen")
    slow = max(each.ms for each in run.iterations)
    healthy = ps.simulation.simulate_mesh(ZB, COSTS, MESH, ring=Ring(window=10e6)).iteration
    assert run.iterations[-1].ms - healthy < (slow - healthy) / 3
    assert all(verdict.kept for verdict in controller.verdicts)


def test_a_pipeline_was_put_on_a_slow_link_since_its_messages_had_no_size() -> None:
    """Costs as measured know no sizes: 16 ms were simulated after the move, and steps took 297."""
    watching = Orchestrator(job(), MESH)
    watching.weigh(Transfers.of((0, 1), [(1e6, 0.0, 1.0)]))
    rounds = {link: LinkTime(0.25, 0.8) for link in combinations(range(4), 2)} | {(2, 3): LinkTime(0.25, 1600.0)}
    while watching.search is None and not (watching.verifies(Probed.of(rounds)) and watching.answer()):
        pass
    assert watching.search is not None
    watching.take(watching.search())
    found = watching.answer()
    assert found is not None
    assert found.mesh.use(2, 3).group not in (LinkGroup.PP, LinkGroup.DP)
    assert watching.job.costs.message_bytes == (1e6, 1e6)


def test_what_does_not_become_faster_is_moved_back_and_stays_there() -> None:
    """Probes find a late link, and steps are slow, for another reason."""
    controller = Controller(job())
    late = probes(MESH, Links.parse("2:3=latency:40ms"), 0.0)
    decisions = []
    for number in range(80):
        made = list(controller.feed(IterationEnded(number, 600.0 + number % 3)))
        if (number + 1) % 5 == 0:
            made += controller.feed(late)
            if controller.search is not None:
                made += controller.feed(controller.search())
        decisions += made
        if controller.waiting is not None:
            controller.feed(Switched(controller.waiting.number))
    assert [each.action for each in decisions] == [Action.MOVE, Action.TAKE_BACK]
    assert decisions[1].configuration == controller.job.start == controller.now
    assert any("taken back" in str(each) and "between nodes 2:3" in str(each) for each in controller.unanswered)


@pytest.mark.parametrize("every", [12, 30, 100])
def test_bug_a_ring_that_slowed_down_between_two_probes_was_called_absorbed(every: int) -> None:
    """Steps rise from 70 to 255 ms, and the link is found two probes later. By then slow steps counted as usual."""
    controller, draw, decisions, asked = Controller(job()), random.Random(7), [], 0
    onset = 4 * every + every // 3
    for number in range(onset + 6 * every):
        made = list(
            controller.feed(IterationEnded(number, draw.gauss(255, 10) if number >= onset else draw.gauss(70, 4)))
        )
        if number % every == 0:
            made += controller.feed(probes(MESH, Links.parse("2:3=latency:40ms" if number >= onset else ""), 0.0))
            if controller.search is not None:
                made += controller.feed(controller.search())
        if number < onset:
            assert not controller.wants_probes
        asked += controller.wants_probes
        decisions += made
        if decisions:
            break
    assert [each.action for each in decisions] == [Action.MOVE]
    assert decisions[0].iteration <= onset + 3 * every
    assert 0 < asked <= 2 * CLOSELY, "links are to be probed soon, but not for ever"
    (unknown,) = (each for each in controller.unanswered if each.obstacle is Obstacle.UNKNOWN)
    assert (unknown.before, unknown.now) == (pytest.approx(70, abs=4), pytest.approx(255, abs=25))


def test_regression_nodes_moved_long_after_the_link_had_cost_what_moving_takes() -> None:
    """The loss counted from the first late probe on, and was compared with the price of moving only at a probe."""
    controller, draw, decisions, last, onset = Controller(job()), random.Random(7), [], 0, 90
    for number in range(200):
        ms = draw.gauss(255, 10) if number >= onset else draw.gauss(70, 4)
        decisions += controller.feed(IterationEnded(number, ms))
        if number - last == 20 or (controller.wants_probes and number - last >= 5):
            last = number
            late = Links.parse("2:3=latency:40ms" if number >= onset else "")
            decisions += controller.feed(probes(MESH, late, 0.0))
        if controller.search is not None:
            decisions += controller.feed(controller.search())
        if decisions:
            break
    (decision,) = decisions
    assert decision.action is Action.MOVE
    lost = (decision.iteration - onset + 1) * (decision.ms_now - decision.ms_then)
    assert decision.price <= lost <= decision.price + 2 * (decision.ms_now - decision.ms_then)


def test_probes_without_a_mesh_are_refused() -> None:
    start = Configuration(ZB, "frozen", caps=peaks(ZB, COSTS))
    with pytest.raises(ControlError, match="no mesh whose nodes may move"):
        Controller(Job(COSTS, start)).feed(Probed.of({(0, 1): 1.0}))
    with pytest.raises(ControlError, match="give both alike"):
        Job(COSTS, start, mesh=MESH)


def test_a_job_with_a_mesh_and_probes_go_through_json() -> None:
    assert job_from_json(job_to_json(job())) == job()
    probed = Probed.of({(3, 1): 0.25, (0, 1): LinkTime(30.0, 1600.0)})
    assert event_from_json(event_to_json(probed)) == probed
    with pytest.raises(ControlError):
        Probed.of({(1, 1): 0.25})


def test_of_replicas_the_slowest_counts_link_by_link() -> None:
    fast = [Transfers.of((0, 1), [(8.0, 0.0, 1.0)]), OpTimes.of(0, 0, [("F", 9.0)]), IterationEnded(3, 50.0)]
    slow = [Transfers.of((0, 1), [(8.0, 0.0, 30.0)]), OpTimes.of(0, 0, [("F", 8.0)]), IterationEnded(3, 80.0)]
    assert slowest_of([fast, slow]) == [slow[0], fast[1], slow[2]]


TWENTY = ps.Mesh(5, 4)
SLOW_RING = Links.parse("2:3=bandwidth:5Mbit/s", default="bandwidth:900Mbit/s")
"""Nodes 2 and 3 lie in the ring of rank 0."""


def job_of_twenty(nodes_stay: str = "") -> Job:
    costs = ps.Costs([10] * 5, [10] * 5, [10] * 5, gradient_bytes=[2e5] * 5)
    zb = ps.build("zb-h1", 5, 6)
    start = Configuration(zb, "frozen", caps=[4 * cap for cap in peaks(zb, costs)], nodes=TWENTY.nodes)
    return Job(costs, start, mesh=TWENTY, nodes_stay=nodes_stay)


def test_a_ring_on_a_slow_link_is_named_with_its_bandwidth_and_moved_away_from() -> None:
    """Row 3: probes measured latency alone, so steps became four times as long and nothing was said."""
    lines: list[str] = []
    controller = Controller(job_of_twenty(), log=lines.append)
    run = rehearse(controller, SLOW_RING, until=18_000)
    assert replay(lines) == run.decisions
    (move,) = run.decisions
    assert move.action is Action.MOVE
    assert "link between nodes 2:3 at 5 Mbit/s, others 900" in move.reason
    assert move.causes == ("bandwidth",)
    assert replace(TWENTY, nodes=move.configuration.nodes).use(2, 3).group is not LinkGroup.DP
    assert run.iterations[-1].ms < run.iterations[0].ms * 0.6
    assert all(verdict.kept for verdict in controller.verdicts)


def test_a_ring_on_a_slow_link_is_named_where_nodes_cannot_move() -> None:
    controller = Controller(job_of_twenty("nodes cannot move: stages are given as modules"))
    run = rehearse(controller, SLOW_RING, until=18_000)
    assert run.decisions == ()
    (said,) = [str(each) for each in controller.unanswered if each.nodes]
    assert "link between nodes 2:3 at 5 Mbit/s" in said
    assert "stages are given as modules" in said
    assert "ms a step by simulation" in said


def test_the_controller_decides_on_while_places_are_searched_for() -> None:
    """Row 9: the search ran inside the controller, for 19 to 41 s with 256 nodes."""
    lines: list[str] = []
    controller = Controller(job_of_twenty(), log=lines.append)
    slow, number = probes(TWENTY, SLOW_RING, 0.0), 0
    while controller.search is None:
        assert controller.feed(slow) == ()
    search = controller.search
    for number in range(30):
        assert controller.feed(IterationEnded(number, 900.0 + number % 3)) == ()
        assert controller.feed(slow) == ()
        assert controller.search is search, "nothing has changed, so there is nothing else to search for"
    (move,) = controller.feed(search())
    assert move.action is Action.MOVE
    assert controller.search is None
    assert replay(lines) == (move,), "the answer is an event of the log"
