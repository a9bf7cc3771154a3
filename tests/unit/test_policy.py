"""Waiting for what is nearly due, and the choice of a policy by simulation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import penstock as ps
from penstock.cost import Links
from penstock.cost.links import LinkQueues
from penstock.dispatch import Dispatch, Policy
from penstock.runtime.execute import plan as step_plan
from penstock.runtime.execute.plan import dispatch_of
from penstock.runtime.mesh.peers import LocalPeers
from penstock.runtime.transport.choose import TransportChoice
from penstock.simulation.auto import POLICIES, choose_policy, jittered
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Decoupled

pytestmark = pytest.mark.unit

HALF_A_MS = ps.Links({}, 0.5)


def zb_h1() -> tuple[ps.Schedule, ps.Costs]:
    return ps.build("zb-h1", 8, 16), ps.Costs.uniform(8, 10, 10, 10)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policys_text_reads_back(policy: Policy) -> None:
    assert Policy.parse(str(policy)) == policy
    assert Policy.of(policy) is policy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("warm", "dispatch 'warm': give 'frozen', 'hinted' or 'dynamic', 'hinted:0.5' to wait, or 'auto'"),
        ("hinted:", "dispatch 'hinted:': give"),
        ("hinted:soon", "dispatch 'hinted:soon': give"),
        ("hinted:-1", "a wait of -1.0: give a share of an op's duration, at least 0"),
        ("hinted:nan", "a wait of nan"),
        ("hinted:inf", "a wait of inf"),
        ("frozen:1", "only a hinted rank, which follows its order as far as it can, waits"),
        ("dynamic:0.5", "give 'hinted:0.5', or 'dynamic'"),
    ],
)
def test_what_is_no_policy_is_refused(text: str, said: str) -> None:
    with pytest.raises(ps.ScheduleError) as refused:
        ps.simulate(ps.build("1f1b", 2, 2), dispatch=text)
    assert said in str(refused.value)


def test_a_rank_waits_for_what_is_nearly_due() -> None:
    """With half a millisecond on every link hinted ranks start a W, or an F, a moment before the I that they have
    first; those that wait do not."""
    schedule, costs = zb_h1()
    frozen, hinted, waiting = (
        ps.simulate(schedule, costs, links=HALF_A_MS, dispatch=each) for each in ("frozen", "hinted", "hinted:1")
    )
    assert hinted.makespan > 1.05 * frozen.makespan
    assert waiting.makespan <= frozen.makespan
    assert waiting.dispatch == "hinted:1"


def test_a_rank_waits_until_what_it_waits_for_is_overdue_and_no_longer() -> None:
    """What a plan without delays says is overdue by 30 ms: then the rank goes on with another op."""
    schedule, costs = ps.build("1f1b", 4, 8), ps.Costs.uniform(4, 10, 10, 10)
    late = ps.Links({(2, 3): 30.0, (3, 2): 30.0})
    runner = Runner(costs)
    order = runner.order(schedule)
    due = runner.run(order, ps.Links(), transport=Decoupled()).start_time

    def takes(dispatch: str) -> float:
        caps = [peak + 2 for peak in order.peaks]
        return runner.run(order, late, dispatch=dispatch, transport=Decoupled(), caps=caps, due=due).makespan

    assert takes("hinted") <= takes("hinted:1") < takes("frozen")


@pytest.mark.parametrize("links", [ps.Links(), HALF_A_MS, ps.Links({(3, 4): 30.0})], ids=["none", "half", "late"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "hanayo"])
def test_auto_takes_the_fastest_and_the_timeline_says_so(name: str, links: ps.Links) -> None:
    schedule = ps.build(name, 8, 16)
    found = ps.simulate(schedule, links=links, dispatch="auto")
    takes = {str(each): ps.simulate(schedule, links=links, dispatch=each).makespan for each in POLICIES}
    assert dict(found.considered) == takes
    assert found.makespan == takes[found.dispatch] == min(takes.values())
    assert ps.simulate(schedule, links=links, dispatch=found.dispatch).considered == ()


def test_auto_goes_on_from_what_a_run_left_on_the_links() -> None:
    """Trying policies leaves nothing on the links for the run that counts."""
    schedule, conditions = ps.build("zb", 4, 8), Links.parse("0:1=occupancy:9ms 2:3=loss:20%")
    first, then = LinkQueues(conditions), LinkQueues(conditions)
    found = ps.simulate(schedule, links=first, dispatch="auto")
    assert found == ps.simulate(schedule, links=then, dispatch="auto")
    assert found.makespan == dict(found.considered)[found.dispatch]
    again = ps.simulate(schedule, links=then, dispatch="auto", links_at=found.makespan)
    assert again.makespan == dict(again.considered)[again.dispatch]


def test_auto_keeps_to_the_caps_and_takes_no_warm_up() -> None:
    schedule, costs = ps.build("zb", 4, 12), ps.Costs.uniform(4, 10, 10, 10)
    late = ps.Links({(0, 1): 60.0})
    tight = ps.simulate(schedule, costs, links=late, dispatch="auto")
    wide = ps.simulate(schedule, costs, links=late, dispatch="auto", memory_limit=12)
    assert wide.makespan < tight.makespan
    assert max(wide.peak_activations) <= 12
    with pytest.raises(ps.ScheduleError, match="'auto' may choose"):
        ps.simulate(schedule, costs, dispatch="auto", warmup=[7, 5, 3, 1])


def test_under_jitter_all_policies_meet_the_same_draws_and_frozen_gives_way_to_more_than_chance_alone() -> None:
    schedule, costs = zb_h1()
    one = choose_policy(schedule, costs, jitter=0.2, seed=1)
    assert one == choose_policy(schedule, costs, jitter=0.2, seed=1)
    assert one.makespans != choose_policy(schedule, costs, jitter=0.2, seed=2).makespans
    order = Runner(costs).order(schedule)
    durations = [each.duration for each in jittered(order, 0.2, 8, 1)]
    assert all((each != order.duration).all() for each in durations)
    assert sum(each.mean() for each in durations) / 8 == pytest.approx(10, rel=0.02)
    late = choose_policy(schedule, costs, jitter=0.2, links=ps.Links({(3, 4): 60.0, (4, 3): 60.0}))
    assert late.policy != Policy(Dispatch.FROZEN)
    assert late.means[str(late.policy)] < late.means["frozen"]


@pytest.mark.parametrize("bad", [{"jitter": -0.1}, {"jitter": float("nan")}, {"jitter": 0.1, "num_draws": 0}])
def test_a_jitter_that_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ps.CostError, match="give a share of at least 0, and at least 1 draw"):
        choose_policy(*zb_h1(), **bad)


def test_ranks_that_run_an_op_together_are_late_together() -> None:
    schedule = ps.build("mllm", 4, 8)
    order = Runner(ps.Costs.assumed(4, schedule.placement)).order(schedule)
    (drawn,) = jittered(order, 0.3, 1, 0)
    first, members = order.graph.arrays.gang_first, order.graph.arrays.gang_ops
    assert len(first) > 1
    for a, b in pairwise(first):
        assert len(set(drawn.duration[members[a:b]])) == 1
    assert ps.simulate(schedule, dispatch="auto").makespan <= ps.simulate(schedule).makespan


def test_one_process_simulates_and_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, costs = zb_h1()
    told = []

    class SecondOfTwo(LocalPeers):
        def gather(self, value: Any) -> list[Any]:
            told.append(value)
            return ["hinted", value]

    host = TransportChoice(ps.TransportOptions())
    assert dispatch_of("auto", schedule, costs, host, peers=LocalPeers(4)) is Dispatch.HINTED
    second = SecondOfTwo(2)
    second.here = (1,)
    monkeypatch.setattr(step_plan, "choose_policy", None)  # whoever simulates fails
    assert dispatch_of("auto", schedule, costs, host, peers=second) is Dispatch.HINTED
    assert told == [None]


def test_the_runtime_chooses_too_and_refuses_to_wait_by_name() -> None:
    schedule, costs = zb_h1()
    host = TransportChoice(ps.TransportOptions())
    assert dispatch_of("auto", schedule, costs, host) is Dispatch.HINTED
    assert dispatch_of("auto", schedule, costs, host, HALF_A_MS) is Dispatch.FROZEN
    assert dispatch_of("auto", schedule, costs, TransportChoice(ps.TransportOptions("nccl"))) is Dispatch.HINTED
    asynchronous = ps.build("amdp", 4, 8, window=4)
    assert dispatch_of("hinted", asynchronous, None, host) is Dispatch.HINTED
    with pytest.raises(ps.ScheduleError, match="policies that wait are for"):
        ps.emulate(schedule, costs, dispatch="hinted:0.5")
    with pytest.raises(ps.ScheduleError, match="give 'frozen', 'hinted' or 'dynamic'"):
        ps.plan(costs, 8, 16, dispatch="auto", time_limit=0.1)
