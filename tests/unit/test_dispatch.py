"""The decision core, fed lists of events: what it decides, and that the same events give the same decisions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import penstock as ps
from penstock.dispatch import Dispatch, Dispatcher, FrozenDispatcher, Graph, lower
from penstock.simulation.lowered import frozen_caps, memory_changes

pytestmark = pytest.mark.unit


def dispatcher(schedule: ps.Schedule, rank: int, dispatch: Dispatch, cap: float = math.inf) -> Dispatcher:
    graph = lower(schedule)
    costs = ps.Costs.uniform(schedule.num_stages, freed_by_input=0.0)
    return Dispatcher(graph, rank, dispatch, memory_changes(graph, costs), cap)


def tell(decider: Dispatcher, script: str) -> list[str]:
    """Feeds words like `>1F0` (the message that op 1F0 needs arrives), `-0F0` (it ended) and `?` (ask)."""
    decided = []
    graph = decider.graph
    number = {str(op): n for n, op in enumerate(graph.ops)}
    for word in script.split():
        if word == "?":
            op = decider.next()
            decided.append("wait" if op is None else str(graph.ops[op]))
        elif word[0] == ">":
            decider.arrive(number[word[1:]])
        else:
            decider.finish(number[word[1:]])
    return decided


def test_frozen_waits_for_its_next_op_though_another_is_ready() -> None:
    decider = dispatcher(ps.build("1f1b", 2, 3), 0, Dispatch.FROZEN)
    assert tell(decider, "? -0F0 ? -0F1 ? >0B0 ?") == ["0F0", "0F1", "wait", "0B0"]
    awaited = decider.first_awaited()
    assert awaited is not None
    assert str(decider.graph.ops[awaited]) == "0F2"


def test_dynamic_runs_what_is_ready_under_its_cap() -> None:
    wide = dispatcher(ps.build("1f1b", 2, 3), 0, Dispatch.DYNAMIC, cap=3)
    assert tell(wide, "? -0F0 ? -0F1 ? -0F2 ? >0B0 ?") == ["0F0", "0F1", "0F2", "wait", "0B0"]
    narrow = dispatcher(ps.build("1f1b", 2, 3), 0, Dispatch.DYNAMIC, cap=2)
    assert tell(narrow, "? -0F0 ? -0F1 ? >0B0 ? -0B0 ?") == ["0F0", "0F1", "wait", "0B0", "0F2"]


def test_dynamic_prefers_backward_then_forward_then_weights() -> None:
    decider = dispatcher(ps.build("zb-h1", 2, 3), 1, Dispatch.DYNAMIC, cap=3)
    assert tell(decider, ">1F0 >1F1 ? -1F0 ? -1I0 ? -1F1 ? -1I1 ?") == ["1F0", "1I0", "1F1", "1I1", "1W0"]


@pytest.mark.parametrize(("dispatch", "third"), [(Dispatch.HINTED, "1W0"), (Dispatch.DYNAMIC, "1F1")])
def test_hinted_takes_the_earliest_ready_op_of_its_order(dispatch: Dispatch, third: str) -> None:
    """Where F1 and W0 are both ready, class first takes the forward, and hinted what the order has first."""
    schedule = ps.build("zb-h1", 2, 2)
    row = [ps.Op(kind, 1, int(m)) for kind, m in ("F0", "I0", "W0", "F1", "I1", "W1")]
    schedule = replace(schedule, order=(schedule.order[0], tuple(row)))
    decider = dispatcher(schedule, 1, dispatch, cap=3)
    assert tell(decider, "? >1F0 ? -1F0 ? >1F1 -1I0 ?") == ["wait", "1F0", "1I0", third]


def test_hinted_runs_what_is_ready_where_the_next_op_waits_and_under_its_cap() -> None:
    wide = dispatcher(ps.build("1f1b", 2, 3), 0, Dispatch.HINTED, cap=3)
    assert tell(wide, "? -0F0 ? -0F1 ? -0F2 ? >0B0 ?") == ["0F0", "0F1", "0F2", "wait", "0B0"]
    narrow = dispatcher(ps.build("1f1b", 2, 3), 0, Dispatch.HINTED, cap=2)
    assert tell(narrow, "? -0F0 ? -0F1 ? >0B0 ? -0B0 ?") == ["0F0", "0F1", "wait", "0B0", "0F2"]


def test_dynamic_keeps_microbatch_order_within_a_kind() -> None:
    decider = dispatcher(ps.build("1f1b", 2, 3), 1, Dispatch.DYNAMIC)
    assert tell(decider, ">1F1 ? >1F0 ? -1F0 ?") == ["wait", "1F0", "1B0"]


def test_an_early_forward_leaves_room_for_what_the_frozen_order_still_needs() -> None:
    """Rank 0 of zb-v may not fill its memory with stage 0 while stage 3 must still come in between."""
    schedule = ps.build("zb-v", 2, 8)
    decider = dispatcher(schedule, 0, Dispatch.DYNAMIC, cap=4)
    assert tell(decider, "? -0F0 ? -0F1 ? -0F2 ?") == ["0F0", "0F1", "0F2", "wait"]
    assert tell(decider, ">3F0 ? -3F0 ?") == ["3F0", "3I0"]


def test_finished_and_held() -> None:
    decider = dispatcher(ps.build("1f1b", 1, 1), 0, Dispatch.FROZEN)
    assert tell(decider, "? -0F0") == ["0F0"]
    assert (decider.finished, decider.held) == (False, 1)
    assert tell(decider, "? -0B0 ?") == ["0B0", "wait"]
    assert (decider.finished, decider.held) == (True, 0)


Events = list[tuple[str, int]]
"""What a dispatcher was told and decided, in order, with the op's number."""


@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("name", ps.library.SCHEDULES)
def test_the_same_events_give_the_same_decisions(name: str, dispatch: Dispatch) -> None:
    graph, changes, caps = _lowered(ps.build(name, 2, 4))
    events = _drive(graph, [Dispatcher(graph, r, dispatch, changes, caps[r]) for r in range(graph.num_ranks)])
    for rank, each in enumerate(events):
        _replay(Dispatcher(graph, rank, dispatch, changes, caps[rank]), each)


@pytest.mark.parametrize("name", ps.library.SCHEDULES)
def test_a_frozen_dispatcher_decides_and_holds_what_the_core_does(name: str) -> None:
    graph, changes, caps = _lowered(ps.build(name, 2, 4))
    core = [Dispatcher(graph, r, Dispatch.FROZEN, changes, caps[r]) for r in range(graph.num_ranks)]
    for rank, each in enumerate(_drive(graph, core)):
        twin = Dispatcher(graph, rank, Dispatch.FROZEN, changes, caps[rank])
        _replay(FrozenDispatcher(graph, rank, changes), each, twin)


def _lowered(schedule: ps.Schedule) -> tuple[Graph, list[float], list[float]]:
    graph = lower(schedule)
    changes = memory_changes(graph, ps.Costs.uniform(schedule.num_stages))
    return graph, changes, frozen_caps(graph, changes)


def _replay(again: Dispatcher | FrozenDispatcher, events: Events, twin: Dispatcher | None = None) -> None:
    """Tells a dispatcher what another was told, and expects what that one decided; `twin` is told the same."""
    for what, op in events:
        for each in (again,) if twin is None else (again, twin):
            if what == "run":
                assert each.first_awaited() is not None
                assert each.next() == op
            elif what == "wait":
                assert each.next() is None
            elif what == "finish":
                each.finish(op)
            else:
                each.arrive(op)
        if twin is not None:
            assert (again.held, again.first_awaited(), again.finished) == (
                twin.held, twin.first_awaited(), twin.finished,
            )  # fmt: skip
    assert again.finished


def _drive(graph: Graph, deciders: list[Dispatcher]) -> list[Events]:
    """Runs dispatchers by hand, one op of one rank at a time, messages at once."""
    events: list[Events] = [[] for _ in deciders]
    while not all(d.finished for d in deciders):
        ran = False
        for rank, each in enumerate(deciders):
            op = each.next()
            if op is None:
                events[rank].append(("wait", -1))
                continue
            ran = True
            each.finish(op)
            events[rank] += [("run", op), ("finish", op)]
            for successor in graph.successors(op):
                if (host := graph.rank[successor]) != rank:
                    deciders[host].arrive(successor)
                    events[host].append(("arrive", successor))
        assert ran, "every rank waits"
    return events


def test_the_graph_is_what_its_docstring_draws() -> None:
    schedule = ps.Schedule.of(
        "x",
        ps.Placement(((0, 1),)),
        [[ps.Op(k, 0, m) for k in "FB" for m in (0, 1)], [ps.Op(k, 1, m) for m in (0, 1) for k in "FB"]],
        2,
    )
    graph = lower(schedule)
    edges = {(s, t) for s in range(8) for t in graph.edge_to[graph.edge_first[s] : graph.edge_first[s + 1]]}
    assert edges == {(0, 4), (1, 6), (5, 2), (7, 3), (0, 2), (1, 3), (4, 5), (6, 7)}


def test_weights_and_full_backwards_of_one_stage_keep_their_order() -> None:
    """They add to the same gradients, and a sum of floats depends on its order."""
    head = "schedule x: 1 rank, 1 stage, 3 microbatches\npipeline 0: stages on ranks 0\n"
    schedule = ps.parse(head + "rank 0 | F0 F1 F2 I0 W0 B1 I2 W2")
    decider = dispatcher(schedule, 0, Dispatch.DYNAMIC)
    decided = tell(decider, "? -0F0 ? -0I0 ? -0F1 ? -0F2 ? -0W0 ? -0B1 ? -0I2 ?")
    assert decided == ["0F0", "0I0", "0F1", "0F2", "0W0", "0B1", "0I2", "0W2"]


def test_extra_edges_are_needs_too() -> None:
    schedule = ps.build("gpipe", 1, 2)
    graph = lower(schedule, extra=[(ps.Op("B", 0, 1), ps.Op("B", 0, 0))])
    assert graph.num_needed[graph.number[ps.Op("B", 0, 0)]] == 2
