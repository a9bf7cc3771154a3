"""Makes a schedule in three ways: as a grid, by rules, and by a function that takes each decision.

python examples/own_schedule.py
"""

from __future__ import annotations

from collections.abc import Sequence

import penstock as ps

GRID = """
rank 0 | F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
rank 1 | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
rank 2 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
"""
"""1F1B with one more forward on rank 0, which helps where the link to rank 1 is late."""


def written() -> ps.Schedule:
    return ps.parse(GRID)


def by_rules() -> ps.Schedule:
    """Stages in a V, backwards in halves, at most as much memory as 1F1B."""
    rules = ps.Rules(kinds="backward-first", forward=ps.depth_first(), max_in_flight=6)
    return ps.Program(ps.placements.v_shape(3), 6, rules, split=True, name="by-rules").build()


def by_function() -> ps.Schedule:
    """Whatever belongs to the earliest microbatch goes first."""

    def oldest(view: object, ready: Sequence[ps.Op]) -> ps.Op:
        return min(ready, key=lambda op: (op.microbatch, op.stage))

    rules = ps.Rules(choose=oldest, max_in_flight=3)
    return ps.Program(ps.placements.one_to_one(3), 6, rules, name="by-function").build()


def main() -> None:
    for schedule in (written(), by_rules(), by_function(), ps.build("1f1b", 3, 6)):
        ps.check(schedule)
        ran, late = ps.simulate(schedule), ps.simulate(schedule, links=ps.Links({(0, 1): 2.0}))
        print(schedule)
        print(f"takes {ran.makespan:g}, with a late link {late.makespan:g}, and {ran.bubble_ratio:.0%} is waiting\n")


if __name__ == "__main__":
    main()
