"""What a rank keeps of messages on their way: slots and numbers, what is expected, and what is lent."""

from __future__ import annotations

import pytest

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport.base import StepMessages
from penstock.runtime.transport.channel import ChannelKey, ExpectedMessages
from penstock.runtime.transport.delegate.boxes import LENT, DelegateInbox, Outbox
from penstock.runtime.transport.delegate.carrier.frames import Descriptor, DescriptorKind
from penstock.schedule import Op

pytestmark = pytest.mark.unit

MB = 1 << 20


class Orders:
    """Takes down what a delegate is ordered."""

    def __init__(self, rank: int, host_memory: int) -> None:
        self.rank, self.host_memory, self.span = rank, host_memory, 8 * host_memory
        self.given: list[Descriptor] = []

    def order(self, descriptor: Descriptor) -> None:
        self.given.append(descriptor)


def send(outbox: Outbox, target: int = 1, size: int = MB // 2) -> bool:
    slot = outbox.take(target, size)
    if slot is None:
        return False
    offset, capacity = slot
    outbox.post(Descriptor(DescriptorKind.SEND, 0, target, offset=offset, capacity=capacity))
    return True


def test_messages_to_each_rank_have_numbers_of_their_own() -> None:
    orders = Orders(0, 64 * MB)
    outbox = Outbox(orders)  # type: ignore[arg-type]
    assert all(send(outbox, target) for target in (1, 2, 1))
    assert [(each.target, each.number) for each in orders.given] == [(1, 1), (2, 1), (1, 2)]
    assert outbox.targets() == {1, 2}
    outbox.answered(Descriptor(DescriptorKind.ANSWERED, 0, 1, number=2))  # answers come in any order
    outbox.answered(Descriptor(DescriptorKind.ANSWERED, 0, 1, number=1))
    assert outbox.targets() == {2}


def test_room_is_what_was_answered() -> None:
    outbox = Outbox(Orders(0, 2 * MB))  # type: ignore[arg-type]
    assert all(send(outbox) for _ in range(4))
    assert not send(outbox)
    outbox.answered(Descriptor(DescriptorKind.ANSWERED, 0, 1, number=2))
    assert send(outbox)
    assert not send(outbox)
    with pytest.raises(RuntimeFailure, match="host_memory"):
        outbox.take(1, 17 * MB)


def test_bug_a_message_above_host_memory_was_an_error() -> None:
    """It ended a healthy run as soon as --adapt delegated a late link."""
    outbox = Outbox(Orders(0, 2 * MB))  # type: ignore[arg-type]
    assert send(outbox)
    assert not send(outbox, size=3 * MB)  # until nothing else is on its way
    outbox.answered(Descriptor(DescriptorKind.ANSWERED, 0, 1, number=1))
    assert send(outbox, size=3 * MB)
    assert not send(outbox)
    outbox.answered(Descriptor(DescriptorKind.ANSWERED, 0, 1, number=2))
    assert all(send(outbox) for _ in range(4))
    assert not send(outbox)


EDGES = [Edge(Op("F", 0, m), Op("F", 1, m)) for m in range(4)]
EXPECTED = [ExpectedMessages(ChannelKey.of(EDGES[0]), 0, tuple((edge, 100 + m) for m, edge in enumerate(EDGES)))]
STEP = StepMessages(EXPECTED, digest=5)


def message(number: int, tag: int, step: int = 1, digest: int = 5, capacity: int = 4096) -> Descriptor:
    return Descriptor(
        DescriptorKind.MESSAGE, 0, 1, 0, number, tag, step << 32 | digest, 0, 0, 0, number * 4096, capacity, 10, 1064
    )


def test_messages_are_known_by_their_tags_and_freed_once_taken() -> None:
    orders = Orders(1, 64 * MB)
    inbox = DelegateInbox(orders)  # type: ignore[arg-type]
    inbox.begin(STEP)
    inbox.heard(message(1, 102))
    assert inbox.arrivals() == [EDGES[2]]
    assert inbox.owed() == {0}
    inbox.free(inbox.take(EDGES[2]))
    assert (orders.given[-1].kind, orders.given[-1].offset) == (DescriptorKind.FREE, 4096)
    assert [one.num_bytes for one in inbox.crossings.take()] == [1000]
    with pytest.raises(RuntimeFailure, match="does not wait for"):
        inbox.heard(message(2, 102))  # a second time
    with pytest.raises(RuntimeFailure, match="of the same shapes"):
        inbox.heard(message(3, 101, digest=6))


def test_messages_of_the_next_step_wait_and_late_ones_are_errors() -> None:
    inbox = DelegateInbox(Orders(1, 64 * MB))  # type: ignore[arg-type]
    inbox.begin(STEP)
    inbox.heard(message(1, 100, step=2))
    assert inbox.arrivals() == []
    inbox.begin(STEP)
    assert inbox.arrivals() == [EDGES[0]]
    with pytest.raises(RuntimeFailure, match="at step 2 and got message 101 of step 1"):
        inbox.heard(message(2, 101, step=1))


def test_the_delegate_connects_to_those_from_whom_messages_are_expected() -> None:
    orders = Orders(1, 64 * MB)
    inbox = DelegateInbox(orders)  # type: ignore[arg-type]
    inbox.begin(STEP)
    assert orders.given == [Descriptor(DescriptorKind.CONNECT, 1, 0)]


def test_as_much_as_host_memory_is_lent_until_it_is_given_back() -> None:
    orders = Orders(1, MB)
    inbox = DelegateInbox(orders)  # type: ignore[arg-type]
    inbox.begin(STEP)
    assert inbox.lend(message(1, 100, capacity=LENT // 2)) is None  # small ones are copied out
    held = message(2, 101, capacity=MB)
    give_back = inbox.lend(held)
    assert give_back is not None
    assert inbox.lend(message(3, 102, capacity=LENT)) is None
    give_back()
    inbox.take_back()
    assert (orders.given[-1].kind, orders.given[-1].offset) == (DescriptorKind.FREE, held.offset)
    assert inbox.lend(message(3, 102, capacity=LENT)) is not None
