"""Head-of-line blocking: what a late link costs where sends queue up in a bounded channel, and where delegates send.

    python benchmarks/head_of_line/run.py [--stretch 3] [--steps 3] [--out FILE.json]

Iteration times as multiples of those with no delay, simulated beside measured beside the paper's (PipeMorph, section
3.2 and Figure 6: a 7B model on 4 ranks, 30 ms between the first two, 710 ms become 1350 ms, 1.9 times; Figure 14: the
last two, 703 ms with ZB and 579 ms with delegates alone, of 368 ms). Ranks are threads of this process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import penstock as ps
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.cost.presets import PRESETS
from penstock.runtime.emulation.pipeline import Emulation
from penstock.runtime.transport.choose import TransportOptions

NORMAL_14 = 368.0
"""Milliseconds of the iteration of Figure 14 without delay: 398 ms, "only 30 ms slowdown"."""
PAPER = {
    ("zb", "0:1=occupancy:30ms", "direct"): 1350 / 710,
    ("zb", "2:3=occupancy:30ms", "direct"): 703 / NORMAL_14,
    ("zb", "2:3=latency:30ms", "delegate"): 579 / NORMAL_14,
}
"""What the paper has, on the 7B model, as multiples."""


@dataclass(frozen=True)
class ToyPipeline:
    """What is trained: a chain of stages, one per rank."""

    name: str
    costs: ps.Costs
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return self.costs.num_stages


@dataclass(frozen=True)
class Case:
    """One bar: what is trained, how, over what links, sent by what.

    Attributes:
        links: what is injected, as `ps.Links.parse` reads it; "" for nothing.
        depth: of direct channels.
    """

    pipeline: ToyPipeline
    schedule: str
    links: str
    transport: str
    depth: int | None

    @property
    def paper(self) -> float | None:
        """The paper's multiple, where it has one."""
        return PAPER.get((self.schedule, self.links, self.transport)) if self.pipeline == GPT_7B else None


GPT_7B = ToyPipeline("gpt2-7b", PRESETS["gpt2-7b"].costs(), PRESETS["gpt2-7b"].num_microbatches)
CHAIN_8 = ToyPipeline("8 ranks, ops of 10 ms", ps.Costs.uniform(8, 10, 10, 10), 32)


def cases(pipelines: Sequence[ToyPipeline]) -> Iterator[Case]:
    """For each pipeline and schedule: no delay first, then the first and last link late, by each way of sending.

    The authors inject a delay on GPUs by a kernel that spins before each send: the link is busy with one message at
    a time ("occupancy"), whatever the channel's depth. Where delays are of latency, depth 2 holds up less.
    """
    for pipeline in pipelines:
        last = pipeline.num_ranks - 1
        for schedule in ("1f1b", "zb"):
            yield Case(pipeline, schedule, "", "direct", 2)
            for link in ("0:1", f"{last - 1}:{last}"):
                for ms in (30,) if pipeline is GPT_7B else (30, 60):
                    late = f"{link}=latency:{ms}ms"
                    yield Case(pipeline, schedule, f"{link}=occupancy:{ms}ms", "direct", 2)
                    yield Case(pipeline, schedule, late, "direct", 1)
                    yield Case(pipeline, schedule, late, "direct", 2)
                    yield Case(pipeline, schedule, late, "delegate", None)


def run(pipelines: Sequence[ToyPipeline], steps: int, stretch: float) -> Iterator[dict[str, Any]]:
    """A row for each case, as it comes."""
    without: dict[tuple[str, str], tuple[float, float]] = {}
    for case in cases(pipelines):
        emulation = _emulate(case, steps, stretch)
        simulated = emulation.simulated[0].makespan
        measured = [timeline.makespan for timeline in emulation.timelines]
        key = case.pipeline.name, case.schedule
        if not case.links:
            without[key] = simulated, statistics.median(measured)
        base_simulated, base_measured = without[key]
        yield {
            "pipeline": case.pipeline.name,
            "num_ranks": case.pipeline.num_ranks,
            "num_microbatches": case.pipeline.num_microbatches,
            "schedule": case.schedule,
            "links": case.links,
            "transport": case.transport,
            "depth": case.depth,
            "simulated_ms": simulated,
            "measured_ms": measured,
            "simulated": simulated / base_simulated,
            "measured": statistics.median(measured) / base_measured,
            "paper": case.paper,
            "own_latency_ms": emulation.own_latency,
            "late_ms": emulation.late.median,
        }


def _emulate(case: Case, steps: int, stretch: float) -> Emulation:
    pipeline = case.pipeline
    schedule = ps.build(case.schedule, pipeline.num_ranks, pipeline.num_microbatches)
    links = ps.Links.parse(case.links)
    return ps.emulate(
        schedule,
        pipeline.costs,
        links=links,
        num_steps=steps,
        stretch=stretch,
        transport=TransportOptions(case.transport, depth=case.depth),
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| pipeline | schedule | links | sent by | simulated | measured | paper | ms, simulated | ms, measured |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        by = row["transport"] if row["depth"] is None else f"{row['transport']}, depth {row['depth']}"
        paper = "" if row["paper"] is None else f"{row['paper']:.2f}"
        cells = [row["pipeline"], row["schedule"], row["links"] or "no delay", by]
        cells += [f"{row['simulated']:.2f}", f"{row['measured']:.2f}", paper]
        cells += [f"{row['simulated_ms']:.0f}", f"{statistics.median(row['measured_ms']):.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stretch", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for row in run([GPT_7B, CHAIN_8], given.steps, given.stretch):
        rows.append(row)
        print(row["pipeline"], row["schedule"], row["links"], row["transport"], row["depth"], file=sys.stderr)
    if given.out is not None:
        save_summary(given.out, {**record(), "stretch": given.stretch, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
