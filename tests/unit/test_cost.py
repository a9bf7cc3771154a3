"""Costs and links: defaults, and refusals that say what was given."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

import penstock as ps
from penstock.cost import LinkCondition

pytestmark = pytest.mark.unit


def test_b_is_i_plus_w_unless_given() -> None:
    assert ps.Costs(f=[1, 2], i=[3, 4], w=[5, 6]).b == (8, 10)
    assert ps.Costs(f=[1, 2], i=[3, 4], w=[5, 6], b=[7, 7]).b == (7, 7)


def test_uniform() -> None:
    costs = ps.Costs.uniform(num_stages=3, f=10, i=20, w=30)
    assert costs == ps.Costs(f=[10] * 3, i=[20] * 3, w=[30] * 3)
    assert (costs.num_stages, costs.activation, costs.freed_by_input) == (3, (1, 1, 1), 0.5)
    assert [costs.duration(kind, 1) for kind in "FIWB"] == [10, 20, 30, 50]


def test_what_i_and_w_free_adds_up_to_what_f_keeps() -> None:
    costs = ps.Costs.uniform(1, activation=8, freed_by_input=0.25)
    assert [costs.memory_change(kind, 0) for kind in "FIWB"] == [8, -2, -6, -8]


def test_arrays_are_welcome() -> None:
    costs = ps.Costs(f=np.ones(2), i=np.ones(2), w=np.ones(2), b=np.ones(2, np.float32), activation=np.arange(2))
    assert costs == ps.Costs(f=[1, 1], i=[1, 1], w=[1, 1], b=[1, 1], activation=[0, 1])
    assert ps.Links({(np.int64(0), np.int64(1)): np.float32(2)}).delay(0, 1) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"f": [], "i": [], "w": []}, "costs need at least one stage"),
        ({"i": [1]}, "i has 1 entries; give one per stage, 2 in all"),
        ({"b": [1, 2, 3]}, "b has 3 entries; give one per stage, 2 in all"),
        ({"activation": [1]}, "activation has 1 entries; give one per stage, 2 in all"),
        ({"w": [1, -2]}, "w of stage 1 is -2.0: give a number of at least 0"),
        ({"f": [math.nan, 1]}, "f of stage 0 is nan: give a number of at least 0"),
        ({"f": [math.inf, 1]}, "f of stage 0 is inf: give a number of at least 0"),
        ({"f": 10}, "f is 10: give one number per stage"),
        ({"f": "ab"}, "f is 'ab': give one number per stage"),
        ({"f": None}, "f is None: give one number per stage"),
        ({"f": [10**400, 1]}, "f is [1"),
        ({"freed_by_input": 1.5}, "freed_by_input is 1.5: give a share from 0 to 1"),
        ({"freed_by_input": math.nan}, "freed_by_input is nan: give a share from 0 to 1"),
        ({"freed_by_input": "half"}, "freed_by_input is 'half': give a share from 0 to 1"),
    ],
)
def test_wrong_costs(arguments: dict, message: str) -> None:
    with pytest.raises(ps.CostError) as caught:
        ps.Costs(**({"f": [1, 1], "i": [1, 1], "w": [1, 1]} | arguments))
    assert str(caught.value).startswith(message)


def test_uniform_needs_a_stage() -> None:
    with pytest.raises(ps.CostError, match="costs need at least one stage, a whole number, got 0"):
        ps.Costs.uniform(0)


def test_a_link_holds_both_ways_unless_told_apart() -> None:
    links = ps.Links({(0, 1): 20.0, (2, 1): 5.0, (1, 2): 7.0}, default=1.0)
    assert [links.delay(*pair) for pair in ((0, 1), (1, 0), (1, 2), (2, 1), (0, 2))] == [20, 20, 7, 5, 1]


@pytest.mark.parametrize(
    ("delays", "default", "message"),
    [
        ({(0, 1): -1.0}, 0.0, "the delay of link 0:1 is -1.0: give milliseconds of at least 0"),
        ({(0, 1): math.nan}, 0.0, "the delay of link 0:1 is nan"),
        ({(0, 1): math.inf}, 0.0, "the delay of link 0:1 is inf"),
        ({(0, 1): "late"}, 0.0, "the delay of link 0:1 is 'late': 'late' is not a number with a unit"),
        ({(1, 1): 1.0}, 0.0, "link 1:1 joins a rank to itself; name two ranks"),
        ({"0:1": 1.0}, 0.0, "link '0:1': name it by its two ranks, like (0, 1)"),
        ({(0, 1, 2): 1.0}, 0.0, "link (0, 1, 2): name it by its two ranks, like (0, 1)"),
        ({}, -2.0, "the default delay is -2.0: give milliseconds of at least 0"),
    ],
)
def test_wrong_links(delays: dict, default: float, message: str) -> None:
    with pytest.raises(ps.CostError) as caught:
        ps.Links(delays, default)
    assert str(caught.value).startswith(message)


def test_links_keep_what_they_were_given() -> None:
    delays = {(0, 1): 1.0}
    links = ps.Links(delays)
    delays[0, 1] = 9.0
    assert links.delay(0, 1) == 1.0


def test_links_are_one_value_however_they_are_given() -> None:
    ways = [
        ps.Links({(0, 1): 20.0}, default=1.0),
        ps.Links({(np.int64(0), 1): np.float32(20)}, default="1ms"),
        ps.Links({(0, 1): "latency:20ms"}, 1),
        ps.Links({(0, 1): LinkCondition.parse("20")}, LinkCondition.parse("latency:1ms")),
        ps.Links.parse("0:1=20", default=1.0),
    ]
    assert len(set(ways)) == 1
    assert {repr(each) for each in ways} == {"Links({(0, 1): 20.0}, default=1.0)"}
    assert eval(repr(ways[0]), {"Links": ps.Links}) == ways[0]
    assert pickle.loads(pickle.dumps(ways[0])) == ways[0]
    assert ways[0].is_constant
    assert ways[0] != ps.Links({(0, 1): 20.0}, default=1.0, base=0.5) != ps.Links({(0, 1): 20.0, (1, 0): 20.0}, 1.0)


def test_delays_are_asked_of_links_that_last() -> None:
    assert ps.Links() == ps.Links({}, default=0.0)
    for changing, shown in (
        (ps.Links({(0, 1): "latency:steps:0ms/0ms,1s/40ms"}), "0:1=latency:steps:0ms/0ms,1000ms/40ms"),
        (ps.Links({(0, 1): 20.0, (1, 2): "occupancy:5ms"}), "1:2=occupancy:5ms"),
        (ps.Links(default="loss:1%"), "default=loss:1%"),
        (ps.Links(base=0.5), "base=0.5ms"),
    ):
        assert not changing.is_constant
        with pytest.raises(ps.CostError, match="needs delays that do not change") as caught:
            changing.delay(0, 1)
        assert shown in str(caught.value)
        with pytest.raises(ps.CostError, match=r"ps\.plan needs delays that do not change"):
            ps.plan(ps.Costs.uniform(3), 3, 3, links=changing)
