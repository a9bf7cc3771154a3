"""Updates as ops where stages branch, or where ranks share them, with tied weights and without."""

from __future__ import annotations

from pathlib import Path

import pytest

import window_runs as runs
from penstock.runtime import RuntimeFailure

TIED = {"mllm": [(), (0, 5), (0, 2, 5), (1, 3)], "fork": [(), (0, 3), (0, 1, 2, 3)]}


@pytest.mark.parametrize("name", TIED)
def test_windows_are_steps_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    found = {tied: runs.unlike_steps(name, 4, tied) for tied in TIED[name]}
    found |= {("dynamic", *TIED[name][1]): runs.unlike_steps(name, 4, TIED[name][1], dispatch="dynamic")}
    found |= {("loaded", *TIED[name][1]): runs.unlike_when_loaded(name, 4, TIED[name][1], tmp_path)}
    assert not any(found.values()), found


def test_a_tied_stage_that_its_lowest_does_not_feed_is_refused() -> None:
    with pytest.raises(RuntimeFailure, match="whose lowest stage does not feed all other stages") as error:
        runs.pipeline("fork", 4, (1, 2))
    assert "1.up.weight, 2.up.weight of stages 1, 2" in str(error.value)
