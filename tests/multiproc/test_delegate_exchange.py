"""Messages between ranks by delegates: each once, bit for bit, whatever their sizes and shapes."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import pytest
import torch

from delegate_ranks import Chain, Ended, exchange, payload_of, run_delegate_ranks
from penstock.cost import Links
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.transport.base import StepMessages
from penstock.runtime.transport.delegate import DelegateTransport
from penstock.runtime.transport.link_conditions import ConditionedTransport, Conditions
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.multiproc]


def values(outcomes: list[Ended]) -> list[Any]:
    assert all(not one.error for one in outcomes), "\n".join(one.text for one in outcomes)
    return [one.value for one in outcomes]


def plain(rank: int, gather: Any, num_ranks: int, options: dict[str, Any]) -> tuple[int, int, int]:
    chain = Chain(num_ranks, 12)
    transport = DelegateTransport(rank, gather, chain.tags, PATIENCE, **options)
    with closing(transport):
        came = sum(exchange(transport, chain, rank, step, lambda m: (m + 1, 40)) for step in range(3))
        found = transport.crossings()
        assert all(one.target == rank and one.sent <= one.arrived and one.num_bytes > 0 for one in found)
        return came, transport.counters.messages, len(found)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(2, {}), (3, {"num_lanes": 2}), (2, {"interfaces": ("127.0.0.2", "127.0.0.3"), "num_lanes": 3})],
)
def test_every_message_comes_once_bit_for_bit(num_ranks: int, options: dict[str, Any]) -> None:
    found = values(run_delegate_ranks(num_ranks, plain, num_ranks, options))
    links = [1 if rank in (0, num_ranks - 1) else 2 for rank in range(num_ranks)]
    assert found == [(36 * n, 36 * n, 36 * n) for n in links]


def changing(rank: int, gather: Any) -> tuple[int, int]:
    chain = Chain(2, 4)
    # 3 messages of 16 MB fill host memory: senders wait for room, receivers' delegates ask for more than their share.
    transport = DelegateTransport(rank, gather, chain.tags, PATIENCE, host_memory=56 << 20)
    shapes = [(4, 1 << 20), (7,), (3, 1), (1 << 21,)]
    with closing(transport):
        came = 0
        for step in range(4):
            came += exchange(transport, chain, rank, step, lambda m: shapes[(step + m) % 4])  # noqa: B023
        came += exchange(transport, chain, rank, 4, lambda m: shapes[0])
        return came, transport.counters.messages


@pytest.mark.slow
def test_messages_of_16_mb_and_of_changing_shapes() -> None:
    assert values(run_delegate_ranks(2, changing)) == [(20, 20), (20, 20)]


def freed(rank: int, gather: Any) -> list[int]:
    chain = Chain(2, 1)
    transport = DelegateTransport(rank, gather, chain.tags, PATIENCE, host_memory=64 << 20)
    places = []
    with closing(transport):
        for step in range(4):
            chain.begin(transport, rank)
            gather(None)
            if rank == 0:
                assert transport.send(*chain.outgoing(0)[0], payload_of(chain.forward(0)[0], step, (1 << 20,)))
                wait_until(lambda: not transport.arrivals() and not transport._outbox.targets(), lambda: "no answer")
            gather(None)  # the message is there
            if rank == 1:
                (edge,) = transport.wait([], lambda: "rank 1 waits")
                leaf = transport.take(edge).leaves[0]
                places.append(0 if leaf is None else leaf.data_ptr())
            transport.end()
            leaf = None  # after the step, as in a graph that is kept
        return places


def test_a_step_took_memory_that_was_never_touched_though_slots_were_free_again() -> None:
    """A message of 64 MB took 45 ms in place of 17."""
    _, places = values(run_delegate_ranks(2, freed))
    assert len(set(places)) == 1


def held(rank: int, gather: Any) -> list[tuple[int, int]]:
    chain = Chain(2, 6)
    conditions = Conditions(Links.parse("0:1=latency:40ms 1:0=occupancy:20ms"))
    transport = ConditionedTransport(DelegateTransport(rank, gather, chain.tags, PATIENCE), conditions)
    with closing(transport):
        exchange(transport, chain, rank, 0, lambda m: (100,))
        found = sorted(transport.crossings(), key=lambda one: one.arrived)
        first = min(one.sent for one in found)
        return [(one.duration, one.arrived - first) for one in found]


def test_conditions_hold_messages_back() -> None:
    ms = 1_000_000
    by_rank = values(run_delegate_ranks(2, held))
    assert all(duration >= 40 * ms for duration, _ in by_rank[1])  # from rank 0: each late by the latency
    # From rank 1 the link is busy with one after the other: the k-th ends no sooner than k occupancies.
    assert all(since >= (k + 1) * 20 * ms for k, (_, since) in enumerate(by_rank[0]))


def too_large(rank: int, gather: Any) -> str:
    chain = Chain(2, 1)
    transport = DelegateTransport(rank, gather, chain.tags, PATIENCE, host_memory=1 << 17)
    try:
        if rank == 0:
            chain.begin(transport, rank)
            edge, target = chain.outgoing(rank)[0]
            from penstock.runtime.tensors.message import Payload

            transport.send(edge, target, Payload([torch.zeros(1 << 20)], 0, [True]))
        return ""
    except RuntimeFailure as error:
        return str(error)
    finally:
        transport.close()


def test_a_message_larger_than_the_memory_that_is_mapped_is_an_error() -> None:
    said = values(run_delegate_ranks(2, too_large))[0]
    assert "more than the 1048576 bytes of host memory" in said
    assert "host_memory=131072; give host_memory= more" in said


def larger(rank: int, gather: Any) -> tuple[int, int]:
    chain = Chain(2, 4)
    transport = DelegateTransport(rank, gather, chain.tags, PATIENCE, host_memory=1 << 20)
    shapes = [(1 << 19,), (7,), (3, 1 << 18), (1 << 17,)]  # of 2 MB, 28 bytes, 3 MB and 512 kB
    with closing(transport):
        came = 0
        for step in range(3):
            came += exchange(transport, chain, rank, step, lambda m: shapes[(step + m) % 4])  # noqa: B023
        return came, transport.counters.messages


def test_bug_messages_above_host_memory_ended_the_run() -> None:
    """A healthy run whose late link --adapt delegated ended, though gloo had carried its messages."""
    assert values(run_delegate_ranks(2, larger)) == [(12, 12), (12, 12)]


def other_steps(rank: int, gather: Any, what: str) -> str:
    chain = Chain(2, 2)
    transport = DelegateTransport(rank, gather, chain.tags, PATIENCE)
    try:
        exchange(transport, chain, rank, 0, lambda m: (5,))  # its delegates start, which may take long
        transport._timeout = 2.0  # for the rank that meets no error
        if rank == 0 and what == "step":
            transport.begin(StepMessages([], [], 7))
            transport.end()
        gather(None)  # rank 0 has ended its second step before rank 1 sends in it
        exchange(transport, chain, rank, 1, lambda m: (5,)) if what == "step" else _digests(transport, chain, rank)
        return ""
    except RuntimeFailure as error:
        return str(error)
    finally:
        gather(None)
        transport.close()


def _digests(transport: DelegateTransport, chain: Chain, rank: int) -> None:
    chain.begin(transport, rank, digest=rank)
    for edge, target in chain.outgoing(rank):
        transport.send(edge, target, payload_of(edge, 0, (5,)))
    for _ in range(2):
        transport.wait([], lambda: f"rank {rank} waits")


@pytest.mark.slow
@pytest.mark.parametrize(("what", "words"), [("step", "run the same steps"), ("digest", "of the same shapes")])
def test_messages_of_another_step_or_batch_are_errors(what: str, words: str) -> None:
    assert any(words in said for said in values(run_delegate_ranks(2, other_steps, what)))


def two_at_once(rank: int, gather: Any) -> list[str]:
    chain = Chain(2, 2)
    transport = DelegateTransport(rank, gather, chain.tags, PATIENCE)
    said = []
    with closing(transport):
        exchange(transport, chain, rank, 0, lambda m: (5,))
        chain.begin(transport, rank, digest=rank)
        gather(None)
        for edge, target in chain.outgoing(rank) if rank == 1 else ():
            transport.send(edge, target, payload_of(edge, 1, (5,)))
        if rank == 1:  # answered messages are with the other rank
            wait_until(lambda: transport.arrivals() == [] and not transport._outbox.targets(), lambda: "no answer")
        gather(None)
        for _ in range(2 if rank == 0 else 0):
            try:
                transport.arrivals()
            except RuntimeFailure as error:
                said.append(str(error))
        gather(None)
    return said


def test_bug_what_a_delegate_told_after_an_unexpected_message_was_heard_with_the_next_news_only() -> None:
    said = values(run_delegate_ranks(2, two_at_once))[0]
    assert len(said) == 2
    assert all("of the same shapes" in each for each in said)


def elsewhere(rank: int, gather: Any) -> None:
    DelegateTransport(rank, lambda value: [value], Chain(1, 1).tags, 5.0, interfaces=("203.0.113.77",))


def test_an_interface_of_another_host_is_an_error() -> None:
    (outcome,) = run_delegate_ranks(1, elsewhere)
    assert "cannot be started for 203.0.113.77" in outcome.error


def cramped(rank: int, gather: Any) -> tuple[str, int]:
    import resource

    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 4, before + 4))
    chain = Chain(2, 1)
    try:
        DelegateTransport(rank, gather, chain.tags, PATIENCE)
    except RuntimeFailure as error:
        return str(error), len(os.listdir("/proc/self/fd")) - before
    return "", 0


def test_too_few_descriptors_for_a_delegate_are_an_error_that_leaves_nothing() -> None:
    for said, left in values(run_delegate_ranks(2, cramped)):
        assert "file descriptors" in said
        assert "ulimit -n" in said
        assert left == 0
