"""Lines between GPUs: how many there may be, and how the host waits for a message that only a stream waits for."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.mesh.collective import explain
from penstock.runtime.transport import nccl
from penstock.runtime.transport.channel import ChannelKey
from penstock.runtime.transport.nccl import DeviceLines, NcclMessageHandle, lines_of, require_queues
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
        NcclMessageHandle(work, NoStreams(), threading.Event()).wait(timedelta(seconds=0.01))
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
    with pytest.raises(RuntimeFailure, match=r"13 streams on rank 1.*its GPU has 8 queues.*CONNECTIONS=32 before"):
        require_queues(plain, 1)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    require_queues(plain, 1)
    with pytest.raises(RuntimeFailure, match="fewer stages per rank"):
        require_queues(chunks, 1)


def test_an_aborted_message_that_counts_as_completed_is_not_taken() -> None:
    given_up = threading.Event()
    aborted = NcclMessageHandle(Never(0), NoStreams(), given_up)
    given_up.set()
    with pytest.raises(RuntimeError, match="the lines of this rank were given up"):
        aborted.wait(timedelta(seconds=1))
    assert not aborted.has_ended


class Groups:
    """Groups of two ranks, and what torch.distributed does with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
        self.aborted: list[Any] = []
        self.environment: dict[str, str | None] = {}
        self.kept: list[Any] = []
        monkeypatch.setattr(nccl, "groups_of", self.made)
        monkeypatch.setattr(nccl, "dist", self)
        self._work = work

    def made(self, sets: Any, *_: Any) -> dict[Any, Any]:
        self.environment = {name: os.environ.get(name) for name in nccl.WITHOUT_WATCHDOG}
        self.kept = [Group(self) for _ in sets]
        return dict(zip(sets, self.kept, strict=True))

    def get_rank(self, group: Any) -> int:
        return 0

    def send(self, *_: Any, **__: Any) -> None: ...

    recv = send

    def isend(self, *_: Any, **__: Any) -> Any:
        return self._work

    irecv = isend


class Group:
    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def abort(self) -> None:
        self._groups.aborted.append(self)


def lines_over(groups: Groups) -> DeviceLines:
    made: Any = lines_of(wire(ps.build("1f1b", 2, 4)))
    return DeviceLines(None, made, "nccl", 1.0, torch.device("cpu"), NoStreams())  # type: ignore[arg-type]


FORWARD, BACKWARD = (ChannelKey(0, 1, True, 0), 1), (ChannelKey(1, 0, False, 0), 1)
PACKET: Any = SimpleNamespace(buffer=None, free=None)


def test_lines_are_given_up_all_at_once_and_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    groups = Groups(monkeypatch, Never(0))
    lines = lines_over(groups)
    assert groups.environment == nccl.WITHOUT_WATCHDOG
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
    before = lines.receive(*BACKWARD, PACKET, 1.0)
    lines.give_up()
    lines.give_up()
    assert len(groups.aborted) == len(groups.kept) == 2
    with pytest.raises(RuntimeError, match="given up"):
        before.wait(timedelta(seconds=1))
    for post in (lambda: lines.send(*FORWARD, PACKET, 1.0), lambda: lines.receive(*BACKWARD, PACKET, 1.0)):
        with pytest.raises(PeerLost, match="rank 0 lost its connection to rank 1"):
            post()


def test_lines_are_given_up_though_a_rank_stands_still_in_posting_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "POSTING", 0.01)
    groups = Groups(monkeypatch, Never(0))
    lines = lines_over(groups)
    with lines._posting:
        lines.give_up()
    assert len(groups.aborted) == 2


@pytest.mark.parametrize(
    ("work", "gives_up"), [(Never(2), False), (Never(float("inf")), True), (Never(0, "NCCL"), True)]
)
def test_what_is_under_way_at_the_end_of_a_pipeline_is_given_up(
    work: Never, gives_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of the process would wait for the device, and that for what never comes."""
    monkeypatch.setattr(nccl, "LEAVING", 0.05)
    groups = Groups(monkeypatch, work)
    lines = lines_over(groups)
    lines.send(*FORWARD, PACKET, 1.0)
    lines.close()
    assert bool(groups.aborted) == gives_up
