"""The process that ranks are forked from: it loads torch and Penstock once, and not once a rank.

    parent --order--> fork server --fork--> rank 0, rank 1, ...
       ^                  |
       +-- pids, ends ----+

It is started with the environment that the ranks have in common, so that what is read as a library loads (the number
of OpenMP's threads) is theirs, and it is given no other descriptors than theirs. It imports, and nothing else: no
thread of ours and no CUDA context is there when it forks. Each rank then leaves `serve` and runs its program as the
interpreter's main one, with a session, a stderr and variables of its own. The server stays as the ranks' parent: it
says how each has ended and keeps its process number taken until the launching process has seen all. When that one is
gone, it ends what is left.

A program that is Penstock's own forks a server ahead, from a process that has loaded what ranks need and done nothing
else (`WaitingServer`). Another program has none: what user code does before the fork (threads, CUDA, seeds) would be
in every rank.

    penstock train: loads torch --fork--> fork server, which waits
                    checks, reads data --order and descriptors--> --fork--> rank 0, rank 1, ...

The server of another program is this file, run by its path, so that nothing is imported before it has put the
program's folder first on the path.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

TICK = 0.02  # seconds between two looks at the ranks
MOST_DESCRIPTORS = 8
ABOVE_STANDARD = 3
"""The first descriptor that is not stdin, stdout or stderr."""


def read_order(channel: socket.socket) -> dict[str, Any]:
    """What the launching process asks for."""
    with channel.makefile("r") as lines:
        order: dict[str, Any] = json.loads(lines.readline())
    return order


def serve(channel: socket.socket, order: dict[str, Any]) -> dict[str, Any] | None:
    """Loads, forks, and tells of the ranks until the launching process is gone. In a rank: its order."""
    _first_on_path(order["program"])
    if sys.platform == "linux":  # elsewhere ranks load for themselves: not every system's libraries survive a fork
        _load(order["preload"])
    gc.collect()
    gc.freeze()  # a rank's collections then leave alone what it shares with the others
    leading, leads = os.pipe()
    running: dict[int, int] = {}
    for rank, own in enumerate(order["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for descriptor in (leading, leads):
                os.close(descriptor)
            channel.close()
            return {**order, **own, "rank": rank}
        running[rank] = pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it stays for as long as the launching process does
    for descriptor in (leads, *order["descriptors"]):
        os.close(descriptor)
    os.read(leading, 1)  # its end: each rank leads a session now, or is gone
    pids = list(running.values())
    _say(channel, {"pids": pids})
    while not _gone(channel):
        for rank, pid in list(running.items()):
            code = _end(pid)
            if code is not None:
                del running[rank]
                _say(channel, {"rank": rank, "code": code, "time": time.time()})
    for pid in running.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    # Nobody is left to read or remove them, or they are read by now. No rank is left to write another, which would
    # keep the folder from being removed.
    shutil.rmtree(order["reports"], ignore_errors=True)
    return None


def become(order: dict[str, Any]) -> None:
    """Makes this forked process the rank, and runs its program."""
    held = os.open(order["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(held, 2)
    os.close(held)
    for descriptor in order["closes"]:
        os.close(descriptor)
    os.environ.update(order["environment"])
    program: list[str] = order["program"]
    if sys.platform != "linux":
        os.execv(sys.executable, [sys.executable, *program])
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(f"rank {order['rank']}")  # what top and ps call it
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def _first_on_path(program: list[str]) -> None:
    """What `python -m NAME` or `python FILE` has first on its path, in place of this file's folder."""
    first = os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))
    if not sys.flags.safe_path:
        sys.path[0] = first


def _load(preload: Sequence[str]) -> None:
    """Imports modules; of MODULE:FUNCTION the function is called, too."""
    for each in preload:
        name, _, function = each.partition(":")
        module = importlib.import_module(name)
        if function:
            getattr(module, function)()


def _say(channel: socket.socket, what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the other end is gone, which is seen next
        channel.sendall(json.dumps(what).encode() + b"\n")


def _gone(channel: socket.socket) -> bool:
    """Whether the launching process has ended or closed its end, which says nothing otherwise."""
    return bool(select.select([channel], [], [], TICK)[0])


def _end(pid: int) -> int | None:
    """The exit code of a process that has ended, minus the signal of one that was killed. It is not reaped where that
    can be asked without.
    """
    if not hasattr(os, "waitid"):
        found, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None
    state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


class RankOrder:
    """In a rank: what it is to run. The program returns from all it was doing and calls it last of all."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order

    def run(self) -> int:
        """Runs the rank's program as the interpreter would, and returns the exit code."""
        try:
            become(self._order)
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
            order = _serve_once_asked(theirs, preload)
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


def _serve_once_asked(channel: socket.socket, preload: Sequence[str]) -> dict[str, Any] | None:
    """What the forked process does: waits for its order, then forks ranks as any fork server."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    _load(preload)
    numbers, received, _, _ = socket.recv_fds(channel, struct.calcsize(f"{MOST_DESCRIPTORS}i"), MOST_DESCRIPTORS)
    if not received:
        return None
    stdout, stderr, *descriptors = (_above_standard(number) for number in received)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    theirs = struct.unpack(f"{MOST_DESCRIPTORS}i", numbers)[2 : 2 + len(descriptors)]
    order = _renumbered(read_order(channel), dict(zip(theirs, descriptors, strict=True)))
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["variables"])
    return serve(channel, order)


def _above_standard(descriptor: int) -> int:
    """The same open file, never in place of stdin, stdout or stderr, which may be closed here."""
    if descriptor >= ABOVE_STANDARD:
        return descriptor
    higher = fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE_STANDARD)
    os.close(descriptor)
    return higher


def _renumbered(order: dict[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    """The order with descriptors as they are numbered here."""
    from penstock.runtime.launch.child import LaunchEnvironment  # which this file, where it is run, must do without

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


if __name__ == "__main__":
    _channel = socket.socket(fileno=int(sys.argv[1]))
    _order = serve(_channel, read_order(_channel))
    if _order is not None:
        become(_order)
