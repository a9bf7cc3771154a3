"""Figure 21: what delegates cost where no link is slow: all links by delegates against all links direct.

    python -m experiments.pipemorph.figure21 --backend processes      two minutes

Emulated devices, a process a rank, real messages (10 MB each for these models) through the real transports; 4 ranks
and 12 microbatches (7B), 8 ranks and 24 microbatches (14B). Stretched by 10 where nothing else is said: two cores
move all ranks' messages, where the paper's machines have a network card for each rank. The paper: as fast as direct
for 7B and 14B, up to 16.4% slower for 30B and 60B.

The copies, as shares of an iteration of a middle rank: into shared memory and out of it (the paper's device to host
and host to device: 0.6 to 1.2% and 2.6 to 4.4%). Host parts only: there is no device here to copy from, and copies
are plain ones in host memory. What the way between delegates takes (the paper: 5.7 to 10.5%) is in
`benchmarks/delegate`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from experiments.common.results import Row, find, table
from experiments.pipemorph.backends import Backend, emulate
from experiments.pipemorph.command import command
from experiments.pipemorph.iterations import best_known, pair
from experiments.pipemorph.setups import MODELS, late
from experiments.pipemorph.systems import setting
from penstock.draw.chart import Axis, Bars, Figure, bar_chart

NAMES = ("7B", "14B")
TRANSPORTS = ("direct", "delegate")
TARGET = 0.03
"""Delegates over direct, at most."""
PAPER = "0.6 to 1.2%, 2.6 to 4.4%"
"""Copies in and out."""


def rows(backend: Backend, names: Sequence[str] = NAMES) -> Iterator[Row]:
    """A row for each model and transport, with the times of the parts."""
    for name in names:
        model = MODELS[name]
        runs = setting("zb", model, {})
        if backend.name != "processes":
            runs = replace(runs, job=replace(runs.job, costs=replace(model.costs, message_bytes=())))
        size = int(max(model.costs.message_bytes))
        parts = copies(size)
        for transport in TRANSPORTS:
            row = emulate(backend, runs, late({}, base=0.0), transport=transport)
            yield {
                "model": name,
                "transport": transport,
                "message_bytes": size,
                "messages_a_rank": 2 * model.num_microbatches,
                **parts,
                **row,
            }


def copies(num_bytes: int) -> dict[str, float]:
    """Milliseconds of a message's copies in host memory: into shared memory, and out of it."""
    import torch  # here, so that simulation starts without it

    torch.set_num_threads(1)  # as in a rank
    private, shared = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    shared.share_memory_()
    return {"in_ms": timed(lambda: shared.copy_(private)), "out_ms": timed(lambda: private.copy_(shared))}


def timed(work: Callable[[], object]) -> float:
    """The median time of some runs (ms)."""
    times = []
    for _ in range(30):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    return median(times)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    body = []
    for name in dict.fromkeys(row["model"] for row in rows):
        direct, delegate = (find(rows, model=name, transport=transport) for transport in TRANSPORTS)
        one, other = best_known(direct), best_known(delegate)
        iteration = one * delegate["stretch"]
        count = delegate["messages_a_rank"]
        shares = [count * delegate[part] / iteration for part in ("in_ms", "out_ms")]
        body.append([name, pair(direct), pair(delegate), f"{other / one - 1:+.1%}", *(f"{x:.1%}" for x in shares)])
    yield "iteration (ms, as if not stretched), simulated/measured, and parts of the delegates' path"
    yield from table(["", *TRANSPORTS, "delegates cost", "copy in", "copy out"], body)
    yield f"target: at most {TARGET:.0%}; paper: none for 7B and 14B; copies {PAPER}"


def chart(rows: Sequence[Row]) -> Figure:
    names = list(dict.fromkeys(row["model"] for row in rows))
    series = [
        Bars(transport, [best_known(find(rows, model=name, transport=transport)) for name in names])
        for transport in TRANSPORTS
    ]
    return bar_chart(
        names,
        series,
        title="Figure 21: delegates where no link is slow",
        y=Axis("iteration (ms)"),
        show="{:.0f}".format,
    )


if __name__ == "__main__":
    command("figure21", __doc__, rows, lines, chart, backends=("processes", "threads"), stretch=10.0)
