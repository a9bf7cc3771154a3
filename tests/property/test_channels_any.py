"""Channels over many schedules: the proof says what an executor of its own does, and placed messages lose little."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import penstock as ps
from channel_executor import ENDED, HANGS, WRONG_DATA, execute
from penstock.cost.conditions import Constant, LinkCondition
from penstock.passes import add_communication
from penstock.schedule.messages import CHANNELS
from tiers import examples, others_nightly

pytestmark = pytest.mark.property

NAMES = ("gpipe", "1f1b", "zb", "zb-h1", "interleaved-1f1b", "zb-v", "hanayo", "chimera", "dualpipe-v")
SHAPES = ((2, 4), (3, 6), (4, 8), (4, 12))


def draw_schedule(rng: random.Random) -> ps.Schedule:
    while True:
        try:
            return ps.build(rng.choice(NAMES), *rng.choice(SHAPES))
        except ps.ScheduleError:
            continue


def draw_costs(rng: random.Random, schedule: ps.Schedule) -> ps.Costs:
    times = [[float(rng.randint(2, 9)) for _ in range(schedule.num_stages)] for _ in "fiw"]
    return ps.Costs(*times, message_bytes=[1e6] * schedule.num_stages)


def draw_links(rng: random.Random, num_ranks: int, bandwidth: bool = False) -> ps.Links:
    late = {}
    for _ in range(rng.randint(1, 2)):
        first = rng.randrange(num_ranks - 1)
        rate = "+bandwidth:500MB/s" * (bandwidth and rng.random() < 0.5)
        late[first, first + 1] = f"latency:{rng.randint(2, 25)}ms{rate}"
    return ps.Links(late)


def disturb(schedule: ps.Schedule, rng: random.Random) -> ps.Schedule:
    """The same ops with a few messages of one row moved."""
    rows = [list(row) for row in schedule.order]
    for _ in range(rng.randint(1, 3)):
        row = rng.choice(rows)
        messages = [place for place, op in enumerate(row) if op.kind[:4] in ("SEND", "RECV")]
        if messages:
            op = row.pop(rng.choice(messages))
            row.insert(rng.randrange(len(row) + 1), op)
    return replace(schedule, order=tuple(map(tuple, rows)))


def proved(schedule: ps.Schedule, channel: str) -> str:
    try:
        ps.check(schedule, channels=channel)
    except ps.ScheduleError as error:
        return {"message": WRONG_DATA, "order": HANGS, "deadlock": HANGS}[error.rule]
    return ENDED


@pytest.mark.slow
@pytest.mark.parametrize("block", others_nightly(range(50), range(2)))
def test_the_proof_says_what_an_executor_does(block: int) -> None:
    """10,000 rows by night, most of them wrong: who hangs, who takes another message's data, who ends."""
    rng = random.Random(block)
    seen: set[str] = set()
    for _ in range(200):
        schedule, channel = draw_schedule(rng), rng.choice(CHANNELS[1:])
        placed = add_communication(schedule, channels=rng.choice(CHANNELS), most_posted=rng.choice([1, 3, 8]))
        if rng.random() < 0.8:
            placed = disturb(placed, rng)
        said = proved(placed, channel)
        happened = execute(placed, channel, rng)
        seen.add(said)
        if said == WRONG_DATA:  # which may also hang
            assert happened != ENDED, (str(placed), channel)
        elif said == HANGS and happened == WRONG_DATA:
            raise AssertionError((str(placed), channel))
        else:
            assert happened == said, (str(placed), channel)
    assert seen == {ENDED, HANGS, WRONG_DATA}


@pytest.mark.parametrize("seed", range(examples(40)))
def test_placed_messages_hang_on_no_channel_and_lose_little_on_gloo(seed: int) -> None:
    """On gloo 8 posted receives do as well as all of them; on healthy links no channel loses more than 2.5%."""
    rng = random.Random(seed)
    schedule = draw_schedule(rng)
    costs, links = draw_costs(rng, schedule), draw_links(rng, schedule.num_ranks, bandwidth=True)
    for channel in CHANNELS:
        placed = add_communication(schedule, costs, links, channels=channel)
        ps.check(placed, channels=channel)
        assert execute(placed, channel, rng) == ENDED
        run = ps.simulate(placed, costs, links=links, channels=channel)
        for message in run.messages:
            assert message.sent <= message.left <= message.arrived
            assert channel == "buffered" or message.posted <= message.left
        healthy = ps.simulate(schedule, costs, channels=channel).makespan
        assert healthy <= 1.025 * ps.simulate(schedule, costs).makespan
    blind = add_communication(schedule, costs, channels="gloo")
    all_first = add_communication(schedule, costs, links, channels="gloo", most_posted=schedule.num_ops)
    least, most = (ps.simulate(rows, costs, links=links, channels="gloo").makespan for rows in (all_first, blind))
    assert most <= 1.001 * least


@pytest.mark.parametrize("seed", range(examples(20)))
def test_streams_of_edges_and_pairs_are_links_that_are_busy(seed: int) -> None:
    """A stream of a directed edge is a link that is busy for as long as a message travels; one of a pair is that
    link with one message at a time in both directions together."""
    rng = random.Random(seed)
    schedule = ps.build(rng.choice(["1f1b", "zb-h1", "gpipe"]), 4, 8)
    costs = draw_costs(rng, schedule)
    late = {(r, r + 1): float(rng.choice([0, 3, 11])) for r in range(3)}
    links = ps.Links(late)
    busy = ps.Links({link: LinkCondition(Constant(0.0), Constant(ms)) for link, ms in late.items()})
    by_edge = ps.simulate(schedule, costs, links=links, channels="nccl-edge").makespan
    assert by_edge == pytest.approx(ps.simulate(schedule, costs, links=busy).makespan)


@pytest.mark.parametrize("seed", range(examples(40)))
def test_rows_are_never_slower_than_the_arbiter_that_wrote_them(seed: int) -> None:
    rng = random.Random(1000 + seed)
    schedule = draw_schedule(rng)
    costs, links = draw_costs(rng, schedule), draw_links(rng, schedule.num_ranks)
    ideal = ps.simulate(schedule, costs, links=links).makespan
    for channel in ("nccl", "nccl-pair"):
        placed = add_communication(schedule, costs, links, channels=channel)
        again = add_communication(schedule, costs, links, channels=channel)
        assert placed == again
        assert ps.simulate(placed, costs, links=links, channels=channel).makespan >= ideal - 1e-6
