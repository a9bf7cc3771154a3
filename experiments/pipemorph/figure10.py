"""Figures 10 to 12 on one GPU: a message's way from GPU to GPU by delegates, and its copies beside computation.

    PYTHONPATH=src:. python -m experiments.pipemorph.figure10 --out FOLDER      less than a minute, on one GPU

Protocol, written before the run. Two processes share the GPU and are joined by `DelegateTransport` itself.

1. *The way.* Messages of 1, 10 and 64 MB go from rank 0's part of the GPU to rank 1's, one at a time, and nothing
   else runs: 3 that do not count, then 10. The whole is from the call of `send` to the end of the copy that `take`
   started, by the host's clock. In 10 more torch.profiler tells how long the two copies took; the copies' own sizes
   say that they are those of the message. What the delegates took (loopback TCP, and handing over) is from `send`
   until the message lay in rank 1's host memory, by the transport's own record, less the copy out.
2. *Pinned or pageable.* Copies of the same sizes both ways between the GPU and the transport's own kind of shared
   memory, registered with CUDA and not, 10 of each in alternation, after one that does not count.
3. *Beside computation.* Rank 0 computes 12 ops of 10 ms (GEMMs of about 110 microseconds, timed by events), each op
   launched behind the one that runs. After each op a message goes to rank 1, and rank 1 sends one every 10 ms, so
   that copies go both ways; those of 64 MB every fourth op, as loopback TCP takes no more. Rank 1 keeps to host
   memory and has no work on the GPU, so that nothing takes turns with rank 0's GEMMs. No messages, and messages of 10
   and of 64 MB, take 5 turns in an order that rotates, after one turn of each that does not count. Compared is the
   median GEMM over that without messages, and the makespan likewise.
4. *A timeline.* One more turn of each size under torch.profiler: kernels, copies out and copies in as they lay on the
   device, and the share of the copies' time that lies beside kernels. Its times are not those of part 3, as the
   profiler takes some itself.

Expected: copies of pinned memory are faster than those of pageable memory, GEMMs keep their time within a few per
cent, and nearly all of the copies' time lies beside kernels, but for the last message's.

`--device cpu` runs the same code with small sizes for the tests, where nothing is profiled; its numbers mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.common.command import options
from experiments.common.results import Row, draw, find, save, table
from experiments.pipemorph import RESULTS
from experiments.pipemorph.gpu import (
    MB,
    OP_MS,
    DelegatedLink,
    DeviceClock,
    Gemms,
    Peer,
    device_facts,
    intervals,
    run_pair,
    spread,
)
from experiments.pipemorph.spans import copies, drawn, inside, profiled, tracks
from penstock.draw.chart import Axis, Bars, Figure, bar_chart
from penstock.runtime.execute.launched_ops import MOST_LAUNCHED_OPS
from penstock.runtime.transport.rank_memory import MappedMemory

LIMIT = 110.0
"""Seconds that the two processes may take."""
WARM_UPS = 3
"""Messages of each size that do not count."""
KINDS = ("pinned", "pageable")


@dataclass(frozen=True)
class Protocol10:
    """What is run: sizes in MB of the three parts, how often, and the ops beside which copies lie."""

    device: str = "cuda"
    sizes: tuple[float, ...] = (1, 10, 64)
    repeats: int = 10
    beside: tuple[float, ...] = (0, 10, 64)
    rounds: int = 5
    num_ops: int = 12
    op_ms: float = OP_MS
    host_memory: int = 512 * MB


def rank_main(peer: Peer, protocol: Protocol10) -> dict[str, Any]:
    """One of the two processes; rank 0 returns the rows."""
    device = torch.device(protocol.device)
    rows = list(_way(peer, protocol, device))
    if peer.rank == 0:
        rows += _copies(protocol, device)
    rows += _beside(peer, protocol, device)
    return {"rows": rows, "facts": device_facts(device) if peer.rank == 0 else {}}


# 1. The way.


def _way(peer: Peer, protocol: Protocol10, device: torch.device) -> Iterator[Row]:
    num = WARM_UPS + 2 * protocol.repeats
    link = DelegatedLink(peer, device, num, protocol.host_memory)
    clock = DeviceClock(device)
    for mb in protocol.sizes:
        size = round(mb * MB)
        leaf = torch.empty(size, dtype=torch.uint8, device=device)
        link.begin(num if peer.rank else 0, size)
        passed = [_pass(peer, link, clock, leaf, number) for number in range(WARM_UPS + protocol.repeats)]
        with profiled(device) as found:
            passed += [_pass(peer, link, clock, leaf, number) for number in range(len(passed), num)]
        mine = copies(found.spans, "in" if peer.rank else "out", least=size)
        copied = [span.ms for span in mine]
        pinned = bool(mine) and all(span.pinned for span in mine)
        crossed = [(record.arrived - record.sent) / 1e6 for record in link.transport.crossings()]
        told = peer.gather((copied, crossed, pinned))
        link.transport.end()
        counted = slice(WARM_UPS, WARM_UPS + protocol.repeats)
        if peer.rank == 0:
            yield {
                "part": "way",
                "mb": mb,
                "whole_ms": passed[counted],
                "crossing_ms": told[1][1][counted],
                "out_ms": told[0][0],
                "in_ms": told[1][0],
                "pinned": [told[0][2], told[1][2]],
            }
    link.transport.close()


def _pass(peer: Peer, link: DelegatedLink, clock: DeviceClock, leaf: torch.Tensor, number: int) -> float:
    """One message; returns the milliseconds from the call of `send` to the end of the copy in."""
    value = number % 251 + 1
    if peer.rank == 0:
        leaf.fill_(value)
        clock.synchronize()
    peer.gather(None)
    if peer.rank == 0:
        began = time.perf_counter()
        link.send(number, leaf)
        at = began
    else:
        came, there = link.receive()
        clock.synchronize()
        at = time.perf_counter()
        if came != number or not bool((there == value).all()):
            raise RuntimeError(f"message {came} came with other bytes than message {number} was sent with")
    began, ended = peer.gather(at)
    return (ended - began) * 1e3


# 2. Pinned or pageable.


def _copies(protocol: Protocol10, device: torch.device) -> Iterator[Row]:
    clock = DeviceClock(device)
    for mb in protocol.sizes:
        size = round(mb * MB)
        there = torch.ones(size, dtype=torch.uint8, device=device)
        memories = {kind: MappedMemory.make("penstock-messages", size) for kind in KINDS}
        if device.type == "cuda":
            memories["pinned"].pin()
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(1 + protocol.repeats):
            for kind, memory in memories.items():
                here = memory.part(0, size)
                for way, target, source in (("out", here, there), ("in", there, here)):
                    clock.synchronize()
                    began = time.perf_counter()
                    target.copy_(source, non_blocking=True)
                    clock.synchronize()
                    found.setdefault((kind, way), []).append((time.perf_counter() - began) * 1e3)
                del here, target, source
        for kind, memory in memories.items():
            memory.close()
            yield {
                "part": "copies",
                "mb": mb,
                "memory": kind,
                "out_ms": found[kind, "out"][1:],
                "in_ms": found[kind, "in"][1:],
            }


# 3 and 4. Beside computation.


def _beside(peer: Peer, protocol: Protocol10, device: torch.device) -> Iterator[Row]:
    computes = peer.rank == 0
    link = DelegatedLink(peer, device if computes else torch.device("cpu"), protocol.num_ops, protocol.host_memory)
    clock = DeviceClock(device if computes else torch.device("cpu"))
    gemms = Gemms(device) if computes else None
    count = gemms.count_for(protocol.op_ms, clock) if gemms is not None else 0
    num = len(protocol.beside)
    turns = [
        (turn, protocol.beside[(place + max(turn, 0)) % num])
        for turn in range(-1, protocol.rounds)
        for place in range(num)
    ]
    for turn, mb in turns:
        row = _turn(peer, protocol, link, clock, gemms, count, mb)
        if computes and turn >= 0:
            yield {"part": "beside", "mb": mb, "turn": turn, "gemms_an_op": count, **row}
    for mb in protocol.beside:
        if computes:
            with profiled(device) as found:
                row = _turn(peer, protocol, link, clock, gemms, count, mb)
            least = round(mb * MB)
            moved = [*copies(found.spans, "out", least), *copies(found.spans, "in", least)] if mb else []
            yield {
                "part": "timeline",
                "mb": mb,
                "tracks": tracks(found.spans),
                "inside": inside(found.spans, least) if mb else None,
                "num_copies": len(moved),
                "makespan_ms": row["makespan_ms"],
            }
        else:
            _turn(peer, protocol, link, clock, gemms, count, mb)
    link.transport.close()


def every(mb: float) -> int:
    """Ops from one message to the next."""
    return max(1, -(-int(mb) // 16))


def _turn(
    peer: Peer,
    protocol: Protocol10,
    link: DelegatedLink,
    clock: DeviceClock,
    gemms: Gemms | None,
    count: int,
    mb: float,
) -> Row:
    """All ops once, with messages of this size both ways, or none."""
    size = round(mb * MB)
    incoming = protocol.num_ops // every(mb) if size else 0
    link.begin(incoming, max(size, 1))
    leaves = [torch.zeros(size, dtype=torch.uint8, device=clock.device) for _ in range(incoming)]
    clock.synchronize()
    peer.gather(None)
    row: Row = {}
    if gemms is None:
        _answer(every(mb) * protocol.op_ms / 1e3, link, leaves)
    else:
        row = _compute(protocol, link, clock, gemms, count, leaves)
    peer.gather(None)
    link.transport.end()
    return row


def _compute(
    protocol: Protocol10,
    link: DelegatedLink,
    clock: DeviceClock,
    gemms: Gemms,
    count: int,
    leaves: Sequence[torch.Tensor],
) -> Row:
    """Rank 0's part of a turn."""
    ops: list[tuple[list[Any], Any]] = []
    came = 0
    for op in range(protocol.num_ops):
        if op >= MOST_LAUNCHED_OPS:
            ops[op - MOST_LAUNCHED_OPS][1].synchronize()
        if leaves:
            came += len(link.arrived())
        marks = gemms.op(count, clock)
        number = (op + 1) * len(leaves) // protocol.num_ops - 1
        sends = (op + 1) * len(leaves) % protocol.num_ops == 0 and bool(leaves)
        if sends:
            leaves[number].fill_(number + 1)
        end = clock.mark(sleeps=True)
        if sends:
            link.send(number, leaves[number])
        ops.append((marks, end))
    last = clock.mark()
    last.synchronize()
    while came < len(leaves):
        link.receive()
        came += 1
    clock.synchronize()
    return {
        "gemm_ms": spread([ms for marks, _ in ops for ms in intervals(marks)]),
        "op_ms": spread([marks[0].elapsed_time(end) for marks, end in ops]),
        "pause_ms": [end.elapsed_time(after[0]) for (_, end), (after, _) in pairwise(ops)],
        "makespan_ms": ops[0][0][0].elapsed_time(last),
    }


def _answer(pace: float, link: DelegatedLink, leaves: Sequence[torch.Tensor]) -> None:
    """Rank 1's part of a turn: a message every `pace` seconds, and what comes is looked at, in part, and let go."""
    began, came = time.perf_counter(), 0

    def looked_at(number: int, leaf: torch.Tensor) -> int:
        if not bool((leaf[::4096] == number + 1).all()):  # all of it would take longer than the way
            raise RuntimeError(f"message {number} came with other bytes than were sent")
        return 1

    for number, leaf in enumerate(leaves):
        link.send(number, leaf)
        came += sum(looked_at(*each) for each in link.arrived())
        time.sleep(max(0.0, began + (number + 1) * pace - time.perf_counter()))
    while came < len(leaves):
        came += looked_at(*link.receive())


# What was found.


def of_part(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def gb_s(mb: float, ms: Sequence[float]) -> float | None:
    """Gigabytes a second, of the median time; None of none."""
    return mb * MB / 1e6 / median(ms) if ms else None


def parts(row: Row) -> dict[str, float | None]:
    """Milliseconds of a message's way, each a median."""
    out, into = (median(row[key]) if row[key] else None for key in ("out_ms", "in_ms"))
    crossing = median(row["crossing_ms"])
    return {
        "copy out": out,
        "delegates": crossing - (out or 0.0),
        "copy in": into,
        "whole": median(row["whole_ms"]),
    }


def beside(rows: Sequence[Row], mb: float, value: Callable[[Row], float]) -> float:
    """The median over the turns."""
    return median(value(row) for row in of_part(rows, "beside") if row["mb"] == mb)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield from way_lines(rows)
    yield ""
    yield from beside_lines(rows)


def way_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Parts 1 and 2."""
    if not any(row["out_ms"] for row in of_part(rows, "way")):
        yield "torch.profiler recorded nothing of a GPU: copies within messages are not known by themselves"
    yield "a message's way from GPU to GPU (ms, medians), and what the copies in it reach (GB/s)"
    body = []
    for row in of_part(rows, "way"):
        rates = [gb_s(row["mb"], row[key]) for key in ("out_ms", "in_ms")]
        body.append([f"{row['mb']:g} MB", *map(_number, parts(row).values()), *map(_number, rates)])
    yield from table(["", "copy out", "delegates", "copy in", "whole", "out, GB/s", "in, GB/s"], body)
    yield ""
    yield "copies by themselves (GB/s, medians)"
    body = []
    for mb in dict.fromkeys(row["mb"] for row in of_part(rows, "copies")):
        cells = [f"{mb:g} MB"]
        for kind in KINDS:
            row = find(rows, part="copies", mb=mb, memory=kind)
            cells += [_number(gb_s(mb, row[key])) for key in ("out_ms", "in_ms")]
        body.append(cells)
    yield from table(["", "pinned out", "pinned in", "pageable out", "pageable in"], body)


def beside_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Parts 3 and 4."""
    base, whole = (beside(rows, 0, value) for value in (_gemm("median"), _makespan))
    yield f"beside messages both ways; without, a GEMM takes {base * 1e3:.1f} us and 12 ops {whole:.1f} ms"
    body = []
    for mb in dict.fromkeys(row["mb"] for row in of_part(rows, "beside")):
        body.append(
            [
                f"{mb:g} MB" if mb else "none",
                f"{beside(rows, mb, _gemm('median')) / base:.3f}",
                f"{beside(rows, mb, _gemm('p90')) / base:.3f}",
                f"{beside(rows, mb, lambda row: max(row['pause_ms'])):.2f}",
                f"{beside(rows, mb, _makespan) / whole:.3f}",
            ]
        )
    yield from table(["", "GEMM", "its 90th percentile", "longest pause, ms", "12 ops"], body)
    for row in of_part(rows, "timeline"):
        if row["inside"] is None:
            continue
        yield ""
        yield f"{row['mb']:g} MB: {row['inside']:.0%} of the time of {row['num_copies']} copies lies beside kernels"
        yield from drawn(row["tracks"])


def _gemm(key: str) -> Callable[[Row], float]:
    return lambda row: float(row["gemm_ms"][key])


def _makespan(row: Row) -> float:
    return float(row["makespan_ms"])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def chart(rows: Sequence[Row]) -> Figure:
    """Copies, pinned and pageable."""
    found = of_part(rows, "copies")
    sizes = list(dict.fromkeys(row["mb"] for row in found))
    series = [
        Bars(f"{kind}, {way}", [gb_s(mb, find(rows, part="copies", mb=mb, memory=kind)[key]) for mb in sizes])
        for kind in KINDS
        for way, key in (("out", "out_ms"), ("in", "in_ms"))
    ]
    return bar_chart(
        [f"{mb:g} MB" for mb in sizes],
        series,
        title="Figures 10 to 12: copies between a GPU and shared memory",
        y=Axis("GB/s"),
        show="{:.1f}".format,
    )


def main() -> None:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=Protocol10.rounds, help="turns beside computation that count")
    given = parser.parse_args()
    small: dict[str, Any] = {}
    if given.device == "cpu":
        small = {
            "sizes": (0.5, 1),
            "beside": (0, 1),
            "repeats": 2,
            "num_ops": 4,
            "op_ms": 2.0,
            "host_memory": 64 * MB,
        }
    began = time.perf_counter()
    found = run_pair(rank_main, Protocol10(given.device, rounds=given.rounds, **small), limit=LIMIT)[0]
    seconds = round(time.perf_counter() - began, 1)
    name = "figure10-gpu" if given.device == "cuda" else "figure10-cpu"
    save(Path(given.out), name, found["rows"], seeds=[0], figure="figure10", seconds=seconds, **found["facts"])
    print("\n".join(lines(found["rows"])))
    draw(Path(given.out), name, chart(found["rows"]))


if __name__ == "__main__":
    main()
