"""Many runs of many orders: the same as one by one, compiled or not, whatever the links."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import penstock as ps
from penstock.cost import Links
from penstock.dispatch import Dispatch
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Blocking, Decoupled

pytestmark = pytest.mark.unit

LINKS = {
    "delays": ps.Links({(0, 1): 7.7, (3, 2): 20.0}),
    "traces": Links.parse(
        "0:1=latency:steps:0ms/3ms,40ms/22.2ms,90ms/1ms+bandwidth:0.1GB/s 1:2=occupancy:9.1ms 2:3=5"
    ),
    "base": Links(Links.parse("1:2=occupancy:4ms+latency:8ms").conditions, base=1.5),
}


@pytest.mark.parametrize("links", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("seed", range(3))
def test_a_runner_gives_what_simulate_gives(seed: int, links: ps.Links) -> None:
    rng = random.Random(seed)
    costs = ps.Costs(*([rng.randint(1, 9) + 0.1 for _ in range(4)] for _ in "FIW"), message_bytes=[1e6] * 4)
    plain, fast = Runner(costs, compile=False), Runner(costs, compile=True)
    for name in ("zb", "zb-h1", "zb-h2", "zb"):
        schedule = ps.build(name, 4, 8)
        for dispatch in Dispatch:
            for transport in (Blocking(1), Blocking(2, frozenset({(1, 2)})), Decoupled()):
                timeline = ps.simulate(schedule, costs, links=links, dispatch=dispatch, transport=transport)
                caps = plain.order(schedule).peaks
                for runner in (plain, fast):
                    ran = runner.run(runner.order(schedule), links, dispatch=dispatch, transport=transport, caps=caps)
                    assert ran.makespan == timeline.makespan
                    assert ran.peaks == timeline.peak_activations
                    assert ran.executed() == timeline.executed()


@pytest.mark.parametrize("text", ["0:1=loss:30%", "0:1=latency:normal:20ms,8ms@50ms..80ms"])
def test_lots_are_drawn_as_simulate_draws_them(text: str) -> None:
    costs, schedule, links = ps.Costs.uniform(4, 10, 10, 10), ps.build("zb", 4, 8), Links.parse(text)
    runner = Runner(costs, compile=True)
    ran = runner.run(runner.order(schedule), links, transport=Decoupled(), links_at=30.0)
    assert ran.makespan == ps.simulate(schedule, costs, links=links, links_at=30.0).makespan


def test_orders_of_other_ops_are_lowered_anew() -> None:
    costs = ps.Costs.uniform(4, 10, 10, 10)
    runner = Runner(costs)
    for schedule in (ps.build("zb", 4, 8), ps.build("1f1b", 4, 8), ps.build("zb", 4, 6), ps.build("gpipe", 4, 8)):
        ran = runner.run(runner.order(schedule), ps.Links(), transport=Decoupled())
        assert ran.makespan == ps.simulate(schedule, costs).makespan
    schedule = ps.build("zb", 4, 8)
    first, *others = schedule.order
    with pytest.raises(ps.ScheduleError, match="is there twice"):
        runner.order(replace(schedule, order=((*first[:-1], first[0]), *others)))
