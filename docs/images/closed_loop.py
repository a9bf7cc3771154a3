"""Makes closed_loop.svg, a picture in docs/control.md: iterations with a late link, with the controller and without.

python docs/images/closed_loop.py

The site makes a narrow one of it, for phones.
"""

from __future__ import annotations

from pathlib import Path

import penstock as ps
from penstock.control import Configuration, Controller, Job, rehearse, run_once
from penstock.cost import Links
from penstock.draw.chart import Axis, Level, Line, Mark, line_chart

RANKS, MICROBATCHES, OP = 8, 32, 10.0
LATE = "6:7=latency:steps:0ms/0ms,10300ms/60ms,44s/0ms"


def pictures(width: int = 900) -> dict[str, str]:
    """The last link is 60 ms late for a while: what the controller does about it, and what it costs to do nothing."""
    costs = ps.Costs.uniform(RANKS, f=OP, i=OP, w=OP)
    zb = ps.build("zb", RANKS, MICROBATCHES)
    job = Job(costs, Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations))
    late = Links.parse(LATE)
    run = rehearse(Controller(job), late, until=58_000)
    kept = [run_once(job, job.start, late, each.start).makespan for each in run.iterations]
    numbers = [each.number for each in run.iterations]
    first = {number: min(each.number for each in run.iterations if each.decision == number) for number in (1, 2)}
    names = [decision.action.value for decision in run.decisions]
    figure = line_chart(
        [
            Line("nothing done", numbers, kept, hue="brick", stroke="dashed"),
            Line("controlled", numbers, [each.ms for each in run.iterations], hue="blue"),
        ],
        title="The last of seven links is 60 ms late for a while",
        note=f"{RANKS} ranks, {MICROBATCHES} microbatches, ops of {OP:g} ms; rehearsed in simulation.",
        x=Axis("iteration"),
        y=Axis("ms an iteration", high=2500, ticks=range(0, 2501, 500)),
        marks=[Mark(first[number] - 0.5, name, hue="purple") for number, name in zip((1, 2), names, strict=True)],
        levels=[Level(ps.simulate(zb, costs).makespan, "no link late")],
        width=width,
        height=340,
        label="Iteration time with a late link: 2140 ms with nothing done, soon 1090 ms under control",
        comment="made by: python docs/images/closed_loop.py",
    )
    return {"closed_loop": str(figure)}


if __name__ == "__main__":
    for name, text in pictures().items():
        Path(__file__).with_name(f"{name}.svg").write_text(text, encoding="utf-8")
