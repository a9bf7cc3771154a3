"""Hosts whose link turns late while they train find it and change places: a sample of `pipemorph/moved.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.pipemorph import moved
from labs import needs_lab

pytestmark = [pytest.mark.multiproc, pytest.mark.alone, needs_lab]


@pytest.mark.nightly
def test_a_late_link_of_a_ring_is_found_and_moved_away_from(tmp_path: Path) -> None:
    found = moved.run(tmp_path, moved.Order(steps=9, late_from=4, probe_every=1, width=64))
    (done,) = found["done"]
    assert list(done["late"]) == ["2:3"]
    assert done["use"] == "unused"
    assert done["after_step"] < 8
    assert len(found["losses"]) == 9
