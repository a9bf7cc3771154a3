"""What delegates carry of what one TCP stream carries, between two hosts of a lab; and small messages' time.

    python benchmarks/delegate/stream.py --out benchmarks/delegate/stream.json

Two network namespaces of this machine, joined by a link without a limit; a process in each. They take turns, round
after round, so that what else happens on the machine hits both alike:

    tcp        64 MB of memory written to one TCP connection, and read into memory at its other end
    delegate   a message of 64 MB: from `send` until the tensor is there, copies included

Messages of 64 KB and 4 KB by delegates follow in each round. Times are from before the first call at the sender to
after the last at the receiver: namespaces share the machine's clock. Results are medians over the rounds, and the
median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import penstock as ps
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.lab import Lab
from penstock.runtime.mesh.interfaces import local_addresses
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages
from penstock.runtime.transport.channel import ChannelKey, ExpectedMessages, Tags
from penstock.runtime.transport.delegate import DelegateTransport
from penstock.schedule import Op

LARGE = 64 << 20
SIZES = {"64 MB": LARGE, "64 KB": 64 << 10, "4 KB": 4 << 10}
NUM_SMALL = 40
"""Small messages a round, one after the other."""
PORT = 5999


class Delegates:
    """A rank's delegates, and one edge to send by."""

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]], lanes: int | None) -> None:
        self._rank, tags = rank, Tags(ps.build("gpipe", 2, 1))
        options: dict[str, Any] = {"interfaces": local_addresses()} | ({} if lanes is None else {"num_lanes": lanes})
        self.transport = DelegateTransport(rank, gather, tags, 60.0, **options)
        self._edge = Edge(Op("F", 0, 0), Op("F", 1, 0))
        self._messages = ((self._edge, tags.message(self._edge)),)

    def begin(self) -> None:
        expected = [ExpectedMessages(ChannelKey.of(self._edge), 0, self._messages)] if self._rank else []
        self.transport.begin(StepMessages(expected, ["s"]))

    def pass_one(self, payload: Payload) -> torch.Tensor | None:
        if self._rank == 0:
            while not self.transport.send(self._edge, 1, payload):
                self.transport.wait([], lambda: "the sender waits for room")
            return None
        while not self.transport.wait([], lambda: "the receiver waits"):
            pass
        return self.transport.take(self._edge).leaves[0]


def rank_main(rank: int, rounds: int, lanes: int | None) -> None:
    """Runs one end; rank 0 prints what it found."""
    torch.set_num_threads(1)
    peer, stream = _connections(rank)
    told = peer.makefile("rwb")

    def gather(value: Any) -> list[Any]:
        told.write(json.dumps(value).encode() + b"\n")
        told.flush()
        other = json.loads(told.readline())
        return [value, other] if rank == 0 else [other, value]

    delegates = Delegates(rank, gather, lanes)
    memory = torch.randint(0, 255, (LARGE,), dtype=torch.uint8)
    payloads = {name: Payload([torch.randn(size // 4)], 0, [True]) for name, size in SIZES.items()}
    found: dict[str, list[float]] = {"tcp": [], **{name: [] for name in SIZES}}

    def timed(act: Callable[[], Any]) -> float:
        gather(None)
        begun = time.perf_counter()
        act()
        moments = gather((begun, time.perf_counter()))
        return (moments[1][1] - moments[0][0]) * 1e3

    def pass_stream() -> None:
        view = memory.numpy().data
        if rank == 0:
            stream.sendall(view)
        else:
            while view:
                view = view[stream.recv_into(view) :]

    for turn in range(rounds + 1):
        row = {"tcp": timed(pass_stream)}
        for name, payload in payloads.items():
            times = []
            for _ in range(1 if name == "64 MB" else NUM_SMALL):
                delegates.begin()
                times.append(timed(lambda payload=payload: delegates.pass_one(payload)))  # type: ignore[misc]
            row[name] = statistics.median(times)
        if turn:  # the first round warms up
            for name, value in row.items():
                found[name].append(value)
    gather(None)
    delegates.transport.close()
    if rank == 0:
        print(json.dumps(found), flush=True)


def _connections(rank: int) -> tuple[socket.socket, socket.socket]:
    """One to agree by, and the plain stream."""
    if rank == 0:
        with socket.create_server((local_addresses()[0], PORT)) as listener:
            made = [listener.accept()[0] for _ in range(2)]
    else:
        made = []
        while len(made) < 2:
            try:
                made.append(socket.create_connection((os.environ["MASTER_ADDR"], PORT)))
            except ConnectionRefusedError:
                time.sleep(0.05)
    for each in made:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made[0], made[1]


def measure(rounds: int, lanes: int | None) -> dict[str, Any]:
    """Runs both ends in a lab, and sums up."""
    with Lab(2, 1) as lab:
        words = ["python", str(Path(__file__).resolve()), "--rounds", str(rounds)]
        words += [] if lanes is None else ["--lanes", str(lanes)]
        ranks = [
            lab.start(host, [*words, "--rank", str(host)], {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
            for host in (0, 1)
        ]
        found = json.loads(ranks[0].popen.communicate()[0])
        assert ranks[1].wait(60) == 0
    shares = [tcp / large for tcp, large in zip(found["tcp"], found["64 MB"], strict=True)]
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    return {**record(), "rounds": rounds, "median_ms": medians, "share_of_tcp": round(statistics.median(shares), 3)}


def table(found: dict[str, Any]) -> str:
    """The medians, and the share."""
    lines = ["| what | ms |", "|---|---:|", f"| one TCP stream, 64 MB | {found['median_ms']['tcp']:.1f} |"]
    lines += [f"| delegates, {name} | {found['median_ms'][name]:.2f} |" for name in SIZES]
    return "\n".join([*lines, "", f"Delegates carry {found['share_of_tcp']:.0%} of what one TCP stream carries."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments.rank, arguments.rounds, arguments.lanes)
        return
    found = measure(arguments.rounds, arguments.lanes)
    if arguments.out is not None:
        save_summary(arguments.out, found)
    print(table(found))


if __name__ == "__main__":
    main()
