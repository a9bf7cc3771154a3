"""Makes schedules.svg, the README's picture: three schedules of one model on one time axis.

python docs/images/schedules.py

The site makes a narrow one of it, for phones.
"""

from __future__ import annotations

from pathlib import Path

import penstock as ps
from penstock.draw import to_svg

RANKS, MICROBATCHES = 4, 8


def pictures(width: int = 760) -> dict[str, str]:
    """1F1B, ZB and ZB-V, `width` pixels wide. ZB-V cuts the same model into twice as many stages of half the time."""
    whole = ps.Costs.uniform(RANKS, f=10, i=10, w=10)
    halves = ps.Costs.uniform(2 * RANKS, f=5, i=5, w=5)
    timelines = [
        ps.simulate(ps.build("1f1b", RANKS, MICROBATCHES), whole),
        ps.simulate(ps.build("zb", RANKS, MICROBATCHES, warmup=[7, 5, 3, 1]), whole),
        ps.simulate(ps.build("zb-v", RANKS, MICROBATCHES), halves),
    ]
    titles = ["1f1b", "zb, warm-up 7 5 3 1", "zb-v, two stages per rank"]
    comment = "made by: python docs/images/schedules.py"
    return {"schedules": to_svg(timelines, titles=titles, width=width, comment=comment)}


if __name__ == "__main__":
    for name, text in pictures().items():
        Path(__file__).with_name(f"{name}.svg").write_text(text, encoding="utf-8")
