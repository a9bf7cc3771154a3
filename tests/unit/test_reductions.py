"""Reductions of gradients as ops: one per stage, right after its gradients are complete."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.passes import add_reductions
from penstock.passes.reduce import REDUCE, reduced_stages
from penstock.schedule import Op, ScheduleError

NAMES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "hanayo", "looped-bfs", "mllm"]


@given(st.sampled_from(NAMES), st.integers(1, 3), st.integers(1, 3))
def test_each_stage_is_reduced_once_after_its_last_gradient(name: str, half_ranks: int, rounds: int) -> None:
    plain = ps.build(name, 2 * half_ranks, 2 * half_ranks * rounds)
    schedule = add_reductions(plain)
    ps.check(schedule)
    rows = [[op for op in row if op.kind != REDUCE] for row in schedule.order]
    assert rows == [list(row) for row in plain.order]
    shared = {stage for stage, _ in plain.placement.shared}
    found = [op.stage for row in schedule.order for op in row if op.kind == REDUCE]
    assert sorted(found) == [stage for stage in range(plain.num_stages) if stage not in shared]
    for row in schedule.order:
        for place, op in enumerate(row):
            if op.kind == REDUCE:
                before, after = row[:place], row[place + 1 :]
                assert before[-1].stage == op.stage
                assert before[-1].kind in ("B", "W")
                assert not any(other.stage == op.stage and other.kind in ("B", "W", "I") for other in after)
    assert add_reductions(schedule) == schedule
    assert ps.parse(str(schedule)) == schedule


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_reductions_that_take_no_time_change_no_time(dispatch: str) -> None:
    schedule = ps.build("zb-v", 4, 8)
    costs = ps.Costs.uniform(8, f=10, i=11, w=9)
    plain = ps.simulate(schedule, costs, dispatch=dispatch)
    reduced = ps.simulate(add_reductions(schedule), costs, dispatch=dispatch)
    assert reduced.makespan == plain.makespan


def test_a_reduction_goes_on_beside_its_rank() -> None:
    """The first starts while the rank has six ops to run, and the second when there is nothing left to do."""
    schedule = add_reductions(ps.build("interleaved-1f1b", 2, 4))
    plain = ps.simulate(ps.build("interleaved-1f1b", 2, 4), ps.Costs.uniform(4)).makespan
    costs = ps.Costs(f=[1] * 4, i=[1] * 4, w=[1] * 4, other={REDUCE: 3.0})
    assert ps.simulate(schedule, costs).makespan == plain + 3.0
    blocking = add_reductions(ps.build("interleaved-1f1b", 2, 4), asynchronous=False)
    assert ps.simulate(blocking, costs).makespan > plain + 3.0


def test_a_reduction_waits_for_its_gradients_under_dynamic_dispatch_too() -> None:
    schedule = add_reductions(ps.build("interleaved-1f1b", 2, 4))
    timeline = ps.simulate(schedule, ps.Costs.uniform(4), dispatch="dynamic", links=ps.Links({(0, 1): 3.0}))
    ends = {row.op: row.end for row in timeline.ops}
    starts = {row.op: row.start for row in timeline.ops}
    for stage in range(4):
        assert starts[Op(REDUCE, stage, 0)] >= max(ends[Op("B", stage, m)] for m in range(4))


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_bug_reductions_began_before_ops_of_the_users_that_may_change_gradients(
    dispatch: str, asynchronous: bool
) -> None:
    noise = ps.NewOp("NOISE", stage=2, after={("B", 2): 2}, time=7.0, asynchronous=asynchronous)
    program = ps.Program(ps.placements.circular(2, 4), 4, ops=[noise])
    schedule = add_reductions(program.build())
    ps.check(schedule)
    assert ps.parse(str(schedule)) == schedule
    costs = program.all_costs
    for late in (None, ps.Links({(0, 1): 3.0})):
        timeline = ps.simulate(schedule, costs, dispatch=dispatch, links=late)
        starts = {row.op: row.start for row in timeline.ops}
        ends = {row.op: row.end for row in timeline.ops}
        for stage in (0, 2):  # those of its rank
            assert starts[Op(REDUCE, stage, 0)] >= max(ends[Op("NOISE", 2, number)] for number in range(2))
        assert starts[Op(REDUCE, 3, 0)] < ends[Op("NOISE", 2, 1)]


def test_what_is_reduced_when_the_step_is_over() -> None:
    assert reduced_stages(ps.build("chimera", 4, 8)) == []  # copies are added up first
    assert reduced_stages(ps.build("mllm", 4, 8)) == [1, 2, 3, 4]  # 0 and 5 are shared
    halves = ps.Schedule.of(
        "halves",
        ps.Placement(((0,),)),
        [[Op("F", 0, 0), Op("B", 0, 0), Op("F", 0, 1), Op("I", 0, 1), Op("W", 0, 1)]],
        2,
    )
    assert reduced_stages(halves) == []
    assert add_reductions(halves) == halves


def test_updates_as_ops_are_refused() -> None:
    schedule = ps.build("amdp", 4, 16, window=8)
    with pytest.raises(ScheduleError, match=r"has updates as ops .* gradients are reduced once a step"):
        add_reductions(schedule)


def test_regression_an_op_of_the_users_named_reduce_was_never_called() -> None:
    called: list[int] = []
    reduce = ps.NewOp(REDUCE, stage=1, after={("B", 1): 4}, run=lambda call: called.append(call.index))
    program = ps.Program(ps.placements.one_to_one(2), 4, ops=[reduce])
    pipe = ps.Pipeline(
        [nn.Linear(2, 2), nn.Linear(2, 1)], program.build(), loss_fn=nn.MSELoss(), ops=program.callables
    )
    pipe.step(torch.ones(4, 2), torch.ones(4, 1), update=False)
    assert called == [0]


def test_a_schedule_with_reductions_runs_without_replicas() -> None:
    stages = [nn.Linear(2, 2), nn.Linear(2, 1)]
    pipe = ps.Pipeline(stages, add_reductions(ps.build("1f1b", 2, 4)), loss_fn=nn.MSELoss())
    assert pipe.step(torch.ones(4, 2), torch.ones(4, 1), update=False).loss >= 0


def test_a_schedule_with_reductions_trains_where_there_are_no_replicas() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    schedule = add_reductions(ps.build("1f1b", 2, 4))
    with ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD) as pipe:
        pipe.step(torch.ones(4, 4), torch.ones(4, 1))
        assert pipe.num_updates == 1
