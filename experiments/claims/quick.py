"""The papers' headlines once more: simulated to the digit, three ratios measured within 5%.

    python -m experiments.claims.quick                  a quarter of an hour at most; also `make papers-quick`
    python -m experiments.claims.quick --no-measured    the simulated ones alone

Each claim's number is made anew and held against the committed results. No simulated one depends on how quick the
machine is: orders are built from rules, or made anew out of what the committed results say was chosen, and no search
has a time limit. Exit code 1 where one differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from experiments.claims import amdp, flexpipe, pipemorph
from experiments.claims.claim import Claim, Value, rows_of
from experiments.common.command import options
from experiments.common.results import Row, find, table

WITHIN = 0.05
"""How far a ratio that is measured again may be from the one committed."""


@dataclass(frozen=True)
class Again:
    """A number found once more, beside the committed one."""

    paper: str
    what: str
    committed: str
    again: str
    same: bool


def compared(paper: str, claim: Claim, rows: Sequence[Row]) -> Again:
    """A simulated claim, and what rows found anew make of it."""
    kept, found = claim.committed("simulated"), claim.value(rows, "simulated")
    assert kept is not None
    assert found is not None
    same = round(kept, claim.digits) == round(found, claim.digits)
    return Again(paper, f"{claim.item}: {claim.what}", claim.show.format(kept), claim.show.format(found), same)


def simulated() -> Iterator[Again]:
    """All claims that can be simulated anew in seconds."""
    for paper in (pipemorph.PAPER, flexpipe.PAPER, amdp.PAPER):
        for claim in paper.claims:
            if claim.again is not None:
                yield compared(paper.key, claim, list(claim.again()))


@dataclass(frozen=True)
class Ratio:
    """A ratio that is measured again on emulated devices."""

    paper: str
    what: str
    file: str
    value: Value
    again: Callable[[], list[Row]]

    def compared(self) -> Again:
        kept, found = self.value(rows_of(self.file), "measured"), self.value(self.again(), "measured")
        assert kept is not None
        assert found is not None
        within = abs(found / kept - 1) <= WITHIN
        return Again(self.paper, f"{self.what}, measured", f"{kept:.3f}", f"{found:.3f}", within)


def _figure15() -> list[Row]:
    from experiments.pipemorph import figure15
    from experiments.pipemorph.backends import Backend, Case
    from experiments.pipemorph.setups import late
    from experiments.pipemorph.systems import setting

    model = figure15.MODEL
    cases = [
        Case({"system": system, "delay_ms": ms}, setting(system, model, {model.last: ms}), late({model.last: ms}))
        for system, ms in (("zb", 0.0), ("zb", 60.0))
    ]
    return list(Backend("threads", jobs=1).run(cases))


def _figure12() -> list[Row]:
    from experiments.flexpipe import sweep
    from experiments.flexpipe.measured import measure
    from experiments.flexpipe.setups import GPT_5B

    found = []
    for method in ("Megatron-LM", "Tessel"):
        row = find(rows_of("flexpipe/figure12"), vocabulary=1000, method=method)
        run = sweep.chosen(GPT_5B, row)
        found.append(row | {"measured": run.samples(measure(run, 2.0))})
    return found


def _table4() -> list[Row]:
    from experiments.amdp import table4
    from experiments.amdp.measured import measure

    return [keys | measure(trial) for keys, trial in table4.trials() if (keys["model"], keys["batch"]) == ("GPT", 32)]


RATIOS = (
    Ratio(
        "pipemorph",
        "Figure 15: ZB, 60 ms late, over ZB without delay",
        "pipemorph/figure15-threads",
        pipemorph.slower({"system": "zb", "delay_ms": 60.0}, {"system": "zb", "delay_ms": 0.0}),
        _figure15,
    ),
    Ratio(
        "flexpipe",
        "Figure 12: Tessel over Megatron-LM, 1000K words",
        "flexpipe/figure12",
        flexpipe.over(1000, "Tessel", "Megatron-LM"),
        _figure12,
    ),
    Ratio("amdp", "Table 4: without ZeRO over with it, b = 32", "amdp/table4", amdp.without_zero("GPT", 32), _table4),
)


def lines(found: Sequence[Again]) -> Iterator[str]:
    """A table of all, and how many are the same."""
    head = ["paper", "claim", "committed", "again", ""]
    rows = [[each.paper, each.what, each.committed, each.again, "same" if each.same else "NOT"] for each in found]
    width = max(len(row[1]) for row in rows)
    yield from table(head, [[row[0], row[1].ljust(width), *row[2:]] for row in rows])
    yield f"{sum(each.same for each in found)} of {len(found)} are the same"


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--no-measured", action="store_true", help="nothing by the clock")
    given = parser.parse_args()
    found = list(simulated())
    if not given.no_measured:
        found += [each.compared() for each in RATIOS]
    print("\n".join(lines(found)))
    return 0 if all(each.same for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
