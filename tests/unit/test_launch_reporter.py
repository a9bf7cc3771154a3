"""A failed rank's last word where the store does not answer, as behind an interface that died."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.runtime.errors import DeadlineExceeded, PeerLost
from penstock.runtime.launch.child import StoreReportSink
from penstock.runtime.launch.failures import FailureReport


class Unreachable:
    """A store whose answers never come; `end` lets those that wait go."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def compare_set(self, *_: Any) -> bytes:
        self.end.wait(60)
        raise RuntimeError("gone")

    check = compare_set


@pytest.mark.slow
@pytest.mark.parametrize("error", [DeadlineExceeded("nothing came"), PeerLost("rank 0 is gone")])
def test_a_rank_speaks_for_itself(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    store: Any = Unreachable()
    StoreReportSink(store, patience=0.1).take(FailureReport.of(error, 1))
    store.end.set()
    assert capsys.readouterr().err == f"penstock: rank 1 failed: {type(error).__name__}: {error}\n"
