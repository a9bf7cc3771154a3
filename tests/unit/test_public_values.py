"""What the top level shows of itself: every public name in `dir`, and reprs that a terminal can show."""

from __future__ import annotations

import pytest

import penstock as ps

pytestmark = pytest.mark.unit


@pytest.mark.xfail(strict=True, reason="every op is spelled out")
def test_a_repr_is_short_however_much_a_value_holds() -> None:
    schedule = ps.build("1f1b", 8, 64)
    for value in (schedule, ps.simulate(schedule), ps.Costs.uniform(1000)):
        assert len(repr(value)) < 2_000


@pytest.mark.xfail(strict=True, reason="what is lazily imported is not there")
def test_dir_has_every_public_name() -> None:
    assert set(ps.__all__) <= set(dir(ps))
