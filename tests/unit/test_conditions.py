"""Link conditions: the language, what a message meets, and that the simulator follows them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.cost.conditions import (
    RATE,
    TIME,
    Constant,
    LinkCondition,
    LinkQueue,
    OverTime,
    PacketLoss,
    RandomSteps,
    Trace,
    read_over_time,
)
from penstock.cost.links import LinkQueues, Links

pytestmark = pytest.mark.unit

ZB = ps.build("zb", num_ranks=4, num_microbatches=12, warmup=[7, 5, 3, 1])
TENS = ps.Costs.uniform(4, f=10, i=10, w=10)


def arrivals(text: str, sent: list[float], num_bytes: float = 0.0) -> list[float]:
    """When messages from 0 to 1 arrive."""
    lines = LinkQueues(Links.parse(f"0:1={text}"))
    return [lines.arrival(0, 1, num_bytes, now) for now in sent]


# The language.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0:1=20", "0:1=latency:20ms"),
        ("0:1=0.5s", "0:1=latency:500ms"),
        ("3:2=latency:30ms+occupancy:5ms", "3:2=latency:30ms+occupancy:5ms"),
        ("0:1=bandwidth:1GB/s", "0:1=bandwidth:1GB/s"),
        ("0:1=bandwidth:8Gbit/s", "0:1=bandwidth:1GB/s"),
        ("0:1=loss:1%", "0:1=loss:1%"),
        ("0:1=loss:0.001,200ms#4", "0:1=loss:0.1%,200ms#4"),
        ("0:1=latency:normal:30ms,10ms@50..100ms", "0:1=latency:normal:30ms,10ms@50ms..100ms"),
        ("0:1=occupancy:uniform:1ms,2ms@1s#9", "0:1=occupancy:uniform:1ms,2ms@1000ms#9"),
        ("0:1=latency:steps:0/13,100/40", "0:1=latency:steps:0ms/13ms,100ms/40ms"),
        ("0:1=0", "0:1=latency:0ms"),
        ("0:1=occupancy:5ms+half-duplex", "0:1=occupancy:5ms+half-duplex"),
        ("0:1=20+half-duplex", "0:1=latency:20ms+half-duplex"),
    ],
)
def test_reads_and_shows(text: str, shown: str) -> None:
    conditions = Links.parse([text])
    assert conditions.texts() == [shown]
    assert Links.parse(str(conditions)) == conditions
    assert hash(Links.parse(str(conditions))) == hash(conditions)


NUMBERS = st.floats(0, 1e6, allow_subnormal=False)
LONG = st.floats(1e4, 1e6)
ABOVE = st.floats(1e-3, 1e6)


def over_time(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[OverTime]:
    traces = st.lists(st.tuples(ABOVE, numbers), max_size=4, unique_by=lambda pair: pair[0]).map(sorted)
    return st.one_of(
        numbers.map(Constant),
        st.builds(
            lambda first, rest: Trace((0.0, *(t for t, _ in rest)), (first, *(v for _, v in rest))), numbers, traces
        ),
        st.builds(
            lambda values, every, seed: RandomSteps("uniform", *sorted(values), *sorted(every), seed),
            st.tuples(numbers, numbers),
            st.tuples(LONG, LONG),
            st.integers(0, 9),
        ),
    )


LOSSES = st.builds(PacketLoss, st.floats(0, 0.99), st.none() | NUMBERS, st.integers(0, 9))
CONDITIONS = st.builds(
    LinkCondition, over_time(NUMBERS), over_time(NUMBERS), st.none() | over_time(ABOVE), st.none() | LOSSES
)


@given(CONDITIONS)
def test_what_is_shown_reads_back_as_the_same_value(condition: LinkCondition) -> None:
    assert LinkCondition.parse(str(condition)) == condition


@pytest.mark.parametrize(
    ("text", "rule"),
    {
        "0-1": "write RANK:RANK=CONDITION, like 0:1=20",
        "1:1=20": "joins a rank to itself",
        "0:1=-20": "at least 0",
        "0:1=latency:3weeks": "not a number with a unit; units are us, ms, s, min",
        "0:1=speed:3": "'speed' is not a condition; give latency, occupancy, bandwidth, loss",
        "0:1=latency:1+latency:2": "latency is given twice",
        "0:1=bandwidth:0B/s": "may be 0 lets no message pass",
        "0:1=loss:100%": "at least 0% and below 100%",
        "0:1=loss:1%#x": "a seed, a whole number",
        "0:1=latency:cauchy:1,2@3": "'cauchy' is not known here",
        "0:1=latency:normal:1,2": "write it like normal:30ms,10ms@50..100ms",
        "0:1=latency:normal:1,2@0": "an interval of at least 1 ms",
        "0:1=latency:uniform:5,3@1s": "the lowest value comes first",
        "0:1=latency:steps:5/3": "has a gap: it starts at 5 ms",
        "0:1=latency:steps:0/3,5/": "is a gap: each time needs its value",
        "0:1=latency:steps:0/3,5/4,5/4": "its times must ascend",
        "0:1=latency:trace:/nowhere/at/all": "No such file",
    }.items(),
)
def test_wrong_texts_are_named_with_their_rule(text: str, rule: str) -> None:
    with pytest.raises(ps.CostError) as raised:
        Links.parse([text])
    assert repr(text) in str(raised.value)
    assert rule in str(raised.value)


def test_a_link_is_given_once_and_its_ranks_are_there() -> None:
    with pytest.raises(ps.CostError, match="link 0:1 is given twice"):
        Links.parse("0:1=1 0:1=2")
    with pytest.raises(ps.CostError, match="link 0:9: ranks go from 0 to 3"):
        ps.simulate(ZB, links=Links.parse("0:9=latency:1"))
    with pytest.raises(ps.CostError, match="name it by its two ranks"):
        Links({"0:1": LinkCondition()})  # type: ignore[dict-item]


# Values over time.


def test_a_trace_file_holds_each_value_until_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "wan.txt"
    path.write_text("# time value\n0 13\n0.1s, 40ms  # later\n\n300ms 5\n")
    trace = read_over_time(f"trace:{path}", TIME)
    assert [trace.at(t, "") for t in (-1, 0, 99.9, 100, 299, 300, 1e9)] == [13, 13, 13, 40, 40, 5, 5]
    conditions = Links.parse([f"0:1=latency:trace:{path}"])
    assert Links.parse(str(conditions)) == conditions


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ("0 1\n50\n", "line 2: '50' is not a time and a value"),
        ("# nothing\n", "has 0 times"),
    ],
)
def test_a_wrong_trace_file_is_named(tmp_path: Path, lines: str, rule: str) -> None:
    path = tmp_path / "wan.txt"
    path.write_text(lines)
    with pytest.raises(ps.CostError) as raised:
        read_over_time(f"trace:{path}", TIME)
    assert str(path) in str(raised.value)
    assert rule in str(raised.value)


def test_draws_come_again_and_differ_by_seed_and_link() -> None:
    def values(text: str, stream: str) -> list[float]:
        value = read_over_time(text, TIME)
        return [value.at(float(t), stream) for t in range(2000)]

    text = "normal:30ms,10ms@50..100ms"
    assert values(text, "0:1") == values(text, "0:1")
    assert values(text, "0:1") != values(text, "1:2")
    assert values(text, "0:1") != values(text + "#1", "0:1")
    backwards = read_over_time(text, TIME)
    assert [backwards.at(float(t), "0:1") for t in reversed(range(2000))][::-1] == values(text, "0:1")


def test_draws_last_as_long_as_stated_and_follow_their_distribution() -> None:
    value = read_over_time("normal:30ms,10ms@50..100ms", TIME)
    seen = [value.at(float(t), "a") for t in range(200_000)]
    lasted, run = [], 1
    for before, after in pairwise(seen):
        if before == after:
            run += 1
        else:
            lasted.append(run)
            run = 1
    assert min(lasted) >= 49
    assert max(lasted) <= 101
    draws = sorted(set(seen))
    mean = sum(draws) / len(draws)
    deviation = (sum((draw - mean) ** 2 for draw in draws) / len(draws)) ** 0.5
    assert 29 < mean < 31
    assert 9 < deviation < 11
    assert draws[0] >= 0


# What a message meets.


def test_late_messages_travel_together_and_busy_links_make_them_queue() -> None:
    assert arrivals("latency:30ms", [0, 1, 2]) == [30, 31, 32]
    assert arrivals("occupancy:30ms", [0, 1, 2]) == [30, 60, 90]
    assert arrivals("latency:10ms+occupancy:5ms", [0, 0, 40]) == [15, 20, 55]


def test_bandwidth_takes_size_over_rate() -> None:
    assert arrivals("bandwidth:1GB/s", [0, 0], num_bytes=16e6) == pytest.approx([16, 32])
    assert arrivals("bandwidth:steps:0ms/1GB/s,10ms/2GB/s", [0, 10], 16e6) == pytest.approx([16, 24])
    assert arrivals("bandwidth:1MB/s", [0, 0], num_bytes=0) == [0, 0]


def test_directions_have_queues_of_their_own_and_the_same_latency() -> None:
    lines = LinkQueues(Links.parse("0:1=latency:normal:30ms,10ms@1s+occupancy:5ms"))
    there, back = lines.arrival(0, 1, 0, 0.0), lines.arrival(1, 0, 0, 0.0)
    assert there == back
    assert lines.arrival(0, 1, 0, 0.0) == there + 5
    one_way = Links.parse("0:1=latency:9 1:0=latency:1")
    assert [one_way.delay_of(a, b, 0, 0, LinkQueue()).arrived for a, b in ((0, 1), (1, 0), (1, 2))] == [9, 1, 0]


def test_loss_delays_some_messages_and_all_behind_them() -> None:
    sent = [float(t) for t in range(1000)]
    came = arrivals("latency:10ms+loss:5%", sent)
    assert came == arrivals("latency:10ms+loss:5%", sent)
    late = [b - a > 10 for a, b in zip(sent, came, strict=True)]
    assert came == sorted(came), "a stream keeps its order"
    # 50 of 1000 are hit, each keeping up to 20 ms of messages waiting.
    assert 100 < sum(late) < 1000
    assert came != arrivals("latency:10ms+loss:5%#1", sent)
    first = late.index(True)
    assert came[first] == sent[first] + 10 + 20, "one more round trip"
    assert arrivals("latency:10ms+loss:5%,200ms", sent)[first] == sent[first] + 10 + 200


def test_how_often_messages_are_hit_follows_from_their_packets() -> None:
    loss = PacketLoss(0.01)
    small = [loss.rounds(100, number, "a") for number in range(20_000)]
    assert 0.008 < sum(map(bool, small)) / len(small) < 0.012
    large = [loss.rounds(100 * 1448, number, "a") for number in range(5_000)]
    assert sum(map(bool, large)) / len(large) == pytest.approx(1 - 0.99**100, abs=0.03)
    assert PacketLoss(0.0).rounds(1e9, 0, "a") == 0


@given(CONDITIONS, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20))
def test_messages_never_arrive_early_or_out_of_order(
    condition: LinkCondition, sent: list[tuple[float, float]]
) -> None:
    queue, last, clock = LinkQueue(), 0.0, 0.0
    for gap, size in sent:
        clock += gap
        passage = condition.delay_of(size, clock, queue, "0:1", "0>1")
        assert passage == condition.delay_of(size, clock, queue, "0:1", "0>1")
        assert clock <= passage.left <= passage.arrived
        assert passage.arrived >= last
        queue, last = passage.queue, passage.arrived
    assert queue.num_sent == len(sent)


# In the simulator.


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
@pytest.mark.parametrize("transport", ["decoupled", "blocking"])
def test_plain_latencies_are_what_links_are(dispatch: str, transport: str) -> None:
    links = ps.Links({(0, 1): 20.0, (2, 3): 5.0}, default=1.0)
    plain = ps.simulate(ZB, TENS, links=links, dispatch=dispatch, transport=transport)
    steps = {pair: f"latency:steps:0ms/{ms}ms" for pair, ms in links.delays.items()}  # which goes the long way
    stepped = ps.Links(steps, default="latency:steps:0ms/1ms")
    assert not stepped.is_constant
    assert ps.simulate(ZB, TENS, links=stepped, dispatch=dispatch, transport=transport) == plain
    none = ps.simulate(ZB, TENS, dispatch=dispatch, transport=transport)
    assert ps.simulate(ZB, TENS, links=Links(), dispatch=dispatch, transport=transport) == none


def test_occupancy_hurts_only_where_messages_meet() -> None:
    def makespan(text: str) -> float:
        return ps.simulate(ZB, TENS, links=Links.parse(text)).makespan

    # Ops of 10 ms send at most a message in 10 ms each way, so a link busy for 5 is just late by 5.
    assert makespan("0:1=occupancy:5ms") == makespan("0:1=latency:5ms")
    assert makespan("0:1=occupancy:30ms") > makespan("0:1=latency:30ms")


def test_sizes_of_messages_count_where_there_is_a_bandwidth() -> None:
    link = Links.parse("0:1=bandwidth:1GB/s")
    sized = ps.Costs([10] * 4, [10] * 4, [10] * 4, message_bytes=[5e6, 1e9, 1e9, 1e9])
    expected = ps.simulate(ZB, TENS, links=Links.parse("0:1=occupancy:5ms")).makespan
    assert ps.simulate(ZB, sized, links=link).makespan == pytest.approx(expected)
    assert ps.simulate(ZB, TENS, links=link).makespan == ps.simulate(ZB, TENS).makespan


def test_conditions_have_a_time_of_their_own_and_lines_go_on() -> None:
    link = Links.parse("0:1=latency:steps:0/0,1000/40")
    assert ps.simulate(ZB, TENS, links=link).makespan == ps.simulate(ZB, TENS).makespan
    late = ps.simulate(ZB, TENS, links=ps.Links({(0, 1): 40.0})).makespan
    assert ps.simulate(ZB, TENS, links=link, links_at=1000.0).makespan == late
    busy = Links.parse("0:1=occupancy:30ms")
    lines, one = LinkQueues(busy), ps.build("gpipe", 2, 4)
    first = ps.simulate(one, links=lines)
    again = ps.simulate(one, links=lines, links_at=60.0)
    assert again.makespan > first.makespan, "the link was still busy with the first run's messages"


def test_a_network_has_a_latency_of_its_own() -> None:
    base = Links({(0, 1): LinkCondition(Constant(20.0))}, base=1.0)
    plain = ps.Links({(0, 1): 21.0}, default=1.0)
    assert ps.simulate(ZB, TENS, links=base).makespan == ps.simulate(ZB, TENS, links=plain).makespan
    with pytest.raises(ps.CostError, match=r"a base of -1\.0 ms"):
        Links(base=-1.0)


def test_rates_are_read_in_bytes_and_bits() -> None:
    assert read_over_time("1KB/s", RATE) == Constant(1000.0)
    assert read_over_time("8Kbit/s", RATE) == Constant(1000.0)


def test_both_directions_of_a_half_duplex_link_wait_for_each_other() -> None:
    found = {}
    for text in ("occupancy:5ms", "occupancy:5ms+half-duplex"):
        lines = LinkQueues(Links.parse(f"0:1={text}"))
        found[text] = [lines.arrival(*way, 0.0, 10.0) for way in ((0, 1), (1, 0), (0, 1), (0, 2))]
    assert found["occupancy:5ms"] == [15.0, 15.0, 20.0, 10.0]
    assert found["occupancy:5ms+half-duplex"] == [15.0, 20.0, 25.0, 10.0]
    busy = [Links.parse("0:1=" + text.replace("5ms", "25ms")) for text in found]
    simulated = [ps.simulate(ZB, TENS, links=links).makespan for links in busy]
    assert simulated[1] > simulated[0]


def test_a_half_duplex_link_needs_one_process() -> None:
    from penstock.runtime.errors import RuntimeFailure
    from penstock.runtime.transport.link_conditions import Conditions

    Conditions(Links.parse("0:1=occupancy:5ms")).require_own_queues()
    with pytest.raises(RuntimeFailure, match="link 0:1 is half-duplex"):
        Conditions(Links.parse("0:1=occupancy:5ms+half-duplex")).require_own_queues()
    with pytest.raises(RuntimeFailure, match="link default is half-duplex"):
        Conditions(Links(default="occupancy:5ms+half-duplex")).require_own_queues()
