"""Values of the wrong kind given to the top level's functions: an error of ours that says what was needed."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps

pytestmark = pytest.mark.unit


@pytest.mark.xfail(strict=True, reason="an AttributeError from inside")
@pytest.mark.parametrize("ending", [".json", ".txt", ".csv"])
def test_a_timeline_is_no_schedule_to_save(ending: str, tmp_path: Path) -> None:
    with pytest.raises(ps.ScheduleError, match="not a Timeline"):
        ps.save(ps.simulate(ps.build("1f1b", 2, 2)), tmp_path / f"made{ending}")
