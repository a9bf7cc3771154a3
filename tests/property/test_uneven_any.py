"""Any schedule over any microbatches that differ: caps hold what is really held, and no run under one gets stuck."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.dispatch import Policy
from penstock.engine.tolerance import slack
from penstock.passes import reorder_microbatches
from penstock.planning.microbatch_order import OrderSearch
from penstock.planning.uneven import uneven_bound
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Decoupled
from tiers import examples

NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb", "zb-v", "v-half", "chimera", "hanayo", "dualpipe")
POLICIES = ("frozen", "hinted", "hinted:0.5", "hinted:1", "dynamic")


def runs(seed: int) -> tuple[ps.Schedule, ps.Costs, ps.Links, np.random.Generator]:
    """A schedule, costs that differ by kind, stage and microbatch in all ways, and late links."""
    draw = np.random.default_rng(seed)
    num_ranks = int(draw.choice([2, 4]))
    num = int(draw.choice([2, 3]) * num_ranks)
    schedule = ps.build(str(draw.choice(NAMES)), num_ranks, num)
    stages = schedule.num_stages

    def factors() -> list[list[float]]:
        rows = int(draw.choice([1, stages]))
        return (np.exp(draw.normal(0, 0.8, (rows, num))) * (draw.random((rows, num)) > 0.1)).tolist()

    costs = ps.Costs(
        f=draw.uniform(1, 20, stages).tolist(),
        i=draw.uniform(1, 20, stages).tolist(),
        w=draw.uniform(1, 20, stages).tolist(),
        activation=draw.uniform(0.5, 3, stages).tolist(),
        freed_by_input=float(draw.choice([0.0, 0.3, 1.0])),
        uneven={"time": {kind: factors() for kind in "FIW"}, "activation": factors(), "message": factors()},
    )
    delays = {(a, b): float(draw.exponential(15)) for a, b in itertools.permutations(range(num_ranks), 2)}
    return schedule, costs, ps.Links(delays), draw


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_run_under_a_cap_that_its_order_fits_ends_and_keeps_it(policy: str, seed: int) -> None:
    schedule, costs, links, draw = runs(seed)
    peaks = Runner(costs).order(schedule).peaks
    caps = [peak * float(draw.choice([1.0, 1.2, 2.0])) for peak in peaks]
    timeline = ps.simulate(schedule, costs, links=links, dispatch=policy, memory_limit=caps)
    assert Counter(timed.op for timed in timeline.ops) == Counter(op for row in schedule.order for op in row)
    for rank, cap in enumerate(caps):
        assert timeline.peak_activations[rank] <= cap * (1 + 1e-9)
        held = peak = 0.0
        kinds = {timed.op.kind for timed in timeline.ops}
        for timed in timeline.rows[rank]:
            held += costs.memory_change(*timed.op)
            peak = max(peak, held)
        assert kinds <= set("FBIW")
        assert held == pytest.approx(0, abs=1e-6)
        assert timeline.peak_activations[rank] == pytest.approx(peak)
    lowest = [peak * 0.99 for peak in peaks]
    with pytest.raises(ps.ScheduleError, match="raise memory_limit"):
        ps.simulate(schedule, costs, links=links, dispatch=policy, memory_limit=lowest)


@pytest.mark.parametrize("compile", [False, True])
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_run_within_a_limit_is_the_whole_run_or_sure_to_be_above_it(compile: bool, seed: int) -> None:
    """Also where runs over other times come before it, in the same space."""
    schedule, costs, links, draw = runs(seed)
    runner = Runner(costs, compile=compile)
    order = runner.order(schedule)
    for policy in ("frozen", "hinted", "dynamic"):
        prepared = runner.prepared(order, links, Policy.of(policy), Decoupled(), order.peaks)
        for _ in range(4):
            duration = order.duration * draw.uniform(0.5, 2, order.num_ops)
            whole = prepared.run(duration, order.change).makespan
            for share in (0.3, 0.9, 0.999, 1, 1.5, np.inf):
                found = prepared.makespan_within(share * whole + slack(whole), duration, order.change)
                assert found == whole or (share < 1 and found == np.inf)
        assert prepared.makespan_within(0.3 * whole, duration, order.change) == np.inf


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_another_order_of_microbatches_is_the_same_schedule_over_their_costs(seed: int) -> None:
    """Renumbered rows under the costs run as the rows did under costs in that order: what the planner counts on."""
    schedule, costs, links, draw = runs(seed)
    if schedule.placement.num_pipelines > 1:
        return
    order = draw.permutation(schedule.num_microbatches).tolist()
    renumbered = reorder_microbatches(schedule, order, order)
    moved = {
        what: {kind: [[row[m] for m in order] for row in rows] for kind, rows in costs.factors.rows_of(what).items()}
        for what in ("time", "message")
    }
    moved["activation"] = {"F": [[row[m] for m in order] for row in costs.factors.rows_of("activation")[""]]}
    for policy in ("frozen", "hinted", "dynamic"):
        one = ps.simulate(renumbered, costs, links=links, dispatch=policy)
        other = ps.simulate(schedule, replace(costs, uneven=moved), links=links, dispatch=policy)
        assert one.makespan == other.makespan
        assert one.peak_activations == other.peak_activations
        assert [(t.start, t.end) for t in one.ops] == [(t.start, t.end) for t in other.ops]


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_order_is_above_its_caps_or_below_the_bound(seed: int) -> None:
    """What is planned runs as predicted, keeps the caps and is no slower than arrival; no order beats the bound."""
    schedule, costs, links, draw = runs(seed)
    scale = float(draw.choice([1.0, 1.1, 1.5]))
    caps = [scale * peak for peak in Runner(costs).order(schedule).peaks]
    search = OrderSearch(schedule, costs, links, memory_limit=caps)
    best = search.best_by_rules()
    best = search.moved(best, time.perf_counter() + 0.1, seed)
    bound = uneven_bound(best, links)
    planned = search.schedule(best)
    ps.check(planned)
    for policy in POLICIES:
        run = ps.simulate(planned, costs, links=links, dispatch=policy, memory_limit=caps)
        assert run.makespan >= bound * (1 - 1e-9)
        assert all(held <= cap * (1 + 1e-9) for held, cap in zip(run.peak_activations, caps, strict=True))
        if policy == best.dispatch:
            assert run.makespan == pytest.approx(best.makespan, rel=1e-9)
    assert best.makespan <= search.arrival.makespan * (1 + 1e-9)
    frozen = search.executed(best)
    ps.check(frozen)
    run = ps.simulate(frozen, costs, links=links, memory_limit=caps)
    assert bound * (1 - 1e-9) <= run.makespan <= best.makespan * (1 + 1e-9)
