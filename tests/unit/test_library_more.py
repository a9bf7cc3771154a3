"""The later library schedules against their formulas: bubble, span and peak, for many ranks and microbatches."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.schedule import peak_in_flight
from tiers import others_nightly

pytestmark = pytest.mark.unit

TIMES = ((1, 1, 1), (2, 3, 1), (10, 20, 10), (1, 2, 3))
"""f, i, w of a stage."""


def timed(schedule: ps.Schedule, f: float, i: float, w: float) -> ps.Timeline:
    return ps.simulate(schedule, ps.Costs.uniform(schedule.num_stages, f, i, w))


def bubble(schedule: ps.Schedule, f: float, i: float, w: float) -> float:
    """Makespan above a rank's busy time, in ms; every rank hosts as much as the others."""
    timeline = timed(schedule, f, i, w)
    return timeline.makespan - sum(timeline.busy) / schedule.num_ranks


@pytest.mark.parametrize("p", others_nightly(range(1, 7), (1, 2, 4)))
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("n", others_nightly([1, 2, 3, 5, 8, 12], [1, 3, 8]))
def test_looped_bfs(p: int, v: int, n: int) -> None:
    schedule = ps.build("looped-bfs", p, n, num_stages=v * p)
    for f, i, w in TIMES:
        assert bubble(schedule, f, i, w) == (p - 1 + (v - 1) * max(p - n, 0)) * (f + i + w)
    assert peak_in_flight(schedule) == (v * n,) * p


@pytest.mark.parametrize("p", others_nightly(range(1, 13), (1, 2, 3, 4, 5, 9, 12)))
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_v_half(p: int, rounds: int) -> None:
    n = rounds * p
    schedule = ps.build("v-half", p, n)
    if p > 2:
        assert timed(schedule, 1, 1, 1).span - 6 * n == (3 * p - 4 if p % 2 else 3 * p - 7)
    elif n > 2:
        assert timed(schedule, 1, 1, 1).span == 6 * n
    assert max(peak_in_flight(schedule)) <= p + 2 - p % 2
    if n >= p > 1:
        assert max(peak_in_flight(schedule)) == p + 2 - p % 2


@pytest.mark.parametrize("p", others_nightly(range(1, 13), (1, 2, 3, 4, 5, 9, 12)))
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_v_min(p: int, rounds: int) -> None:
    n = rounds * p
    schedule = ps.build("v-min", p, n)
    found = timed(schedule, 1, 1, 1).span - 6 * n
    if p % 3 == 2:
        assert found <= 4 * p - 6
    elif p > 1:
        assert found == (4 * p - 5 if p % 3 == 1 else 4 * p - 7)
    assert max(peak_in_flight(schedule)) == 2 * (-(-p // 3) + (p % 3 != 1))


@pytest.mark.parametrize(("p", "peak"), [(4, 2), (8, 4), (16, 6), (24, 9)])
def test_v_min_holds_as_few_full_stages_as_its_authors_say(p: int, peak: int) -> None:
    assert max(peak_in_flight(ps.build("v-min", p, p))) == 2 * peak


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_v_patterns_with_any_number_of_microbatches(name: str, p: int, n: int) -> None:
    """A single microbatch leaves every rank the whole chain's F and I but its own; more can only fill bubbles."""
    found = timed(ps.build(name, p, n), 1, 1, 1).makespan
    assert found <= n * (4 * p + 2)
    if n == 1:
        assert found == 4 * p + (2 if p == 1 else 1)


EVEN = ((1, 1, 1), (3, 2, 1), (4, 4, 2), (2, 2, 1), (4, 3, 2))
"""Times with w <= i <= f <= i + w."""


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize("more", [0, 2, 6])
def test_dualpipe(p: int, more: int) -> None:
    schedule = ps.build("dualpipe", p, 2 * p + more)
    for f, i, w in EVEN:
        assert bubble(schedule, f, i, w) == (p // 2 - 1) * (f + i - w)
    assert peak_in_flight(schedule) == (p + 1,) * p
    assert schedule.microbatch_pipeline == (0, 1) * (p + more // 2)
    for rank in range(p):
        assert schedule.stages_of(rank) == tuple(sorted({rank, p - 1 - rank}))


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("more", [0, 1, 5])
def test_dualpipe_v(p: int, more: int) -> None:
    schedule = ps.build("dualpipe-v", p, 2 * p + more)
    for f, i, w in EVEN:
        assert bubble(schedule, f, i, w) == (p - 1) * (f + i - w)
    assert peak_in_flight(schedule) == (2 * p + 1,) * p


def test_dualpipe_v_is_half_of_dualpipe() -> None:
    """Rank i of the one runs what rank i of the other, twice as long, does."""
    whole, half = ps.build("dualpipe", 8, 20), ps.build("dualpipe-v", 4, 10)
    for rank in range(4):
        near = [(op.kind, op.microbatch // 2, op.stage) for op in whole.order[rank]]
        assert near == [(op.kind, op.microbatch, op.stage) for op in half.order[rank]]


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw", "spectrain", "xpipe", "vnag"])
@pytest.mark.parametrize("p", others_nightly(range(1, 7), (1, 2, 5)))
@pytest.mark.parametrize("n", others_nightly([1, 3, 8, 24], [1, 3, 8]))
def test_pipedream_fills_and_drains_once(name: str, p: int, n: int) -> None:
    schedule = ps.build(name, p, n)
    for f, i, w in TIMES:
        assert bubble(schedule, f, i, w) == (p - 1) * (f + i + w)
    assert peak_in_flight(schedule) == tuple(min(p - rank, n) for rank in range(p))
    for rank, row in enumerate(schedule.order):
        steady = [op.kind for op in row[min(p - rank, n) - 1 : -min(p - rank, n) or None]]
        assert steady == (["F", "B"] * n)[: len(steady)]


@pytest.mark.slow
@pytest.mark.parametrize(("d", "busy"), [(4, 0.98), (8, 0.98), (12, 0.98), (16, 0.98), (6, 0.9), (10, 0.9)])
def test_amdp_keeps_ranks_busy(d: int, busy: float) -> None:
    schedule = ps.build("amdp", d, 40 * d)
    assert 1 - ps.simulate(schedule, ps.Costs.uniform(d, 1, 1, 1)).bubble_ratio > busy
    assert max(peak_in_flight(schedule)) <= 2 * d


@pytest.mark.slow
@pytest.mark.parametrize("d", [4, 8, 12, 16])
def test_amdp_needs_no_more_than_d_and_one_activations_where_the_directions_are_alike(d: int) -> None:
    schedule = ps.build("amdp", d, 40 * d, b=1.0)
    assert 1 - ps.simulate(schedule, ps.Costs.uniform(d, 1, 1, 0)).bubble_ratio > 0.99
    assert max(peak_in_flight(schedule)) == d + 1


@pytest.mark.parametrize("d", [2, 4, 6, 8, 10, 16])
def test_amdp_places_each_stage_once_in_every_pipeline(d: int) -> None:
    placement = ps.build("amdp", d, 1).placement
    assert placement.num_pipelines == d // 2
    for j, hosts in enumerate(placement.pipelines):
        assert sorted(hosts) == list(range(d))
        assert hosts == tuple((2 * j + i if j % 2 == 0 else 2 * j - i + d + 1) % d for i in range(d))
    for rank in range(d):
        assert len(placement.stages_of(rank)) == d // 2


@pytest.mark.parametrize(("ratio", "ahead"), [(0.5, 0), (1.0, 1), (2.0, 2), (3.5, 3)])
def test_amdp_reads_two_microbatches_and_a_floor_of_the_ratio_ahead(ratio: float, ahead: int) -> None:
    schedule = ps.build("amdp", 8, 64, b=ratio)
    held = 0
    for j, hosts in enumerate(schedule.placement.pipelines):
        open_now = 0
        for op in schedule.order[hosts[0]]:
            if op.stage == 0 and schedule.microbatch_pipeline[op.microbatch] == j:
                open_now += 1 if op.kind == "F" else -1
                held = max(held, open_now)
    if ratio == ahead:
        assert held == 2 + ahead
    else:  # rounded up, where that is faster
        assert held in (2 + ahead, 2 + ahead + 1)


@pytest.mark.parametrize("branches", [[1, 1], [2, 2], [3, 1], [4, 4], [2, 1, 3], [1, 1, 1, 1]])
@pytest.mark.parametrize(("n", "every"), [(4, 1), (4, 4), (12, 2), (12, 3), (12, 4), (12, 12)])
def test_distmm(branches: list[int], n: int, every: int) -> None:
    p = sum(branches)
    schedule = ps.build("distmm", p, n, branches=branches, gather_every=every)
    for f, i, w in TIMES:
        busy = n * (f + i + w)
        assert timed(schedule, f, i, w).makespan == busy + (max(branches) - 1) * (f + i + w)
        slow = ps.Costs([f] * p, [i] * p, [w] * p, other={"GATHER": 5})
        assert ps.simulate(schedule, slow).makespan <= busy + (max(branches) - 1) * (f + i + w) + 5 * (n // every)
    expected = [min(size - 1 - place + every, n) for size in branches for place in range(size)]
    assert list(peak_in_flight(schedule)) == expected


def test_distmm_backwards_wait_for_the_gather_of_both_branches() -> None:
    schedule = ps.build("distmm", 4, 8, gather_every=4)
    late = ps.Costs([1, 1, 1, 50], [1] * 4, [1] * 4)
    ends = {t.op: (t.start, t.end) for t in ps.simulate(schedule, late).ops}
    assert ends[ps.Op("B", 1, 0)][0] >= ends[ps.Op("F", 3, 3)][1]
    assert [op for op in schedule.order[1] if op.kind == "GATHER"] == [
        op for op in schedule.order[3] if op.kind == "GATHER"
    ]


ROUND_TRIPS = [
    ("chimera", {}, 1, range(2, 17, 2)),
    ("hanayo", {"waves": 1}, 2, range(1, 13)),
    ("hanayo", {"waves": 2}, 4, range(1, 9)),
    ("hanayo", {"waves": 3}, 6, range(1, 9)),
    ("bitpipe", {}, 2, range(2, 13, 2)),
    ("vchimera", {}, 2, range(2, 13, 2)),
]
"""Schedule, options, stages a rank for a full stage, ranks."""
SIZES = [(name, options, full, p) for name, options, full, ranks in ROUND_TRIPS for p in ranks]
SMALL_SIZES = [row for row in SIZES if row[3] in (2, 3, 4, 6)]


def factor(name: str, p: int) -> int:
    """The bubble at F = B = 1, in stage times."""
    return 2 * (p - 1) if name == "hanayo" else p - 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "full", "p"), others_nightly(SIZES, SIZES[::3]))
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_deepest_first_with_whole_backwards(name: str, options: dict, full: int, p: int, rounds: int) -> None:
    schedule = ps.build(name, p, rounds * p, **options)
    for f, i, w in ((1, 0.5, 0.5), (1, 1, 1), (2, 2, 1), (1, 1, 2)):
        assert bubble(schedule, f, i, w) == factor(name, p) * (f + (i + w - f) * rounds)
    assert max(peak_in_flight(schedule)) == full * p


@pytest.mark.parametrize(("name", "options", "full", "p"), others_nightly(SIZES, SIZES[::3]))
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_deepest_first_with_split_backwards(name: str, options: dict, full: int, p: int, rounds: int) -> None:
    schedule = ps.build(name, p, rounds * p, backward="split", **options)
    assert bubble(schedule, 1, 1, 1) == factor(name, p) / 2
    assert max(peak_in_flight(schedule)) == full * p


@pytest.mark.parametrize(("name", "options", "full", "p"), others_nightly(SMALL_SIZES, SMALL_SIZES[::2]))
@pytest.mark.parametrize("n", others_nightly([1, 2, 3, 5, 7, 9, 13], [1, 2, 5, 9]))
@pytest.mark.parametrize("backward", ["whole", "split"])
def test_deepest_first_with_any_number_of_microbatches(
    name: str, options: dict, full: int, p: int, n: int, backward: str
) -> None:
    schedule = ps.build(name, p, n, backward=backward, **options)
    assert max(peak_in_flight(schedule)) <= full * min(p, n)
    assert {op.kind for row in schedule.order for op in row} == set("FB" if backward == "whole" else "FIW")


def test_opposite_pipelines_mirror_one_another() -> None:
    """With as many microbatches each way, the ranks read from the last to the first are the other pipeline."""
    for name in ("chimera", "bitpipe", "vchimera"):
        down, up = ps.build(name, 6, 12).placement.pipelines
        assert tuple(5 - rank for rank in down) == up
        order = ps.build(name, 6, 12).order
        swapped = [[op._replace(microbatch=op.microbatch ^ 1) for op in row] for row in order[::-1]]
        assert swapped == [list(row) for row in order]


@pytest.mark.parametrize(
    ("n", "window", "options"),
    [
        (17, 8, {"f": 1.5, "b": 0.3, "u": 9.0, "message": 0.1, "update_message": 7.0}),
        (13, 4, {"f": [0.5, 1.1, 1.0, 0.5], "b": [1.25, 2.75, 3.25, 1.25], "u": 2.0, "update_message": 7.0}),
    ],
)
def test_bug_the_update_of_a_short_last_window_stood_before_that_of_the_window_before(
    n: int, window: int, options: dict
) -> None:
    schedule = ps.build("amdp", 4, n, window=window, **options)
    assert max(ps.schedule.count_mismatch(schedule).values()) <= 1


BRANCHES = "give at least two, each of at least 1 rank, that add up to the 4 ranks"
YES_OR_NO = "give True or False, on the command line overlap=true or overlap=false"
REFUSED: list[tuple[str, int, object, dict[str, object], str]] = [
    ("1f1bb", 4, 12, {}, "no schedule named '1f1bb'; did you mean 1f1b?"),
    ("1f1b", 4, "8", {}, "1f1b: the number of microbatches is '8'; give a whole number"),
    (
        "interleaved-1f1b",
        4,
        12,
        {"num_stages": 6},
        "interleaved-1f1b needs stages in a multiple of the 4 ranks, got 6; use 4 or 8",
    ),
    (
        "looped-bfs",
        4,
        8,
        {"num_stages": 6},
        "looped-bfs needs stages in a multiple of the 4 ranks, got 6; use 4 or 8",
    ),
    ("zb", 4, 12, {"warmup": [3, 1]}, "zb: warmup has 2 counts; give one per rank, 4 in all"),
    ("zb", 4, 12, {"warmup": [3, 2, 1, 0]}, "zb: a warm-up count is at least 1, got [3, 2, 1, 0]"),
    (
        "zb",
        4,
        12,
        {"warmup": [3, 4, 2, 1]},
        "zb: warm-up counts never rise from one stage to the next, but rank 1 has 4 after 3",
    ),
    (
        "zb",
        4,
        12,
        {"max_in_flight": 3},
        "zb with warm-up counts [7, 5, 3, 1] needs at least 7 activations in flight (max_in_flight), got 3",
    ),
    ("dualpipe", 3, 8, {}, "dualpipe needs ranks in a multiple of the 2 pipelines, got 3; use 2 or 4"),
    ("dualpipe", 4, 8, {"overlap": "no"}, f"dualpipe: overlap is 'no'; {YES_OR_NO}"),
    ("dualpipe-v", 4, 8, {"overlap": "no"}, f"dualpipe-v: overlap is 'no'; {YES_OR_NO}"),
    ("distmm", 4, 8, {"overlap": 2}, f"distmm: overlap is 2; {YES_OR_NO}"),
    ("distmm", 1, 4, {}, "distmm needs at least 2 ranks, got 1"),
    ("distmm", 4, 8, {"branches": [3, 2]}, f"distmm: branches are [3, 2]; {BRANCHES}"),
    ("distmm", 4, 8, {"branches": 2}, "distmm: branches is 2; give the number of ranks of each"),
    (
        "distmm",
        4,
        8,
        {"branches": [2, True]},
        "distmm: the number of ranks of a branch is True; give a whole number",
    ),
    ("distmm", 4, 8, {"gather_every": 0}, "distmm needs at least 1 microbatches per gather, got 0"),
    (
        "distmm",
        4,
        8,
        {"gather_every": 3},
        "distmm needs microbatches in a multiple of the 3 that a gather takes, got 8; use 6 or 9",
    ),
    ("chimera", 3, 8, {}, "chimera needs ranks in a multiple of the 2 pipelines, got 3; use 2 or 4"),
    ("chimera", 4, 8, {"backward": "half"}, "chimera: backward is 'half'; give 'whole' or 'split'"),
    ("bitpipe", 5, 8, {}, "bitpipe needs ranks in a multiple of the 2 pipelines, got 5; use 4 or 6"),
    ("vchimera", 1, 8, {}, "vchimera needs ranks in a multiple of the 2 pipelines, got 1; use 2"),
    ("hanayo", 4, 8, {"waves": 0}, "hanayo needs at least 1 waves, got 0"),
    (
        "amdp",
        4,
        12,
        {"window": 6},
        "...a window in a multiple of the 4 microbatches of a block, got 6...",
    ),
    ("amdp", 4, 12, {"window": 8, "max_mismatch": -1}, "...at least 0..."),
    ("amdp", 4, 12, {"window": 8, "u": -1.0}, "...amdp: u is -1.0; give a time of at least 0..."),
    ("amdp", 3, 12, {"window": 6}, "...amdp needs ranks in a multiple of the 2..."),
    ("pipedream", 4, 12, {"window": 0}, "...pipedream needs at least 1..."),
    ("pipedream", 4, 12, {"in_flight": 0}, "...pipedream needs at least 1..."),
    ("pipedream-2bw", 4, 12, {"window": 3}, "...pipedream-2bw needs at least 4..."),
    ("vnag", 4, 12, {"in_flight": 2}, "...vnag has no option 'in_flight'; it takes window..."),
]
"""Schedule, ranks, microbatches, options, and what is said of them, whole or between dots."""


@pytest.mark.parametrize(("name", "p", "n", "options", "message"), REFUSED)
def test_wrong_options_say_what_was_given_and_the_rule(
    name: str, p: int, n: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ps.ScheduleError) as caught:
        ps.build(name, p, n, **options)
    assert caught.value.rule == ("name" if name == "1f1bb" else "options")
    said = str(caught.value)
    assert said == message or (message.startswith("...") and message.strip(".") in said)
