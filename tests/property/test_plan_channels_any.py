"""Plans for channels over drawn problems: proved and carried out on their channel, within limits, above the bound."""

from __future__ import annotations

import random

import pytest

import penstock as ps
from channel_executor import ENDED, execute
from penstock.passes import remove_communication
from penstock.schedule.messages import CHANNELS
from tiers import sample

pytestmark = pytest.mark.property


@pytest.mark.parametrize("seed", range(sample(40, 8)))
def test_a_plan_ends_on_its_channel_when_it_says(seed: int) -> None:
    rng = random.Random(seed)
    channel = CHANNELS[1 + seed % 4]
    num_ranks, num_microbatches = rng.choice([2, 3, 4]), rng.choice([3, 4, 6])
    placement = rng.choice(["one-to-one", "v-shape", "circular", "one-to-one+bidirectional"])
    if placement.endswith("bidirectional"):
        num_microbatches *= 2
    num_stages = num_ranks * (2 if placement in ("v-shape", "circular") else 1)
    times = [[float(rng.randint(0, 9)) for _ in range(num_stages)] for _ in "fiw"]
    costs = ps.Costs(*times, message_bytes=[1e6 * rng.randint(1, 4)] * num_stages)
    late = {}
    for _ in range(rng.randint(1, 2)):
        rank = rng.randrange(num_ranks - 1)
        late[rank, rank + 1] = f"latency:{rng.randint(1, 30)}ms" + "+bandwidth:1GB/s" * rng.randint(0, 1)
    links, limit = ps.Links(late), rng.choice([None, 2.0 * num_stages / num_ranks + 1])
    split = rng.choice([None, True, False])
    plan = ps.plan(
        costs, num_ranks, num_microbatches, links, channels=channel, placement=placement, max_in_flight=limit,
        split=split, time_limit=1.0, seed=seed,
    )  # fmt: skip
    ps.check(plan.schedule, channels=channel)
    ps.check(remove_communication(plan.schedule), max_in_flight=limit)
    assert execute(plan.schedule, channel, rng) == ENDED
    assert plan.makespan == ps.simulate(plan.schedule, costs, links=links, channels=channel).makespan
    assert plan.lower_bound <= plan.makespan
    assert plan.certificate.channel == channel
