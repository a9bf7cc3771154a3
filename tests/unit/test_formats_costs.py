"""Costs files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.formats.costs import costs_from_json, costs_to_json, load_costs

pytestmark = pytest.mark.unit

PLAIN: dict[str, Any] = {"f": 10, "i": [10, 12], "w": 5}


def test_numbers_stand_for_every_stage() -> None:
    assert costs_from_json(json.dumps(PLAIN), 2) == ps.Costs(f=[10, 10], i=[10, 12], w=[5, 5])
    full = PLAIN | {"b": 9, "activation": 3, "freed_by_input": 0.25, "format": "penstock-costs", "version": 1}
    expected = ps.Costs(f=[10, 10], i=[10, 12], w=[5, 5], b=[9, 9], activation=[3, 3], freed_by_input=0.25)
    assert costs_from_json(json.dumps(full), 2) == expected


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"i": [10]}, "field 'i' has 1 entries; give one per stage, 2 in all"),
    ({"i": "ten"}, "field 'i': expected a number or one number per stage, got \"ten\""),
    ({"i": [True, 1]}, "field 'i[0]': expected a number or one number per stage, got true"),
    ({"i": -1}, "i of stage 0 is -1.0: give a number of at least 0"),
    ({"freed_by_input": 2}, "freed_by_input is 2.0: give a share from 0 to 1"),
    ({"freed_by_input": True}, "field 'freed_by_input': expected a share from 0 to 1, got true"),
    ({"other": {"U": [1]}}, "field 'other.U' has 1 entries; give one per stage, 2 in all"),
    ({"other": {"U": "long"}}, "field 'other': expected the milliseconds of each registered kind, or one number"),
    ({"overlap": {"f": 1, "b": 1, "measured": [[0, 1]]}}, "field 'overlap.measured[0]': expected [stage of F, stage"),
    ({"uneven": 3}, "field 'uneven': expected one factor per microbatch, like [1, 2.5], or"),
    ({"version": 2}, "field 'version': expected a version that this Penstock reads, 1, got 2"),
    ({"format": "x"}, "costs are a JSON object"),
    ({"speed": 1}, "field 'speed' is unknown; the fields are f, i, w, b, activation"),
]


def test_wrong_costs_are_named() -> None:
    for change, message in WRONG:
        with pytest.raises(ps.CostError) as caught:
            costs_from_json(json.dumps(PLAIN | change), 2)
        assert str(caught.value).startswith(message)


def test_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for content, message in {
        b"{": "not JSON",
        b"[]": "costs are a JSON",
        b'{"f": 1}': "field 'i' is missing",
        b"\xff": "not text",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ps.CostError) as caught:
            load_costs(path, 2)
        assert str(caught.value).startswith(f"{path}: {message}")
    with pytest.raises(ps.CostError, match=r"No such file.*penstock tune --profile-only --out .*a preset: .*gpt2"):
        load_costs(tmp_path / "none.json", 2)


def test_written_costs_are_read_back() -> None:
    rows = {"b": [3, 4], "activation": [5, 6], "message_bytes": [7, 0], "update_bytes": [8, 9], "take_over": [0.5, 1]}
    state = {"weight_bytes": [20, 22], "gradient_bytes": [40, 44], "optimizer_bytes": [120, 132]}
    other = {("U", 0): 2.5, ("U", 1): 3.5, "GATHER": 1.0}
    full = ps.Costs([1, 2], [1, 2], [1, 2], freed_by_input=0.25, kept_by_recompute=0.1, other=other, **rows, **state)
    for costs in (ps.Costs.uniform(3), full, ps.cost.costs_preset("amdp-gpt", 4), ps.cost.costs_preset("gpt2-7b")):
        read = costs_from_json(costs_to_json(costs), costs.num_stages)
        assert read == costs
        assert costs_to_json(read) == costs_to_json(costs)


def test_a_kind_that_costs_something_on_one_stage_alone_costs_nothing_on_others() -> None:
    costs = ps.Costs([1, 2], [1, 2], [1, 2], other={("U", 1): 3.5, "U": 1.0, ("V", 0): 2.0})
    read = costs_from_json(costs_to_json(costs), 2)
    for kind, stage in (("U", 0), ("U", 1), ("V", 0), ("V", 1)):
        assert read.duration(kind, stage) == costs.duration(kind, stage)


def test_what_a_file_cannot_hold() -> None:
    with pytest.raises(ps.CostError, match="kind OFFLOAD takes memory"):
        costs_to_json(ps.Costs([1], [1], [1], other={"OFFLOAD": (1.0, -1.0)}))
