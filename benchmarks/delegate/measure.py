"""What messages cost by delegates, by a plain socket in the rank itself, and by gloo; and what idle delegates cost.

    python benchmarks/delegate/measure.py --out benchmarks/delegate/results.json

Two ranks on this machine. A message is a tensor in at one rank and a tensor out at the other, packed and unpacked as
the runtime does it, whoever carries it. The three ways take turns, round after round, so that what else happens on
the machine hits them alike; the tables show medians over the rounds.

    stream    messages one right after the other: bytes / time from the first send to the last tensor out
    one       a single message at a time: from send to tensor out
    CPU       of both ranks and all their delegates together, a message of the stream
    idle      CPU of delegates that are connected, with nothing to carry, a share of one core each
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import penstock as ps
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages
from penstock.runtime.transport.channel import ChannelKey, ExpectedMessages, Tags
from penstock.runtime.transport.delegate import DelegateTransport
from penstock.runtime.transport.wire_format import Packet, WireSpec
from penstock.schedule import Op

SIZES = {"16 MB": 16 << 20, "1 MB": 1 << 20, "64 KB": 64 << 10}
NUM_STREAMED = {"16 MB": 16, "1 MB": 64, "64 KB": 128}
NUM_SINGLE = 5
MAX_MESSAGES = 128
HOST_MEMORY = 4 * (16 << 20) + (1 << 20)
"""So that four messages of 16 MB are under way: no training rank sends many one right after the other."""


class Way(Protocol):
    """A way for messages from rank 0 to rank 1."""

    def begin(self, count: int) -> None: ...

    def send(self, number: int, payload: Payload) -> None: ...

    def receive(self) -> Payload: ...

    def processes(self) -> list[int]: ...

    def close(self) -> None: ...


class Plain:
    """A TCP socket that the rank itself sends from and receives at."""

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        if rank == 1:
            listener = socket.create_server(("127.0.0.1", 0))
            gather(listener.getsockname())
            self._socket, _ = listener.accept()
            listener.close()
        else:
            self._socket = socket.create_connection(tuple(gather(None)[1]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._packets: dict[WireSpec, Packet] = {}
        self.spec: WireSpec | None = None

    def begin(self, count: int) -> None:
        pass

    def _packet(self, spec: WireSpec) -> Packet:
        return self._packets.setdefault(spec, Packet(spec)) if spec not in self._packets else self._packets[spec]

    def send(self, number: int, payload: Payload) -> None:
        packet = self._packet(WireSpec.of(payload))
        packet.pack(payload)
        self._socket.sendall(packet.buffer.numpy().data)

    def receive(self) -> Payload:
        assert self.spec is not None
        packet = self._packet(self.spec)
        view = packet.buffer.numpy().data.cast("B")
        while view:
            view = view[self._socket.recv_into(view) :]
        return packet.unpack()

    def processes(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        self._socket.close()


class Gloo(Plain):
    """torch.distributed's sends, two under way, and receives, two posted ahead."""

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]], folder: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        self._rings: dict[WireSpec, list[Packet]] = {}
        self._under_way: list[tuple[Any, Packet]] = []
        self._left = 0
        self.spec = None

    def begin(self, count: int) -> None:
        self._left = count
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []

    def _next(self, spec: WireSpec) -> Packet:
        ring = self._rings.setdefault(spec, [Packet(spec) for _ in range(2)])
        ring.append(ring.pop(0))
        return ring[-1]

    def send(self, number: int, payload: Payload) -> None:
        if len(self._under_way) == 2:
            self._under_way.pop(0)[0].wait()
        packet = self._next(WireSpec.of(payload))
        packet.pack(payload)
        self._under_way.append((dist.isend(packet.buffer, 1), packet))

    def receive(self) -> Payload:
        assert self.spec is not None
        while len(self._under_way) < 2 and self._left:
            packet = self._next(self.spec)
            self._under_way.append((dist.irecv(packet.buffer, 0), packet))
            self._left -= 1
        work, packet = self._under_way.pop(0)
        work.wait()
        return packet.unpack()

    def close(self) -> None:
        dist.destroy_process_group()


class Delegates:
    """The delegate transport."""

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        self._edges = [Edge(Op("F", 0, m), Op("F", 1, m)) for m in range(MAX_MESSAGES)]
        self._tags = Tags(ps.build("gpipe", 2, MAX_MESSAGES))
        self._rank = rank
        self.transport = DelegateTransport(rank, gather, self._tags, 60.0, host_memory=HOST_MEMORY)
        self._came: list[Edge] = []
        self.spec: WireSpec | None = None

    def begin(self, count: int) -> None:
        messages = tuple((edge, self._tags.message(edge)) for edge in self._edges[:count])
        expected = [ExpectedMessages(ChannelKey.of(self._edges[0]), 0, messages)] if self._rank else []
        self.transport.begin(StepMessages(expected, ["s"] * MAX_MESSAGES))

    def send(self, number: int, payload: Payload) -> None:
        while not self.transport.send(self._edges[number], 1, payload):
            self.transport.wait([], lambda: "the sender waits for room")

    def receive(self) -> Payload:
        if not self._came:
            self._came = self.transport.wait([], lambda: "the receiver waits")
        return self.transport.take(self._came.pop(0))

    def processes(self) -> list[int]:
        return [os.getpid(), *self.transport.pids.values()]

    def close(self) -> None:
        self.transport.close()


def cpu_seconds(pids: list[int]) -> float:
    """CPU time that these processes have used."""
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in pids) / 1e9


def rank_main(rank: int, pipe: Connection, folder: str, rounds: int, idle_seconds: float) -> None:
    torch.set_num_threads(1)

    def gather(value: Any) -> list[Any]:
        pipe.send(value)
        return pipe.recv()

    ways: dict[str, Any] = {
        "in process": Plain(rank, gather),
        "gloo": Gloo(rank, gather, folder),
        "delegate": Delegates(rank, gather),
    }
    samples: list[dict[str, Any]] = []
    for turn in range(rounds + 1):
        for size, num_bytes in SIZES.items():
            torch.manual_seed(turn)
            payload = Payload([torch.randn(num_bytes // 4)], 0, [True])
            for name, way in ways.items():
                way.spec = WireSpec.of(payload)
                found = _measure(rank, gather, way, payload, NUM_STREAMED[size])
                if turn and rank == 0:  # the first round warms up
                    samples.append({"way": name, "size": size, "bytes": num_bytes, **found})
    idle = _idle(gather, ways["delegate"], idle_seconds)
    for way in ways.values():
        way.close()
    pipe.send({"samples": samples, "idle": idle} if rank == 0 else {"idle": idle})


def _measure(
    rank: int, gather: Callable[[Any], list[Any]], way: Any, payload: Payload, count: int
) -> dict[str, float]:
    """One stream and some single messages; rank 0 returns what both saw."""
    way.begin(count)
    before = gather(cpu_seconds(way.processes()))
    begun = time.perf_counter()
    for number in range(count):
        if rank == 0:
            way.send(number, payload)
        else:
            found = way.receive()
    ended = time.perf_counter()
    if rank == 1 and not torch.equal(found.leaves[0], payload.leaves[0]):
        raise SystemExit(f"{type(way).__name__} brought other numbers than were sent")
    times = gather((begun, ended))
    after = gather(cpu_seconds(way.processes()))
    stream = times[1][1] - times[0][0]
    singles = []
    for _ in range(NUM_SINGLE):
        way.begin(1)
        gather(None)
        begun = time.perf_counter()
        if rank == 0:
            way.send(0, payload)
        else:
            way.receive()
        moments = gather((begun, time.perf_counter()))
        singles.append(moments[1][1] - moments[0][0])
    way.begin(0)
    num_bytes = sum(leaf.numel() * leaf.element_size() for leaf in payload.leaves if leaf is not None)
    return {
        "gb_per_s": count * num_bytes / stream / 1e9,
        "one_ms": statistics.median(singles) * 1e3,
        "cpu_ms": (sum(after) - sum(before)) / count * 1e3,
    }


def _idle(gather: Callable[[Any], list[Any]], way: Delegates, seconds: float) -> dict[str, float]:
    """The share of a core that each delegate takes with nothing to do."""
    gather(None)
    pids = way.transport.pids
    before = {name: cpu_seconds([pid]) for name, pid in pids.items()}
    rank_before = time.process_time()
    time.sleep(seconds)
    shares = {name: (cpu_seconds([pid]) - before[name]) / seconds for name, pid in pids.items()}
    shares["rank"] = (time.process_time() - rank_before) / seconds
    memory = {name: _memory_mb(pid) for name, pid in pids.items()}
    gather(None)
    return {**shares, **{f"{name}: MB of its own": mb for name, mb in memory.items()}}


def _memory_mb(pid: int) -> float:
    """Memory of a process that is no file and not shared, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(rounds: int, idle_seconds: float) -> dict[str, Any]:
    """Runs it all, in processes of its own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe() for _ in range(2)]
        children = [
            context.Process(target=rank_main, args=(rank, pairs[rank][1], folder, rounds, idle_seconds))
            for rank in range(2)
        ]
        for child in children:
            child.start()
        try:
            while True:
                told = [ours.recv() for ours, _ in pairs]
                if isinstance(told[0], dict) and "samples" in told[0]:
                    break
                for ours, _ in pairs:
                    ours.send(told)
        finally:
            for child in children:
                child.join(10)
                child.kill()
    return {
        **record(),
        "load_before_and_after": None,
        "rounds": rounds,
        **summary(told[0]["samples"], [told[0]["idle"], told[1]["idle"]]),
    }


def summary(samples: list[dict[str, Any]], idle: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the rounds, the delegates' share of the in-process sender's rate, round by round, and idling."""
    rows = []
    for size in SIZES:
        for way in ("in process", "gloo", "delegate"):
            mine = [one for one in samples if one["size"] == size and one["way"] == way]
            medians = {key: statistics.median(s[key] for s in mine) for key in ("gb_per_s", "one_ms", "cpu_ms")}
            rows.append({"size": size, "way": way, **medians})
    shares = {}
    for size in SIZES:
        mine, theirs = (
            [s["gb_per_s"] for s in samples if (s["size"], s["way"]) == (size, way)]
            for way in ("delegate", "in process")
        )
        shares[size] = statistics.median(ours / other for ours, other in zip(mine, theirs, strict=True))
    cores = [v for one in idle for k, v in one.items() if "MB" not in k and k != "rank"]
    memory = [v for one in idle for k, v in one.items() if "MB" in k]
    return {
        "rows": rows,
        "delegates_share": shares,
        "idle": {
            "cores_a_delegate": statistics.median(cores),
            "most_cores_a_delegate": max(cores),
            "most_cores_a_rank": max(one["rank"] for one in idle),
            "mb_a_delegate": statistics.median(memory),
        },
    }


def table(found: dict[str, Any]) -> str:
    """Medians, and the delegates' rate as a share of the in-process sender's."""
    lines = ["| size | way | GB/s | one message, ms | CPU a message, ms |", "|---|---|---:|---:|---:|"]
    for row in found["rows"]:
        figures = f"{row['gb_per_s']:.2f} | {row['one_ms']:.2f} | {row['cpu_ms']:.2f}"
        lines.append(f"| {row['size']} | {row['way']} | {figures} |")
    for size, share in found["delegates_share"].items():
        lines.append(f"\nDelegates at {size}: {share:.0%} of the in-process sender's GB/s (median)")
    idle = found["idle"]
    lines.append(
        f"\nIdle: a delegate takes {idle['cores_a_delegate']:.2%} of a core (most: "
        f"{idle['most_cores_a_delegate']:.2%}), a rank {idle['most_cores_a_rank']:.2%}; a delegate has "
        f"{idle['mb_a_delegate']:.1f} MB of its own"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    found = measure(arguments.rounds, arguments.idle_seconds)
    found["load_before_and_after"] = [before, os.getloadavg()[0]]
    if arguments.out is not None:
        save_summary(arguments.out, found)
    print(table(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
