"""Plans of any small problem: every op once, within the cap, no sooner than the bound, simulated as planned."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.planning.bounds import ramp_bound, work_bound
from penstock.planning.problem import pose
from penstock.planning.search import time_of
from refutation import destructive_bound
from strategies import times
from tiers import examples

PLACEMENTS = {
    "one-to-one": lambda p: ps.Placement((tuple(range(p)),)),
    "v": lambda p: ps.Placement(((*range(p), *range(p - 1, -1, -1)),)),
    "circular": lambda p: ps.Placement((tuple(s % p for s in range(2 * p)),)),
    "bidirectional": lambda p: ps.Placement((tuple(range(p)), tuple(range(p - 1, -1, -1)))),
    "two v": lambda p: ps.Placement(((*range(p), *range(p - 1, -1, -1)), (*range(p - 1, -1, -1), *range(p)))),
}


@st.composite
def planned(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `ps.plan`, with room for at least one microbatch."""
    ranks = draw(st.integers(1, 4))
    placement = PLACEMENTS[draw(st.sampled_from(sorted(PLACEMENTS)))](ranks)
    stages = placement.num_stages
    row = st.lists(times(), min_size=stages, max_size=stages)
    kept = draw(st.lists(st.floats(0.1, 4), min_size=stages, max_size=stages))
    costs = ps.Costs(draw(row), draw(row), draw(row), (), kept, draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])))
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    links = ps.Links(draw(st.dictionaries(st.sampled_from(pairs), times(60), max_size=3)) if pairs else {})
    most = max(sum(1 for host in hosts if host == rank) for hosts in placement.pipelines for rank in range(ranks))
    limits: dict[str, Any] = {}
    which = draw(st.sampled_from(["none", "in flight", "memory"]))
    if which == "in flight":
        limits["max_in_flight"] = most + draw(st.integers(0, 4))
    elif which == "memory":
        limits["memory_limit"] = sum(kept) + draw(st.floats(0, 8))
    return {
        "costs": costs,
        "num_ranks": ranks,
        "num_microbatches": draw(st.integers(1, 7)),
        "links": links,
        "placement": placement,
        "split": draw(st.booleans()),
        "objective": draw(st.sampled_from(["makespan", "span"])),
        "time_limit": 0.05,
        **limits,
    }


@pytest.mark.nightly
@settings(max_examples=examples(60), deadline=None)
@given(planned())
def test_any_plan_is_valid_within_limits_and_above_its_bound(given_: dict[str, Any]) -> None:
    plan = ps.plan(**given_)
    ps.check(plan.schedule)
    costs, links = given_["costs"], given_["links"]
    timeline = ps.simulate(plan.schedule, costs, links=links)
    assert abs(timeline.makespan - plan.makespan) <= 1e-6
    assert abs(getattr(timeline, given_["objective"]) - plan.value) <= 1e-6
    assert plan.value >= plan.lower_bound
    if "memory_limit" in given_:
        assert max(timeline.peak_activations) <= given_["memory_limit"] * (1 + 1e-6)
    if "max_in_flight" in given_:
        ones = ps.Costs(costs.f, costs.i, costs.w, freed_by_input=0.0)
        assert max(ps.simulate(plan.schedule, ones).peak_activations) <= given_["max_in_flight"]


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(planned(), st.randoms(use_true_random=False))
def test_no_order_beats_the_bound(given_: dict[str, Any], random: Any) -> None:
    """Orders drawn by letting a random rank run a random op that it may run."""
    costs, placement, ranks = given_["costs"], given_["placement"], given_["num_ranks"]
    cap = float(given_.get("max_in_flight", 10**6))
    problem = pose(
        costs, placement, ranks, given_["num_microbatches"], given_["links"],
        [(1.0, 0.0)] * placement.num_stages, [cap] * ranks, given_["split"],
    )  # fmt: skip
    queues = problem.queues
    head = [0] * len(queues.rank)
    held = [0.0] * ranks
    rows: list[list[int]] = [[] for _ in range(ranks)]
    while True:
        able = [
            q
            for q in range(len(head))
            if head[q] < queues.size[q]
            and all(b < 0 or head[b] > head[q] for b in (queues.message_from[q], queues.local_from[q]))
            and (queues.memory[q] <= 0 or held[queues.rank[q]] + queues.memory[q] <= cap)
        ]
        if not able:
            break
        q = random.choice(able)
        rows[queues.rank[q]].append(q)
        held[queues.rank[q]] += queues.memory[q]
        head[q] += 1
    if sum(map(len, rows)) < queues.num_ops:
        return  # memory ran out: this draw is not a schedule
    import numpy as np

    row = np.array([q for mine in rows for q in mine], np.int64)
    bound = ramp_bound(problem, work_bound(problem))
    assert bound >= work_bound(problem)
    assert time_of(problem, row) >= bound * (1 - 1e-9)
    assert time_of(problem, row) >= destructive_bound(problem, bound, 1.1 * bound) * (1 - 1e-9)
