"""Frames: what goes in comes out, and nothing else is taken for it. Slots: never two in one place, never two beyond
the limit. Connections: which the kernel says are dead.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.transport.delegate.carrier.frames import (
    FRAME_BYTES,
    PAGE,
    Descriptor,
    DescriptorKind,
    Slots,
    frames,
    is_unacknowledged,
    spec_room,
)

pytestmark = pytest.mark.unit

numbers = st.integers(-(2**63), 2**63 - 1)
descriptors = st.builds(Descriptor, st.sampled_from(DescriptorKind), *[numbers] * (len(Descriptor._fields) - 1))


@given(st.lists(descriptors, max_size=20), st.binary(max_size=FRAME_BYTES - 1))
def test_frames_are_read_as_they_were_written(told: list[Descriptor], begun: bytes) -> None:
    came = bytearray(b"".join(one.to_bytes() for one in told) + begun)
    assert list(frames(came)) == told
    assert came == begun  # the rest of a frame is yet to come


def test_other_bytes_are_no_frame() -> None:
    data = Descriptor(DescriptorKind.PING, 0, 1).to_bytes()
    with pytest.raises(OSError, match="starts with"):
        Descriptor.from_bytes(b"HTTP" + data[4:])
    with pytest.raises(OSError, match="99"):
        Descriptor.from_bytes(data[:4] + bytes([99]) + data[5:])


def test_the_payload_is_aligned_after_the_spec() -> None:
    assert [spec_room(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert Descriptor(DescriptorKind.SEND, spec_bytes=65, payload_bytes=1000).body_bytes == 1128


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9 * PAGE), st.integers(0, 100)), max_size=60),
    st.integers(1, 20),
)
def test_slots_never_overlap_nor_pass_the_limit(moves: list[tuple[bool, int, int]], num_pages: int) -> None:
    slots = Slots(num_pages * PAGE, 24 * PAGE)
    held: list[tuple[int, int]] = []
    for take, size, which in moves:
        if take or not held:
            found = slots.take(size)
            if found is None:
                free = num_pages * PAGE - sum(c for _, c in held)
                # Only too little memory or no hole of the size is a reason.
                assert size > free or len(held) > 0
                continue
            offset, capacity = found
            assert capacity >= size
            assert offset % PAGE == 0
            assert offset + capacity <= 24 * PAGE
            assert all(offset + capacity <= o or o + c <= offset for o, c in held)
            held.append(found)
            assert len(held) == 1 or sum(c for _, c in held) <= num_pages * PAGE
        else:
            slots.free(*held.pop(which % len(held)))
        assert slots.used == sum(c for _, c in held)
    for one in held:
        slots.free(*one)
    assert slots.take(num_pages * PAGE) == (0, num_pages * PAGE)  # all of it, in one piece again


def test_a_higher_limit_lets_more_be_taken_up_to_what_is_mapped() -> None:
    slots = Slots(PAGE, 3 * PAGE)
    assert slots.take(PAGE) == (0, PAGE)
    assert slots.take(1) is None
    slots.limit += 100 * PAGE
    assert slots.take(3 * PAGE) is None
    assert slots.take(2 * PAGE) == (PAGE, 2 * PAGE)
    slots.free(PAGE, 2 * PAGE)
    slots.limit -= 100 * PAGE
    assert slots.take(1) is None


class Connection:
    """A socket with so many packets unacknowledged, the last acknowledgement so long ago, and such a round trip."""

    def __init__(self, unacked: int, last_ack_ms: int, rtt_us: int) -> None:
        info = bytearray(104)
        for offset, value in ((24, unacked), (56, last_ack_ms), (68, rtt_us)):
            info[offset : offset + 4] = value.to_bytes(4, "little")
        self._info = bytes(info)

    def getsockopt(self, *_: Any) -> bytes:
        return self._info


@pytest.mark.parametrize(
    ("unacked", "last_ack_ms", "rtt_us", "is_dead"),
    [
        (2905, 2200, 176_433, True),  # as it was seen, with none sent again
        (1, 501, 100, True),
        (1, 500, 100, False),
        (1, 2200, 600_000, False),  # a long way
        (0, 60_000, 100, False),  # its process stands still, or there is nothing to acknowledge
    ],
)
def test_a_network_that_acknowledges_nothing(unacked: int, last_ack_ms: int, rtt_us: int, is_dead: bool) -> None:
    made: Any = Connection(unacked, last_ack_ms, rtt_us)
    assert is_unacknowledged(made) == is_dead


def test_a_connection_that_stands_or_is_closed_is_not_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = socket.create_connection(listener.getsockname())
        assert not is_unacknowledged(made)
        made.close()
        assert not is_unacknowledged(made)
