"""Makes channels.svg, of docs/simulation.md: one order over gloo, and over one communicator of NCCL.

python docs/images/channels.py

The site makes a narrow one of it, for phones.
"""

from __future__ import annotations

from pathlib import Path

import penstock as ps
from penstock.draw import to_svg

RANKS, MICROBATCHES = 4, 8


def pictures(width: int = 960) -> dict[str, str]:
    """ZB with a late last link, `width` pixels wide: the messages of both runs are placed for their channel."""
    zb = ps.build("zb", RANKS, MICROBATCHES, warmup=[7, 5, 3, 1])
    costs, late = ps.Costs.uniform(RANKS, f=10, i=10, w=10), ps.Links({(2, 3): 30.0})
    timelines = [ps.simulate(zb, costs, links=late, channels=each) for each in ("gloo", "nccl")]
    titles = ["over gloo", "over one communicator of NCCL"]
    comment = "made by: python docs/images/channels.py"
    return {"channels": to_svg(timelines, titles=titles, width=width, comment=comment)}


if __name__ == "__main__":
    for name, text in pictures().items():
        Path(__file__).with_name(f"{name}.svg").write_text(text, encoding="utf-8")
