"""The trace keeps what Perfetto's importer asks of Chrome's JSON: slices nest, flows bind, processes differ."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

import penstock as ps
from penstock.formats.perfetto import COMPUTE_TRACK, held_over_time, messages_of, to_perfetto
from penstock.simulation import Timeline

pytestmark = pytest.mark.unit
Event = dict[str, Any]


def slow(link: float = 35.0, **more: Any) -> ps.Timeline:
    schedule = ps.build("zb", 4, 12, warmup=[7, 5, 3, 1])
    links = ps.Links({(0, 1): link}, default=1.0)
    return ps.simulate(schedule, ps.Costs.uniform(4, f=10, i=10, w=10), links=links, **more)


def events(*timelines: Timeline) -> list[Event]:
    value = json.loads(to_perfetto(list(timelines)))
    assert value["displayTimeUnit"] == "ms"
    return list(value["traceEvents"])


def slices(trace: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def flows(trace: list[Event]) -> dict[int, list[Event]]:
    found = defaultdict(list)
    for event in trace:
        if event["ph"] in "stf":
            found[event["id"]].append(event)
    return found


def around(tracks: dict[tuple[int, int], list[Event]], step: Event) -> Event:
    """The slice that a flow step binds to, as the importer finds it: the one open at its time."""
    open_now = [
        s for s in tracks[step["pid"], step["tid"]] if s["ts"] <= step["ts"] and step["ts"] < s["ts"] + s["dur"]
    ]
    assert len(open_now) == 1, step
    return open_now[0]


def test_every_op_is_a_slice_of_its_rank_with_its_story() -> None:
    t = slow()
    found = {e["args"]["op"]: e for e in events(t) if e["ph"] == "X" and e["cat"] == "compute"}
    assert len(found) == len(t.ops)
    for op in t.ops:
        event, args = found[str(op.op)], found[str(op.op)]["args"]
        assert (event["pid"], event["tid"]) == (op.rank + 1, COMPUTE_TRACK)
        assert event["name"] == f"{op.op.kind} {op.op.microbatch}"
        assert (event["ts"], event["dur"]) == pytest.approx((1000 * op.start, 1000 * (op.end - op.start)))
        assert (args["stage"], args["microbatch"], args["waited_ms"]) == (*op.op[1:], op.waited)
        assert args.get("waited_for") == (str(op.waited_for) if op.waited_for else None)


@pytest.mark.parametrize("transport", ["decoupled", "blocking"])
@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_slices_of_a_track_never_overlap(transport: str, dispatch: str) -> None:
    """Messages under way at once have lanes of their own."""
    trace = events(slow(transport=transport, dispatch=dispatch))
    for track in slices(trace).values():
        for before, after in itertools.pairwise(track):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    names = {e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "thread_name"}
    assert transport == "blocking" or {"to rank 1", "to rank 1, 2", "to rank 1, 3"} <= names


def test_every_message_is_an_arrow_over_its_link() -> None:
    t = slow()
    trace = events(t)
    tracks = slices(trace)
    arrows = flows(trace)
    assert len(arrows) == len(t.messages)
    ends = set()
    for steps in arrows.values():
        assert [s["ph"] for s in steps] == ["s", "t", "f"]
        assert all(s["bp"] == "e" for s in steps[1:])
        source, on_link, target = (around(tracks, s) for s in steps)
        assert on_link["cat"] == "message"
        assert on_link["args"]["from"] == source["args"]["op"]
        assert on_link["args"]["to"] == target["args"]["op"]
        assert source["pid"] == on_link["pid"] != target["pid"]
        assert source["ts"] < target["ts"]
        ends.add((source["args"]["op"], target["args"]["op"]))
    assert ends == {(str(m.source), str(m.target)) for m in t.messages}


def test_posted_messages_wait_on_their_link_before_they_leave() -> None:
    schedule = ps.build("zb", 4, 12, warmup=[7, 5, 3, 1])
    t = ps.simulate(schedule, ps.Costs.uniform(4, 10, 10, 10), links=ps.Links({(0, 1): 35.0}), channels="nccl")
    trace = events(t)
    for track in slices(trace).values():
        for before, after in itertools.pairwise(track):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    on_links = [e for e in trace if e["ph"] == "X" and e["cat"] == "message"]
    found = {(e["args"]["from"], "waits" in e["name"]): e for e in on_links}
    for message in t.messages:
        for waits, begin, end in ((True, message.sent, message.left), (False, message.left, message.arrived)):
            event = found.pop((str(message.source), waits), None)
            assert (event is None) == (begin == end)
            if event is not None:
                assert (event["ts"], event["dur"]) == pytest.approx((1000 * begin, 1000 * (end - begin)))
                assert event["args"]["receive_posted_ms"] == message.posted
    assert not found
    assert len(flows(trace)) == len(t.messages)


def test_blocked_time_is_a_slice() -> None:
    t = slow(transport=ps.Blocking(1))
    blocked = [e for e in events(t) if e["name"] == "blocked: link full"]
    assert sum(e["dur"] for e in blocked) == pytest.approx(1000 * sum(op.blocked for op in t.ops))
    assert blocked


def test_measured_timelines_without_messages_start_at_zero() -> None:
    t = slow()
    later = tuple(replace(op, start=op.start + 123456.789, end=op.end + 123456.789) for op in t.ops)
    trace = events(replace(t, ops=later, messages=(), source="measured"))
    assert min(e["ts"] for e in trace if "ts" in e) == 0
    assert len(flows(trace)) == len(t.messages)
    assert all(e["cat"] != "message" for e in trace if e["ph"] == "X")


def test_several_timelines_share_no_process_and_no_arrow() -> None:
    a, b = slow(), replace(slow(0.0), source="measured")
    trace = events(a, b)
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert len(names) == 8
    assert names[1] == "zb simulated, rank 0"
    assert names[8] == "zb measured, rank 3"
    assert len(flows(trace)) == len(a.messages) + len(b.messages)
    assert all(max(s["pid"] for s in f) <= 4 or min(s["pid"] for s in f) > 4 for f in flows(trace).values())


def test_held_activations_are_counted() -> None:
    t = ps.simulate(ps.build("1f1b", 4, 8))
    for rank, row in enumerate(t.rows):
        steps = held_over_time(row)
        assert max(held for _, held in steps) == 4 - rank
        assert steps[-1][1] == 0
    counters = [e for e in events(t) if e["ph"] == "C"]
    assert {e["pid"] for e in counters} == {1, 2, 3, 4}
    assert max(e["args"]["held"] for e in counters) == 4


def test_implied_messages_match_the_recorded_ones() -> None:
    for name in ps.library.SCHEDULES:
        t = ps.simulate(ps.build(name, 4, 8))
        implied = messages_of(replace(t, messages=()))
        assert {(m.source, m.target) for m in implied} == {(m.source, m.target) for m in t.messages}
