"""The controller in a process of its own: events go in by a pipe, its log comes out by another.

A decision simulates all that could run. In a thread of rank 0 that would keep the interpreter's lock from the rank's
ops; here it runs beside, at a lower priority.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from penstock.control import Job, Sensitivity
from penstock.control.log import header
from penstock.runtime.errors import RuntimeFailure

END = 2.0
"""Seconds that the process has to end by itself."""


class ControllerProcess:
    """A running controller.

    Args:
        take: called, in a thread, with every line of its output: the log's, and records.
        ended: called where the process ends though nobody closed it, with the reason.

    Raises:
        RuntimeFailure: the process cannot be started.
    """

    def __init__(
        self, job: Job, sensitivity: Sensitivity, take: Callable[[str], None], ended: Callable[[str], None]
    ) -> None:
        self._take, self._ended = take, ended
        self._closed = False
        path = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.control"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
                # The terminal's Ctrl-C is for the ranks; a launcher finds what is in their session.
                process_group=0,
            )
        except OSError as error:
            raise RuntimeFailure(f"the controller's process cannot be started: {error.strerror}") from None
        self._write(header(job, sensitivity))
        self._reader = threading.Thread(target=self._read, name="penstock-decider", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def feed(self, *lines: str) -> None:
        """Hands on events, as lines of the log, and records, which come back with their simulated time. Waits where
        the process is far behind.
        """
        self._write("\n".join(lines))

    def close(self) -> None:
        """Ends the process, with what it was doing, and the thread that reads its words."""
        self._closed = True
        late = threading.Timer(END, self._process.kill)
        late.start()
        with contextlib.suppress(OSError, ValueError):
            self._input.close()
        self._process.wait()
        late.cancel()
        self._reader.join(END)

    @property
    def _input(self) -> IO[str]:
        assert self._process.stdin is not None, "it was started with a pipe"
        return self._process.stdin

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # its end is told by the reader
            self._input.write(line + "\n")
            self._input.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it was started with a pipe"
        with self._process.stdout as lines:
            try:
                for line in lines:
                    self._take(line.rstrip("\n"))
            except Exception as error:
                # Nobody reads what it says from here on: it would stand still, and whoever feeds it, too.
                self._process.kill()
                reason = f"what the controller said could not be taken in: {error!r}"
            else:
                reason = f"the controller's process ended with exit code {self._process.wait()}"
        if not self._closed:
            self._ended(reason)
