"""What a rank is given as it starts: environment variables from its launcher, and loaded modules from the server.

On Linux, ranks of one machine are forked from a server, so that torch is loaded once for all of them. It is the fork
server of `multiprocessing`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a program: the process that starts ranks passes them on, and the server ignores them."""

_INSTEAD = "start with `penstock train` or torchrun, which set it, or unset RANK to run without them"


class RankEnvironmentError(Exception):
    """A variable is missing or can't be. The message says which, what it is, the rule and what to do."""

    exit_code = 1


@dataclass(frozen=True)
class RankEnvironment:
    """What a launcher such as torchrun told this process in environment variables.

    Attributes:
        rank, num_ranks: RANK and WORLD_SIZE. local_rank, num_local: LOCAL_RANK and LOCAL_WORLD_SIZE, on this host.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> RankEnvironment | None:
        """What is said there; None where no launcher has started this process, and so RANK is not set.

        Raises:
            RankEnvironmentError: names the variable that cannot be.
        """
        if "RANK" not in variables:
            return None
        rank, num_ranks = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
        if rank >= num_ranks:
            raise RankEnvironmentError(
                f"environment variable RANK is {rank} and WORLD_SIZE is {num_ranks}: ranks are numbered from 0, "
                f"below their number; {_INSTEAD}"
            )
        local_rank, num_local = _number(variables, "LOCAL_RANK", "0"), _number(variables, "LOCAL_WORLD_SIZE", "1")
        return cls(rank, num_ranks, local_rank, num_local)


def _number(variables: Mapping[str, str], name: str, default: str = "") -> int:
    text = variables.get(name, default)
    if not (text.isascii() and text.isdigit()):
        raise RankEnvironmentError(f"environment variable {name} is {text!r}, not a number from 0 on; {_INSTEAD}")
    return int(text)


def start_rank_server(modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Starts the server of ranks, which loads these modules at once, and ends with this process.

    Nothing happens where one runs already.
    """
    multiprocessing.set_forkserver_preload([*modules, "penstock.runtime.launch.loaded"])
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS if is_main}  # the server inherits
    before = dict(os.environ)
    try:
        # It finds modules where this process does, and never in the current folder, as `python -c` would.
        path = os.pathsep.join(filter(None, sys.path))
        os.environ.update(environment, PYTHONPATH=path, PYTHONSAFEPATH="1")
        ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
