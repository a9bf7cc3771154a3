"""Connections cut in the middle of a message, delegates killed, ranks gone: each message once all the same, or an
error in time that says who; and never a process left over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from delegate_ranks import Chain, Ended, exchange, run_delegate_ranks
from listening import runs
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.transport.delegate import DelegateTransport
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.multiproc


def values(outcomes: list[Ended]) -> list[Any]:
    assert all(not one.error for one in outcomes), "\n".join(one.text for one in outcomes)
    return [one.value for one in outcomes]


# Killed delegates.


def killed(rank: int, gather: Any) -> tuple[str, str]:
    """Rank 0's delegate is killed while rank 0 computes."""
    chain = Chain(2, 4)
    transport = DelegateTransport(rank, gather, chain.tags, PATIENCE)
    try:
        exchange(transport, chain, rank, 0, lambda m: (10,))
        gather(None)
        if rank == 0:
            for pid in transport.pids.values():
                os.kill(pid, signal.SIGKILL)
        exchange(transport, chain, rank, 1, lambda m: (1 << 18,))
        return "", ""
    except RuntimeFailure as error:
        return type(error).__name__, str(error)
    finally:
        transport.close()


@pytest.mark.slow
def test_a_killed_delegate_is_an_error_that_names_it_and_the_other_rank_knows_who_is_gone() -> None:
    first, second = values(run_delegate_ranks(2, killed))
    assert first[0] == "RuntimeFailure"
    assert "the delegate of rank 0 ended with exit code -9" in first[1]
    assert second[0] == "PeerLost"
    assert "rank 0 is gone" in second[1]


# Connections that go.


class Proxy:
    """A TCP proxy that cuts a connection after so many bytes went through it, a given number of times."""

    def __init__(self, target: tuple[str, int], address: str, cuts: list[int]) -> None:
        self._target, self._cuts = target, cuts
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            ours, _ = self._listener.accept()
            theirs = socket.create_connection(self._target)
            cut = self._cuts.pop(0) if self._cuts else None
            for one, other, after in ((ours, theirs, cut), (theirs, ours, None)):
                threading.Thread(target=self._carry, args=(one, other, after), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket, after: int | None) -> None:
        carried = 0
        try:
            while data := one.recv(1 << 18):
                other.sendall(data)
                carried += len(data)
                if after is not None and carried >= after:
                    break
        except OSError:
            pass
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def through(gather: Any, rank: int, place: int, cuts: list[int]) -> Callable[[Any], list[Any]]:
    """`gather`, with proxies before one interface of the other ranks' delegates."""

    def wrapped(value: Any) -> list[Any]:
        told = []
        for other, (*facts, ends) in enumerate(gather(value)):
            if other != rank:
                ends = [
                    (host, Proxy((host, port), host, cuts).port if at == place else port)
                    for at, (host, port) in enumerate(ends)
                ]
            told.append((*facts, ends))
        return told

    return wrapped


def cut(rank: int, gather: Any, interfaces: tuple[str, ...], cuts: list[int]) -> dict[str, Any]:
    chain = Chain(2, 5)
    meet = through(gather, rank, 0, list(cuts)) if rank == 0 else gather
    transport = DelegateTransport(rank, meet, chain.tags, PATIENCE, interfaces=interfaces, num_lanes=1)
    with closing(transport):
        came = sum(exchange(transport, chain, rank, step, lambda m: (1 << 22,)) for step in range(2))
        counters = transport.counters
        gather(None)
        return {"came": came, **vars(counters)}


@pytest.mark.slow
@pytest.mark.parametrize("interfaces", [("127.0.0.1",), ("127.0.0.2", "127.0.0.3")])
def test_connections_cut_in_the_middle_of_messages_of_16_mb(interfaces: tuple[str, ...]) -> None:
    mb = 1 << 20
    found = values(run_delegate_ranks(2, cut, interfaces, [9 * mb, 40 * mb, 3 * mb + 17]))
    assert [one["came"] for one in found] == [10, 10]
    sender = found[0]
    assert sender["reconnects"] + sender["failovers"] >= 2
    assert sender["resent"] >= 2
    assert [one["messages"] for one in found] == [10, 10]  # nothing came twice to a rank


def other_interface(rank: int, gather: Any) -> dict[str, Any]:
    """The preferred interface of rank 1 accepts and never answers: all goes by the other one."""
    deaf = socket.create_server(("127.0.0.2", 0))

    def meet(value: Any) -> list[Any]:
        told = gather(value)
        if rank == 0:
            *facts, ends = told[1]
            told[1] = (
                *facts,
                [(host, deaf.getsockname()[1] if at == 0 else port) for at, (host, port) in enumerate(ends)],
            )
        return told

    chain = Chain(2, 3)
    interfaces = ("127.0.0.2", "127.0.0.3")
    transport = DelegateTransport(rank, meet, chain.tags, PATIENCE, interfaces=interfaces, num_lanes=1)
    with closing(transport):
        came = exchange(transport, chain, rank, 0, lambda m: (100,))
        gather(None)
        return {
            "came": came,
            "events": [str(one) for one in transport.link_events()],
            "notices": transport.notices,
        }


@pytest.mark.slow
def test_an_interface_that_never_answers_is_left_for_the_next() -> None:
    first, second = values(run_delegate_ranks(2, other_interface))
    assert (first["came"], second["came"]) == (3, 3)
    assert "LinkDown" in first["events"][0]
    assert "(0, 1)" in first["events"][0]
    # Where the other end takes seconds to start, the second interface may count as dead too, and is tried again.
    assert first["notices"][0] == ("messages of rank 0 to rank 1 go from 127.0.0.3 to 127.0.0.3: nothing was lost")


# Ranks that go or stand still.


def leaver(rank: int, gather: Any) -> tuple[str, str]:
    chain = Chain(2, 4)
    transport = DelegateTransport(rank, gather, chain.tags, 60.0)
    exchange(transport, chain, rank, 0, lambda m: (10,))
    gather(None)  # rank 0 has everything: what a rank had not yet sent on dies with it
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    chain.begin(transport, rank)
    try:
        for _ in range(4):
            transport.wait([], lambda: "rank 0 waits to run B0 of stage 0, which needs B0 of stage 1 from rank 1")
    except (PeerLost, DeadlineExceeded) as error:
        return type(error).__name__, str(error)
    finally:
        transport.close()
    return "", ""


def test_a_dead_rank_is_told_long_before_the_deadline() -> None:
    first, second = run_delegate_ranks(2, leaver, deadline=250)
    assert not first.error, first.text
    assert first.value[0] == "PeerLost"
    assert "rank 1 is gone" in first.value[1]
    assert "B0 of stage 1 from rank 1" in first.value[1]
    assert second.value is None


def stands_still(rank: int, gather: Any) -> tuple[str, str]:
    chain = Chain(2, 4)
    transport = DelegateTransport(rank, gather, chain.tags, PATIENCE)
    try:
        exchange(transport, chain, rank, 0, lambda m: (10,))  # its delegates start, which may take long
        gather(None)
        if rank == 1:
            for pid in transport.pids.values():
                os.kill(pid, signal.SIGSTOP)
        gather(None)
        if rank == 1:
            gather(None)  # returns when rank 0 has given up
            return "", ""
        transport._timeout = 2.0
        chain.begin(transport, rank)
        transport.wait([], lambda: "rank 0 waits for rank 1")
    except (PeerLost, DeadlineExceeded) as error:
        gather(None)
        return type(error).__name__, str(error)
    finally:
        transport.close()
    return "", ""


@pytest.mark.slow
def test_a_rank_whose_delegate_stands_still_is_named_at_the_deadline() -> None:
    first, _ = values(run_delegate_ranks(2, stands_still))
    assert first[0] == "DeadlineExceeded"
    assert "rank 0 waits for rank 1" in first[1]


SCRIPT = """
import os, sys, time
from delegate_ranks import Chain
from penstock.runtime.transport.delegate import DelegateTransport
transport = DelegateTransport(0, lambda value: [value], Chain(1, 1).tags, 60.0)
transport.prepare([(0, 0)])
if os.fork() == 0:  # holds every descriptor that the rank had, as a data loader's worker would
    time.sleep(600)
    os._exit(0)
if sys.argv[1] == "stopped":
    for pid in transport.pids.values():
        os.kill(pid, 19)
        os.waitpid(pid, os.WUNTRACED)  # until it has stopped: the kernel wakes only such ones when their parent ends
print(*transport.pids.values(), flush=True)  # from here on the test kills it
time.sleep(600)
"""


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("state", ["running", "stopped"])
def test_delegates_end_with_their_rank_however_it_ends(state: str) -> None:
    paths = os.pathsep.join(["tests", *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    rank = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, state], stdout=subprocess.PIPE, text=True, env=environment, process_group=0
    )
    try:
        assert rank.stdout is not None
        pids = [int(word) for word in rank.stdout.readline().split()]
        assert len(pids) == 1
        rank.kill()
        rank.wait()
        wait_until(
            lambda: not any(map(runs, pids)), lambda: f"of {pids} there are {[pid for pid in pids if runs(pid)]}"
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)  # the fork
        rank.wait()
        if rank.stdout is not None:
            rank.stdout.close()
