"""A forked process becomes a rank: it runs the program as the interpreter would, and ends with its server."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection

from penstock.runtime.launch.child import Reporter, write_whole_lines


@dataclass(frozen=True)
class LaunchOrder:
    """What a launching process asks for.

    Attributes:
        program: a script's path, or -m and a module's name, and the arguments.
        first_on_path: the folder that Python puts first on the path of such a program. None if it puts none there.
        environment, folder: all variables, and the current folder, of the ranks.
        port: the store's; None for any free one.
        grace, patience: seconds that ranks have to end once one has failed, and from SIGTERM to SIGKILL.
    """

    program: tuple[str, ...]
    num_ranks: int
    first_on_path: str | None
    environment: Mapping[str, str]
    folder: str
    port: int | None
    grace: float
    patience: float


def run_rank(rank: int, order: LaunchOrder, reports: Connection) -> None:
    """What the forked process does. `reports` takes the exception by which it ends."""
    os.setsid()  # the terminal's Ctrl-C then reaches the launching process alone
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with_server, name="penstock-lifeline", daemon=True).start()
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(f"rank {rank}")  # what top and ps call it
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    write_whole_lines()
    reporter = sys.excepthook = Reporter(rank, reports.send)
    try:
        _run(order)
    except SystemExit:
        raise
    except BaseException as error:
        reporter(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)
    finally:  # what the interpreter does at its end; a process of multiprocessing ends without calling exit handlers
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _run(order: LaunchOrder) -> None:
    program = list(order.program)
    if order.first_on_path is not None:
        sys.path[0] = order.first_on_path
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def _end_with_server() -> None:
    """Ends this process, and all it started, once its server is gone."""
    server = parent_process()
    assert server is not None
    server.join()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
