"""Memory that processes of a host share: each message once, bit for bit, and every wait ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from delegate_ranks import Chain, exchange, payload_of
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport import rank_memory
from penstock.runtime.transport.base import StepMessages
from penstock.runtime.transport.rank_memory import OwnMemory
from penstock.runtime.transport.shared_memory import SharedMemoryTransport, open_shared_memory
from waiting import PATIENCE

pytestmark = pytest.mark.unit


Ends = Callable[..., list[SharedMemoryTransport]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Makes all ends of a chain of ranks in this process, which are closed behind the test."""
    made: list[SharedMemoryTransport] = []

    def make(num_ranks: int, chain: Chain, timeout: float = PATIENCE, **span: int) -> list[SharedMemoryTransport]:
        owns = [OwnMemory(num_ranks, **span) for _ in range(num_ranks)]
        addresses = [own.address for own in owns]
        found = [SharedMemoryTransport(rank, chain.tags, timeout, own, addresses) for rank, own in enumerate(owns)]
        made.extend(found)
        return found

    yield make
    for one in made:
        one.close()


def in_threads(num: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives for each number, each in a thread of its own."""
    found: list[Any] = [None] * num

    def run(number: int) -> None:
        try:
            found[number] = work(number)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def ended_process() -> int:
    """A descriptor of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pidfd = os.pidfd_open(child.pid)
    child.kill()
    child.wait()
    return pidfd


def who() -> str:
    return "rank 1 waits to run F0"


def test_every_message_comes_once_bit_for_bit_whatever_its_shape(ends: Ends) -> None:
    chain = Chain(3, 12)
    made = ends(3, chain)
    shapes: list[tuple[int, ...]] = [(4, 33), (7,), (), (0, 3), (1 << 15,)]

    def work(rank: int) -> tuple[int, int]:
        came = [exchange(made[rank], chain, rank, step, lambda m: shapes[(step + m) % 5]) for step in range(6)]  # type: ignore[arg-type]  # noqa: B023
        found = made[rank].crossings()
        assert all(one.target == rank and one.sent <= one.arrived for one in found)
        return sum(came), len(found)

    assert in_threads(3, work) == [(72, 72), (144, 144), (72, 72)]


def test_memory_is_used_again_from_step_to_step(ends: Ends) -> None:
    chain = Chain(2, 6)
    made = ends(2, chain)
    first = made[0]._own.used

    def work(rank: int) -> list[int]:
        used = []
        for step in range(8):
            exchange(made[rank], chain, rank, step, lambda m: (100 + step, 10))  # type: ignore[arg-type]  # noqa: B023
            used.append(made[rank]._own.used)
        return used

    for used in in_threads(2, work):
        # 48 messages of as good as one size: a rank may be a step ahead of the other one, with 6 more under way.
        assert used[-1] - first <= 4 * 6 * 5120


def test_two_ranks_that_find_each_others_ring_full_go_on(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_memory, "RING", 2)
    chain = Chain(2, 9)
    made = ends(2, chain)

    def work(rank: int) -> list[Edge]:
        one, out = made[rank], chain.backward(rank) if rank else chain.forward(rank)
        into = chain.forward(0) if rank else chain.backward(1)
        chain.begin(one, rank)  # type: ignore[arg-type]
        came: list[Edge] = []
        for edge in out:
            while not one.send(edge, 1 - rank, payload_of(edge, 0, (3,))):
                came += one.wait((), who)
        while len(came) < len(into):
            came += one.wait(into, who)
        for edge in into:
            (leaf,) = one.take(edge).leaves
            assert leaf is not None
            assert torch.equal(leaf, payload_of(edge, 0, (3,)).leaves[0])  # type: ignore[arg-type]
        one.end()
        return came

    assert in_threads(2, work) == [chain.backward(1), chain.forward(0)]


def test_a_ring_that_nobody_looks_at_meets_the_deadline(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_memory, "RING", 2)
    chain = Chain(2, 3)
    made = ends(2, chain, timeout=0.1)
    *fitting, last = chain.forward(0)
    chain.begin(made[0], 0)  # type: ignore[arg-type]
    for edge in fitting:
        assert made[0].send(edge, 1, payload_of(edge, 0, (3,)))
    assert not made[0].send(last, 1, payload_of(last, 0, (3,)))
    with pytest.raises(DeadlineExceeded, match=r"nothing came in for 0\.1 s: rank 1 waits to run F0"):
        made[0].wait((), who)


def test_a_message_of_the_next_step_waits_for_it(ends: Ends) -> None:
    chain = Chain(2, 1)
    made = ends(2, chain)
    (edge,) = chain.forward(0)
    chain.begin(made[1], 1)  # type: ignore[arg-type]
    for step in range(2):
        chain.begin(made[0], 0)  # type: ignore[arg-type]
        made[0].send(edge, 1, payload_of(edge, step, (5,)))
    assert made[1].arrivals() == [edge]
    first = made[1].take(edge).leaves[0]
    chain.begin(made[1], 1)  # type: ignore[arg-type]
    assert made[1].arrivals() == [edge]
    second = made[1].take(edge).leaves[0]
    for step, leaf in enumerate((first, second)):
        assert leaf is not None
        assert torch.equal(leaf, payload_of(edge, step, (5,)).leaves[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("digest", "ahead", "twice", "message"),
    [
        (8, 0, False, "on inputs and targets of the same shapes"),
        (
            7,
            1,
            False,
            r"is at step 2 and got message \d+ of step 1 from rank 0, which it does not wait for",
        ),
        (7, 0, True, "which it does not wait for; every rank must run the same steps and schedules"),
    ],
)
def test_what_is_not_expected_is_an_error(ends: Ends, digest: int, ahead: int, twice: bool, message: str) -> None:
    chain = Chain(2, 1)
    made = ends(2, chain)
    (edge,) = chain.forward(0)
    chain.begin(made[0], 0)  # type: ignore[arg-type]
    for _ in range(1 + ahead):
        chain.begin(made[1], 1, digest)  # type: ignore[arg-type]
    for _ in range(1 + twice):
        made[0].send(edge, 1, payload_of(edge, 0, (5,)))
    with pytest.raises(RuntimeFailure, match=message):
        made[1].arrivals()


def test_a_wait_ends_with_its_deadline_or_when_it_is_woken(ends: Ends) -> None:
    chain = Chain(2, 1)
    made = [*ends(2, chain), *ends(2, chain, timeout=0.3)]
    _, patient, _, hasty = made
    chain.begin(patient, 1)  # type: ignore[arg-type]
    waker = threading.Timer(0.05, patient.wake)
    waker.start()
    assert patient.wait((), who) == []
    waker.join()
    patient.wake()
    assert patient.wait((), who) == []
    chain.begin(hasty, 1)  # type: ignore[arg-type]
    with pytest.raises(DeadlineExceeded, match=r"nothing came in for 0\.3 s: rank 1 waits to run F0"):
        hasty.wait((), who)


def test_a_rank_whose_process_ended_is_lost_after_what_it_had_sent(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(2, 2)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    opened = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", lambda pid: opened(other.pid))
    made = ends(2, chain)
    first, second = chain.forward(0)
    try:
        for rank, one in enumerate(made):
            chain.begin(one, rank)  # type: ignore[arg-type]
        made[0].send(first, 1, payload_of(first, 0, (5,)))
        other.communicate(b"\n")
        assert made[1].wait([first], who) == [first]
        with pytest.raises(PeerLost, match="rank 1 lost its connection to rank 0, whose process has ended: rank 1"):
            made[1].wait([second], who)
    finally:
        other.kill()
        other.wait()
        for one in made:
            one.close()


def test_a_full_channel_is_sent_to_again_once_a_message_is_taken(ends: Ends) -> None:
    chain = Chain(2, 6)
    made = ends(2, chain)
    edges = chain.forward(0)
    for rank, one in enumerate(made):
        one.begin(StepMessages(chain.expected(rank), ["s"] * 6, 7, window={0: 2}))

    def send(one: SharedMemoryTransport) -> int:
        waits = 0
        for edge in edges:
            while not one.send(edge, 1, payload_of(edge, 0, (3,))):
                waits += one.wait((), who) == []
        return waits

    def take(one: SharedMemoryTransport) -> int:
        most = 0
        for edge in edges:
            while edge not in one._inbox._ready:
                one.wait([edge], who)
            most = max(most, len(one._inbox._ready))
            one.take(edge)
        return most

    _, most = in_threads(2, lambda rank: take(made[1]) if rank else send(made[0]))
    assert most <= 2
    assert sum(len(slots) for channel in made[0]._channels.values() for slots in channel.slots.values()) <= 2


@pytest.mark.parametrize("spoiled", ["host", "nonce", "none"])
def test_ranks_that_cannot_reach_each_others_memory_use_none_of_it(
    spoiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(2, 1)
    meeting, given = threading.Barrier(2), [None, None]
    gc.collect()  # what other tests left is closed now, and not in between
    before = set(os.listdir("/proc/self/fd"))

    def work(rank: int) -> SharedMemoryTransport | None:
        def gather(value: Any) -> list[Any]:
            if rank and isinstance(value, tuple):
                changed = {"host": "another", "nonce": 1}
                value = None if spoiled == "none" else value._replace(**{spoiled: changed[spoiled]})  # type: ignore[attr-defined]
            given[rank] = value
            meeting.wait(60)
            found = list(given)
            meeting.wait(60)
            return found

        return open_shared_memory(rank, 2, gather, chain.tags, 5.0)

    assert in_threads(2, work) == [None, None]
    assert set(os.listdir("/proc/self/fd")) <= before


def test_memory_that_is_full_is_an_error_by_name(ends: Ends) -> None:
    chain = Chain(2, 3)
    made = ends(2, chain, span=1 << 16)
    chain.begin(made[0], 0)  # type: ignore[arg-type]
    edge, other, _ = chain.forward(0)
    made[0].send(edge, 1, payload_of(edge, 0, (9000,)))
    with pytest.raises(RuntimeFailure, match=r"fill \d+ bytes of shared memory; use transport='gloo'"):
        made[0].send(other, 1, payload_of(other, 0, (9000,)))


def test_sums_are_of_all_ranks_alike_whoever_comes_first(ends: Ends) -> None:
    """Some ranks are a sum ahead of others; every one has the terms of its own sum, in the order of the ranks."""
    chain, draws = Chain(3, 2), torch.Generator().manual_seed(1)
    made = ends(3, chain)
    rows = [[torch.randn(5, generator=draws, dtype=torch.float64).tolist() for _ in range(3)] for _ in range(200)]

    def work(rank: int) -> list[list[float]]:
        return [made[rank].sum(row[rank]) for row in rows]

    wanted = [[(a + b) + c for a, b, c in zip(*row, strict=True)] for row in rows]
    assert in_threads(3, work) == [wanted] * 3


def test_a_sum_ends_with_its_deadline_or_with_the_rank_that_ended(ends: Ends) -> None:
    chain = Chain(2, 2)
    made = ends(2, chain, timeout=0.2)
    with pytest.raises(DeadlineExceeded, match=r"nothing came in for 0\.2 s: rank 0 waits for a sum .* from rank 1;"):
        made[0].sum([1.0])
    made = ends(2, chain)
    pidfd = ended_process()
    made[0]._watched[pidfd] = 1
    made[0]._own.watch(pidfd)
    try:
        with pytest.raises(PeerLost, match=r"rank 0 lost its connection to rank 1, whose process has ended: rank 0"):
            made[0].sum([1.0])
        assert made[1].sum([2.0]) == [3.0]
    finally:
        os.close(pidfd)


def test_a_process_that_ended_and_owed_nothing_wakes_a_rank_once_and_is_missed_when_it_does_owe(ends: Ends) -> None:
    chain = Chain(2, 1)
    made = ends(2, chain)
    pidfd = ended_process()
    made[1]._watched[pidfd] = 0
    made[1]._own.watch(pidfd)
    try:
        made[1]._sleep(60.0)
        assert made[1]._gone == {0}
        assert made[1]._own.sleep(0.01) == []
        for rank, one in enumerate(made):
            chain.begin(one, rank)  # type: ignore[arg-type]
        with pytest.raises(PeerLost, match="rank 1 lost its connection to rank 0, whose process has ended"):
            made[1].wait(chain.forward(0), who)
        (edge,) = chain.forward(0)
        made[0].send(edge, 1, payload_of(edge, 0, (3,)))
        assert made[1].wait([edge], who) == [edge], "what it wrote before it ended is still there"
    finally:
        os.close(pidfd)


def test_slots_of_messages_without_a_bound_were_kept_for_good(ends: Ends) -> None:
    """A shared weight's messages have no bound, where others have."""
    chain = Chain(2, 4)
    made = ends(2, chain)
    for step in range(3):
        for rank, one in enumerate(made):
            one.begin(StepMessages(chain.expected(rank), ["s"] * 4, 7, window={99: 2}))
        for edge in chain.forward(0):
            made[0].send(edge, 1, payload_of(edge, step, (3,)))
            assert made[1].wait([edge], who) == [edge]
            made[1].take(edge)
    assert [len(channel.under_way) for channel in made[0]._channels.values()] == [0]


def test_memory_of_a_transport_that_was_closed_stayed_mapped_for_its_specs(ends: Ends) -> None:
    chain = Chain(2, 1)
    made = ends(2, chain)
    for rank, one in enumerate(made):
        chain.begin(one, rank)  # type: ignore[arg-type]
    (edge,) = chain.forward(0)
    made[0].send(edge, 1, payload_of(edge, 0, (3,)))
    assert made[1].wait([edge], who) == [edge]
    made[1].take(edge)
    memories = [one._own.memory.map for one in made]
    for one in made:
        one.close()
    gc.collect()
    assert all(memory.closed for memory in memories)
