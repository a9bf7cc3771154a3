"""Makes the pictures of docs/primer.md: GPipe, 1F1B and ZB-H1 over three ranks, each on a time axis of its own.

python docs/images/primer.py

The site makes narrow ones of them, for phones.
"""

from __future__ import annotations

from pathlib import Path

import penstock as ps
from penstock.draw import to_svg

RANKS, MICROBATCHES = 3, 4


def pictures(width: int = 960) -> dict[str, str]:
    """Each schedule with F = I = W = 1 ms, and B twice that, by the name of its file."""
    return {
        f"primer-{name}": to_svg(
            ps.simulate(ps.build(name, RANKS, MICROBATCHES)),
            width=width,
            comment="made by: python docs/images/primer.py",
        )
        for name in ("gpipe", "1f1b", "zb-h1")
    }


if __name__ == "__main__":
    for name, text in pictures().items():
        Path(__file__).with_name(f"{name}.svg").write_text(text, encoding="utf-8")
