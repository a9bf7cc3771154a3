"""Microbatches that meet the same weights may be one: a run comes to what it comes to without, up to rounding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import penstock as ps
from experiments.amdp.convergence import MODELS, ROWS
from experiments.amdp.figure7 import LATE, METHODS
from experiments.amdp.learning import Method, Passes, Task
from experiments.amdp.merging import merged
from penstock.schedule import TENTATIVE, count_mismatch, known_to
from tiers import others_nightly

pytestmark = pytest.mark.unit

WITH_RULE = tuple(method for method in METHODS if method.name == LATE)
WINDOWED = {
    method.name: method for method in (*ROWS, *WITH_RULE) if not method.is_synchronous and method.window is None
}
SAMPLE = ("amdp", "amdp, predicting", "pipedream-2bw", "spectrain, windows", "amdp, Muon", LATE)


def built(method: Method, num: int, window: int) -> ps.Schedule:
    if method.rule is None:
        return ps.build(method.schedule, 4, num, window=window, **method.options)
    if method.rule == TENTATIVE:
        return ps.build(method.schedule, 4, num, window=window, rule=TENTATIVE)
    found = ps.build(method.schedule, 4, num, window=window)
    return replace(found, updates=ps.schedule.Updates(window, rule=method.rule))


@pytest.mark.parametrize("name", WINDOWED)
def test_each_microbatch_is_in_one_group_of_its_window_and_the_order_is_still_right(name: str) -> None:
    schedule = built(WINDOWED[name], 48, 16)
    found = merged(schedule)
    ps.check(found.schedule)
    assert Counter(m for group in found.members for m in group) == Counter(range(48))
    assert found.schedule.windows is not None
    assert found.schedule.windows.num_updates == 3
    size = found.schedule.windows.window
    assert size < 16
    for place, group in enumerate(found.members):
        assert {m // 16 for m in group} == {place // size}
        assert {schedule.microbatch_pipeline[m] for m in group} == {found.schedule.microbatch_pipeline[place]}
    before, after = count_mismatch(schedule), count_mismatch(found.schedule)
    for (stage, pipeline, place), count in after.items():
        assert {before[stage, pipeline, m] for m in found.members[place]} == {count}
    all_known = known_to(schedule)
    for key, places in known_to(found.schedule).items():
        assert sorted(m for place in places for m in found.members[place]) == list(all_known.pop(key))
    assert not any(all_known.values())


@pytest.mark.slow
@pytest.mark.parametrize("model", others_nightly(MODELS, ["GPT"]))
@pytest.mark.parametrize("name", others_nightly(SAMPLE, ["amdp, Muon", LATE]))
def test_a_run_of_merged_microbatches_learns_the_same(model: str, name: str) -> None:
    method = replace(WINDOWED[name], peak=3e-3)
    config: Any = replace(MODELS[model], width=16, num_heads=2)
    task = Task(config, batch=32, num_batches=4, every=2, warmup=1)
    found = []
    for merges in (False, True):
        with Passes([method], [task], 32, merges) as passes:
            losses = [loss for batches in (range(2), range(2, 4)) for loss in passes.train(batches)]
            found.append((losses, passes.evaluate(), passes.mismatch()))
    (losses, evaluated, mismatch), (own, own_evaluated, own_mismatch) = found
    assert own == pytest.approx(losses, abs=2e-4)
    assert own_evaluated == pytest.approx(evaluated, abs=2e-4)
    assert own_mismatch == mismatch
    assert abs(losses[0] - losses[-1]) > 1e-3, "it must have learnt something"


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(ValueError, match="no updates as ops"):
        merged(ps.build("1f1b", 4, 8))
    with pytest.raises(ValueError, match="no multiple of a window of 16"):
        merged(ps.build("amdp", 4, 24, window=16))
    schedule = ps.build("amdp", 8, 64, window=32, max_mismatch=0)
    with pytest.raises(ValueError, match="stage 0 would predict"):
        merged(replace(schedule, updates=ps.schedule.Updates(32, rule="spectrain")))
