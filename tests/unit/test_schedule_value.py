"""The schedule value: immutable, hashable, and what it can say of itself."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

import penstock as ps
from penstock.schedule import Op, circular, one_to_one, v_shape

pytestmark = pytest.mark.unit


def test_counts() -> None:
    schedule = ps.build("zb-v", 4, 8)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (4, 8, 8)
    assert schedule.num_ops == 8 * 8 * 3
    assert schedule.stages_of(1) == (1, 6)
    assert schedule.rank_of(6, 0) == 1
    assert schedule.splits_backward()
    assert not ps.build("1f1b", 4, 8).splits_backward()


def test_it_is_a_value() -> None:
    one, same = ps.build("zb", 3, 6), ps.build("zb", 3, 6)
    assert one == same
    assert hash(one) == hash(same)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != ps.build("zb", 3, 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "other"  # type: ignore[misc]
    assert one.renamed("other").name == "other"


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "-a", "é", "a\n"])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(ps.ScheduleError, match="use letters, digits"):
        ps.build("1f1b", 2, 2).renamed(name)


def test_forward_only() -> None:
    schedule = ps.build("zb-h1", 2, 3).forward_only()
    assert schedule.order == (tuple(Op("F", 0, m) for m in range(3)), tuple(Op("F", 1, m) for m in range(3)))


def test_placements() -> None:
    assert one_to_one(3).pipelines == ((0, 1, 2),)
    assert circular(2, 5).pipelines == ((0, 1, 0, 1, 0),)
    assert v_shape(3).pipelines == ((0, 1, 2, 2, 1, 0),)
    assert ps.Placement(((0, 1), (1, 0))).stages_of(0) == (0, 1)


@pytest.mark.parametrize(
    ("pipelines", "message"),
    [
        ((), "a placement needs at least one pipeline with one stage"),
        (((),), "a placement needs at least one pipeline with one stage"),
        (((0, 1), (0,)), "all pipelines hold the same stages, but their lengths are"),
        (((0, -1),), "a placement names a negative rank"),
    ],
)
def test_wrong_placements(pipelines: tuple, message: str) -> None:
    with pytest.raises(ps.ScheduleError, match=message):
        ps.Placement(pipelines)
