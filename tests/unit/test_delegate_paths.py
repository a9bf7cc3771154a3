"""Which interface next: best first, failed ones rest, and back to a better one only after it was well for a while."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.transport.delegate.carrier.paths import (
    FIRST_HOLD,
    FIRST_REST,
    LONGEST_HOLD,
    LONGEST_REST,
    Path,
    Paths,
    by_preference,
)

pytestmark = pytest.mark.unit

BOTH = by_preference(2, 2)
FIRST, SECOND = Path(0, 0), Path(1, 1)


def test_like_to_like_first_then_crossed() -> None:
    assert BOTH == ((0, 0), (1, 1), (0, 1), (1, 0))
    assert by_preference(1, 3) == ((0, 0), (0, 1), (0, 2))


def test_a_failed_path_gives_way_to_the_next_and_rests_longer_each_time() -> None:
    paths = Paths(BOTH)
    assert paths.choose(0) == (FIRST, 0)
    paths = paths.failed(FIRST, 0)
    assert paths.choose(0) == (SECOND, 0)
    assert paths.choose(FIRST_REST) == (FIRST, FIRST_REST)
    for path in BOTH[1:]:
        paths = paths.failed(path, 0)
    assert paths.all_failed
    assert paths.choose(0) == (None, FIRST_REST)
    for _ in range(20):
        paths = paths.failed(FIRST, 0)
    assert paths.backoffs[FIRST].until == LONGEST_REST
    assert not paths.stands(FIRST).all_failed


def test_what_the_kernel_says_is_down_is_not_tried() -> None:
    paths = Paths(BOTH).interface(0, False, 0)
    assert paths.choose(0) == (SECOND, 0)
    paths = paths.interface(1, False, 0)
    assert paths.choose(7) == (None, 7 + LONGEST_REST)
    assert paths.all_failed
    assert paths.interface(0, True, 9).choose(9) == (FIRST, 9)


def test_a_better_path_must_have_been_well_for_a_while_and_longer_each_time_it_was_left() -> None:
    paths = Paths(BOTH).left(FIRST, 0)
    assert paths.better(SECOND, 0) == (None, FIRST_HOLD)
    assert paths.better(SECOND, FIRST_HOLD) == (FIRST, FIRST_HOLD)
    assert paths.better(FIRST, FIRST_HOLD)[0] is None
    paths = paths.stands(FIRST).left(FIRST, 0)
    assert paths.better(SECOND, FIRST_HOLD)[0] is None
    assert paths.better(SECOND, 2 * FIRST_HOLD)[0] == FIRST
    # An interface that comes up counts as well from then on; one that is down is no candidate.
    paths = paths.interface(0, False, 0)
    assert paths.better(SECOND, LONGEST_HOLD)[0] is None
    later = LONGEST_HOLD
    paths = paths.interface(0, True, later)
    assert paths.better(SECOND, later)[0] is None
    assert paths.better(SECOND, later + 2 * FIRST_HOLD)[0] == FIRST


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3 * FIRST_REST)), max_size=40))
def test_there_is_always_a_path_or_a_moment_to_look_again(moves: list[tuple[int, int, int]]) -> None:
    paths, now = Paths(BOTH), 0
    for what, which, wait in moves:
        now += wait
        path = BOTH[which]
        if what == 0:
            paths = paths.failed(path, now)
        elif what == 1:
            paths = paths.left(path, now)
        elif what == 2:
            paths = paths.stands(path)
        else:
            paths = paths.interface(which % 2, what == 3, now)
        chosen, when = paths.choose(now)
        if chosen is None:
            assert now < when <= now + LONGEST_REST
        else:
            assert chosen.ours not in paths.down
            better, soonest = paths.better(chosen, now)
            assert better is None or BOTH.index(better) < BOTH.index(chosen)
            assert better is not None or now < soonest <= now + LONGEST_HOLD
    paths = paths.interface(0, True, now).interface(1, True, now)
    assert paths.choose(now + LONGEST_REST)[0] == FIRST
