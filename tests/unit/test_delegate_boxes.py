"""What a rank keeps of messages on their way: slots, numbers, lanes in turn, more lanes where rates ask for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport.channel import ChannelKey, ExpectedMessages
from penstock.runtime.transport.delegate import Counters
from penstock.runtime.transport.delegate.boxes import MOST_WAITING, DelegateInbox, Outbox
from penstock.runtime.transport.delegate.carrier.descriptor import Descriptor, DescriptorKind, Lane
from penstock.runtime.transport.delegate.delegates import DelegateKey
from penstock.schedule import Op

pytestmark = pytest.mark.unit

MS, MB = 1_000_000, 1 << 20


class Orders:
    """Takes down what delegates are ordered, by key."""

    def __init__(self, rank: int, host_memory: int) -> None:
        self.rank, self.host_memory, self.share = rank, host_memory, host_memory // 2
        self.given: dict[DelegateKey, list[Descriptor]] = {}

    def get(self, key: DelegateKey) -> Any:
        def order(descriptor: Descriptor) -> bool:
            self.given.setdefault(key, []).append(descriptor)
            return True

        return SimpleNamespace(order=order)

    def restart(self, key: DelegateKey, **resumed: Any) -> Any:
        self.resumed = resumed
        self.given.pop(key, None)
        return self.get(key)


def send(outbox: Outbox, at: int, size: int = MB) -> Lane | None:
    found = outbox.take(1, 0, size)
    if found is None:
        return None
    lane, (offset, capacity) = found
    outbox.post(Descriptor(DescriptorKind.SEND, lane, sent=at, offset=offset, capacity=capacity))
    return lane


def test_lanes_take_turns_and_number_their_own() -> None:
    fleet = Orders(0, 64 * MB)
    outbox = Outbox(fleet, 2, 4)  # type: ignore[arg-type]
    lanes = [send(outbox, at) for at in range(5)]
    assert [lane.place for lane in lanes if lane is not None] == [0, 1, 0, 1, 0]
    assert [one.number for one in fleet.given[DelegateKey(True, 0, 0)]] == [1, 2, 3]
    assert [one.number for one in fleet.given[DelegateKey(True, 0, 1)]] == [1, 2]
    assert outbox.targets() == {1}


def test_room_is_what_was_answered() -> None:
    outbox = Outbox(Orders(0, 3 * MB), 1, 1)  # type: ignore[arg-type]
    assert all(send(outbox, at) for at in range(3))
    assert send(outbox, 3) is None
    lane = Lane(0, 1, 0, 0)
    assert not outbox.answered(Descriptor(DescriptorKind.ANSWERED, lane, 0))
    assert outbox.answered(Descriptor(DescriptorKind.ANSWERED, lane, 2))
    assert send(outbox, 4, 2 * MB)
    assert send(outbox, 5) is None
    with pytest.raises(RuntimeFailure, match="host_memory"):
        outbox.take(1, 0, 4 * MB)


def test_a_delegate_gets_no_more_than_fits_its_ring_when_it_starts_anew() -> None:
    fleet = Orders(0, 1 << 30)
    outbox = Outbox(fleet, 1, 1)  # type: ignore[arg-type]
    assert all(send(outbox, at, 10) for at in range(MOST_WAITING))
    assert send(outbox, 0, 10) is None
    outbox.answered(Descriptor(DescriptorKind.ANSWERED, Lane(0, 1, 0, 0), 3))
    assert outbox.restart(DelegateKey(True, 0, 0)) == MOST_WAITING - 3
    assert [one.number for one in fleet.given[DelegateKey(True, 0, 0)]] == list(range(4, MOST_WAITING + 1))


def step(outbox: Outbox, begin: int, gap: int, busy: int) -> None:
    """32 messages a step, given every `gap` and answered every `busy` by each lane."""
    free: dict[Lane, int] = {}
    numbers: dict[Lane, int] = {}
    sent: list[tuple[Lane, int]] = []
    for k in range(32):
        lane = send(outbox, begin + k * gap)
        assert lane is not None
        sent.append((lane, begin + k * gap))
    for lane, at in sent:
        free[lane] = max(free.get(lane, 0), at) + busy
        numbers[lane] = numbers.get(lane, outbox._lanes[lane].waiting[0].number - 1) + 1
        outbox.answered(Descriptor(DescriptorKind.ANSWERED, lane, numbers[lane], arrived=free[lane]))
    outbox.grow()


def test_lanes_grow_with_what_two_steps_in_a_row_ask_for() -> None:
    outbox = Outbox(Orders(0, 64 * MB), 1, 3)  # type: ignore[arg-type]
    found = []
    for k in range(6):
        step(outbox, k * 1000 * MS, gap=4 * MS, busy=11 * MS)  # 250 a second, 11 ms each: 3 lanes
        found.append(outbox.lanes_to(1, 0))
    assert found == [1, 2, 3, 3, 3, 3]


def test_lanes_that_keep_up_do_not_grow() -> None:
    outbox = Outbox(Orders(0, 64 * MB), 1, 3)  # type: ignore[arg-type]
    for k in range(4):
        step(outbox, k * 1000 * MS, gap=4 * MS, busy=3 * MS)
    assert outbox.lanes_to(1, 0) == 1


EDGES = [Edge(Op("F", 0, m), Op("F", 1, m)) for m in range(4)]
EXPECTED = [ExpectedMessages(ChannelKey.of(EDGES[0]), 0, tuple((edge, 100 + m) for m, edge in enumerate(EDGES)))]
POST, LANE = DelegateKey(False, 0, 0), Lane(0, 1, 0, 0)


def message(number: int, tag: int, step: int = 1, digest: int = 5, sent: int = 0, arrived: int = 0) -> Descriptor:
    return Descriptor(
        DescriptorKind.MESSAGE, LANE, number, tag, step, digest, sent, sent, arrived, number * 4096, 4096, 10, 1064
    )


def test_messages_are_known_by_their_tags_and_freed_once_taken() -> None:
    fleet = Orders(1, 64 * MB)
    inbox = DelegateInbox(fleet, Counters())  # type: ignore[arg-type]
    assert inbox.begin(1, 5, EXPECTED, 1) == []
    assert inbox.came(POST, message(1, 102)) == EDGES[2]
    assert inbox.owed() == {0}
    held = inbox.take(EDGES[2])
    inbox.free(held)
    assert fleet.given[POST][-1].kind is DescriptorKind.FREE
    assert fleet.given[POST][-1].offset == 4096
    assert [one.num_bytes for one in inbox.crossings.take()] == [1000]
    with pytest.raises(RuntimeFailure, match="does not wait for"):
        inbox.came(POST, message(2, 102))  # a second time
    with pytest.raises(RuntimeFailure, match="other shapes"):
        inbox.came(POST, message(3, 101, digest=6))


def test_messages_of_the_next_step_wait_and_late_ones_are_errors() -> None:
    inbox = DelegateInbox(Orders(1, 64 * MB), Counters())  # type: ignore[arg-type]
    inbox.begin(1, 5, EXPECTED, 1)
    assert inbox.came(POST, message(1, 100, step=2)) is None
    assert inbox.begin(2, 5, EXPECTED, 1) == [EDGES[0]]
    with pytest.raises(RuntimeFailure, match="different steps"):
        inbox.came(POST, message(2, 101, step=1))


def test_a_new_receiving_delegate_knows_what_its_forerunner_delivered_and_what_is_held() -> None:
    fleet = Orders(1, 64 * MB)
    inbox = DelegateInbox(fleet, Counters())  # type: ignore[arg-type]
    inbox.begin(1, 5, EXPECTED, 1)
    for number in (1, 2, 3):
        inbox.came(POST, message(number, 99 + number))
    inbox.free(inbox.take(EDGES[1]))
    inbox.restart(POST)
    assert fleet.resumed["lanes"] == [(0, 1, 3)]
    assert fleet.resumed["taken"] == [(4096, 4096), (3 * 4096, 4096)]
    assert [one.kind for one in fleet.given[POST]] == [DescriptorKind.EXPECT]


def test_delegates_are_granted_what_the_messages_on_their_way_take() -> None:
    fleet = Orders(1, 80 * 1024)  # ten slots are a share
    inbox = DelegateInbox(fleet, Counters())  # type: ignore[arg-type]
    inbox.begin(1, 5, EXPECTED, 1)
    for number in range(4):  # one each ms, 6 ms on its way: ceil(2 * 6) + 1 must have a place
        inbox.came(POST, message(number + 1, 100 + number, sent=number * MS, arrived=(number + 6) * MS))
    inbox.begin(2, 5, EXPECTED, 1)
    (grant,) = [one for one in fleet.given[POST] if one.kind is DescriptorKind.GRANT]
    assert grant.number == 13 * 4096 - 40 * 1024
    inbox.begin(3, 5, EXPECTED, 1)
    assert len([one for one in fleet.given[POST] if one.kind is DescriptorKind.GRANT]) == 1
