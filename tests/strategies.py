"""Hypothesis strategies over schedules, costs and links, for every tier that wants them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

import penstock as ps
from penstock.passes import overlap_pairs, reorder_microbatches, separate_gradients, separate_pairs
from penstock.schedule import Op

TWO_WAYS = ("chimera", "bitpipe", "vchimera", "dualpipe", "amdp")
"""Schedules with pipelines in both directions, which need an even number of ranks."""

RUN_TOGETHER = ("distmm", "mllm")
"""Schedules with ops that several ranks run together, which the reference does not know."""


@st.composite
def library_schedules(draw: st.DrawFn, max_ranks: int = 5, max_microbatches: int = 10) -> ps.Schedule:
    """A valid schedule of small size, of any library kind in which each op is one rank's."""
    name = draw(st.sampled_from([name for name in ps.library.SCHEDULES if name not in RUN_TOGETHER]))
    p = draw(st.integers(1, max_ranks))
    n = draw(st.integers(1, max_microbatches))
    options: dict[str, Any] = {}
    if name in TWO_WAYS:
        p += p % 2
    if name in ("chimera", "hanayo", "bitpipe", "vchimera"):
        options["backward"] = draw(st.sampled_from(["whole", "split"]))
    elif name in ("dualpipe", "dualpipe-v"):
        options["overlap"] = draw(st.booleans())
    elif name == "looped-bfs":
        options["num_stages"] = p * draw(st.integers(1, 3))
    elif name == "amdp":
        options["f"], options["b"] = draw(st.sampled_from([(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)]))
    elif name == "interleaved-1f1b":
        options["num_stages"] = p * draw(st.integers(1, 3))
        options["backward"] = draw(st.sampled_from(["whole", "split"]))
    elif name == "zb":
        counts = draw(st.lists(st.integers(1, n + 2), min_size=p, max_size=p))
        options["warmup"] = sorted(counts, reverse=True)
        room = draw(st.none() | st.integers(0, 3))
        if room is not None:
            options["max_in_flight"] = min(max(counts), n) + room
    return ps.build(name, p, n, **options)


@st.composite
def paired(draw: st.DrawFn, schedule: ps.Schedule) -> ps.Schedule:
    """A schedule with some of the pairs that its order allows, of those that deadlock nothing."""
    found = overlap_pairs(schedule).pairs
    return replace(schedule, pairs=tuple(pair for pair in found if draw(st.booleans())))


@st.composite
def any_schedules(draw: st.DrawFn) -> ps.Schedule:
    """A well-formed schedule value that need not be valid: any ops of any kind anywhere, several pipelines."""
    num_ranks, num_stages = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    ranks = st.integers(0, num_ranks - 1)
    chain = st.lists(ranks, min_size=num_stages, max_size=num_stages).map(tuple)
    pipelines = tuple(draw(st.lists(chain, min_size=1, max_size=3)))
    pipeline_of = draw(st.lists(st.integers(0, len(pipelines) - 1), max_size=6))
    kinds = st.sampled_from("FBIWUQ")
    ops = st.builds(Op, kinds, st.integers(0, num_stages + 1), st.integers(0, 12))
    rows = draw(st.lists(st.lists(ops, max_size=8).map(tuple), min_size=num_ranks, max_size=num_ranks))
    limit = draw(st.none() | st.floats(1e-9, 1e12) | st.integers(1, 2**40))
    name = draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,8}", fullmatch=True))
    schedule = ps.Schedule(name, ps.Placement(pipelines), tuple(rows), tuple(pipeline_of), limit)
    orders = []
    for kind, stage, pipeline in draw(
        st.sets(st.tuples(st.sampled_from("FB"), st.integers(0, num_stages - 1), st.integers(0, len(pipelines) - 1)))
    ):
        own = schedule.microbatches_of(kind, stage, pipeline)
        orders.append(ps.schedule.MicrobatchOrder(kind, stage, tuple(draw(st.permutations(own))), pipeline))
    return replace(schedule, microbatch_orders=tuple(orders))


@st.composite
def reordered(draw: st.DrawFn, schedule: ps.Schedule) -> ps.Schedule:
    """A synchronous schedule with one permutation of microbatches in all queues, or, where all forwards come before
    all backwards, with one of the forwards and others of the backwards of each stage."""
    microbatches = st.permutations(range(schedule.num_microbatches))
    forward = draw(microbatches)
    if schedule.name not in ("gpipe", "looped-bfs"):
        return reorder_microbatches(schedule, forward, forward)
    schedule = reorder_microbatches(schedule, forward, draw(st.just("reversed") | microbatches))
    if draw(st.booleans()):
        schedule = separate_gradients(schedule)
    return schedule


def times(max_value: int = 20) -> st.SearchStrategy[float]:
    """Milliseconds: whole numbers, where ties abound, and others."""
    return st.integers(0, max_value).map(float) | st.floats(0, max_value)


@st.composite
def costs_for(draw: st.DrawFn, schedule: ps.Schedule) -> ps.Costs:
    n = schedule.num_stages
    row = st.lists(times(), min_size=n, max_size=n)
    kept = st.lists(st.floats(0.1, 10), min_size=n, max_size=n)
    share = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1)
    b: list[float] = draw(st.just([]) | row)
    return ps.Costs(draw(row), draw(row), draw(row), b, draw(st.just([]) | kept), draw(share))


@st.composite
def links_for(draw: st.DrawFn, schedule: ps.Schedule) -> ps.Links:
    ranks = range(schedule.num_ranks)
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    if not pairs:
        return ps.Links()
    chosen = draw(st.dictionaries(st.sampled_from(pairs), times(60), max_size=4))
    return ps.Links(chosen, draw(st.just(0.0) | times(5)))


@st.composite
def problems(draw: st.DrawFn) -> tuple[ps.Schedule, ps.Costs, ps.Links]:
    """A library schedule with costs and links for it; each op runs for itself."""
    schedule = separate_pairs(draw(library_schedules()))
    return schedule, draw(costs_for(schedule)), draw(links_for(schedule))
