"""Which interface next: best first, failed ones rest, and back to a better one only after it was well for a while."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.transport.delegate.carrier.lanes import (
    HOLD,
    LONGEST_HOLD,
    LONGEST_REST,
    REST,
    Paths,
)

pytestmark = pytest.mark.unit


def test_a_failed_path_gives_way_to_the_next_and_rests_longer_each_time() -> None:
    paths = Paths(3)
    assert paths.choose(0) == 0
    paths.failed(0, 0, stood=False)
    assert paths.choose(0) == 1
    assert paths.choose(2 * REST) == 0
    for path in (1, 2):
        paths.failed(path, 0, stood=False)
    assert paths.choose(0) is None
    for _ in range(20):
        paths.failed(0, 0, stood=False)
    assert paths.choose(LONGEST_REST - 1) == 1
    assert paths.choose(LONGEST_REST) == 0
    paths.failed(0, 0, stood=False)
    paths.stands(0)
    assert paths.choose(REST) == 0


def test_a_better_path_must_have_been_well_for_a_while_and_longer_each_time_it_was_lost() -> None:
    paths = Paths(2)
    paths.failed(0, 0, stood=True)
    assert paths.better(1, 2 * HOLD - 1) is None
    assert paths.better(1, 2 * HOLD) == 0
    assert paths.better(0, 2 * HOLD) is None
    paths.stands(0)
    paths.failed(0, 0, stood=True)
    assert paths.better(1, 2 * HOLD) is None
    assert paths.better(1, 4 * HOLD) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 6 * REST)), max_size=40))
def test_no_path_rests_for_ever(moves: list[tuple[int, int, int]]) -> None:
    paths, now = Paths(4), 0
    for what, path, wait in moves:
        now += wait
        if what == 0:
            paths.stands(path)
        else:
            paths.failed(path, now, stood=what == 1)
        chosen = paths.choose(now)
        better = None if chosen is None else paths.better(chosen, now)
        assert better is None or chosen is None or better < chosen
    assert paths.choose(now + LONGEST_REST) == 0
    assert paths.better(1, now + LONGEST_HOLD) == 0
