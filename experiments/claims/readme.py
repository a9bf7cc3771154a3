"""The README's five rows of figures: torch's runtime alone and with a plan, from committed results.

python -m experiments.claims.readme     a second; writes the rows between the two comments of README.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median

from experiments.claims import pipemorph
from experiments.claims.claim import ROOT
from experiments.common.readme import markdown, write_between

README = ROOT / "README.md"
ARRIVE = ROOT / "benchmarks" / "arrive" / "results.json"
HEAD = ("", "torch alone", "with a plan")


def figures() -> list[str]:
    """The lines of the table."""
    return markdown(HEAD, _rows())


def _rows() -> Iterator[tuple[str, str, str]]:
    cases = json.loads(ARRIVE.read_text(encoding="utf-8"))["cases"]
    late, healthy = cases["late"]["ways"], cases["healthy"]["ways"]

    def ms(way: dict[str, list[float]]) -> str:
        return f"{median(way['ms']):,.0f} ms"

    def times(way: dict[str, list[float]]) -> str:
        return f"{median(way['ms']) / way['simulated']:.2f} times as long"  # type: ignore[operator]

    claims = {(claim.item, claim.what): claim for claim in pipemorph.PAPER.claims}
    usual, ours = (claims["Figure 15", f"{name}, 60 ms"].shown("measured") for name in ("1F1B", "ours"))
    yield "a step of `Schedule1F1B`, one link 120 ms late", ms(late["1f1b"]), ms(late["placed"])
    yield "the same, stages in a V (`zb-v`)", ms(late["zb-v"]), ms(late["placed zb-v"])
    yield "the same as `Schedule1F1B`, no link late", ms(healthy["1f1b"]), ms(healthy["placed"])
    yield "the step, beside its simulation, with the late link", times(late["1f1b"]), times(late["placed"])
    yield (
        "8 ranks in Penstock's runtime, the last link turns 60 ms late",
        f"{usual} times as long",
        f"{ours} times as long",
    )


def main() -> None:
    write_between(README, "figures", figures())


if __name__ == "__main__":
    main()
