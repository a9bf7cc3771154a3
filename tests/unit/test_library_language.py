"""Library schedules written in the language: the same ops in the same order.

Those that the page on the papers' schedules writes are compared in `test_program.py`.
"""

from __future__ import annotations

import pytest

import penstock as ps
from tiers import others_nightly

pytestmark = pytest.mark.unit

ALL_SIZES = [(p, n) for p in range(1, 7) for n in (1, 2, 3, 5, 8, 12)]
SIZES = others_nightly(ALL_SIZES, [(p, n) for p, n in ALL_SIZES if (p + n) % 3 == 1])


def unit(num_stages: int) -> ps.Costs:
    """Every op takes 1 ms."""
    return ps.Costs.uniform(num_stages, b=1.0)


def same(program: ps.Program, name: str, **options: object) -> None:
    library = ps.build(name, program.num_ranks, program.num_microbatches, **options)
    built = program.build()
    assert built.order == library.order, f"\n{built}\n{library}"
    assert (built.placement, built.graph) == (library.placement, library.graph)


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "pipedream-2bw", "spectrain", "xpipe", "vnag"])
@pytest.mark.parametrize(("p", "n"), SIZES)
def test_1f1b(name: str, p: int, n: int) -> None:
    rules = ps.Rules("backward-first", max_in_flight=[p - rank for rank in range(p)])
    same(ps.Program(ps.placements.one_to_one(p), n, rules), name)


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_1f1b_by_turns(p: int, n: int) -> None:
    rules = ps.Rules("interleaved", strict=True, warmup=[min(p - rank, n) for rank in range(p)])
    same(ps.Program(ps.placements.one_to_one(p), n, rules), "1f1b")


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_looped_bfs(p: int, n: int) -> None:
    rules = ps.Rules("forward-first", forward=ps.breadth_first(), backward=ps.depth_first())
    same(ps.Program(ps.placements.circular(p, 2 * p), n, rules, costs=unit(2 * p)), "looped-bfs")


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_zb_h1(p: int, n: int) -> None:
    def late(view: ps.program.View, op: ps.Op) -> bool:
        """W of a microbatch waits for I of the one that is `stage` later."""
        return op.kind != "W" or view.started("I", op.stage) > min(op.microbatch + op.stage, n - 1)

    warmup = [min(p - rank, n) for rank in range(p)]
    rules = ps.Rules("interleaved", strict=True, max_in_flight=p, warmup=warmup, check=late)
    same(ps.Program(ps.placements.one_to_one(p), n, rules, split=True), "zb-h1")


@pytest.mark.parametrize("warmup", [[7, 5, 3, 1], [9, 6, 3, 1], [4, 3, 2, 1], [12, 1, 1, 1]])
@pytest.mark.parametrize("n", [12, 20])
@pytest.mark.parametrize("room", [None, 0, 2])
def test_zb(warmup: list[int], n: int, room: int | None) -> None:
    limit = None if room is None else max(warmup) + room
    rules = ps.Rules("backward-first", warmup=warmup, max_in_flight=limit)
    same(ps.Program(ps.placements.one_to_one(4), n, rules, split=True), "zb", warmup=warmup, max_in_flight=limit)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "busy"), [(4, 0.96), (8, 0.97), (12, 0.97)])
def test_amdp_oldest_first_is_near_the_library_s_own(d: int, busy: float) -> None:
    """What was ready first is not told to the language; the earlier block and microbatch first comes close to it."""

    def oldest(view: ps.program.View, ready: tuple[ps.Op, ...]) -> ps.Op:
        return min(ready, key=lambda op: (op.microbatch // d, op.kind == "F", op.microbatch))

    rules = ps.Rules(max_in_flight={0: 4}, choose=oldest)
    built = ps.Program(ps.placements.multi_directional(d), 20 * d, rules).build()
    library = ps.build("amdp", d, 20 * d)
    assert built.placement == library.placement
    assert 1 - ps.simulate(built).bubble_ratio > busy
    assert ps.simulate(library).makespan <= ps.simulate(built).makespan
