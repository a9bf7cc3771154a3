"""Plans for what carries messages in other frameworks: their certificate, and small cases whose optimum is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from channel_executor import ENDED, execute
from penstock.passes import add_communication, remove_communication
from penstock.schedule.messages import CHANNELS
from tiers import chosen, others_nightly

pytestmark = pytest.mark.unit

STREAMS = ("nccl", "nccl-pair", "nccl-edge")


def orders(num_microbatches: int) -> Iterator[tuple[str, ...]]:
    """All orders of one rank's F, I and W, each kind in the order of microbatches and behind what it needs."""

    def grown(row: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if len(row) == 3 * num_microbatches:
            yield row
        for kind, before in (("F", ""), ("I", "F"), ("W", "I")):
            number = row.count(kind)
            if number < (row.count(before) if before else num_microbatches):
                yield from grown((*row, kind))

    return grown(())


def least_makespan(costs: ps.Costs, num_microbatches: int, ms: float, one_stream: bool) -> float:
    """The shortest of all orders of two ranks and of the messages between them, one at a time on each stream."""
    every, best = list(orders(num_microbatches)), float("inf")
    sent = sorted(set(itertools.permutations("FB" * num_microbatches))) if one_stream else [()]
    for rows in itertools.product(every, repeat=2):
        for messages in sent:
            best = min(best, makespan(rows, messages, costs, ms))
    return best


def makespan(rows: tuple[tuple[str, ...], ...], messages: tuple[str, ...], costs: ps.Costs, ms: float) -> float:
    """Ops and messages as soon as what they need is there, or infinity where they wait for one another."""
    takes = [{"F": costs.f[rank], "I": costs.i[rank], "W": costs.w[rank]} for rank in range(2)]
    ends: dict[tuple[str, int, int], float] = {}  # (kind, rank, number); messages are of rank -1
    free, place, count = [0.0, 0.0], [0, 0], [{"F": 0, "I": 0, "W": 0} for _ in range(2)]
    stream, moved, edge = 0.0, 0, {"F": 0.0, "B": 0.0}
    sent = {"F": 0, "B": 0}
    progress = True
    while progress:
        progress = False
        for kind in messages[moved : moved + 1] if messages else ("F", "B"):
            made = ("F", 0, sent["F"]) if kind == "F" else ("I", 1, sent["B"])
            if made in ends:
                begin = max(ends[made], stream if messages else edge[kind])
                stream = edge[kind] = ends[kind, -1, sent[kind]] = begin + ms
                sent[kind] += 1
                moved += 1
                progress = True
        for rank in range(2):
            if place[rank] == len(rows[rank]):
                continue
            kind = rows[rank][place[rank]]
            number = count[rank][kind]
            message = ("F", 1, ("F", -1, number)) if kind == "F" else ("I", 0, ("B", -1, number))
            if message[:2] == (kind, rank) and message[2] not in ends:
                continue
            arrived = ends[message[2]] if message[:2] == (kind, rank) else 0.0
            free[rank] = ends[kind, rank, number] = max(free[rank], arrived) + takes[rank][kind]
            count[rank][kind] += 1
            place[rank] += 1
            progress = True
    return max(free) if place == [len(row) for row in rows] else float("inf")


@pytest.mark.parametrize(
    ("f", "i", "w", "ms"),
    [((3, 5), (0, 4), (7, 2), 6.0), ((4, 2), (2, 3), (5, 1), 9.0), ((6, 6), (6, 6), (6, 6), 2.0)],
)
def test_small_plans_are_the_best_of_all_orders(
    f: tuple[float, ...], i: tuple[float, ...], w: tuple[float, ...], ms: float
) -> None:
    costs, links = ps.Costs(f, i, w), ps.Links({(0, 1): ms})
    shared, apart = (least_makespan(costs, 3, ms, one_stream) for one_stream in (True, False))
    for channel, best in (("nccl", shared), ("nccl-pair", shared), ("nccl-edge", apart)):
        plan = ps.plan(costs, 2, 3, links, channels=channel, time_limit=5.0)
        assert plan.makespan == pytest.approx(best), channel
        assert plan.lower_bound <= best + 1e-9


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_certificate_names_the_channel_and_the_plan_is_for_it(channel: str, tmp_path: Path) -> None:
    costs, links = ps.Costs.uniform(4, f=10, i=10, w=10), ps.Links({(2, 3): 30.0})
    plan = ps.plan(costs, 4, 8, links, channels=channel, time_limit=2.0)
    assert plan.certificate.channel == channel
    assert (f"messages over {channel}" in str(plan.certificate)) == (channel != "buffered")
    assert plan.lower_bound <= plan.makespan
    assert plan.makespan == ps.simulate(plan.schedule, costs, links=links, channels=channel).makespan
    assert plan.timeline.makespan == plan.makespan
    if channel != "buffered":
        ps.check(plan.schedule, channels=channel)
        assert execute(plan.schedule, channel, random.Random(0)) == ENDED
        plan.save(tmp_path / "plan.csv")
        assert ps.load(tmp_path / "plan.csv").order == plan.schedule.order


def test_a_late_link_keeps_one_communicator_busy_twice_for_each_microbatch() -> None:
    """The bound says so, and no order is shorter."""
    costs, links = ps.Costs.uniform(4, f=10, i=10, w=10), ps.Links({(1, 2): 50.0})
    bounds = {each: ps.plan(costs, 4, 8, links, channels=each, time_limit=2.0).lower_bound for each in CHANNELS}
    assert bounds["nccl"] >= bounds["nccl-pair"] >= 2 * 8 * 50
    assert 2 * 8 * 50 > bounds["nccl-edge"] >= 8 * 50
    assert bounds["gloo"] == bounds["buffered"] < 8 * 50


@pytest.mark.slow
def test_a_plan_for_streams_beats_one_placed_on_them() -> None:
    costs, links = ps.Costs.uniform(4, f=10, i=10, w=10), ps.Links({(1, 2): 20.0})
    without = ps.plan(costs, 4, 12, links, time_limit=1.0).schedule
    for channel in chosen(dict.fromkeys(STREAMS), ["nccl"]):
        placed = ps.simulate(without, costs, links=links, channels=channel).makespan
        plan = ps.plan(costs, 4, 12, links, channels=channel, time_limit=4.0)
        assert plan.makespan < placed
        assert plan.gap <= 0.05


@pytest.mark.slow
def test_memory_limits_count_on_streams_too() -> None:
    costs, links = ps.Costs.uniform(4, f=10, i=10, w=10), ps.Links({(0, 1): 20.0})
    for channel in STREAMS:
        plan = ps.plan(costs, 4, 8, links, channels=channel, max_in_flight=3, time_limit=2.0)
        ps.check(remove_communication(plan.schedule), max_in_flight=3)
        ps.check(plan.schedule, channels=channel)


@pytest.mark.slow
@pytest.mark.parametrize("channel", others_nightly(["gloo", *STREAMS], ["gloo", "nccl"]))
def test_what_is_not_searched_with_streams_is_planned_and_placed(channel: str) -> None:
    even, links = ps.Costs.uniform(4, f=10, i=10, w=10), ps.Links({(0, 1): 20.0})
    recomputed = replace(even, kept_by_recompute=0.1)
    fused = ps.Costs([10] * 4, [10] * 4, [10] * 4, b=[15] * 4)
    weighed = replace(even, weight_bytes=[10.0] * 4)
    uneven = replace(even, uneven=[1.0, 2.0] * 4)
    for costs, options in (
        (recomputed, {"memory_limit": 2.0}),
        (fused, {}),
        (weighed, {"total_limit": 1e6}),
        (uneven, {}),
    ):
        plan = ps.plan(costs, 4, 8, links, channels=channel, time_limit=1.0, **options)
        assert plan.lower_bound <= plan.makespan
        assert plan.makespan == ps.simulate(plan.schedule, costs, links=links, channels=channel).makespan
        ps.check(plan.schedule, channels=channel)


def test_two_pipelines_are_planned_with_microbatches_in_turn() -> None:
    costs, links = ps.Costs.uniform(4, f=10, i=10, w=10), ps.Links({(0, 1): 20.0})
    plan = ps.plan(costs, 4, 8, links, channels="nccl", placement="one-to-one+bidirectional", time_limit=2.0)
    assert plan.certificate.microbatches == "in turn"
    ps.check(plan.schedule, channels="nccl")
    assert plan.makespan >= plan.lower_bound


def test_links_with_a_bandwidth_are_planned_for_a_channel() -> None:
    costs = ps.Costs([10] * 3, [10] * 3, [10] * 3, message_bytes=[10e6] * 3)
    links = ps.Links({(0, 1): "latency:5ms+bandwidth:1GB/s"})
    assert ps.plan(costs, 3, 6, links, channels="nccl", time_limit=2.0).lower_bound >= 2 * 6 * 15
    assert ps.plan(costs, 3, 6, links, channels="gloo", time_limit=2.0).makespan >= 210
    with pytest.raises(ps.CostError, match="but the links have 0:1=latency:5ms\\+bandwidth:1GB/s"):
        ps.plan(costs, 3, 6, links)


def test_what_no_channel_of_another_framework_is_planned_for() -> None:
    costs = ps.Costs.uniform(2)
    with pytest.raises(ps.ScheduleError, match="channels 'mpi': give one of buffered, gloo"):
        ps.plan(costs, 2, 4, channels="mpi")
    for options in ({"objective": "span"}, {"dispatch": "hinted"}):
        with pytest.raises(ps.ScheduleError, match="planned for the makespan of a frozen order"):
            ps.plan(costs, 2, 4, channels="nccl", **options)
    with pytest.raises(ps.CostError, match=r"links that do not change.*loss"):
        ps.plan(costs, 2, 4, ps.Links({(0, 1): "latency:5ms+loss:1%"}), channels="nccl")


def test_messages_are_placed_for_the_time_at_which_a_run_starts() -> None:
    """The arbiter once asked links how late they are at the beginning of their time, whenever the run was."""
    schedule, costs = ps.build("1f1b", 4, 8), ps.Costs.uniform(4, f=10, i=10, w=10)
    turning = ps.Links({(1, 2): "latency:steps:0ms/0ms,1000ms/60ms"})
    late = ps.Links({(1, 2): 60.0})
    for channel in ("gloo", *STREAMS):
        then = ps.simulate(schedule, costs, links=turning, links_at=2000.0, channels=channel).makespan
        assert then == ps.simulate(schedule, costs, links=late, channels=channel).makespan


def test_receives_that_are_due_first_are_posted_first_on_gloo() -> None:
    """Receives were posted in the order in which messages leave. Those that left long before their use took all
    eight places, and a step took 1.66 times as long."""
    costs, links = ps.Costs.uniform(3, f=10, i=10, w=10), ps.Links({(1, 2): 40.0})
    schedule = ps.build("zb", 3, 24, warmup=[24, 8, 1])
    eight, every = (
        ps.simulate(
            add_communication(schedule, costs, links, channels="gloo", most_posted=most),
            costs,
            links,
            channels="gloo",
        ).makespan
        for most in (8, 1000)
    )
    assert eight == every
