"""Frames and rings: what goes in comes out, and nothing else is taken for it."""

from __future__ import annotations

import os
from mmap import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.transport.delegate.carrier.descriptor import (
    DEPTH,
    FRAME_BYTES,
    RING_BYTES,
    Descriptor,
    DescriptorKind,
    DescriptorRing,
    FrameError,
    Lane,
    body_bytes,
    spec_room,
)

pytestmark = pytest.mark.unit

words, signed = st.integers(0, 2**63 - 1), st.integers(-(2**63), 2**63 - 1)
ranks, bytes_ = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
lanes = st.builds(Lane, ranks, ranks, st.integers(0, 255))
descriptors = st.builds(
    Descriptor,
    st.sampled_from(DescriptorKind),
    lanes,
    words,
    signed,
    signed,
    bytes_,
    signed,
    signed,
    signed,
    words,
    words,
    words,
    words,
    ranks,
)


@given(descriptors)
def test_a_frame_is_read_as_it_was_written(told: Descriptor) -> None:
    data = told.frame()
    assert len(data) == FRAME_BYTES
    assert Descriptor.of_frame(data) == told


def test_other_bytes_are_no_frame() -> None:
    data = Descriptor(DescriptorKind.PING, Lane(0, 1, 0)).frame()
    with pytest.raises(FrameError, match="starts with"):
        Descriptor.of_frame(b"HTTP" + data[4:])
    with pytest.raises(FrameError, match="kind 99"):
        Descriptor.of_frame(data[:4] + bytes([99]) + data[5:])


def test_the_payload_is_aligned_after_the_spec() -> None:
    assert [spec_room(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert body_bytes(65, 1000) == 1128


def rings(count: int = 1) -> tuple[DescriptorRing, DescriptorRing]:
    """The two ends of a ring, each with a mapping of its own."""
    shared = os.memfd_create("ring")
    os.ftruncate(shared, RING_BYTES)
    ends = DescriptorRing(mmap(shared, RING_BYTES), 0), DescriptorRing(mmap(shared, RING_BYTES), 0)
    os.close(shared)
    return ends


@given(st.lists(descriptors, max_size=20))
def test_a_ring_gives_descriptors_in_the_order_in_which_they_were_put(given: list[Descriptor]) -> None:
    writer, reader = rings()
    for one in given:
        assert writer.put(one)
    assert len(reader) == len(given)
    assert [reader.take() for _ in given] == given
    assert reader.take() is None


def test_a_full_ring_takes_no_more_until_one_was_read() -> None:
    writer, reader = rings()
    lane = Lane(0, 1, 0)
    put = taken = 0
    for _ in range(5):  # several times around
        while writer.put(Descriptor(DescriptorKind.SEND, lane, put)):
            put += 1
        assert put - taken == DEPTH
        for _ in range(DEPTH // 2 + 1):
            one = reader.take()
            assert one is not None
            assert one.number == taken
            taken += 1
