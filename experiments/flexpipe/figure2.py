"""Figure 2: how uneven the stages of GPT 5B are under Megatron-LM, by vocabulary: what the costs here rest on.

    python -m experiments.flexpipe.figure2      a second

The paper: at 1M words "the slowest stage is 5.63x slower than the fastest" and "costs 4.87x more memory". On how many
stages it does not say. On 8 the memory comes out by itself, state alone; then the time fixes the one fitted number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.common.command import options
from experiments.common.results import Row, draw, load, save, table
from experiments.flexpipe import RESULTS
from experiments.flexpipe.methods import megatron
from experiments.flexpipe.setups import GPT_5B, Setup
from penstock.draw.chart import Axis, Bars, Figure, bar_chart

NUM_STAGES = 8
PAPER = {"time": 5.63, "memory": 4.87}


def rows_of(num_stages: int = NUM_STAGES) -> Iterator[Row]:
    for vocabulary in GPT_5B.vocabularies:
        (run,) = megatron(Setup(GPT_5B, vocabulary, num_stages, 32 // num_stages, 1))
        times = [f + b for f, b in zip(run.costs.f, run.costs.b, strict=True)]
        yield {
            "vocabulary": vocabulary,
            "time": max(times) / min(times),
            "memory": max(run.parameters) / min(run.parameters),
            "times_ms": times,
            "state_gb": [run.setup.state_bytes(count) / 1e9 for count in run.parameters],
        }


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield f"GPT 5B on {NUM_STAGES} stages: the slowest stage over the fastest, the largest state over the smallest"
    body = [[f"{row['vocabulary']}K", f"{row['time']:.2f}", f"{row['memory']:.2f}"] for row in rows]
    yield from table(["vocabulary", "time", "memory"], [*body, ["paper, 1M", *(f"{x:.2f}" for x in PAPER.values())]])


def chart(rows: Sequence[Row]) -> Figure:
    last = [None] * (len(rows) - 1)
    return bar_chart(
        [f"{row['vocabulary']}K" for row in rows],
        [Bars(name, [row[name] for row in rows], paper=[*last, PAPER[name]]) for name in PAPER],
        title=f"Figure 2: GPT 5B on {NUM_STAGES} stages, the heaviest stage over the lightest",
        note="time of a forward and a backward; state of the parameters; the time at 1000K is fitted",
        y=Axis("times", low=0.0),
        show="{:.2f}".format,
        comment="made by: python -m experiments.flexpipe.figure2",
    )


def main() -> None:
    given = options(__doc__, RESULTS).parse_args()
    save(given.out, "figure2", list(rows_of()))
    rows = load(given.out, "figure2")
    print("\n".join(lines(rows)))
    draw(given.out, "figure2", chart(rows))


if __name__ == "__main__":
    main()
