"""Starts a run's ranks on any device, after checking the port and the store."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Mapping, Sequence

from penstock.runtime import RuntimeFailure
from penstock.runtime.adapt.store import StoreLost, open_store
from penstock.runtime.launch import FIRST_OPTIMIZER, RankOrder, WaitingServer, launch
from penstock.runtime.launch.parent import listen
from penstock.runtime.mesh.interfaces import local_addresses
from penstock.train.checks import SettingsError
from penstock.train.run_settings import RunSettings

INTERRUPTED = 130
PATIENCE = 30.0
"""Seconds that SIGTERM leaves for a step and a checkpoint. A scheduler that sends it often kills after that time."""


class RunFailed(Exception):
    """Ranks that ended without a report; the message names the one that failed first."""

    rule = "run"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def check_port(port: int | None) -> None:
    """Raises SettingsError for a port that is in use."""
    try:
        listen(port).close()
    except RuntimeFailure as error:
        raise SettingsError(str(error)) from None


def check_store(address: str | None) -> None:
    """Raises SettingsError for a store that this host cannot reach, or that refuses it."""
    if address is None:
        return
    try:
        open_store(address).close()
    except (RuntimeFailure, StoreLost) as error:
        raise SettingsError(f"--store: {error}") from None


def check_interfaces(settings: RunSettings) -> None:
    """Raises SettingsError for an interface for delegates that this host does not have."""
    if settings.interfaces is None:
        return
    try:
        local_addresses(settings.delegate_options().interfaces)
    except RuntimeFailure as error:
        raise SettingsError(f"--interfaces: {error}") from None


def fork_ahead(preload: str) -> WaitingServer | RankOrder | None:
    """The process from which ranks will be forked. It is forked while this process has loaded only what ranks need.
    In a rank, returns what the rank is to do.

    None if no process is forked ahead: not every system's libraries survive a fork, and neither would a
    thread of ours.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return None
    return WaitingServer.fork([FIRST_OPTIMIZER, preload])


def start_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    port: int | None,
    preload: str,
    waiting: WaitingServer | None,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Starts `python -m penstock.train` with these arguments, one process per rank. Returns the exit code, and
    what was said of a failure. `preload` is the module that has the work of the ranks; `waiting` is what
    `fork_ahead` returned.
    """
    said = io.StringIO()
    program = ["-m", "penstock.train", *arguments]
    with contextlib.redirect_stderr(said):
        code = launch(
            program,
            num_ranks,
            preload=[FIRST_OPTIMIZER, preload],
            waiting=waiting,
            port=port,
            env=dict(env or {}),
            patience=PATIENCE,
        )
    return code, said.getvalue().strip().removeprefix("penstock: ")
