"""How close a lab's links come to what they were set to: round trips of a few bytes, transfers of 16 MB.

python benchmarks/lab/links.py --out benchmarks/lab/links.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.lab import Lab

CONDITIONS = (
    "latency:0ms",
    "latency:5ms",
    "latency:30ms",
    "latency:100ms",
    "bandwidth:1Gbit/s",
    "latency:30ms+bandwidth:1Gbit/s",
    "loss:1%",
)
SIZE = 2**24
PATIENCE = 120.0

_ANSWER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
caller, _ = listener.accept()
caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while head := caller.recv(8, socket.MSG_WAITALL):
    left = int.from_bytes(head, "little")
    while left:
        left -= len(caller.recv(min(left, 1 << 20)))
    caller.sendall(b"!")
"""
_CALL = """
import json, socket, sys, time
address, *counts = sys.argv[1:]
caller = socket.create_connection((address, 5000), timeout=60)
caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
told = []
for count, size in zip(map(int, counts[::2]), map(int, counts[1::2])):
    message, times = size.to_bytes(8, "little") + bytes(size), []
    for _ in range(count):
        start = time.perf_counter()
        caller.sendall(message)
        caller.recv(1)
        times.append((time.perf_counter() - start) * 1e3)
    told.append(times)
print(json.dumps(told))
"""


def measure(lab: Lab, num_small: int, num_large: int) -> tuple[list[float], list[float]]:
    """Milliseconds of round trips of 9 bytes and one back, and of 16 MB and one back; the first of each left out."""
    server = lab.start(1, ["python", "-c", _ANSWER, lab.address(1)], stdout=subprocess.PIPE)
    assert server.popen.stdout is not None
    with server.popen.stdout as lines:
        lines.readline()
        words = ["python", "-c", _CALL, lab.address(1), str(num_small + 1), "1", str(num_large + 1), str(SIZE)]
        out, _ = lab.start(0, words, stdout=subprocess.PIPE).read(PATIENCE)
        server.stop()
    small, large = json.loads(out)
    return small[1:], large[1:]


def run(num_small: int, num_large: int) -> list[dict[str, Any]]:
    """One row a condition."""
    rows = []
    with Lab(2, 1) as lab:
        for condition in CONDITIONS:
            lab.link(0, 1, condition)
            small, large = measure(lab, num_small, num_large)
            rows.append(row_of(condition, small, large))
            print(line_of(rows[-1]), flush=True)
    return rows


def row_of(condition: str, small: Sequence[float], large: Sequence[float]) -> dict[str, Any]:
    """Medians and the like of round trips and of transfers, in ms."""
    return {
        "condition": condition,
        "round_trip_ms": statistics.median(small),
        "least_round_trip_ms": min(small),
        "nine_in_ten_ms": sorted(small)[len(small) * 9 // 10],
        "transfer_ms": statistics.median(large),
    }


def line_of(row: dict[str, Any]) -> str:
    return (
        f"{row['condition']:<32} round trip {row['round_trip_ms']:8.3f} ms (least {row['least_round_trip_ms']:.3f}, "
        f"nine in ten below {row['nine_in_ten_ms']:.3f}), 16 MB in {row['transfer_ms']:7.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=40, help="round trips")
    parser.add_argument("--large", type=int, default=10, help="transfers of 16 MB")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = run(given.small, given.large)
    if given.out is not None:
        save_summary(given.out, {**record(), "rows": rows})


if __name__ == "__main__":
    main()
