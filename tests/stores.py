"""A Redis that tests of stores start, stop for a while and end; and free ports."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from waiting import wait_until

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port on which nobody listens. It lies below those that the kernel gives to connections and to servers that
    ask for any, so that no other program is given it before a server listens there, or while that is started anew.
    """
    first = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32768
    draw = random.SystemRandom()  # tests that run side by side draw other ports
    while True:
        port = draw.randrange(first // 2, first)
        with socket.socket() as one:
            try:
                one.bind(("", port))
            except OSError:
                continue
            return port


class Server:
    """A Redis in a process of its own.

    Attributes:
        address: as users write it.
    """

    def __init__(self, password: str | None = None) -> None:
        self.port, self.password = free_port(), password
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        line = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        line += ["--dir", self._folder.name, *(["--requirepass", self.password] if self.password else [])]
        self._process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

        def listens() -> bool:
            with socket.socket() as one:
                return one.connect_ex(("127.0.0.1", self.port)) == 0

        wait_until(listens, lambda: f"nobody listens at {self.address}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()


@contextmanager
def running(password: str | None = None) -> Iterator[Server]:
    """A server; the test is skipped where there is no redis-server."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server: it is not installed")
    server = Server(password)
    try:
        yield server
    finally:
        server.close()
