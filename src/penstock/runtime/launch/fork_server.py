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

Run by its path, so that nothing is imported before it has put the program's folder first on the path.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import time
from typing import Any

TICK = 0.02  # seconds between two looks at the ranks


def read_order(channel: socket.socket) -> dict[str, Any]:
    """What the launching process asks for."""
    with channel.makefile("r") as lines:
        order: dict[str, Any] = json.loads(lines.readline())
    return order


def serve(channel: socket.socket, order: dict[str, Any]) -> dict[str, Any] | None:
    """Loads, forks, and tells of the ranks until the launching process is gone. In a rank: its order."""
    _first_on_path(order["program"])
    if sys.platform == "linux":  # elsewhere ranks load for themselves: not every system's libraries survive a fork
        for name in order["preload"]:
            importlib.import_module(name)
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
    if running:  # the launching process would have removed them
        shutil.rmtree(order["reports"], ignore_errors=True)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
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


if __name__ == "__main__":
    _channel = socket.socket(fileno=int(sys.argv[1]))
    _order = serve(_channel, read_order(_channel))
    if _order is not None:
        become(_order)
