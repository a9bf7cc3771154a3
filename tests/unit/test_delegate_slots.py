"""Slots of shared memory: never two in one place, never beyond the limit, and what is free can be used again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.transport.delegate.carrier.descriptor import PAGE, Slots, rounded

pytestmark = pytest.mark.unit


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
                assert rounded(size) > free or len(held) > 0
                continue
            offset, capacity = found
            assert capacity >= size
            assert offset % PAGE == 0
            assert offset + capacity <= 24 * PAGE
            assert all(offset + capacity <= o or o + c <= offset for o, c in held)
            held.append(found)
            assert sum(c for _, c in held) <= num_pages * PAGE
        else:
            slots.free(*held.pop(which % len(held)))
        assert slots.used == sum(c for _, c in held)
    for one in held:
        slots.free(*one)
    assert slots.take(num_pages * PAGE) == (0, num_pages * PAGE)  # all of it, in one piece again


def test_a_grant_lets_more_be_taken_up_to_what_is_mapped() -> None:
    slots = Slots(PAGE, 3 * PAGE)
    assert slots.take(PAGE) == (0, PAGE)
    assert slots.take(1) is None
    slots.grant(100 * PAGE)
    assert slots.take(3 * PAGE) is None
    assert slots.take(2 * PAGE) == (PAGE, 2 * PAGE)
    slots.free(PAGE, 2 * PAGE)
    slots.grant(-100 * PAGE)
    assert slots.take(1) is None
