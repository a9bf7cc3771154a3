"""The search against brute force, its limits, and what it leaves out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import penstock as ps
from penstock.formats.profile import MessageCosts, Profile
from penstock.simulation.memory_footprint import in_bytes
from penstock.train.settings import Settings
from penstock.tune.errors import TuneError
from penstock.tune.memory import owned_by
from penstock.tune.predict import Prediction, predict
from penstock.tune.programs import programs_for
from penstock.tune.search import SearchFound, TuneCandidate, candidates, search, settings_of
from penstock.tune.space import ASYNCHRONOUS, Shape, TuneSpace, counts, schedules_for
from tiers import others_nightly
from tune_models import profile, transfer

pytestmark = pytest.mark.unit

LINKS = transfer(send=0.1, receive=0.2, delay=1.0, reduce=2.0, step=0.5)


def everything(space: TuneSpace, model: Profile) -> Iterator[tuple[TuneCandidate, Prediction]]:
    """Every candidate, simulated."""
    for shape, recompute in itertools.product(space.shapes(), space.recompute):
        for candidate in candidates(shape, model, recompute, space.schedules):
            yield candidate, predict(candidate.plan.schedule, candidate.cut, model, LINKS, shape.dp)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "limit"), others_nightly(itertools.product(range(4), [None, 600.0]), [(1, 600.0)]))
def test_the_best_are_those_of_brute_force(seed: int, limit: float | None) -> None:
    space, model = TuneSpace(4, 8), profile(9, seed)
    found = search(space, lambda shape, again: model, lambda shape: LINKS, SearchFound(8, limit, num_best=6))
    fits = [(c, p) for c, p in everything(space, model) if limit is None or p.peak_bytes <= limit]
    expected = sorted((p.step, p.peak_bytes) for _, p in fits)[:6]
    assert [(r.prediction.step, r.prediction.peak_bytes) for r in found.best] == expected
    assert all(r.samples_per_second == 8 / r.prediction.step * 1e3 for r in found.best)
    assert found.num_tried == len(list(everything(space, model)))
    assert found.num_tried - found.num_too_large == len(fits)


def test_a_plan_says_with_which_options_it_was_built() -> None:
    plans = schedules_for(4, 8, 40, ["1f1b", "interleaved-1f1b"])
    assert {plan.name for plan in plans} == {"1f1b", "interleaved-1f1b"}
    for plan in plans:
        assert ps.build(plan.name, 4, 8, **dict(plan.options)) == plan.schedule
    settings = settings_of(TuneCandidate(Shape(4, 1, 1, 8), plans[-1], (range(2),) * 16, False), Settings())
    assert (settings.stages, settings.schedule_options) == (plans[-1].schedule.num_stages, {})


def test_programs_join_the_ranking() -> None:
    model, space = profile(16, 5), TuneSpace(4, 8, dp=[1], microbatch_sizes=[1])
    without = search(space, lambda shape, again: model, lambda shape: LINKS, SearchFound(8))
    found = search(space, lambda shape, again: model, lambda shape: LINKS, SearchFound(8), programs=True)
    assert found.best[0].prediction.step <= without.best[0].prediction.step
    programs = [ranked.candidate for ranked in found.best if ranked.candidate.plan.program]
    assert programs
    for candidate in programs:
        schedule = candidate.plan.schedule
        ps.check(schedule)
        assert (schedule.num_ranks, schedule.num_microbatches) == (candidate.shape.pp, 8)
        assert sum(len(layers) for layers in candidate.cut) == 16
    orders = [(r.candidate.shape, r.candidate.plan.schedule.placement, r.candidate.plan.schedule.order)
              for r in found.best]  # fmt: skip
    assert len(orders) == len(set(orders))


@pytest.mark.slow
def test_programs_of_one_shape_have_names_that_differ() -> None:
    """Regression: one found without a limit and another found within it were called alike."""
    model, shape = profile(16, 5), Shape(4, 1, 1, 8)
    wide = programs_for(shape, model, LINKS, None)
    state = [2 * weight + kept for weight, kept in zip(model.weight, model.state, strict=True)]
    limit = sum(state) / 4 + 1.5 * max(model.activation) * 16 / 4
    both = programs_for(shape, model, LINKS, limit)
    assert len(both) > len(wide)
    names = [plan.name for plan in both]
    assert len(set(names)) == len(names)
    assert any(name.endswith(", within the limit") for name in names)
    assert len({plan.schedule for plan in both}) == len(both)


@pytest.mark.slow
def test_programs_keep_the_memory_limit() -> None:
    model, space = profile(16, 6, activation=[100.0] * 16, held=[50.0] * 16), TuneSpace(4, 8, pp=[4])
    least = min(p.peak_bytes for _, p in everything(space, model))
    found = search(
        space,
        lambda shape, again: model,
        lambda shape: LINKS,
        SearchFound(8, 2 * least, num_best=50),
        programs=True,
    )
    assert all(ranked.prediction.peak_bytes <= 2 * least for ranked in found.best)
    assert any(ranked.candidate.plan.program for ranked in found.best)


def test_every_step_of_a_candidate_simulates_as_predicted() -> None:
    model = profile(8, 3)
    found = search(
        TuneSpace(4, 8, dp=[1]), lambda shape, again: model, lambda shape: transfer(), SearchFound(8, num_best=5)
    )
    for ranked in found.best:
        candidate = ranked.candidate
        stages = range(len(candidate.cut))
        rows = {row: [sum(getattr(model, row)[layer] for layer in candidate.cut[s]) for s in stages]
                for row in ("f", "f_split", "b", "i", "w")}  # fmt: skip
        halved = {op.stage for row in candidate.plan.schedule.order for op in row if op.kind == "I"}
        forward = [rows["f_split" if s in halved else "f"][s] for s in stages]
        costs = ps.Costs(f=forward, i=rows["i"], w=rows["w"], b=rows["b"])
        assert ranked.prediction.makespan == ps.simulate(candidate.plan.schedule, costs).makespan


def test_an_impossible_limit_says_the_least_and_for_what() -> None:
    space, model = TuneSpace(2, 4), profile(6)
    smallest = min(p.peak_bytes for _, p in everything(space, model))
    with pytest.raises(TuneError, match=r"nothing fits in 1 bytes per rank; the least is (.*), for .*pp 2") as told:
        search(space, lambda shape, again: model, lambda shape: LINKS, SearchFound(4, 1.0))
    assert in_bytes(smallest) in str(told.value)
    found = search(space, lambda shape, again: model, lambda shape: LINKS, SearchFound(4, smallest))
    assert found.best[0].prediction.peak_bytes == smallest


def test_an_interrupt_gives_the_best_so_far() -> None:
    model, seen = profile(6), []

    def stop(found: SearchFound) -> None:
        seen.append(found.num_tried)
        if len(seen) == 5:
            raise KeyboardInterrupt

    found = search(TuneSpace(2, 4), lambda shape, again: model, lambda shape: LINKS, SearchFound(4, progress=stop))
    assert found.interrupted
    assert found.num_tried == 5
    assert found.best


def test_an_interrupt_before_anything_was_found_goes_on_up() -> None:
    def stop(shape: Shape, recompute: bool) -> Profile:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(TuneSpace(2, 4), stop, lambda shape: LINKS, SearchFound(4))


def test_shapes_divide_the_batch_and_fit_the_ranks() -> None:
    shapes = TuneSpace(6, 12).shapes()
    assert {shape.pp for shape in shapes} == {1, 2, 3, 4, 6}
    for shape in shapes:
        assert shape.pp * shape.dp <= 6
        assert shape.dp * shape.microbatch_size * shape.num_microbatches == 12
    assert TuneSpace(4, 8, pp=[2], dp=[1], microbatch_sizes=[4]).shapes() == [Shape(2, 1, 4, 2)]
    assert counts(6) == [1, 2, 3, 4, 6]


@pytest.mark.parametrize(
    "space",
    [
        TuneSpace(2, 8, pp=[3]),
        TuneSpace(4, 8, dp=[3]),
        TuneSpace(4, 8, microbatch_sizes=[3]),
        TuneSpace(2, 8, pp=[2], dp=[2]),
    ],
)
def test_a_space_with_nothing_in_it_is_refused(space: TuneSpace) -> None:
    with pytest.raises(TuneError, match="no way to spread the batch is left"):
        space.shapes()


def test_values_that_make_no_sense_are_refused() -> None:
    with pytest.raises(TuneError, match="num devices is 0"):
        TuneSpace(0, 8)
    with pytest.raises(TuneError, match="pp 0; give whole numbers"):
        TuneSpace(2, 8, pp=[0])
    with pytest.raises(ps.ScheduleError, match="did you mean"):
        TuneSpace(2, 8, schedules=["zbv"])
    with pytest.raises(TuneError, match="only amdp is tuned"):
        TuneSpace(2, 8, schedules=[ASYNCHRONOUS[0]])


def test_a_schedule_that_accepts_none_of_the_counts_is_told() -> None:
    model = profile(6)
    with pytest.raises(TuneError, match="no schedule of interleaved-1f1b accepts"):
        search(
            TuneSpace(4, 3, pp=[4], schedules=["interleaved-1f1b"]),
            lambda shape, again: model,
            lambda shape: LINKS,
            SearchFound(3),
        )


def test_each_order_is_tried_once_and_no_run_without_end() -> None:
    plans = schedules_for(4, 8, num_layers=40)
    keys = [(plan.schedule.placement, plan.schedule.order) for plan in plans]
    assert len(keys) == len(set(keys))
    assert {plan.name for plan in plans} >= {"gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb", "zb-v"}
    assert not {plan.name for plan in plans} & {*ASYNCHRONOUS, "mllm"}
    stages = [plan.schedule.num_stages for plan in plans if plan.name == "interleaved-1f1b"]
    assert stages == [8, 12, 16]
    assert all(plan.schedule.num_stages <= 9 for plan in schedules_for(4, 8, num_layers=9))
    assert all(plan.schedule.num_stages == 1 for plan in schedules_for(1, 8, num_layers=9))


def test_layers_are_cut_by_what_they_cost() -> None:
    model = profile(5, f=[1.0, 1.0, 1.0, 1.0, 8.0], b=[2.0, 2.0, 2.0, 2.0, 16.0])
    for candidate in candidates(Shape(2, 1, 1, 4), model, False, ["1f1b"]):
        assert [len(layers) for layers in candidate.cut] == [4, 1]
    assert list(candidates(Shape(8, 1, 1, 4), model, False)) == []


@pytest.mark.parametrize(
    ("value", "shown"), [(12, "12 bytes"), (2048, "2 KiB"), (3.5 * 2**20, "3.5 MiB"), (1020 * 2**30, "1020 GiB")]
)
def test_bytes_are_shown_for_people(value: float, shown: str) -> None:
    assert in_bytes(value) == shown


def test_microbatches_of_a_shape_in_words() -> None:
    assert Shape(2, 1, 16, 1).microbatches == "1 microbatch of 16"
    assert Shape(2, 1, 2, 8).microbatches == "8 microbatches of 2"


def costly_head(num_blocks: int) -> Profile:
    """Layers of F 2 and B 4, and a head of seven times as much."""
    f = [*[2.0] * num_blocks, 14.0]
    rows: dict[str, Any] = {
        "f": f,
        "f_split": f,
        "b": [2 * each for each in f],
        "i": f,
        "w": f,
        "update": [0.1] * (num_blocks + 1),
    }
    return profile(num_blocks + 1, 3, **rows)


def test_full_asynchrony_is_mentioned_where_it_is_faster_and_chosen_only_by_name() -> None:
    model, free = costly_head(7), transfer()
    space = TuneSpace(8, 8, pp=[8], dp=[1], microbatch_sizes=[1])
    found = search(space, lambda shape, again: model, lambda shape: free, SearchFound(8))
    beside = found.asynchronous
    assert beside is not None
    assert beside.prediction.step < found.best[0].prediction.step
    assert not any(each.candidate.is_asynchronous for each in found.best)

    asked = replace(space, schedules=["amdp"])
    named = search(asked, lambda shape, again: model, lambda shape: free, SearchFound(8))
    assert [each.prediction for each in named.best] == [beside.prediction]
    assert named.asynchronous is None
    settings = settings_of(named.best[0].candidate, Settings())
    assert (settings.schedule, settings.rule, settings.window) == ("amdp", "tentative", 8)
    run = replace(settings, drain_every=8)
    assert run.replica_schedule() == named.best[0].candidate.plan.schedule, "penstock train runs what was timed"

    limit = beside.prediction.peak_bytes - 1
    tight = search(space, lambda shape, again: model, lambda shape: free, SearchFound(8, limit))
    assert tight.asynchronous is None, "it does not fit"


def test_steps_that_do_not_drain_have_their_updates_among_their_ops() -> None:
    (candidate,) = candidates(Shape(4, 1, 1, 16), profile(4), False, ["amdp"])
    schedule = candidate.plan.schedule
    assert schedule.windows is not None
    assert schedule.windows.num_updates == 8
    quick, slow = (profile(4, update=[each] * 4) for each in (0.0, 5.0))
    one, other = (predict(schedule, candidate.cut, each, transfer()) for each in (quick, slow))
    assert one.update == one.reduce == 0
    assert other.makespan >= one.makespan + 10, "an update and a tentative one of each step"
    late = predict(schedule, candidate.cut, quick, MessageCosts.assumed(bandwidth=10.0))
    assert late.makespan > one.makespan, "gradients and parameters take their time on the links"
    held, state = one.memory[0], profile(4).state
    assert held.weights == sum(profile(4).weight[stage] for stage in schedule.stages_of(0))
    assert held.versions > 0
    assert held.optimizer > sum(state[stage] for stage in owned_by(schedule.placement, 0)), "PREDICT has it twice"
