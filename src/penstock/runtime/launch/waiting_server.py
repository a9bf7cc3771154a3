"""A fork server that is forked ahead, from a process that has loaded what the ranks need and done nothing else.

    penstock train: loads torch --fork--> fork server, which waits
                    checks, reads data --order and descriptors--> --fork--> rank 0, rank 1, ...

A fork server of its own (`fork_server`) loads torch once more, which takes seconds. This one is there for a program
that is Penstock's own: what user code does before the fork (threads, CUDA, seeds) would be in every rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.runtime.launch import fork_server
from penstock.runtime.launch.child import LaunchEnvironment

__all__ = ["RankOrder", "WaitingServer"]

MOST_DESCRIPTORS = 8
ABOVE_STANDARD = 3
"""The first descriptor that is not stdin, stdout or stderr."""


class RankOrder:
    """In a rank: what it is to run. The program returns from all it was doing and calls it last of all."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order

    def run(self) -> int:
        """Runs the rank's program as the interpreter would, and returns the exit code."""
        try:
            fork_server.become(self._order)
        except KeyboardInterrupt:
            sys.excepthook(*sys.exc_info())
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except Exception:
            sys.excepthook(*sys.exc_info())
            return 1
        return 0


class WaitingServer:
    """The process that waits for an order, as the one that forked it sees it: what `Popen` is for one of its own."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self._pid, self._channel = pid, channel
        self._code: int | None = None

    @classmethod
    def fork(cls, preload: Sequence[str]) -> WaitingServer | RankOrder:
        """Forks this process, which has no thread of Python's but this one and has not used CUDA.

        Args:
            preload: modules that the ranks need and this process may not have loaded yet.

        Returns:
            Here, the process that waits. In every rank, later, what that is to do.
        """
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            return cls(pid, ours)
        ours.close()
        order = None
        try:
            order = _serve(theirs, preload)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        if order is None:
            os._exit(0)  # nothing of the program that was forked runs on here
        return RankOrder(order)

    def start(
        self, order: Mapping[str, Any], environment: Mapping[str, str], descriptors: Sequence[int], stderr: int
    ) -> socket.socket:
        """Sends the order and what the ranks inherit; returns the channel on which the server says how they fare.

        Args:
            environment: all of the ranks' variables. descriptors: those of the order. stderr: what the server has.
        """
        given = [1, stderr, *descriptors]
        numbers = struct.pack(f"{MOST_DESCRIPTORS}i", *given, *[-1] * (MOST_DESCRIPTORS - len(given)))
        whole = {**order, "descriptors": list(descriptors), "variables": dict(environment), "folder": os.getcwd()}
        with contextlib.suppress(OSError):  # it has ended already, which is seen next
            socket.send_fds(self._channel, [numbers], given)
            self._channel.sendall(json.dumps(whole).encode() + b"\n")
        return self._channel

    def kill(self) -> None:
        """Ends it at once, while it waits or loads."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code once it has ended, minus the signal of one that was killed."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def discard(self) -> None:
        """Ends it where it was not needed; nothing where it was."""
        self.kill()
        self._channel.close()
        self.wait()


def _serve(channel: socket.socket, preload: Sequence[str]) -> dict[str, Any] | None:
    """What the forked process does: waits for its order, then forks ranks as any fork server."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    for name in preload:
        importlib.import_module(name)
    numbers, received, _, _ = socket.recv_fds(channel, struct.calcsize(f"{MOST_DESCRIPTORS}i"), MOST_DESCRIPTORS)
    if not received:
        return None
    stdout, stderr, *descriptors = (_above_standard(number) for number in received)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    theirs = struct.unpack(f"{MOST_DESCRIPTORS}i", numbers)[2 : 2 + len(descriptors)]
    order = _renumbered(fork_server.read_order(channel), dict(zip(theirs, descriptors, strict=True)))
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["variables"])
    return fork_server.serve(channel, order)


def _above_standard(descriptor: int) -> int:
    """The same open file, never in place of stdin, stdout or stderr, which may be closed here."""
    if descriptor >= ABOVE_STANDARD:
        return descriptor
    higher = fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE_STANDARD)
    os.close(descriptor)
    return higher


def _renumbered(order: dict[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    """The order with descriptors as they are numbered here."""
    ranks = []
    for rank in order["ranks"]:
        launch_env = LaunchEnvironment.of(rank["environment"])
        assert launch_env is not None
        launch_env = replace(
            launch_env,
            lifeline=numbers[launch_env.lifeline],
            stderr=numbers[launch_env.stderr],
            store=None if launch_env.store is None else numbers[launch_env.store],
        )
        ranks.append(
            {
                **rank,
                "environment": {**rank["environment"], **launch_env.variables()},
                "closes": [numbers[number] for number in rank["closes"]],
            }
        )
    return {**order, "ranks": ranks, "descriptors": [numbers[number] for number in order["descriptors"]]}
