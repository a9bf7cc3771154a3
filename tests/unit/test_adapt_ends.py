"""What an agent's threads and processes do when a disk is full, a store stands still or nonsense comes in: each is
noticed, training goes on, and nothing of ours is left after `close`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from test_adapt_agents import COSTS, HEALTHY, LATE, NUM_RANKS, START, Group, group

from listening import runs
from penstock.control import Job
from penstock.runtime.adapt.coordinator import CONTROL, ITERATIONS, TIMELINES, ControllerProcess, RunLog
from penstock.runtime.adapt.store import RedisStore, TorchStore
from stores import Server, running
from waiting import PATIENCE, wait_until

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full"),
]

DEADLINE = PATIENCE


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("penstock-")}


def children() -> set[int]:
    found: set[int] = set()
    for each in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(OSError):  # a thread that ended meanwhile
            found |= {int(pid) for pid in (each / "children").read_text().split()}
    return found


@contextmanager
def nothing_left() -> Iterator[None]:
    """No thread and no process of ours is left that was not there before."""
    threads, processes = ours(), children()
    yield
    assert ours() <= threads
    assert children() <= processes


def step_until(ranks: Group, what: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < end, [one.notices for one in ranks.agents]
        ranks.step(LATE, heard=False)
        time.sleep(0.02)


# A full disk.


@pytest.mark.slow
@pytest.mark.parametrize("name", [CONTROL, ITERATIONS, TIMELINES])
def test_a_full_disk_ends_the_records_with_one_notice_and_adapting_goes_on(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    with nothing_left(), group(tmp_path) as ranks:
        step_until(ranks, lambda: ranks.agents[0].number >= 1)
        step_until(ranks, lambda: bool(ranks.agents[0].notices))
        for _ in range(3):
            ranks.step(LATE, heard=False)
        (notice,) = ranks.agents[0].notices
        assert notice.startswith(f"records in {tmp_path} end here: {name}: No space left on device")
        assert all(one.notices == [] for one in ranks.agents[1:])


def test_a_disk_that_fills_leaves_whole_lines(tmp_path: Path) -> None:
    """The kernel takes a part of the line that the limit cuts."""
    said: list[str] = []
    records = RunLog(tmp_path, said.append)
    line = json.dumps({"event": "x" * 90})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (350, before[1]))
    try:
        for _ in range(5):
            records.write(CONTROL, line)
            records.write(ITERATIONS, '{"iteration": 1}')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    records.write(CONTROL, line)
    records.close()
    assert said == [f"records in {tmp_path} end here: {CONTROL}: File too large; training goes on"]
    assert (tmp_path / CONTROL).read_text() == f"{line}\n" * 3
    assert (tmp_path / ITERATIONS).read_text() == '{"iteration": 1}\n' * 3


# A controller whose words cannot be taken in.


def test_a_reader_that_cannot_go_on_is_noticed_and_ends_the_controller() -> None:
    said: list[str] = []
    job = Job(COSTS, START)

    def take(line: str) -> None:
        raise OSError(28, "No space left on device")

    with nothing_left():
        decider = ControllerProcess(take, said.append)
        decider.begin(job)
        end = time.monotonic() + DEADLINE
        while not said and time.monotonic() < end:
            decider.feed(json.dumps({"record": {"iteration": 0, "number": 0}}))
            time.sleep(0.01)
        decider.close()
    assert len(said) == 1
    assert "No space left on device" in said[0]


def test_a_controller_that_still_starts_when_a_short_run_ends_gives_its_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine it was killed before it had read anything, and a run of few steps had no records."""
    monkeypatch.setattr("penstock.runtime.adapt.coordinator.END", 0.05)
    came: list[str] = []
    with nothing_left():
        job = Job(COSTS, START)
        decider = ControllerProcess(came.append, came.append)
        decider.begin(job)
        os.kill(decider._process.pid, signal.SIGSTOP)
        decider.feed(json.dumps({"record": {"iteration": 0, "number": 0, "links": {}}}))
        goes_on = threading.Timer(0.5, os.kill, (decider._process.pid, signal.SIGCONT))
        goes_on.start()
        decider.close()
        goes_on.join()
    assert [json.loads(line)["record"]["iteration"] for line in came if "record" in line] == [0]


KILLED = """
import os, time
from penstock.runtime.adapt.coordinator import ControllerProcess
decider = ControllerProcess(print, print)
forked = os.fork()
if forked:
    print(decider._process.pid, forked, flush=True)
time.sleep(600)
"""


def test_a_controller_ends_with_its_rank_while_another_process_holds_its_input() -> None:
    """A rank that was killed left it running: until it had decided, and its input had ended."""
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        controller, forked = map(int, rank.stdout.readline().split())
        try:
            assert runs(controller)
            rank.kill()
            wait_until(lambda: not runs(controller), lambda: f"controller {controller} still runs", seconds=20)
        finally:
            rank.kill()
            os.kill(forked, signal.SIGKILL)


class Garbled(TorchStore):
    """A store from which one queue gives nonsense."""

    def __init__(self, queue: str) -> None:
        super().__init__(dist.HashStore())
        self._garbled = queue

    def pop(self, queue: str) -> bytes | None:
        return b"\xff{" if queue == self._garbled else super().pop(queue)


@pytest.mark.slow
@pytest.mark.parametrize("queue", ["test/plans/2", "test/reports"])
def test_nonsense_from_the_store_ends_adapting_with_one_notice(tmp_path: Path, queue: str) -> None:
    with nothing_left(), group(tmp_path, stores=[Garbled(queue)] * NUM_RANKS) as ranks:
        step_until(ranks, lambda: all(one.notices for one in ranks.agents))
        assert [len(one.notices) for one in ranks.agents] == [1] * NUM_RANKS
        assert {one.number for one in ranks.agents} == {0}


# A store that stands still, or is gone.


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as server:
        yield server


def stands_still(server: Server) -> None:
    server.signal(signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("fate", [stands_still, Server.kill])
def test_no_thread_outlives_close_when_the_store_is_gone(
    tmp_path: Path, server: Server, fate: Callable[[Server], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.adapt.store.ANSWER_S", 1.0)  # how long a Redis may take to answer
    with nothing_left():
        stores = [RedisStore(server.address) for _ in range(NUM_RANKS)]
        with group(tmp_path, stores=stores) as ranks:
            for _ in range(3):
                ranks.step(HEALTHY)
            fate(server)
            for _ in range(3):
                ranks.step(HEALTHY, heard=False)


# A decider that stands still.


@pytest.mark.slow
def test_a_controller_that_stands_still_does_not_hold_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.adapt.coordinator.END", 0.2)
    with nothing_left(), group(tmp_path) as ranks:
        ranks.step(HEALTHY)
        coordinator = ranks.agents[0]._coordinator
        assert coordinator is not None
        pid = coordinator._controller_process._process.pid
        os.kill(pid, signal.SIGSTOP)
        for _ in range(200):  # more than a pipe holds: whoever feeds it stands still, too
            ranks.step(HEALTHY, heard=False)
