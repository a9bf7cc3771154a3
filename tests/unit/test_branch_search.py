"""Layouts of branches: the search finds what trying every layout finds, and tries fewer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest

import penstock as ps
from penstock.cost import CostError
from penstock.planning import BranchLayout, rank_branches, search_branches
from penstock.planning.branch_search import joined_costs

pytestmark = pytest.mark.unit


def ways(work: float, tail: float = 0.0, most: int = 3) -> list[BranchLayout]:
    """A tower whose microbatch takes 3 * `work` ms in all, over 1 to `most` ranks, in one replica or two."""
    found = []
    for p, dp, v in product(range(1, most + 1), (1, 2), (1, 2)):
        stages, n = p * v, 8 // dp
        placement = ps.placements.one_to_one(p) if v == 1 else ps.placements.circular(p, stages)
        share = work / stages
        found.append(
            BranchLayout(
                ps.Branch(placement, n, ps.Rules(max_in_flight=2 * p * v)),
                ps.Costs.uniform(stages, f=share, i=share, w=share, activation=1 / v),
                p * dp,
                ps.Links({(0, 1): 0.5} if p > 1 else {}),
                tail / dp,
                state=2.0,
            )
        )
    return found


def every(towers: dict[str, list[BranchLayout]], num_devices: int, split: bool) -> list[float]:
    """The steps of all layouts, each simulated."""
    found = []
    for chosen in product(*towers.values()):
        if sum(way.num_devices for way in chosen) != num_devices:
            continue
        program = ps.Program.of_branches(
            {name: way.branch for name, way in zip(towers, chosen, strict=True)},
            split=split,
            costs=joined_costs([way.costs for way in chosen]),
            links=_links(chosen),
        )
        timeline = ps.simulate(program.build(), program.all_costs, links=program.links)
        of_ranks = [way for way in chosen for _ in range(way.num_ranks)]
        found.append(max(row[-1].end + way.tail for row, way in zip(timeline.rows, of_ranks, strict=True)))
    return found


def _links(chosen: tuple[BranchLayout, ...]) -> ps.Links:
    delays, first = {}, 0
    for way in chosen:
        if way.num_ranks > 1:
            delays[first, first + 1] = 0.5
        first += way.num_ranks
    return ps.Links(delays)


@pytest.mark.parametrize("split", [False, True])
def test_it_finds_what_trying_all_finds(split: bool) -> None:
    towers = {"audio": ways(4, tail=3.0), "text": ways(2), "video": ways(3, tail=1.0, most=2)}
    steps = every(towers, 7, split)
    found = search_branches(towers, 7, split=split)
    assert found is not None
    assert found.step_ms == pytest.approx(min(steps))
    assert sum(way.num_devices for way in found.ways.values()) == 7
    assert list(found.ways) == ["audio", "text", "video"]
    assert found.num_tried < len(steps), "bounds leave the others out"
    ps.check(found.schedule)


def test_the_best_few_are_those_of_trying_all() -> None:
    towers = {"audio": ways(4, tail=3.0), "text": ways(2), "video": ways(3, tail=1.0, most=2)}
    steps = sorted(every(towers, 7, False))
    found = rank_branches(towers, 7, 9)
    assert [layout.step_ms for layout in found] == pytest.approx(steps[:9])
    assert found[0].num_tried == found[-1].num_tried < len(steps)
    below = [layout.step_ms for layout in rank_branches(towers, 7, 9, below=found[4].step_ms)]
    assert below == [step for step in (layout.step_ms for layout in found) if step < found[4].step_ms]


def test_a_branch_that_all_feed_lies_on_ranks_of_theirs() -> None:
    """With its own ops, tail and state counted where it lies; the ways of the others say where that is."""
    fed = {
        name: [replace(way, branch=replace(way.branch, feeds=("joint",))) for way in ways(work)]
        for name, work in (("audio", 4), ("text", 2))
    }

    def joint(chosen: Mapping[str, BranchLayout]) -> dict[str, BranchLayout]:
        last = sum(way.num_ranks for way in chosen.values()) - 1
        rules = replace(chosen["text"].branch.rules)
        branch = ps.Branch(ps.placements.one_to_one(1), 4, rules, (last,))
        return {"joint": BranchLayout(branch, ps.Costs.uniform(1, f=2.0, i=2.0, w=2.0), 0, tail=5.0, state=7.0)}

    found = search_branches(fed, 4, also=joint)
    assert found is not None
    assert list(found.program.branches) == ["audio", "text", "joint"]
    assert found.schedule.num_ranks == sum(way.num_ranks for way in found.ways.values())
    last = found.timeline.rows[-1][-1].end + found.ways["text"].tail + 5.0
    assert found.step_ms >= last
    held = [*found.timeline.peak_activations]
    assert found.peaks == (*(each + 2.0 for each in held[:-1]), held[-1] + 2.0 + 7.0)
    steps = []
    for chosen in product(*fed.values()):
        if sum(way.num_devices for way in chosen) == 4:
            alone = search_branches(dict(zip(fed, ([way] for way in chosen), strict=True)), 4, also=joint)
            steps += [] if alone is None else [alone.step_ms]
    assert found.step_ms == pytest.approx(min(steps))
    with pytest.raises(ps.ScheduleError, match="over 1 ranks has 0 devices"):
        BranchLayout(ps.Branch(ps.placements.one_to_one(1), 4), ps.Costs.uniform(1), 0)


def test_memory_and_time_limits() -> None:
    towers = {"audio": ways(4), "text": ways(2)}
    frugal = ps.Branch(ps.placements.one_to_one(2), 8, ps.Rules(max_in_flight=1))
    for name, work in (("audio", 4), ("text", 2)):
        towers[name].append(BranchLayout(frugal, ps.Costs.uniform(2, f=work / 2, i=work / 2, w=work / 2), 2))
    free = search_branches(towers, 4)
    assert free is not None
    tight = search_branches(towers, 4, memory_limit=max(free.peaks) - 0.5)
    assert tight is not None
    assert max(tight.peaks) < max(free.peaks)
    assert tight.step_ms >= free.step_ms
    assert search_branches(towers, 4, memory_limit=0.5) is None, "less than one microbatch"
    assert search_branches(towers, 4, below=free.step_ms) is None
    assert search_branches(towers, 99) is None, "no layout takes so many devices"
    assert search_branches(towers, 4, most_tried=0) is None


def test_ops_of_all_branches_take_part() -> None:
    def gather(chosen: object) -> list[ps.NewOp]:
        ends = (("audio", -1), ("text", -1))
        after = {("F", end): 1 for end in ends}
        return [ps.NewOp("GATHER", ends[0], after=after, before={("B", end): 1 for end in ends}, on=ends, time=50.0)]

    one = {
        name: [way for way in ways(work) if way.branch.num_microbatches == 8]
        for name, work in (("audio", 4), ("text", 2))
    }
    without, found = search_branches(one, 4), search_branches(one, 4, ops=gather)
    assert without is not None
    assert found is not None
    assert found.step_ms > without.step_ms + 300
    assert any(op.kind == "GATHER" for row in found.schedule.order for op in row)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ps.ScheduleError, match="no branches"):
        search_branches({}, 4)
    branch = ps.Branch(ps.placements.one_to_one(2), 4)
    with pytest.raises(ps.CostError, match="for 3 stages, the branch has 2; give costs for as many"):
        BranchLayout(branch, ps.Costs.uniform(3), 2)
    with pytest.raises(ps.ScheduleError, match="over 2 ranks has 1 devices"):
        BranchLayout(branch, ps.Costs.uniform(2), 1)
    with pytest.raises(CostError, match="one freed_by_input"):
        joined_costs([ps.Costs.uniform(2), ps.Costs.uniform(2, freed_by_input=0.3)])
