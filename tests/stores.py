"""Servers that tests of stores start, stop for a while and end, by their process."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from processes import forkserver
from waiting import wait_until


def _serve(port: int) -> None:
    from penstock.runtime.adapt.store import QueueServer

    QueueServer(["127.0.0.1"], port)
    while True:
        time.sleep(60)


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
    """A store's server in a process of its own.

    Attributes:
        address: as users write it.
    """

    def __init__(self, kind: str, password: str | None = None) -> None:
        self.kind, self.port, self.password = kind, free_port(), password
        self._folder = tempfile.TemporaryDirectory()
        self._pid: int | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"{self.kind}://127.0.0.1:{self.port}" + ("/0" if self.kind == "redis" else "")

    def start(self) -> None:
        if self.kind == "redis":
            line = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
            line += ["--dir", self._folder.name, *(["--requirepass", self.password] if self.password else [])]
            redis = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            self._pid, self._wait = redis.pid, redis.wait
        else:
            child = forkserver().Process(target=_serve, args=(self.port,))
            child.start()
            assert child.pid is not None
            self._pid, self._wait = child.pid, child.join

        def listens() -> bool:
            with socket.socket() as one:
                return one.connect_ex(("127.0.0.1", self.port)) == 0

        wait_until(listens, lambda: f"nobody listens at {self.address}")

    def kill(self) -> None:
        if self._pid is not None:
            self.signal(signal.SIGKILL)
            self._wait()
            self._pid = None

    def signal(self, number: signal.Signals) -> None:
        assert self._pid is not None
        os.kill(self._pid, number)

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()


@contextmanager
def running(kind: str, password: str | None = None) -> Iterator[Server]:
    """A server; the test is skipped where there is no redis-server."""
    if kind == "redis" and shutil.which("redis-server") is None:
        pytest.skip("needs redis-server: it is not installed")
    server = Server(kind, password)
    try:
        yield server
    finally:
        server.close()
