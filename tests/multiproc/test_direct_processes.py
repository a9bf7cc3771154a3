"""Bounded channels and crossings between processes, over gloo. No test asserts an upper time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from device_queues import lines_over_gloo
from emulated_processes import step, world
from emulated_ranks import blocked_starts
from packed import packed
from penstock.cost import Links
from penstock.runtime import DeadlineExceeded, PeerLost
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.transport.base import TransferRecord, Transport
from penstock.runtime.transport.channel import Tags
from penstock.runtime.transport.choose import TransportChoice, TransportOptions
from penstock.runtime.transport.gloo import GlooTransport
from penstock.runtime.transport.link_conditions import ConditionedTransport, Conditions
from penstock.runtime.transport.nccl import lines_of
from penstock.runtime.transport.wiring import wire
from penstock.schedule import Op, Schedule, declare_shown_order
from plain_loop import gradients
from processes import run_ranks_to_end
from tiers import others_nightly
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc


def made(
    name: str, schedule: Schedule, links: str = "", depth: int | None = None, timeout: float = PATIENCE
) -> Transport:
    """A transport by its name, with conditions where they are given; "lines" are NCCL's, over gloo."""
    tags, wiring = Tags(schedule), wire(schedule)
    conditions = Conditions(Links.parse(links)) if links else None
    if name != "lines":
        choice = TransportChoice(TransportOptions(name, depth=depth, links=conditions and conditions.links))
        peers, cpu = GroupPeers(world(), PATIENCE), torch.device("cpu")
        return choice.make(peers, tags, timeout, wiring, cpu, conditions)
    lines = lines_over_gloo(world(), lines_of(wiring), timeout)
    transport: Transport = GlooTransport(world(), tags, timeout, lines)
    return transport if conditions is None else ConditionedTransport(transport, conditions, depth=depth)


# Bounded channels.


def emulated(rank: int, transport_name: str, name: str, depth: int, dispatch: str) -> list[int]:
    schedule = ps.build(name, num_ranks=3, num_microbatches=4)
    row = [1.0] * schedule.num_stages
    costs = ps.Costs(row, row, row, message_bytes=[100_000] * schedule.num_stages)
    transport = made(transport_name, schedule, "0:1=latency:50ms", depth)
    wiring = wire(schedule)
    found = []
    step(transport, wiring, rank, costs, dispatch, threaded=False)  # with it all shapes are known
    for _ in range(2):
        seen = step(transport, wiring, rank, costs, dispatch, threaded=False)
        found.append(blocked_starts(seen, depth))
        assert {crossing.num_bytes for row in seen.crossings for crossing in row} == {100_016}
        assert all(crossing.duration >= 50_000_000 for row in seen.crossings for crossing in row if is_slow(crossing))
        if transport_name != "lines":  # of which nobody knows when a send began
            # All but those that were sent before their receiver had begun the step.
            assert sum(map(len, seen.crossings)) > 0.7 * sum(len(wiring.expected(r)) for r in range(3))
    transport.close()
    transport.close()
    return found


def is_slow(crossing: TransferRecord) -> bool:
    return {crossing.source, crossing.target} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "name", "depth", "dispatch"),
    [
        ("direct", "1f1b", 1, "frozen"),
        pytest.param("host", "zb-v", 2, "frozen", marks=pytest.mark.nightly),  # tests/unit/test_transport_mailbox.py
        ("gloo", "zb-h1", 1, "dynamic"),
        ("delegate", "1f1b", 2, "dynamic"),
        ("lines", "zb-h1", 1, "frozen"),
    ],
)
def test_a_full_channel_keeps_the_next_op_from_starting(transport: str, name: str, depth: int, dispatch: str) -> None:
    outcomes = run_ranks_to_end(3, emulated, transport, name, depth, dispatch)
    assert all(sum(o.value) > 0 for o in outcomes)


def held_for_long(rank: int) -> str:
    schedule = ps.build("gpipe", num_ranks=2, num_microbatches=3)
    transport = made("direct", schedule, "0:1=latency:1min 1:0=latency:0", 1, (1.0, PATIENCE)[rank])
    dist.barrier()  # however late the other one has come
    try:
        step(transport, wire(schedule), rank, ps.Costs.uniform(2), "frozen", threaded=False)
    except (DeadlineExceeded, PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow
def test_a_channel_that_stays_full_meets_the_deadline() -> None:
    outcomes = run_ranks_to_end(2, held_for_long)
    said = [
        "nothing came in for 1 s: rank 0 waits to send F1 of stage 0 to rank 1: the channel is full",
        "rank 0 waited 1 s for B0 of stage 1 from rank 1",
    ]
    assert any(outcomes[0].value.startswith(f"DeadlineExceeded: {text}") for text in said), outcomes[0].value
    assert outcomes[1].value.startswith("PeerLost: rank 1 lost its connection to rank 0"), outcomes[1].value


def computes_for_long(rank: int) -> int:
    """Forwards together take longer than any wait may, and gradients are expected all that time."""
    schedule = ps.build("gpipe", num_ranks=2, num_microbatches=12)
    transport = made("gloo", schedule, timeout=2.5)
    dist.barrier()  # no rank waits for one that begins late
    seen = step(transport, wire(schedule), rank, ps.Costs.uniform(2, 220, 1, 1), "frozen", threaded=True)
    return len(seen.started())


@pytest.mark.slow
def test_a_thread_may_wait_longer_than_its_rank() -> None:
    outcomes = run_ranks_to_end(2, computes_for_long)
    assert [o.value for o in outcomes] == [48, 48]


def crossed(rank: int) -> int:
    """Four messages leave before the last of them, which is awaited first."""
    first = [Op("F", 0, m) for m in range(4)] + [Op("B", 0, m) for m in range(4)]
    last = [Op("F", 1, 3), Op("B", 1, 3)] + [Op(kind, 1, m) for m in range(3) for kind in "FB"]
    schedule = declare_shown_order(Schedule.of("crossed", ps.build("1f1b", 2, 4).placement, [first, last], 4))
    ps.check(schedule)
    transport = made("gloo", schedule, "0:1=latency:5ms", 1)
    seen = step(transport, wire(schedule), rank, ps.Costs.uniform(2), "frozen", threaded=False)
    transport.close()
    return len(seen.started())


def test_a_bound_does_not_hang_where_messages_are_awaited_in_another_order_than_they_leave_in() -> None:
    outcomes = run_ranks_to_end(2, crossed)
    assert [o.value for o in outcomes] == [16, 16]


# Crossings.


def measured(rank: int, dispatch: str, threaded: bool, links: str) -> tuple[list[list[TransferRecord]], int]:
    schedule = ps.build("1f1b", num_ranks=2, num_microbatches=8)
    costs = ps.Costs([3, 3], [3, 3], [3, 3], message_bytes=[1000, 1000])
    transport = made("gloo", schedule, links)
    wiring = wire(schedule)
    for _ in range(4):  # shapes are told, and as many receives posted as the link wants
        seen = step(transport, wiring, rank, costs, dispatch, threaded)
    transport.close()
    return seen.crossings, sum(len(wiring.expected(rank)) for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("dispatch", "threaded"), [("frozen", False), ("dynamic", True)])
def test_a_late_link_is_seen(dispatch: str, threaded: bool) -> None:
    outcomes = run_ranks_to_end(2, measured, dispatch, threaded, "0:1=latency:30ms")
    crossings, num_messages = outcomes[0].value
    found = [crossing for row in crossings for crossing in row]
    assert {c[:2] for c in found} == {(0, 1), (1, 0)}
    assert all(c.duration >= 30_000_000 and c.num_bytes == 1016 for c in found)
    if threaded:
        assert len(found) > 0.5 * num_messages
    else:
        assert len(found) <= num_messages, "those that a rank found there already are left out"


CONDITIONS = "0:1=latency:20ms 1:2=occupancy:10ms 2:3=bandwidth:100KB/s 3:4=loss:50%,20ms#1"


def conditioned(rank: int, name: str) -> list[TransferRecord]:
    """A link of every kind, by one transport."""
    schedule = ps.build("1f1b", num_ranks=5, num_microbatches=10)
    costs = ps.Costs([3] * 5, [3] * 5, [3] * 5, message_bytes=[1000] * 5)
    transport, wiring = made(name, schedule, CONDITIONS), wire(schedule)
    for _ in range(2):
        seen = step(transport, wiring, rank, costs, "frozen", threaded=True)
    transport.close()
    return [crossing for row in seen.crossings for crossing in row]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", others_nightly(["host", "gloo", "direct", "delegate", "lines"], ["gloo", "delegate", "lines"])
)
def test_every_condition_is_met(name: str) -> None:
    outcomes = run_ranks_to_end(5, conditioned, name)
    found: dict[int, list[int]] = {}
    for crossing in outcomes[0].value:
        assert 1016 <= crossing.num_bytes <= 1088, "the payload, or with its preamble and padding"
        found.setdefault(min(crossing[:2]), []).append(crossing.duration)
    assert sorted(found) == [0, 1, 2, 3]
    assert [min(found[link]) >= 1e6 * least for link, least in enumerate((20, 10, 10))] == [True] * 3
    assert max(found[3]) >= 20e6, "of twenty messages, half of which are sent again at least once"


# Training.


def train(rank: int, name: str, dispatch: str) -> list[bool]:
    """Steps of changing shapes by `host` and by `direct`; and evaluation, whose channels have windows."""
    found: list[list[torch.Tensor]] = []
    slow = Links.parse("0:1=latency:10ms+loss:5% 1:2=occupancy:2ms")
    for how in ({}, {"transport": "direct", "depth": 1, "links": slow}):
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12)))
        schedule = ps.build(name, 3, 6)
        pipe = ps.Pipeline(
            model, schedule, loss_fn=nn.MSELoss(), dispatch=dispatch, timeout=PATIENCE, **packed(**how)
        )  # type: ignore[arg-type]
        numbers = []
        for size in (12, 7, 18, 12):
            x = torch.randn(size, 4)
            y = x.sum(1, keepdim=True).expand(-1, 4)
            numbers += [pipe.step(x, y, update=False).loss, pipe.evaluate(x, y).loss]
        mine = {n: p.grad for n, p in pipe.named_parameters()}
        found.append(numbers + [grad for name, grad in gradients(model).items() if name in mine and grad is not None])
        pipe.zero_grad()
        pipe.close()
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dispatch"), [("zb-v", "frozen"), ("1f1b", "dynamic")])
def test_training_has_the_same_numbers_through_bounded_channels(name: str, dispatch: str) -> None:
    outcomes = run_ranks_to_end(3, train, name, dispatch)
    assert all(all(o.value) and len(o.value) > 8 for o in outcomes)
