"""Messages between ranks over gloo: each once, bit for bit, whatever its shape and whatever the order of sending."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

import emulated_processes
from delegate_ranks import Chain, exchange, payload_of
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.probe import ROUNDS, ahead_of_first
from penstock.runtime.transport import gloo
from penstock.runtime.transport.base import StepMessages
from penstock.runtime.transport.gloo import GlooTransport
from processes import run_ranks
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc

SHAPES: list[tuple[int, ...]] = [(4, 33), (7,), (), (0, 3), (1 << 19,)]


def shapes_that_differ(rank: int) -> int:
    """Microbatches that are said to be alike, and are not."""
    chain = Chain(3, 12)
    transport: Any = GlooTransport(dist.group.WORLD, chain.tags, PATIENCE)
    return sum(exchange(transport, chain, rank, step, lambda m: SHAPES[(step + m) % 5]) for step in range(4))  # noqa: B023


def sent_in_another_order(rank: int) -> list[tuple[int, ...]]:
    """Rank 0 sends first what rank 1 takes last, shapes that rank 1 does not know."""
    chain = Chain(2, 6)
    transport = GlooTransport(dist.group.WORLD, chain.tags, PATIENCE)
    came = []
    for step in range(2):
        signatures = [str(SHAPES[m % 3]) for m in range(6)]
        transport.begin(StepMessages(chain.expected(rank) if rank else [], signatures, threaded=False))
        for edge in chain.forward(0) if rank else reversed(chain.forward(0)):
            shape = SHAPES[edge.consumer.microbatch % 3]
            if rank == 0:
                assert transport.send(edge, 1, payload_of(edge, step, shape))
                continue
            assert transport.wait([edge], str) == [edge]
            found, wanted = transport.take(edge).leaves[0], payload_of(edge, step, shape).leaves[0]
            assert found is not None
            assert wanted is not None
            assert found.equal(wanted)
            came.append(tuple(found.shape))
        transport.end()
    return came


@pytest.mark.parametrize(
    ("num_ranks", "work", "values"),
    [(3, shapes_that_differ, [48, 96, 48]), (2, sent_in_another_order, [[], 4 * SHAPES[:3]])],
)
def test_every_message_comes_once_bit_for_bit(num_ranks: int, work: Any, values: list[Any]) -> None:
    outcomes = run_ranks(num_ranks, work)
    assert [o.value for o in outcomes] == values, "\n".join(o.text for o in outcomes)


def of_hosts_with_clocks_of_their_own(rank: int, knows: bool) -> int:
    """How many messages rank 1 has the times of, whose clock is ahead of rank 0's."""
    further = 10**15 if rank else 0
    gloo.perf_counter_ns = lambda: time.perf_counter_ns() + further
    chain = Chain(2, 40)
    ahead = [further, 0] if rank else [-(10**15)] * 2
    transport: Any = GlooTransport(dist.group.WORLD, chain.tags, PATIENCE, ahead=ahead if knows else ())
    exchange(transport, chain, rank, 0, lambda m: (3,))
    exchange(transport, chain, rank, 1, lambda m: (3,), lambda count: time.sleep(0.001))
    return len(transport.crossings())


@pytest.mark.parametrize("knows", [False, True])
def test_messages_from_a_host_whose_clock_is_behind_had_no_times(knows: bool) -> None:
    """They seemed to have waited for their receives, which began at later moments of another clock."""
    (_, found) = (o.value for o in run_ranks(2, of_hosts_with_clocks_of_their_own, knows))
    assert (found > 0) == knows


class CountingPeers(GroupPeers):
    """Counts what is sent, and by which limits."""

    num_sent = 0

    def send(self, tensor: Any, target: int, what: str, timeout: float | None = None) -> None:
        assert timeout is None, "a rank waits for all that compare before it"
        self.num_sent += 1
        super().send(tensor, target, what)


def clocks_of_three_hosts(rank: int) -> tuple[int, list[int]]:
    peers = CountingPeers(emulated_processes.world(), PATIENCE)
    ahead = ahead_of_first(peers, ["first", "second", "second", "third"])
    return peers.num_sent, ahead


def test_bug_each_rank_of_another_host_compared_its_clock_and_gave_up_after_20_s() -> None:
    outcomes = run_ranks(4, clocks_of_three_hosts)
    assert all(o.value for o in outcomes), "\n".join(o.text for o in outcomes)
    assert [o.value[0] for o in outcomes] == [2 * ROUNDS, ROUNDS, 0, ROUNDS]
    assert len({tuple(o.value[1]) for o in outcomes}) == 1
    first, one, other, _ = outcomes[0].value[1]
    assert (first, one) == (0, other)
