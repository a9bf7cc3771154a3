"""Figures 6 and 9 on one GPU: what a late message does to the GEMMs beside it, by NCCL and by delegates.

    PYTHONPATH=src:. python -m experiments.pipemorph.figure9 --out FOLDER      less than a minute, on one GPU

Protocol, written before the run. Two processes share the GPU. Rank 0 computes 12 ops of 10 ms, each a row of GEMMs
of about 110 microseconds, and after each op sends a message of 10 MB to rank 1, which computes nothing. Rank 1
receives a message once it is told that its op has ended; the receive of the third message is 0 or 30 ms late, as the
paper's link is. As in the runtime, an op is launched behind the one that runs, and no further ahead. Events before
and after each op and between its GEMMs say when they ran. The ways:

    alone            no message
    in order         NCCL; the stream that computes waits for each message, as in an order of ops fixed beforehand
    beside           NCCL on a stream of its own, all else as before (the paper's "opportunistic communication")
    delegates        `DelegateTransport`, pinned memory; rank 1 receives in host memory and leaves the GPU alone
    receive stands   a control: rank 1's NCCL receive is there all the time; the message is sent after the ops
    nobody else      a control: alone, before rank 1 has made a context on the GPU

The ways take 5 turns, in an order that rotates, after one turn of each that does not count; fewer where that one says
that they would take more than half a minute. `nobody else` has its turns before. Of each turn: the longest pause
between two ops, the makespan, the longest time that the call of a send took, and the GEMMs' times (median, 90th
percentile) by what the link did in their middle:

    free     nothing            waits    a message is ready and its receiver is not            moves    data moves

The stretch of a GEMM is its time over the median of `alone`. Compared are medians over the turns. What is expected:
`in order` has a pause of 30 ms more where a message is late, `beside` has none and GEMMs that are slower, and
`delegates` have neither. Rank 1 checks every byte of every message.

NCCL refuses two ranks on one GPU, unless they seem to be on two hosts: each process has an NCCL_HOSTID of its own,
and sockets on loopback carry the data. Should NCCL refuse all the same, that is a row of the results, and the other
ways run without it. Two processes without MPS take turns on the GPU in slices of about 2 ms, so NCCL's receive, which
is a kernel of rank 1, takes time from rank 0's GEMMs that it would not take on a GPU of its own. `receive stands`
says how much. While a message `waits` there is no kernel of rank 1's: what a GEMM loses then is to NCCL's send in
rank 0 alone. The paper's straw man, too, sends from a process of its own on the same GPU.

`--device cpu` runs the same code over gloo with small sizes, for the tests; its numbers mean nothing.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.common.command import options
from experiments.common.results import Row, draw, save, table
from experiments.pipemorph import RESULTS
from experiments.pipemorph.gpu import (
    MB,
    OP_MS,
    DelegatedLink,
    DeviceClock,
    Gemms,
    PairFailed,
    Peer,
    device_facts,
    intervals,
    run_pair,
    spread,
)
from penstock.draw.chart import Axis, Bars, Figure, bar_chart
from penstock.runtime.execute.launched_ops import MOST_LAUNCHED_OPS

NCCL_WAYS = ("in order", "beside", "receive stands")
WAYS = ("alone", "in order", "beside", "delegates", "receive stands")
STATES = ("free", "waits", "moves")
LATE = 2
"""The message whose receive is late: the paper's SF_2."""
DELAYS = (0.0, 30.0)
HOST_MEMORY = 512 * MB
LIMIT = 90.0
"""Seconds that the two processes may take."""
NCCL_TIMEOUT = timedelta(seconds=20)
NCCL_SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""So that two ranks on one GPU talk as two hosts would."""


@dataclass(frozen=True)
class Protocol9:
    """What is run.

    Attributes:
        device: "cuda" or "cpu". rounds: turns that count, at most. nccl: whether its ways are among them.
        budget: seconds that the turns may take, as far as the one before can tell.
    """

    device: str = "cuda"
    num_ops: int = 12
    op_ms: float = OP_MS
    message_bytes: int = 10 * MB
    rounds: int = 5
    nccl: bool = True
    budget: float = 30.0


class Sender(Protocol):
    """Rank 0's end of a way."""

    def send(self, number: int, leaf: Tensor) -> None:
        """Sends what the last op wrote; returns when the next op may be launched."""

    def finish(self) -> None:
        """Returns when the messages may be written over."""


class Nothing:
    """No messages."""

    def send(self, number: int, leaf: Tensor) -> None:
        pass

    def finish(self) -> None:
        pass


class DistributedSender:
    """torch.distributed's sends: NCCL has a stream of its own. `in_order`, the one that computes waits for it."""

    def __init__(self, in_order: bool) -> None:
        self._in_order = in_order
        self._works: list[Any] = []

    def send(self, number: int, leaf: Tensor) -> None:
        work: Any = dist.isend(leaf, 1)
        if self._in_order:
            work.wait()
        else:
            self._works.append(work)

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()


class DelegateSender:
    """Delegates' sends."""

    def __init__(self, link: DelegatedLink, num_bytes: int) -> None:
        self._link = link
        link.begin(0, num_bytes)

    def send(self, number: int, leaf: Tensor) -> None:
        self._link.send(number, leaf)

    def finish(self) -> None:
        self._link.transport.end()


class Announcer:
    """A thread of rank 0 that tells rank 1 of each op that has ended, whatever the rank itself is doing."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._ops: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launched(self, number: int, end: Any) -> None:
        self._ops.put((number, end))

    def close(self) -> None:
        """Returns when all has been told."""
        self._ops.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._ops.get()) is not None:
            number, end = item
            end.synchronize()
            self._tell(number)


def rank_main(peer: Peer, protocol: Protocol9, folder: str) -> dict[str, Any]:
    """One of the two processes; rank 0 returns the rows."""
    return _sending(peer, protocol, folder) if peer.rank == 0 else _receiving(peer, protocol, folder)


def _join(peer: Peer, protocol: Protocol9, folder: str) -> str:
    """Sets torch.distributed up; returns why it can't be, or nothing."""
    why = ""
    if protocol.nccl:
        backend = "nccl" if protocol.device == "cuda" else "gloo"
        os.environ.update(NCCL_SETTINGS if backend == "nccl" else {"GLOO_SOCKET_IFNAME": "lo"})
        os.environ["NCCL_HOSTID"] = f"penstock-rank-{peer.rank}"
        try:
            dist.init_process_group(
                backend, init_method=f"file://{folder}/store", rank=peer.rank, world_size=2, timeout=NCCL_TIMEOUT
            )
            one = torch.zeros(1, device=protocol.device)
            dist.all_reduce(one)
            dist.send(one, 1) if peer.rank == 0 else dist.recv(one, 0)
            if protocol.device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    return next(filter(None, peer.gather(why)), "") if protocol.nccl else ""


def _plan(protocol: Protocol9, refused: str) -> list[tuple[int, str, float]]:
    """The turns: number, -1 for those that do not count; way; how late the receive is."""
    ways = [way for way in WAYS if way not in NCCL_WAYS or (protocol.nccl and not refused)]
    kinds = [(way, ms) for way in ways for ms in (DELAYS if way in ("in order", "beside", "delegates") else (0.0,))]
    return [
        (turn, *kinds[(place + max(turn, 0)) % len(kinds)])
        for turn in range(-1, protocol.rounds)
        for place in range(len(kinds))
    ]


def _sending(peer: Peer, protocol: Protocol9, folder: str) -> dict[str, Any]:
    device = torch.device(protocol.device)
    gemms, clock = Gemms(device), DeviceClock(device)
    count = gemms.count_for(protocol.op_ms, clock)
    leaves = [torch.empty(protocol.message_bytes, dtype=torch.uint8, device=device) for _ in range(protocol.num_ops)]

    def turn(number: int, way: str, late_ms: float, sender: Sender, seen: Callable[[], Any]) -> Row:
        """All ops once; `seen` gives rank 1's moments when all has come."""
        told = way not in ("alone", "nobody else", "receive stands")
        clock = DeviceClock(device)
        announcer = Announcer(peer.signals.send if told else lambda op: None)
        ops: list[tuple[list[Any], Any]] = []
        calls: list[float] = []
        for op in range(protocol.num_ops):
            if op >= MOST_LAUNCHED_OPS:  # as the runtime does, so that no call waits for room in the queue
                ops[op - MOST_LAUNCHED_OPS][1].synchronize()
            marks = gemms.op(count, clock)
            leaves[op].fill_(content(number, op))
            end = clock.mark(sleeps=True)
            announcer.launched(op, end)
            called = time.perf_counter()
            sender.send(op, leaves[op])
            calls.append((time.perf_counter() - called) * 1e3)
            ops.append((marks, end))
        last = clock.mark()
        last.synchronize()
        announcer.close()
        if way == "receive stands":
            work: Any = dist.isend(leaves[0], 1)
            work.wait()
        moments = seen()
        sender.finish()
        clock.synchronize()
        ready = [clock.moment(end) for _, end in ops]
        times = [(clock.moment(marks[place]), ms) for marks, _ in ops for place, ms in enumerate(intervals(marks))]
        return {
            "way": way,
            "late_ms": late_ms,
            "turn": number,
            "gemm_ms": by_state(times, *states(ready, moments)),
            "op_ms": spread([marks[0].elapsed_time(end) for marks, end in ops]),
            "pause_ms": [end.elapsed_time(after[0]) for (_, end), (after, _) in pairwise(ops)],
            "call_ms": max(calls),
            "makespan_ms": ops[0][0][0].elapsed_time(last),
        }

    rows = [turn(number, "nobody else", 0.0, Nothing(), lambda: None) for number in range(-1, protocol.rounds)]
    peer.gather("rank 1 may come to the GPU now")
    refused = _join(peer, protocol, folder)
    link = DelegatedLink(peer, device, protocol.num_ops, HOST_MEMORY)
    began, rounds = time.perf_counter(), protocol.rounds
    plan = _plan(protocol, refused)
    for place, (number, way, late_ms) in enumerate(plan):
        if number == 0 and plan[place - 1][0] < 0:
            rounds = min(rounds, max(1, int(protocol.budget / (time.perf_counter() - began))))
        if peer.gather(rounds)[0] <= number:
            break
        sender: Sender = Nothing()
        if way in ("in order", "beside"):
            sender = DistributedSender(way == "in order")
        elif way == "delegates":
            sender = DelegateSender(link, protocol.message_bytes)
        if way == "receive stands":
            time.sleep(0.02)  # the receive is there when the ops begin
        rows.append(turn(number, way, late_ms, sender, lambda: peer.gather(None)[1]))
    pinned = link.transport._delegate.out_memory.part(0, 1).is_pinned()
    link.transport.close()
    facts = {**device_facts(device), "gemms_an_op": count, "pinned": pinned, "turns": rounds}
    return {"rows": [row for row in rows if row["turn"] >= 0], "refused": refused, "facts": facts}


def _receiving(peer: Peer, protocol: Protocol9, folder: str) -> dict[str, Any]:
    peer.gather(None)
    device = torch.device(protocol.device)
    size, num = protocol.message_bytes, protocol.num_ops
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(num)]
    refused = _join(peer, protocol, folder)
    link = DelegatedLink(peer, torch.device("cpu"), num, HOST_MEMORY)
    for number, way, late_ms in _plan(protocol, refused):
        if way == "delegates":
            link.begin(num, size)
        standing = None
        if peer.gather(None)[0] <= number:
            break
        if way == "receive stands":
            standing = dist.irecv(buffers[0], 0)
        moments: list[tuple[float, float]] = []
        came = buffers
        if way in ("in order", "beside", "delegates"):
            taken, order = {}, []
            for place in range(num):
                peer.signals.recv()
                if place == LATE:
                    time.sleep(late_ms / 1e3)
                posted = time.perf_counter()
                if way == "delegates":
                    at, message = link.receive()  # several lanes carry them, and each comes when it comes
                    taken[at] = message
                    order.append(at)
                else:
                    _received(dist.irecv(buffers[place], 0))
                moments.append((posted, time.perf_counter()))
            if way == "delegates":
                came = [taken[place] for place in range(num)]
                # When they were in host memory, whoever had taken them by then.
                records = link.transport.crossings()
                arrived = {at: record.arrived / 1e9 for at, record in zip(order, records, strict=True)}
                moments = [(posted, arrived[place]) for place, (posted, _) in enumerate(moments)]
            check(number, came)
        if standing is not None:
            _received(standing)
        peer.gather(moments)
        if way == "delegates":
            link.transport.end()
    link.transport.close()
    return {}


def _received(work: Any) -> None:
    """Returns when a message is there, without a kernel that waits for it."""
    if dist.get_backend() == "gloo":
        work.wait()
        return
    while not work.is_completed():
        time.sleep(50e-6)
    work.wait()


def content(turn: int, op: int) -> int:
    """The byte that an op's message is made of."""
    return (13 * (turn + 1) + op) % 251 + 1


def check(turn: int, came: Sequence[Tensor]) -> None:
    """Raises RuntimeError where a message is not the one that was sent."""
    for op, leaf in enumerate(came):
        if not bool((leaf == content(turn, op)).all()):
            raise RuntimeError(f"message {op} of turn {turn} came with other bytes than were sent")


Span = tuple[float, float]


def states(ready: Sequence[float], moments: Sequence[Span] | None) -> tuple[list[Span], list[Span]]:
    """When a message was ready and its receiver was not, and when data moved.

    Args:
        ready: when each message's op had ended. moments: when its receiver began to receive, and when it was there; a
            delegate may have it before anybody asks for it.
    """
    waits, moves = [], []
    for begin, (posted, there) in zip(ready, moments or [], strict=False):
        if there <= posted:  # it lies there and waits
            moves.append((begin, there))
            waits.append((there, posted))
        else:
            waits.append((begin, posted))
            moves.append((max(begin, posted), there))
    return waits, moves


def by_state(
    times: Sequence[tuple[float, float]], waits: Sequence[Span], moves: Sequence[Span]
) -> dict[str, dict[str, float]]:
    """The spread of GEMMs' times by what the link did in their middle.

    Args:
        times: when each began (s), and how long it took (ms).
    """
    found: dict[str, list[float]] = {state: [] for state in STATES}
    for begin, ms in times:
        middle = begin + ms / 2e3
        state = "free"
        if any(start <= middle < end for start, end in moves):
            state = "moves"
        elif any(start <= middle < end for start, end in waits):
            state = "waits"
        found[state].append(ms)
    return {state: spread(values) for state, values in found.items()} | {
        "all": spread([ms for _, ms in times]),
    }


def measure(protocol: Protocol9, limit: float = LIMIT) -> tuple[list[Row], dict[str, Any]]:
    """The rows and what they were measured on; without NCCL where NCCL fails, and then a row says why."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="penstock-figure-") as folder:
        try:
            found = run_pair(rank_main, protocol, folder, limit=limit)[0]
        except PairFailed as error:
            if not protocol.nccl:
                raise
            rows.append({"way": "nccl", "refused": last_words(str(error))})
            without = Protocol9(**{**vars(protocol), "nccl": False})
            found = run_pair(rank_main, without, folder, limit=limit)[0]
    if found["refused"]:
        rows.append({"way": "nccl", "refused": last_words(found["refused"])})
    return [*rows, *found["rows"]], found["facts"]


def last_words(text: str) -> str:
    """The end of an error's text, on one line."""
    return " ".join(text.split())[-600:]


def over_turns(rows: Sequence[Row], way: str, late_ms: float, value: Callable[[Row], float | None]) -> float | None:
    """The median over a way's turns; None where no turn has the value."""
    found = [value(row) for row in rows if row["way"] == way and row.get("late_ms") == late_ms]
    known = [each for each in found if each is not None]
    return median(known) if known else None


def kinds(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """Ways and delays, in the order in which they are shown."""
    there = {(row["way"], row["late_ms"]) for row in rows if "refused" not in row}
    return [(way, ms) for way in ("nobody else", *WAYS) for ms in DELAYS if (way, ms) in there]


def blocked(rows: Sequence[Row]) -> Iterator[str]:
    """Figure 6: pauses between ops."""
    yield from refusals(rows)
    yield "longest pause between two ops, makespan, and longest call of a send (ms); medians over the turns"
    body = [
        [
            way,
            f"{ms:g}",
            _ms(over_turns(rows, way, ms, lambda row: max(row["pause_ms"]))),
            _ms(over_turns(rows, way, ms, lambda row: row["makespan_ms"])),
            _ms(over_turns(rows, way, ms, lambda row: row["call_ms"])),
        ]
        for way, ms in kinds(rows)
    ]
    yield from table(["", "late by", "pause", "makespan", "call"], body)
    yield "paper: a message 30 ms late takes an iteration from 710 to 1350 ms, by calls that block"


def interfered(rows: Sequence[Row]) -> Iterator[str]:
    """Figure 9: what GEMMs take beside messages."""
    yield from refusals(rows)
    base = over_turns(rows, "alone", 0.0, lambda row: row["gemm_ms"]["all"]["median"])
    assert base is not None
    yield f"a GEMM alone takes {base * 1e3:.0f} us; median and 90th percentile beside a link, as multiples of that"
    body = []
    for way, ms in kinds(rows):
        cells = [way, f"{ms:g}"]
        for state in (*STATES, "all"):
            middle, high = (over_turns(rows, way, ms, _gemm(state, key)) for key in ("median", "p90"))
            cells.append("" if middle is None or high is None else f"{middle / base:.2f} ({high / base:.2f})")
        body.append(cells)
    yield from table(["", "late by", *STATES, "all"], body)
    yield "paper: a GEMM of 110 us takes up to 2 ms beside NCCL in a process of its own, 18 times as long"


def _gemm(state: str, key: str) -> Callable[[Row], float | None]:
    return lambda row: row["gemm_ms"][state].get(key)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def refusals(rows: Sequence[Row]) -> Iterator[str]:
    """What NCCL said where it did not run."""
    for row in rows:
        if "refused" in row:
            yield f"NCCL did not run between two ranks on one GPU: {row['refused']}"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield from blocked(rows)
    yield from (line for line in interfered(rows) if not line.startswith("NCCL did not run"))


def chart(rows: Sequence[Row]) -> Figure:
    """Pauses and stretches, beside each other."""
    base = over_turns(rows, "alone", 0.0, lambda row: row["gemm_ms"]["all"]["median"])
    assert base is not None
    shown = kinds(rows)
    highs = [over_turns(rows, way, ms, _gemm("all", "p90")) for way, ms in shown]
    series = [
        Bars("longest pause (ms)", [over_turns(rows, *kind, lambda row: max(row["pause_ms"])) for kind in shown]),
        Bars("GEMM, 90th percentile, over alone", [None if high is None else high / base for high in highs]),
    ]
    return bar_chart(
        [f"{way}, {ms:g} ms late" if ms else way for way, ms in shown],
        series,
        title="Figures 6 and 9 on one GPU: a late message, by the way it goes",
        y=Axis("ms; times as long"),
        show="{:.1f}".format,
    )


def main() -> None:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=Protocol9.rounds, help="turns of each way that count")
    given = parser.parse_args()
    small: dict[str, Any] = {} if given.device == "cuda" else {"op_ms": 2.0, "message_bytes": MB // 4, "num_ops": 4}
    protocol = Protocol9(given.device, rounds=given.rounds, **small)
    began = time.perf_counter()
    rows, facts = measure(protocol)
    seconds = round(time.perf_counter() - began, 1)
    name = "figure9-gpu" if given.device == "cuda" else "figure9-cpu"
    save(Path(given.out), name, rows, seeds=[0], figure="figure9", seconds=seconds, **facts)
    print("\n".join(lines(rows)))
    draw(Path(given.out), name, chart(rows))


if __name__ == "__main__":
    main()
