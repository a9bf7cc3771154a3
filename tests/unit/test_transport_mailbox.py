"""Bounded channels and crossings between threads. No test asserts an upper time."""

from __future__ import annotations

import threading
import time
from itertools import chain, pairwise, product
from typing import Any

import pytest
import torch

import penstock as ps
from emulated_ranks import blocked_starts, in_thread, in_threads, run_threads
from penstock.cost import Links
from penstock.runtime import DeadlineExceeded
from penstock.runtime.errors import PeerLost
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import KEPT_CROSSINGS, CrossingLog, StepMessages, TransferRecord
from penstock.runtime.transport.link_conditions import Conditions, sleep_until
from penstock.runtime.transport.loopback import Mailbox, loopback_ends
from penstock.schedule import Op
from tiers import others_nightly
from waiting import PATIENCE

pytestmark = pytest.mark.unit

LATE = "0:1=latency:30ms"


def uniform(schedule: ps.Schedule, ms: float = 2.0) -> ps.Costs:
    return ps.Costs.uniform(schedule.num_stages, ms, ms, ms)


def edge(microbatch: int) -> Edge:
    return Edge(Op("F", 0, microbatch), Op("F", 1, microbatch))


def two(links: str = "", depth: int | None = None, timeout: float = PATIENCE) -> tuple[Any, Any]:
    boxes, conditions = [Mailbox(), Mailbox()], Conditions(Links.parse(links))
    one, other = (in_thread(boxes, rank, conditions, timeout, depth) for rank in (0, 1))
    return one, other


def in_turns(links: str | None) -> list[Any]:
    return loopback_ends([Mailbox(), Mailbox()], None if links is None else Conditions(Links.parse(links)))


# Bounded channels.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "depth", "dispatch"),
    [
        ("1f1b", 1, "dynamic"),
        ("1f1b", 3, "frozen"),
        ("zb", 2, "frozen"),
        ("zb-v", 2, "dynamic"),
        ("interleaved-1f1b", 1, "frozen"),
    ],
)
def test_a_full_channel_keeps_the_next_op_from_starting(name: str, depth: int, dispatch: str) -> None:
    schedule = ps.build(name, num_ranks=4, num_microbatches=8)
    (ran,) = run_threads(schedule, uniform(schedule), LATE, depth, dispatch=dispatch)
    assert blocked_starts(ran, depth) > 0
    if dispatch == "frozen":
        assert ran.timeline.executed().order == schedule.order


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("name", "depth"), others_nightly(product(("1f1b", "zb"), (1, 2)), [("1f1b", 1), ("zb", 2)]))
def test_what_waits_for_what_is_as_in_the_simulator(name: str, depth: int) -> None:
    """Ops are short beside the delay: what lies most of a delay apart in the simulator has the same order here."""
    delay = 240.0
    schedule = ps.build(name, num_ranks=3, num_microbatches=4)
    costs = uniform(schedule, 1.0)
    simulated = ps.simulate(schedule, costs, links=ps.Links({(0, 1): delay}), transport=ps.Blocking(depth))
    (ran,) = run_threads(schedule, costs, f"0:1=latency:{delay:g}ms", depth)
    ends = [(0, 1), (1, 0)]
    come = [sorted(m.arrived for m in simulated.messages if (m.source_rank, m.target_rank) == link) for link in ends]
    came = [sorted(c.arrived for rows in ran.crossings for c in rows if c[:2] == link) for link in ends]
    assert [*map(len, come)] == [*map(len, came)] == [4, 4]
    started, compared = ran.started(), 0
    moments = list(zip(chain(*come), chain(*came), strict=True))
    for op in simulated.ops:
        for moment, here in moments:
            if abs(op.start - moment) > 0.6 * delay:
                assert (op.start > moment) == (started[op.op] > here), f"{op.op} and what came at {moment:g} ms"
                compared += 1
    assert compared > 100


@pytest.mark.slow
def test_a_delegated_link_has_no_bound_and_others_keep_theirs() -> None:
    schedule = ps.build("1f1b", num_ranks=3, num_microbatches=6)
    both = "0:1=latency:30ms 1:2=latency:30ms"
    runs = run_threads(schedule, uniform(schedule), both, 1, delegated=[(), [(1, 0)], [(0, 1), (1, 2)], ()])
    assert blocked_starts(runs[0], 1) > 0
    assert blocked_starts(runs[1], 1, lambda a, b: {a, b} == {1, 2}) > 0
    with pytest.raises(AssertionError, match=r"(0>1|1>0): more than 1 under way"):
        blocked_starts(runs[1], 1)
    with pytest.raises(AssertionError, match="more than 1 under way"):
        blocked_starts(runs[2], 1, lambda a, b: {a, b} == {1, 2})
    assert blocked_starts(runs[3], 1) > 0


def test_a_link_that_is_bounded_again_waits_for_all_but_depth_of_what_is_under_way() -> None:
    one, _ = two("0:1=latency:1min", depth=2, timeout=0.1)
    assert one.send(edge(0), 1, Payload([]))
    assert one.send(edge(1), 1, Payload([]))
    assert not one.send(edge(2), 1, Payload([]))
    one.route([(0, 1)])
    assert one.send(edge(2), 1, Payload([]))
    one.route([])
    assert not one.send(edge(3), 1, Payload([]))
    with pytest.raises(DeadlineExceeded, match=r"nothing came in for 0.1 s: rank 0 stands still"):
        one.wait([], lambda: "rank 0 stands still")


def test_a_tied_gradient_takes_no_room() -> None:
    one, _ = two("0:1=latency:1min", depth=1)
    assert one.send(edge(0), 1, Payload([]))
    assert one.send(edge(0)._replace(slot=1), 1, Payload([]))
    assert not one.send(edge(1)._replace(slot=-1), 1, Payload([])), "a token is a message as any other"


@pytest.mark.slow
def test_a_sender_that_stands_still_wakes_when_there_is_room_and_when_something_comes() -> None:
    one, other = two("0:1=latency:steps:0ms/600ms,500ms/0ms 1:0=latency:0", depth=1)
    assert one.send(edge(0), 1, Payload([]))
    assert not one.send(edge(1), 1, Payload([]))
    back = Edge(Op("B", 1, 0), Op("B", 0, 0))
    other.send(back, 0, Payload([]))
    assert one.wait([], str) == [back]
    assert one.wait([], str) == []
    assert one.send(edge(1), 1, Payload([]))
    came: list[Edge] = []
    while len(came) < 2:
        came += other.wait([], str)
    assert came == [edge(0), edge(1)]


def test_a_rank_that_fails_ends_one_that_stands_still() -> None:
    boxes, conditions = [Mailbox(), Mailbox()], Conditions(Links.parse("0:1=latency:1min"))
    one = in_thread(boxes, 0, conditions, 60.0, depth=1)
    one.send(edge(0), 1, Payload([]))
    assert not one.send(edge(1), 1, Payload([]))
    found = []

    def stand() -> None:
        with pytest.raises(PeerLost, match="rank 1 failed; rank 0 stands") as caught:
            one.wait([], lambda: "rank 0 stands")
        found.append(caught.value)

    in_threads([stand, lambda: boxes[0].lose(1, None)])
    assert len(found) == 1


def test_a_quick_rank_s_next_step_is_not_taken_for_this_one() -> None:
    one, other = two()
    one.begin(StepMessages())
    other.begin(StepMessages())
    one.send(edge(0), 1, Payload([]))
    one.begin(StepMessages())
    one.send(edge(0), 1, Payload([]))
    assert other.wait([], str) == [edge(0)]
    assert other.arrivals() == []
    other.take(edge(0))
    other.begin(StepMessages())
    assert other.wait([], str) == [edge(0)]


# Crossings.


def test_a_crossing_tells_the_link_from_its_ends() -> None:
    one, other = two("0:1=latency:40ms")
    before = time.perf_counter_ns()
    one.send(edge(0), 1, Payload([]))
    after = time.perf_counter_ns()
    time.sleep(0.08)  # a receiver that looks late makes no slow link
    assert other.arrivals() == [edge(0)]
    (found,) = other.crossings()
    assert (found.source, found.target, found.num_bytes) == (0, 1, 0)
    assert before <= found.sent <= after
    assert found.posted == found.sent
    assert found.duration == found.arrived - found.sent
    assert 40_000_000 - 1000 <= found.duration <= 40_000_000 + 1000, "what the conditions say, to the microsecond"
    assert other.crossings() == []
    assert one.crossings() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("links", "at_least"),
    {
        "0:1=latency:20ms": [20, 20, 20],
        "0:1=occupancy:20ms": [20, 20, 20],
        "0:1=bandwidth:1MB/s": [20, 20, 20],
        "0:1=loss:90%,10ms#1": [10, 10, 10],
        "0:1=latency:steps:0/20,100000/0": [20, 20, 20],
    }.items(),
)
@pytest.mark.parametrize("depth", [None, 1])
def test_every_condition_is_met(links: str, at_least: list[int], depth: int | None) -> None:
    one, other = two(links, depth)
    for number in range(3):
        while not one.send(edge(number), 1, Payload([torch.zeros(20_000, dtype=torch.uint8)])):
            one.wait([], str)
    came: list[Edge] = []
    while len(came) < 3:
        came += other.wait([], str)
    assert came == [edge(0), edge(1), edge(2)]
    found = other.crossings()
    assert [c.num_bytes for c in found] == [20_000] * 3
    assert all(c.duration >= ms * 1e6 - 1000 for c, ms in zip(found, at_least, strict=True))
    if "occupancy" in links or "bandwidth" in links:
        assert all(b.arrived - a.arrived >= 20e6 - 1000 for a, b in pairwise(found))


def test_ranks_in_turn_see_what_the_conditions_say() -> None:
    one, other = in_turns("0:1=latency:20ms")
    one.send(edge(0), 1, Payload([torch.zeros(100, dtype=torch.uint8)]))
    sleep_until(min(other.dues()))
    assert other.arrivals() == [edge(0)]
    (found,) = other.crossings()
    assert (found.source, found.target, found.num_bytes) == (0, 1, 100)
    assert 20_000_000 - 1000 <= found.duration <= 20_000_000 + 1000
    one, other = in_turns(None)
    one.send(edge(0), 1, Payload([]))
    assert other.crossings() == [], "what is handed over crosses no link"


def test_bug_a_link_of_one_process_that_turns_late_had_no_records_of_when_it_was_not() -> None:
    one, other = in_turns("0:1=latency:steps:0ms/0ms,100s/30ms")
    one.send(edge(0), 1, Payload([torch.zeros(100, dtype=torch.uint8)]))
    assert other.arrivals() == [edge(0)]
    (found,) = other.crossings()
    assert (found.source, found.target, found.num_bytes) == (0, 1, 100)
    assert 0 <= found.duration <= 1000, "nanoseconds, to the rounding of clocks"


def test_a_log_that_nobody_reads_keeps_the_latest() -> None:
    log = CrossingLog()
    for number in range(KEPT_CROSSINGS + 5):
        log.add(0, 1, number, 0, 0, 0)
    taken = log.take()
    assert [c.num_bytes for c in taken] == list(range(5, KEPT_CROSSINGS + 5))
    assert log.take() == []


def test_a_late_receiver_s_waiting_is_not_the_link_s() -> None:
    assert TransferRecord(0, 1, 8, sent=100, posted=400, arrived=450).duration == 50
    assert TransferRecord(0, 1, 8, sent=400, posted=100, arrived=450).duration == 50


def test_hang_a_wait_of_a_moment_after_an_entry_was_taken_lasted_for_ever() -> None:
    """`SimpleQueue` of CPython 3.11 waits without a limit where its lock is free and the moment is over at once."""
    box: Mailbox[int | None] = Mailbox()
    found: list[int | None] = []

    def take() -> None:
        for number in range(200):
            box.put(number)
            found.extend((box.get(None, 60.0, str), box.get(None, 60.0, str, until=time.perf_counter_ns() + 100)))

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(30.0)
    assert found == [each for number in range(200) for each in (number, None)]
