"""How a run's ranks are started, on any device, after checking the store; and how they stop.

On Ctrl-C or SIGTERM the signal only sets a flag; the loop ends after its step and saves.
"""

from __future__ import annotations

import contextlib
import io
import signal
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from penstock.runtime import RuntimeFailure
from penstock.runtime.adapt.store import RedisStore
from penstock.runtime.launch import launch
from penstock.runtime.launch.launcher import handled
from penstock.train.checks import SettingsError

INTERRUPTED = 130
PATIENCE = 30.0
"""Seconds that SIGTERM leaves for a step and a checkpoint. A scheduler that sends it often kills after that time."""


class RunFailed(Exception):
    """Ranks that ended without a report; the message names the one that failed first."""

    rule = "run"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def check_store(address: str | None) -> None:
    """Raises SettingsError for a store that this host cannot reach, or that refuses it."""
    if address is None:
        return
    try:
        RedisStore(address).close()
    except RuntimeFailure as error:
        raise SettingsError(f"--store: {error}") from None


def start_ranks(
    program: Sequence[str],
    num_ranks: int,
    preload: str,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Starts a program as `launch` takes it, one process per rank. Returns the exit code, and what was said of a
    failure. `preload` is the module that has the work of the ranks.
    """
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = launch(
            program,
            num_ranks,
            preload=[preload],
            env=dict(env or {}),
            patience=PATIENCE,
        )
    return code, said.getvalue().strip().removeprefix("penstock: ")


SAME = 1.0
"""Seconds in which a second signal counts as the same one, as a terminal and a launcher may both pass it on."""


class StopRequest:
    """Set by SIGINT or SIGTERM inside its `with`. A later second signal ends the process at once by
    KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._number = signal.SIGINT
        self._handled = contextlib.ExitStack()

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a process that ends by the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self._number

    def __enter__(self) -> StopRequest:
        self._handled.enter_context(handled(self._note, signal.SIGINT, signal.SIGTERM))
        return self

    def __exit__(self, *error: object) -> None:
        self._handled.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at, self._number = now, signal.Signals(number)
        elif now - self._asked_at > SAME:
            raise KeyboardInterrupt
