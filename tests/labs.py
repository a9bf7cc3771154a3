"""What tests of the lab share: where one can be made, what is there of labs, small programs for hosts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.lab import Lab, missing
from penstock.lab.layout import lab_of
from penstock.lab.removal import hosts_file
from waiting import PATIENCE


def refused() -> str:
    """What stands in the way of a lab here, "" where nothing does: the kernel is asked, as `.ci/run` asks it."""
    if lacking := missing():
        return "; ".join(lacking)
    probe = f"penstock-probe-{os.getpid()}"
    lines = (
        f"ip netns add {probe}",
        f"ip netns exec {probe} ip tuntap add dev probe mode tun",
        f"ip netns delete {probe}",
    )
    for line in lines:
        ran = subprocess.run(line.split(), capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
            return f"{line}: {ran.stderr.strip()}"
    return ""


_REFUSED = refused()
needs_lab = pytest.mark.skipif(bool(_REFUSED), reason=f"needs namespaces: {_REFUSED}")
START = 2 * PATIENCE
"""Seconds that a program on a host may take on a busy machine."""


def left_of(name: str) -> list[str]:
    """What is there of a lab: namespaces, processes in them, its keeper, its hosts file. Empty once it is gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    found = [line for line in listed.splitlines() if lab_of(line.split()[0]) == name]
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if path.name == name and b"penstock.lab.keeper" in words:
                found.append(f"keeper {name}")
            if f"PENSTOCK_TEST_OF={name}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(f"process {path.name}: {words}")
    return found + [str(path) for path in (hosts_file(name),) if path.exists()]


ANSWER = """
import socket, sys
listener = socket.create_server(("", 5000))
print("listening", flush=True)
size = int(sys.argv[1])
caller, _ = listener.accept()
while True:
    left = size
    while left:
        got = len(caller.recv(min(left, 1 << 20)))
        if not got:
            sys.exit()
        left -= got
    caller.sendall(b"!")
"""
"""Takes messages of a size and answers each with one byte."""

CALL = """
import json, socket, sys, time
address, size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
caller = socket.create_connection((address, 5000), timeout=60)
caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
message, seconds = bytes(size), []
for _ in range(count):
    start = time.monotonic()
    caller.sendall(message)
    assert caller.recv(1) == b"!"
    seconds.append(time.monotonic() - start)
print(json.dumps(seconds))
"""


def round_trips(lab: Lab, source: int, target: int, nic: int = 0, size: int = 1, count: int = 1) -> list[float]:
    """Milliseconds of sending `size` bytes over TCP and getting one byte back, `count` times."""
    server = lab.start(target, ["python", "-c", ANSWER, str(size)], stdout=subprocess.PIPE)
    assert server.popen.stdout is not None
    assert server.popen.stdout.readline() == "listening\n"
    words = ["python", "-c", CALL, lab.address(target, nic), str(size), str(count)]
    client = lab.start(source, words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = client.read(START)
    server.stop()
    server.popen.stdout.close()
    assert client.poll() == 0, error
    return [seconds * 1e3 for seconds in json.loads(out)]


def reaches(lab: Lab, source: int, target: int, nic: int, timeout: float = 60.0) -> bool:
    """Whether a connection can be asked for: refused is an answer too, silence within `timeout` s is none.

    A test that expects none gives a short one; an answer may take its time on a busy machine.
    """
    program = f"""
import socket
try:
    socket.create_connection(({lab.address(target, nic)!r}, 9), timeout={timeout})
except ConnectionRefusedError:
    print("refused")
except OSError as error:
    print(error)
"""
    out, _ = lab.start(source, ["python", "-c", program], stdout=subprocess.PIPE).read(START)
    return out == "refused\n"


def until(holds: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether `holds()` becomes true within a deadline."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
