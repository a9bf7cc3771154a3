"""`PlannedSchedule` in torch's own pipelining: losses and gradients are torch's, and plans change between steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

import penstock as ps
from penstock.integrations import torch_replanning
from penstock.integrations.torch import PlannedSchedule, Replanner, costs_in_torch, to_torch
from penstock.passes import add_communication, remove_communication
from penstock.runtime.mesh import probe
from processes import run_ranks_to_end

pytestmark = pytest.mark.multiproc

WIDTH, MICROBATCHES = 8, 4


def make_stages(schedule: ps.Schedule, rank: int) -> list[PipelineStage]:
    made = []
    for stage in schedule.stages_of(rank):
        torch.manual_seed(100 + stage)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        made.append(PipelineStage(module, stage, schedule.num_stages, torch.device("cpu"), group=dist.group.WORLD))
    return made


def batch(num: int = MICROBATCHES) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    first, second = (torch.randn(3 * num, WIDTH, generator=draws) for _ in range(2))
    return first, second


def one_step(runtime: Any, stages: list[PipelineStage], num: int = MICROBATCHES) -> list[Tensor]:
    """The losses, where the last stage is, and all gradients of a step."""
    x, y = batch(num)
    numbers = {stage.stage_index for stage in stages}
    for stage in stages:
        stage.submod.zero_grad()
    losses: list[Tensor] = []
    last = stages[0].num_stages - 1 in numbers
    runtime.step(*[x] * (0 in numbers), target=y if last else None, losses=losses if last else None)
    grads = [p.grad.clone() for stage in stages for p in stage.submod.parameters() if p.grad is not None]
    return [loss.detach() for loss in losses] + grads


SENDS_TO_ITSELF = torch.__version__.startswith("2.11.")
"""This torch's pipelining, when it starts, sends from a stage to the next one on the same rank, which gloo can't."""

TORCHS_OWN: dict[str, tuple[Callable[..., Any], str]] = {
    "1f1b": (schedules.Schedule1F1B, "1f1b"),
    "interleaved": (schedules.ScheduleInterleaved1F1B, "interleaved-1f1b"),
    "zbv": (schedules.ScheduleZBVZeroBubble, "zb-v"),
    "dualpipe-v": (schedules.ScheduleDualPipeV, "dualpipe-v"),
}


def beside_torchs_own(rank: int) -> dict[str, bool]:
    same = {}
    for name, (own, ours) in TORCHS_OWN.items():
        if SENDS_TO_ITSELF and name in ("zbv", "dualpipe-v"):
            continue
        plan = ps.build(ours, 2, MICROBATCHES)
        stages = make_stages(plan, rank)
        theirs = own(stages[0] if own is schedules.Schedule1F1B else stages, MICROBATCHES, nn.MSELoss())
        expected = one_step(theirs, stages)
        for channel in ("gloo", "nccl", "nccl-pair", "nccl-edge"):
            fresh = make_stages(plan, rank)
            found = one_step(PlannedSchedule(fresh, plan, MICROBATCHES, nn.MSELoss(), channels=channel), fresh)
            same[f"{name} {channel}"] = len(found) == len(expected) and all(map(torch.equal, found, expected))
    return same


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_torchs_own_schedules() -> None:
    outcomes = run_ranks_to_end(2, beside_torchs_own)
    assert len(outcomes[0].value) == (8 if SENDS_TO_ITSELF else 16)
    assert [name for o in outcomes for name, same in o.value.items() if not same] == []


def swapping(rank: int, folder: str) -> list[list[Tensor]]:
    """Four plans, loaded between steps, each from another kind of source."""
    first = ps.build("1f1b", 4, 8)
    stages = make_stages(first, rank)
    schedule = PlannedSchedule(stages, first, loss_fn=nn.MSELoss())
    found = [one_step(schedule, stages, 8)]
    path = Path(folder) / "gpipe.csv"
    if rank == 0:
        ps.save(ps.build("gpipe", 4, 8), path)
    dist.barrier()
    late = ps.Links({(2, 3): 3.0})
    costs = ps.Costs.uniform(4, f=1, i=1, w=1)
    placed = add_communication(ps.build("zb", 4, 8, warmup=[7, 5, 3, 1]), costs, late, channels="gloo")
    for plan in (ps.build("zb-h1", 4, 8), path, placed, first):
        schedule.load(plan)
        found.append(one_step(schedule, stages, 8))
    return found


def test_plans_are_swapped_between_steps_bitwise(tmp_path: Path) -> None:
    outcomes = run_ranks_to_end(4, swapping, str(tmp_path))
    for outcome in outcomes:
        first, *others = outcome.value
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def alternating(one: ps.Schedule, other: ps.Schedule, **options: Any) -> Replanner:
    """Takes the other plan at every chance, whatever was measured."""

    def planner(costs: ps.Costs, links: ps.Links, running: ps.Schedule) -> ps.Schedule:
        return other if remove_communication(running).order == one.order else one

    return Replanner(planner, least_gain=-9.0, least_change=-1.0, patience=1, **options)


def votes(rank: int) -> tuple[list[list[Tensor]], list[tuple[int, tuple[Any, ...]]]]:
    """40 steps of training: their results, and from which steps which plan was taken. 5 of evaluation are between."""
    first = ps.build("1f1b", 4, 6)
    stages = make_stages(first, rank)
    replan = alternating(first, ps.build("zb-h1", 4, 6))
    schedule = PlannedSchedule(stages, first, loss_fn=nn.MSELoss(), replan=replan)
    found, taken = [], []
    for step in range(40):
        found.append(one_step(schedule, stages, 6))
        for _ in range(5 * (step == 0)):  # torch 2.11 can't train after a first step of evaluation
            schedule.eval(*[batch(6)[0]] * (rank == 0), target=batch(6)[1] if rank == 3 else None)
        if len(schedule.replanned) > len(taken):
            taken.append((schedule.replanned[-1].step, schedule.plan.order))
    return found, taken


@pytest.mark.slow
def test_all_ranks_take_the_same_plan_at_the_same_step_and_numbers_stay_the_same() -> None:
    outcomes = run_ranks_to_end(4, votes)
    assert outcomes[0].value[1]
    assert all(step <= 40 for step, _ in outcomes[0].value[1])  # steps of evaluation do not count
    for outcome in outcomes:
        first, *others = outcome.value[0]
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
        assert outcome.value[1] == outcomes[0].value[1]


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    time.sleep(0.03)
    return nn.functional.mse_loss(output, target)


def with_a_slow_loss(rank: int) -> list[ps.Costs]:
    """The costs that a planner is given; on rank 0."""
    first, costs_seen = ps.build("1f1b", 2, MICROBATCHES), []

    def planner(costs: ps.Costs, links: ps.Links, running: ps.Schedule) -> ps.Schedule:
        costs_seen.append(costs)
        return running

    stages = make_stages(first, rank)
    replan = Replanner(planner, least_change=-1.0, patience=1)
    schedule = PlannedSchedule(stages, first, loss_fn=slow_loss, replan=replan)
    for _ in range(8):
        one_step(schedule, stages)
    return costs_seen


def test_the_loss_counts_as_part_of_the_last_stages_forward() -> None:
    outcomes = run_ranks_to_end(2, with_a_slow_loss)
    assert outcomes[0].value
    for costs in outcomes[0].value:
        assert costs.f[1] >= 30.0 > costs.f[0]


def on_clocks_of_their_own(rank: int) -> list[float]:
    """The longest delay of each plan that is made; on rank 0, whose forwards take 200 ms.

    Each rank believes to be a machine of its own, which was started an hour after the one before. Before the fourth
    step its time of day is set, and its clock has run ahead.
    """
    ahead = SimpleNamespace(since_start=3600.0 * rank, of_day=0.0)

    def since_start() -> float:
        return time.perf_counter() + ahead.since_start

    torch_replanning.time = SimpleNamespace(  # type: ignore[assignment]
        perf_counter=since_start, time=lambda: time.time() + ahead.of_day
    )
    probe.time = SimpleNamespace(perf_counter_ns=lambda: round(since_start() * 1e9))  # type: ignore[assignment]
    torch_replanning.clock_name = lambda: f"machine {rank}"
    torch_replanning.CLOCK_COMPARISON_ITERATIONS = 3
    first, delays = ps.build("1f1b", 2, MICROBATCHES), []

    def planner(costs: ps.Costs, links: ps.Links, running: ps.Schedule) -> ps.Schedule:
        delays.append(max(links.delay(0, 1), links.delay(1, 0)))
        return running

    stages = make_stages(first, rank)
    stages[0].submod.register_forward_pre_hook(lambda *_: time.sleep(0.2 * (rank == 0)))
    replan = Replanner(planner, least_change=-1.0, patience=1)
    schedule = PlannedSchedule(stages, first, loss_fn=nn.MSELoss(), replan=replan)
    for step in range(8):
        if step == 3:
            ahead.since_start, ahead.of_day = ahead.since_start + 0.15 * rank, 0.15 * rank
        one_step(schedule, stages)
    return delays


def test_a_clock_that_was_set_was_taken_for_a_late_link() -> None:
    outcomes = run_ranks_to_end(2, on_clocks_of_their_own)
    assert len(outcomes[0].value) > 3
    assert max(outcomes[0].value) < 100.0, outcomes[0].value


def with_sums_in_turn(last: int) -> ps.Schedule:
    """Two stages a rank, whose W come at the end: those of one stage last, so gradients are summed in that order."""
    plan = ps.build("looped-bfs", 2, MICROBATCHES)
    rows = []
    for row in plan.order:
        ops = [op._replace(kind="I") if op.kind == "B" else op for op in row]
        weights = [op._replace(kind="W") for op in row if op.kind == "B"]
        rows.append((*ops, *sorted(weights, key=lambda op: (op.stage // 2 == last, op.microbatch))))
    return replace(plan, order=tuple(rows))


def replicas(rank: int) -> dict[str, Any]:
    """Two pipelines of two ranks that shard each other's parameters: with changes of plan, without, and refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    first, other = with_sums_in_turn(0), with_sums_in_turn(1)
    replica, place = mesh["data"].get_local_rank(), mesh["pipeline"].get_local_rank()

    def train(replan: Replanner | bool) -> tuple[list[Tensor], list[int]]:
        stages = []
        for number in first.stages_of(place):
            torch.manual_seed(100 + number)
            module = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), mesh=mesh["data"])
            group = mesh["pipeline"].get_group()
            stages.append(PipelineStage(module, number, 4, torch.device("cpu"), group=group))
        schedule = PlannedSchedule(stages, first, loss_fn=nn.MSELoss(), replan=replan)
        parameters = [p for stage in stages for p in stage.submod.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        draws = torch.Generator().manual_seed(replica)
        for _ in range(30):
            x, y = (torch.randn(3 * MICROBATCHES, WIDTH, generator=draws) for _ in range(2))
            optimizer.zero_grad()
            schedule.step(*[x] * (place == 0), target=y if place == 1 else None)
            optimizer.step()
        return [p.full_tensor() for p in parameters], [each.step for each in schedule.replanned]

    expected, _ = train(False)
    found, changes = train(alternating(first, other, group=dist.group.WORLD))
    told = []
    for replan in (True, Replanner(group=mesh["data"].get_group())):
        with pytest.raises(ps.ScheduleError) as caught:
            train(replan)
        told.append(str(caught.value))
    return {"same": all(map(torch.equal, found, expected)), "changes": changes, "told": told}


@pytest.mark.slow
def test_replicas_take_the_same_plan_by_a_vote_of_all_pipelines() -> None:
    outcomes = run_ranks_to_end(4, replicas)
    assert outcomes[0].value["changes"]
    for outcome in outcomes:
        assert outcome.value["same"]
        assert outcome.value["changes"] == outcomes[0].value["changes"]
        alone, others = outcome.value["told"]
        assert "has replicas in other pipelines" in alone
        assert "are not in Replanner's group" in others


def with_few_sends(rank: int) -> tuple[bool, int, str, bool]:
    """Whether numbers stay the same if torch limits the sends under way, the most there were, and a limit too low."""
    plan = ps.build("zb-h1", 2, 8)
    stages = make_stages(plan, rank)
    expected = one_step(PlannedSchedule(stages, plan, loss_fn=nn.MSELoss()), stages, 8)
    fresh = make_stages(plan, rank)
    with pytest.raises(ps.ScheduleError, match='asks for channels="nccl"'):
        PlannedSchedule(fresh, plan, loss_fn=nn.MSELoss(), max_outstanding_sends=2)
    schedule = PlannedSchedule(fresh, plan, loss_fn=nn.MSELoss(), channels="nccl", max_outstanding_sends=2)
    found = one_step(schedule, fresh, 8)
    under_way = most = 0
    for action in schedule.pipeline_order_with_comms[rank]:
        name = str(action).lstrip("0123456789")
        under_way += name.startswith("SEND") - name.startswith("WAIT_SEND")
        most = max(most, under_way)
    schedule._max_outstanding_sends = 0
    before = schedule.pipeline_order_with_comms
    with pytest.raises(ps.ScheduleError, match="max_outstanding_sends=0") as caught:
        schedule.load(ps.build("1f1b", 2, 8))
    kept = schedule.pipeline_order_with_comms is before and schedule.plan.order == plan.order
    return all(map(torch.equal, found, expected)), most, str(caught.value), kept


if hasattr(schedules, "WAIT_SEND_F"):  # since torch 2.15

    def test_a_limit_of_sends_under_way_is_kept_in_our_rows() -> None:
        outcomes = run_ranks_to_end(2, with_few_sends)
        for outcome in outcomes:
            same, most, told, kept = outcome.value
            assert same
            assert 1 <= most <= 2
            assert "torch refuses the plan" in told
            assert kept


def refusals(rank: int) -> list[str]:
    plan = ps.build("zb-v", 2, 4)
    stages = make_stages(plan, rank)
    told = []
    for given, more in (
        (ps.build("zb-v", 2, 6), {"n_microbatches": 4}),
        (ps.build("interleaved-1f1b", 2, 4), {}),
        (ps.build("1f1b", 2, 4), {}),
        (plan, {"channels": "mpi"}),
        (ps.build("chimera", 2, 4), {}),
    ):
        try:
            PlannedSchedule(stages, given, loss_fn=nn.MSELoss(), **more)
        except ps.ScheduleError as error:
            told.append(str(error))
    return told


def test_plans_that_do_not_fit_are_refused_before_a_step() -> None:
    outcomes = run_ranks_to_end(2, refusals)
    for rank, outcome in enumerate(outcomes):
        counts, placement, stages, channel, pipelines = outcome.value
        assert "the plan has (4, 2, 6) stages, ranks and microbatches, torch has (4, 2, 4)" in counts
        assert f"rank {rank} has stages" in placement
        assert "the plan has (2, 2, 4) stages, ranks and microbatches, torch has (4, 2, 4)" in stages
        assert "channels 'mpi'" in channel
        assert "stages" in pipelines


@pytest.mark.parametrize("name", ["1f1b", "zb", "zb-v", "interleaved-1f1b"])
def test_rows_for_torch_are_what_its_own_reader_makes_of_the_file(name: str, tmp_path: Path) -> None:
    schedule = ps.build(name, 2, 4)
    rows = to_torch(schedule, channels="gloo")
    assert sorted(rows) == [0, 1]
    kept = [[str(action) for action in row if action.computation_type.value in "FBIW"] for row in rows.values()]
    assert kept == [[str(op) for op in row] for row in schedule.order]


def test_the_first_stage_has_its_whole_backward_in_w() -> None:
    costs = costs_in_torch(ps.Costs(f=[1, 2], i=[3, 4], w=[5, 6]))
    assert (costs.i, costs.w, costs.duration("B", 0)) == ((0.0, 4.0), (8.0, 6.0), 8.0)
