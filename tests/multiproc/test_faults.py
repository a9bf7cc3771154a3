"""Ranks that are killed, or whose disk fills, while what they run changes: one message, nothing left, and the same
losses after they have gone on. `benchmarks/faults/kill.py` goes over every place; these are a sample.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fault_runs import Fault, apart, filling, may_mount, points, undisturbed, without_delegates, wrong
from tiers import others_nightly

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds what is left by /proc"),
    pytest.mark.timeout(600),
]

DELEGATE = "penstock.runtime.transport.delegate"


KILLED = [
    Fault("switching", "penstock.runtime.pipeline:Pipeline._switch", 1, "after", 1),
    Fault("delegating", f"{DELEGATE}.boxes:DelegateProcess.meet", 1, "after", 0),
    Fault("delegating", f"{DELEGATE}.transport:DelegateTransport.send", 3, "after", 1, "kill delegates"),
    Fault("handing over", "penstock.runtime.checkpoint.state_transfer:_exchange", 1, "before", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", others_nightly(KILLED, KILLED[:1]), ids=str)
def test_what_is_killed_goes_on_with_the_same_losses(fault: Fault, tmp_path: Path) -> None:
    expected = undisturbed(fault.phase, tmp_path / "plain")
    assert wrong(fault, apart(fault, tmp_path / "struck"), expected) == []


@pytest.mark.nightly
@pytest.mark.skipif(not may_mount(), reason="needs mounts: a disk that fills is a tmpfs of its own")
def test_a_full_disk_ends_with_one_message_and_the_older_checkpoint_goes_on(tmp_path: Path) -> None:
    fault = Fault("handing over", "penstock.runtime.checkpoint.state_transfer:_exchange", 1, "before", 0, "fill")
    outcome = apart(fault, tmp_path / "struck")
    assert outcome.code == 1
    assert wrong(fault, outcome, undisturbed(fault.phase, tmp_path / "plain")) == []


def test_every_place_of_the_list_is_there() -> None:
    """A function that is renamed must be renamed in the list: a place that is never reached shows nothing."""
    import importlib
    from operator import attrgetter

    faults = [*KILLED, *points(), *filling(), *without_delegates()]
    assert {fault.phase for fault in faults} == {"switching", "delegating", "handing over"}
    for where in {fault.at for fault in faults}:
        module, _, path = where.partition(":")
        assert callable(attrgetter(path)(importlib.import_module(module)))
