"""Makes choose-schedule.svg, of docs/tutorials/choose-schedule.md: two schedules of the same memory on one time axis.

python docs/images/choose_schedule.py

The site makes a narrow one of it, for phones.
"""

from __future__ import annotations

from pathlib import Path

import penstock as ps
from penstock.draw import to_svg

RANKS, MICROBATCHES = 4, 12


def pictures(width: int = 960) -> dict[str, str]:
    """1F1B and V-Half over the costs of the tutorial's model, `width` pixels wide."""
    timelines = []
    for name in ("1f1b", "v-half"):
        schedule = ps.build(name, RANKS, MICROBATCHES)
        costs = ps.cost.costs_preset("gpt2-7b", num_stages=schedule.num_stages, device="a100")
        timelines.append(ps.simulate(schedule, costs))
    comment = "made by: python docs/images/choose_schedule.py"
    return {"choose-schedule": to_svg(timelines, titles=["1f1b", "v-half"], width=width, comment=comment)}


if __name__ == "__main__":
    for name, text in pictures().items():
        Path(__file__).with_name(f"{name}.svg").write_text(text, encoding="utf-8")
