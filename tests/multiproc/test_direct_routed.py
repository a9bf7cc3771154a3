"""Links by two transports at once, between processes. No test asserts a time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import penstock as ps
from emulated_processes import step, world
from emulated_ranks import Ran, blocked_starts
from penstock.cost import Links
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.transport.channel import Tags
from penstock.runtime.transport.choose import TransportChoice
from penstock.runtime.transport.delegate import DelegateTransport
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.link_conditions import ConditionedTransport, Conditions
from penstock.runtime.transport.routed import RoutedTransport
from penstock.runtime.transport.wiring import wire
from plain_loop import gradients
from processes import run_ranks_to_end
from tiers import others_nightly
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc


class Routed(NamedTuple):
    """Links by two transports, with conditions and a bound that delegated ones don't have."""

    whole: ConditionedTransport
    inner: RoutedTransport

    def route(self, delegated: Collection[tuple[int, int]]) -> None:
        self.whole.route(delegated)
        self.inner.route(delegated)


def routed(tags: Tags, links: str, depth: int) -> Routed:
    base = GlooTransport(world(), tags, PATIENCE)
    inner = RoutedTransport(base, DelegateTransport(base.rank, GroupPeers(world(), PATIENCE).gather, tags, PATIENCE))
    whole = ConditionedTransport(inner, Conditions(Links.parse(links)), depth=depth)
    return Routed(whole, inner)


def emulated(rank: int, dispatch: str) -> list[tuple[int, int]]:
    schedule = ps.build("1f1b", num_ranks=3, num_microbatches=6)
    transport = routed(Tags(schedule), "0:1=latency:20ms 1:0=latency:100ms 1:2=latency:45ms", 1)
    wiring, costs = wire(schedule), ps.Costs.uniform(3, 1, 1, 1)
    choice: Any = TransportChoice(ps.TransportOptions())
    found = []
    for delegated in [(), [(0, 1), (1, 2)], (), [(1, 0)], [(1, 2)], [(1, 2), (0, 1)]]:
        transport.route(delegated)
        seen = step(transport.whole, wiring, rank, costs, dispatch, threaded=False)
        held = [delay_count(seen, link) for link in ((0, 1), (1, 2))]
        found.append((held[0], held[1]))
    assert choice.seen(transport.whole)[1]["messages"] > 0
    transport.whole.close()
    return found


def delay_count(seen: Ran, link: tuple[int, int]) -> int:
    """How often a full channel held up an op on this link; -1 where more was under way than it takes."""
    try:
        return blocked_starts(seen, 1, lambda a, b: {a, b} == set(link))
    except AssertionError:
        return -1


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", others_nightly(["frozen", "dynamic"], ["frozen"]))
def test_each_link_goes_its_own_way_and_both_ends_switch(dispatch: str) -> None:
    outcomes = run_ranks_to_end(3, emulated, dispatch)
    for found in (o.value for o in outcomes):
        assert [(a > 0, b > 0) for a, b in found[2:]] == [(True, True), (False, True), (True, False), (False, False)]
        assert [min(pair) for pair in found[3:]] == [-1, -1, -1], "without bound, more is under way"


def train(rank: int, dispatch: str) -> list[bool]:
    """Steps of changing shapes, and evaluation, by one transport and by two between which links change."""
    found: list[list[torch.Tensor]] = []
    ways = [(), [(0, 1)], [(0, 1), (1, 2)], [(2, 1)], ()]
    for both in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)))
        schedule = ps.build("zb-v", 3, 6)
        pipe = ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), dispatch=dispatch, timeout=PATIENCE)
        way = routed(pipe._local.tags, "0:1=latency:5ms 1:2=occupancy:1ms", 2) if both else None
        if way is not None:
            pipe._local.transport = way.whole
        numbers = []
        for size, delegated in zip((12, 7, 18, 12, 7), ways, strict=True):
            if way is not None:
                way.route(delegated)
            x = torch.randn(size, 4)
            y = x.sum(1, keepdim=True).expand(-1, 4)
            numbers += [pipe.step(x, y, update=False).loss, pipe.evaluate(x, y).loss]
        mine = {n: p.grad for n, p in pipe.named_parameters()}
        found.append(numbers + [grad for name, grad in gradients(model).items() if name in mine and grad is not None])
        pipe.zero_grad()
        if way is not None:
            way.whole.close()
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", others_nightly(["frozen", "dynamic"], ["dynamic"]))
def test_training_has_the_same_numbers_whatever_way_links_go(dispatch: str) -> None:
    outcomes = run_ranks_to_end(3, train, dispatch)
    assert all(all(o.value) and len(o.value) > 8 for o in outcomes)
