"""Which interface next: best first, failed ones rest, and back to a better one only after it was well for a while."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.transport.delegate.carrier.lanes import (
    FIRST_HOLD,
    FIRST_REST,
    LONGEST_HOLD,
    LONGEST_REST,
    Path,
    Paths,
)

pytestmark = pytest.mark.unit

FIRST, SECOND = Path(0, 0), Path(1, 1)


def test_like_to_like_first_then_crossed() -> None:
    assert Paths(2, 2).order == [(0, 0), (1, 1), (0, 1), (1, 0)]
    assert Paths(1, 3).order == [(0, 0), (0, 1), (0, 2)]


def test_a_failed_path_gives_way_to_the_next_and_rests_longer_each_time() -> None:
    paths = Paths(2, 2)
    assert paths.choose(0) == FIRST
    paths.failed(FIRST, 0, stood=False)
    assert paths.choose(0) == SECOND
    assert paths.choose(FIRST_REST) == FIRST
    for path in paths.order[1:]:
        paths.failed(path, 0, stood=False)
    assert paths.choose(0) is None
    for _ in range(20):
        paths.failed(FIRST, 0, stood=False)
    assert paths.choose(LONGEST_REST - 1) == SECOND
    assert paths.choose(LONGEST_REST) == FIRST
    paths.failed(FIRST, 0, stood=False)
    paths.stands(FIRST)
    assert paths.choose(0) == FIRST


def test_a_better_path_must_have_been_well_for_a_while_and_longer_each_time_it_was_lost() -> None:
    paths = Paths(2, 2)
    paths.failed(FIRST, 0, stood=True)
    assert paths.better(SECOND, FIRST_HOLD - 1) is None
    assert paths.better(SECOND, FIRST_HOLD) == FIRST
    assert paths.better(FIRST, FIRST_HOLD) is None
    paths.stands(FIRST)
    paths.failed(FIRST, 0, stood=True)
    assert paths.better(SECOND, FIRST_HOLD) is None
    assert paths.better(SECOND, 2 * FIRST_HOLD) == FIRST


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3 * FIRST_REST)), max_size=40))
def test_no_path_rests_for_ever(moves: list[tuple[int, int, int]]) -> None:
    paths, now = Paths(2, 2), 0
    for what, which, wait in moves:
        now += wait
        if what == 0:
            paths.stands(paths.order[which])
        else:
            paths.failed(paths.order[which], now, stood=what == 1)
        chosen = paths.choose(now)
        better = None if chosen is None else paths.better(chosen, now)
        assert better is None or paths.order.index(better) < paths.order.index(chosen)  # type: ignore[arg-type]
    assert paths.choose(now + LONGEST_REST) == FIRST
    assert paths.better(SECOND, now + LONGEST_HOLD) == FIRST
