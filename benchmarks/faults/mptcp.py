"""The kernel's own way to go on over another network, Multipath TCP: how long does a message wait that a cut meets?

    python benchmarks/faults/mptcp.py --count 10 --out benchmarks/faults/mptcp.json      # Linux 5.19, ip, as root

Two hosts of a lab, two networks of 1 Gbit/s. One connection carries messages of 16 MiB from host 0 to host 1, each
answered with one byte before the next leaves. At a random moment in the fourth message one of the two networks is
cut, by turns: an "interface" of one of the hosts goes down, or the network goes "silent" and nobody is told. Twelve
messages are sent in all, on a connection of its own for each run.

- "both": the kernel sends over both networks at once, as it does where it is told of two addresses.
- "backup": the second is there for the first's failure alone, which is how our delegates use it.

A run is right if all messages came, bytes as they were. Told: the usual time of a message, the longest time of one
after the cut, and over how many networks the connection went before. `benchmarks/lab` has the same for delegates.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.lab import HostProcess, Lab

SIZE = 16 << 20
NUM_MESSAGES, CUT_IN = 12, 4
PORT = 29700
LINK = "bandwidth:1Gbit/s"
PATIENCE = 20.0
SOL_MPTCP, MPTCP_INFO, IPPROTO_MPTCP = 284, 1, 262
MODES, HOWS = ("both", "backup"), ("interface", "silent")


def message(number: int) -> bytes:
    return random.Random(number).randbytes(1 << 16) * (SIZE >> 16)


# On the hosts.


def receive() -> None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", PORT))  # also for what joins by the other network
    listener.listen(1)
    say({"listens": True})
    made, _ = listener.accept()
    made.settimeout(PATIENCE)
    digests = []
    buffer = bytearray(SIZE)
    for _ in range(NUM_MESSAGES):
        left = memoryview(buffer)
        while left and (num := made.recv_into(left)):
            left = left[num:]
        digests.append(hashlib.sha256(buffer).hexdigest())
        made.sendall(b"!")
    say({"digests": digests})


def send(theirs: str) -> None:
    messages = [message(number) for number in range(NUM_MESSAGES)]
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP)
    made.settimeout(PATIENCE)
    made.connect((theirs, PORT))
    for number, data in enumerate(messages):
        if number == CUT_IN - 1:
            say({"subflows": 1 + made.getsockopt(SOL_MPTCP, MPTCP_INFO, 64)[0]})
        begin = time.perf_counter_ns()
        made.sendall(data)
        answered = made.recv(1) == b"!"
        say({"message": number, "begin": begin, "end": time.perf_counter_ns(), "answered": answered})
    say({"digests": [hashlib.sha256(data).hexdigest() for data in messages]})


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


# The lab.


def hear(process: HostProcess, word: str, heard: list[dict[str, Any]]) -> dict[str, Any]:
    """What a process tells next that has `word` in it; all that it tells is added to `heard`."""
    assert process.popen.stdout is not None
    for line in process.popen.stdout:
        heard.append(json.loads(line))
        if word in heard[-1]:
            return heard[-1]
    raise RuntimeError(f"a host's program ended before it told of {word}: {process.popen.wait()}")


def configure(lab: Lab, mode: str) -> None:
    """Tells both kernels of the second network. It takes the right to configure a host's network."""
    backup = ["backup"] if mode == "backup" else []
    for host, words in (
        (0, ["limits", "set", "subflows", "2", "add_addr_accepted", "2"]),
        (1, ["limits", "set", "subflows", "2", "add_addr_accepted", "2"]),
        (1, ["endpoint", "add", lab.layout.address(1, 1), "dev", lab.layout.interface(1), "signal", *backup]),
    ):
        code = lab.start(host, ["ip", "mptcp", *words]).wait(10.0)
        if code:
            raise RuntimeError(f"ip mptcp {' '.join(words)} ended with {code} on host {host}")


def one_run(lab: Lab, network: int, how: str, chance: random.Random) -> dict[str, Any]:
    def start(host: int, *role: str) -> HostProcess:
        return lab.start(host, ["python", str(Path(__file__).resolve()), *role], stdout=subprocess.PIPE)

    there: list[dict[str, Any]] = []
    here: list[dict[str, Any]] = []
    receiver = start(1, "--receive")
    hear(receiver, "listens", there)
    sender = start(0, "--send", lab.layout.address(1))
    subflows = hear(sender, "subflows", here)["subflows"]
    time.sleep(chance.uniform(0.01, 0.06))
    cut = time.perf_counter_ns()
    if how == "interface":
        lab.interface_down(chance.randrange(2), network)
    else:
        lab.link(0, 1, "down", nic=network)
    try:
        sent = hear(sender, "digests", here)["digests"]
        got = hear(receiver, "digests", there)["digests"]
    except RuntimeError as failed:
        sent, got = [str(failed)], []
    finally:
        for host in lab.hosts:
            lab.interface_up(host, network)
        lab.link(0, 1, LINK, nic=network)
        for process in (sender, receiver):
            process.stop()
    times = [(each["end"] - each["begin"], each["end"] > cut) for each in here if "message" in each]
    return {
        "right": sent == got,
        "subflows": subflows,
        "usual_ms": statistics.median(ns / 1e6 for ns, after in times[1:] if not after),
        "longest_ms": max((ns / 1e6 for ns, after in times if after), default=float("nan")),
    }


def cell(mode: str, how: str, count: int) -> dict[str, Any]:
    runs = []
    with Lab(2, 2, (f"0:1={LINK}",)) as lab:
        configure(lab, mode)
        for run in range(count):
            runs.append(one_run(lab, run % 2, how, random.Random(f"{mode} {how} {run}")))
    return {
        "mode": mode,
        "how": how,
        "runs": count,
        "right": sum(each["right"] for each in runs),
        "subflows": sorted({each["subflows"] for each in runs}),
        "usual_ms": round(statistics.median(each["usual_ms"] for each in runs), 1),
        "longest_ms_by_network": [
            [round(each["longest_ms"], 1) for each in runs[network::2]] for network in range(2)
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    if given.receive or given.send:
        receive() if given.receive else send(given.send)
        return 0
    known, cells = record(), []
    for mode in MODES:
        for how in HOWS:
            cells.append(cell(mode, how, given.count))
            print(json.dumps(cells[-1]), flush=True)
            if given.out:
                save_summary(given.out, {**known, "cells": cells})
    return int(any(each["right"] < each["runs"] for each in cells))


if __name__ == "__main__":
    sys.exit(main())
