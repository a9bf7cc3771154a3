"""What a GPU did and when, out of a trace of torch.profiler: kernels, and copies to and from host memory.

compute  ####.####.####.    where kernels ran: spans that nearly touch are one
out      ..##...##...##.    copies to host memory
in       .##...##...##..    copies from host memory

with profiled(device) as found:
    ...
found.spans
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

NEAR = 0.02
"""Milliseconds between two kernels that count as one span."""
TRACKS = ("compute", "out", "in")
Interval = tuple[float, float]


@dataclass(frozen=True)
class DeviceSpan:
    """Something that a device did.

    Attributes:
        track: "compute", "out" (to host memory), "in" (from it) or "other".
        name: as the profiler has it. stream: of the device.
        start, end: milliseconds of the profiler's clock. num_bytes: of a copy. pinned: whether its host memory is.
    """

    track: str
    name: str
    stream: int
    start: float
    end: float
    num_bytes: int = 0
    pinned: bool = False

    @property
    def ms(self) -> float:
        return self.end - self.start


def device_spans(trace: Mapping[str, Any]) -> list[DeviceSpan]:
    """The spans of a Chrome trace as torch.profiler exports it, by their start. What the host did is left out."""
    found = []
    for event in trace["traceEvents"]:
        kind, name = event.get("cat"), event.get("name", "")
        if event.get("ph") != "X" or kind not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        given = event.get("args", {})
        track = "compute" if kind == "kernel" else "other"
        if kind == "gpu_memcpy":
            track = {"DtoH": "out", "HtoD": "in"}.get(name.partition(" ")[2][:4], "other")
        start = event["ts"] / 1e3
        found.append(
            DeviceSpan(
                track,
                name,
                int(given.get("stream", -1)),
                start,
                start + event.get("dur", 0) / 1e3,
                int(given.get("bytes", 0)),
                "Pinned" in name,
            )
        )
    return sorted(found, key=lambda span: (span.start, span.end))


@dataclass
class Profiled:
    """What a device did within the `with`; filled when it ends."""

    spans: list[DeviceSpan] = field(default_factory=list)


@contextmanager
def profiled(device: torch.device) -> Iterator[Profiled]:
    """Records what a GPU does. Nothing is recorded on a CPU, and where a machine does not let CUPTI trace its GPU."""
    found = Profiled()
    if device.type != "cuda":
        yield found
        return
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        yield found
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory(prefix="penstock-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found.spans = device_spans(json.loads(path.read_text(encoding="utf-8")))


def copies(spans: Sequence[DeviceSpan], track: str, least: int = 0) -> list[DeviceSpan]:
    """The copies of a track that carry at least so many bytes."""
    return [span for span in spans if span.track == track and span.num_bytes >= least]


def merged(spans: Sequence[DeviceSpan], track: str, near: float = NEAR) -> list[Interval]:
    """When a track was busy: its spans, those that overlap or nearly touch as one."""
    found: list[Interval] = []
    for span in spans:
        if span.track != track:
            continue
        if found and span.start - found[-1][1] <= near:
            found[-1] = (found[-1][0], max(found[-1][1], span.end))
        else:
            found.append((span.start, span.end))
    return found


def overlap(one: Sequence[Interval], others: Sequence[Interval]) -> float:
    """How much of `one` lies within `others`; neither has overlaps in itself."""
    return sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in one for begin, stop in others)


def inside(spans: Sequence[DeviceSpan], least: int = 0) -> float | None:
    """The share of the time of copies, both ways, that lies beside kernels; None where there are no copies."""
    compute = merged(spans, "compute")
    moved = [*copies(spans, "out", least), *copies(spans, "in", least)]
    whole = sum(span.ms for span in moved)
    if not whole:
        return None
    return sum(overlap([(span.start, span.end)], compute) for span in moved) / whole


def tracks(spans: Sequence[DeviceSpan]) -> dict[str, list[Interval]]:
    """When each track was busy, from 0 on."""
    origin = min((span.start for span in spans), default=0.0)
    return {track: [(start - origin, end - origin) for start, end in merged(spans, track)] for track in TRACKS}


def drawn(found: Mapping[str, Sequence[Sequence[float]]], width: int = 96) -> Iterator[str]:
    """Tracks as lines of text: `#` where one is busy for at least half of a column's time, `-` where for less."""
    end = max((each[1] for spans in found.values() for each in spans), default=0.0)
    column = end / width or 1.0
    yield f"{end:.1f} ms, {column:.2f} ms a column"
    for track, spans in found.items():
        cells = []
        for place in range(width):
            busy = overlap([(place * column, (place + 1) * column)], [(each[0], each[1]) for each in spans])
            cells.append("#" if busy >= column / 2 else "-" if busy > 0 else ".")
        yield f"{track:8}{''.join(cells)}"
