"""Lines between GPUs: how many there may be, and how the host waits for a message that only a stream waits for."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.mesh.process_group import explain
from penstock.runtime.transport.nccl import OnALine, lines_of, require_queues
from penstock.runtime.transport.wiring import wire


class Never:
    """A message that has come after so many looks, or never."""

    def __init__(self, looks: float, error: str = "") -> None:
        self.left, self.error = looks, error

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


class NoStreams:
    def receiving(self, free: Any) -> Any:
        return nullcontext()

    def ending(self) -> Any:
        return nullcontext()

    def used(self, buffer: Any) -> Any:
        return None


def failure(work: Never) -> RuntimeFailure | None:
    try:
        OnALine(work, NoStreams()).wait(timedelta(seconds=0.01))
    except RuntimeError as error:
        return explain(error, 0, 1, "a message", 0.01)
    return None


def test_a_message_that_never_comes_meets_the_deadline_and_one_of_a_line_that_broke_names_its_end() -> None:
    assert failure(Never(3)) is None
    late = failure(Never(float("inf")))
    assert isinstance(late, DeadlineExceeded)
    assert "rank 0 waited 0.01 s for a message from rank 1" in str(late)
    broken = failure(Never(0, "NCCL communicator was aborted on rank 1"))
    assert isinstance(broken, PeerLost)
    assert str(broken) == "rank 0 lost its connection to rank 1 while it waited for a message"


def test_a_rank_with_more_lines_than_queues_is_refused_and_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, chunks = (lines_of(wire(ps.build("interleaved-1f1b", 4, 8, num_stages=n))) for n in (8, 32))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    few = lines_of(wire(ps.build("1f1b", 2, 4)))
    require_queues(few, 0)
    with pytest.raises(RuntimeFailure, match=r"13 streams on rank 1.*gives its GPU 8 queues.*CONNECTIONS=32 before"):
        require_queues(plain, 1)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    require_queues(plain, 1)
    with pytest.raises(RuntimeFailure, match="fewer stages per rank"):
        require_queues(chunks, 1)
