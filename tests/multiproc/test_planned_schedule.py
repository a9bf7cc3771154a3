"""`PlannedSchedule` in torch's own pipelining: losses and gradients are torch's, and plans change between steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import penstock as ps
from penstock.integrations.torch import PlannedSchedule, Replanner, costs_in_torch, to_torch
from penstock.passes import add_communication
from processes import run_ranks

pytestmark = pytest.mark.multiproc

WIDTH, MICROBATCHES = 8, 4


class Slow(nn.Module):
    """A layer whose forward and backward sleep, so that a late message matters."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
            if x.requires_grad:
                x.register_hook(lambda _: time.sleep(self.seconds))
        return torch.tanh(self.linear(x))


def make_stages(schedule: ps.Schedule, rank: int, seconds: float = 0.0) -> list[PipelineStage]:
    made = []
    for stage in schedule.stages_of(rank):
        torch.manual_seed(100 + stage)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Slow(seconds))
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


TORCHS_OWN: dict[str, tuple[Callable[..., Any], str]] = {
    "1f1b": (schedules.Schedule1F1B, "1f1b"),
    "interleaved": (schedules.ScheduleInterleaved1F1B, "interleaved-1f1b"),
    "zbv": (schedules.ScheduleZBVZeroBubble, "zb-v"),
    "dualpipe-v": (schedules.ScheduleDualPipeV, "dualpipe-v"),
}


def beside_torchs_own(rank: int) -> dict[str, bool]:
    same = {}
    for name, (own, ours) in TORCHS_OWN.items():
        plan = ps.build(ours, 2, MICROBATCHES)
        stages = make_stages(plan, rank)
        theirs = own(stages[0] if own is schedules.Schedule1F1B else stages, MICROBATCHES, nn.MSELoss())
        expected = one_step(theirs, stages)
        for channel in ("gloo", "nccl", "nccl-pair", "nccl-edge"):
            fresh = make_stages(plan, rank)
            found = one_step(PlannedSchedule(fresh, plan, MICROBATCHES, nn.MSELoss(), channels=channel), fresh)
            same[f"{name} {channel}"] = len(found) == len(expected) and all(map(torch.equal, found, expected))
    return same


def test_losses_and_gradients_are_those_of_torchs_own_schedules() -> None:
    outcomes = run_ranks(2, beside_torchs_own)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-3000:] for o in outcomes)
    assert len(outcomes[0].value) == 16
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
    outcomes = run_ranks(4, swapping, str(tmp_path))
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-3000:] for o in outcomes)
    for outcome in outcomes:
        first, *others = outcome.value
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


class LateWork:
    """A receive over a late link: what it waits for is there some seconds after it really is."""

    def __init__(self, work: Any, seconds: float) -> None:
        self.there = threading.Event()
        threading.Thread(target=self._receive, args=(work, seconds), daemon=True).start()

    def _receive(self, work: Any, seconds: float) -> None:
        work.wait()
        time.sleep(seconds)
        self.there.set()

    def wait(self) -> None:
        self.there.wait()


def turns_late(rank: int) -> tuple[list[list[Tensor]], list[Any]]:
    """14 steps; the link between ranks 1 and 2 is 40 ms late both ways from step 3 to step 8."""
    plan = ps.build("1f1b", 4, 6)
    stages = make_stages(plan, rank, seconds=0.004)
    schedule = PlannedSchedule(stages, plan, loss_fn=nn.MSELoss(), replan=Replanner(seconds=0.3))
    real, number = schedules._batch_p2p, 0

    def late_p2p(ops: list[Any], desc: str | None = None) -> list[Any]:
        works = real(ops, desc)
        if 3 <= number < 8 and ops and ops[0].op is dist.irecv and {rank, ops[0].group_peer} == {1, 2}:
            return [LateWork(work, 0.04) for work in works]
        return works

    schedules._batch_p2p = late_p2p  # type: ignore[assignment]
    found = []
    for number in range(14):  # noqa: B007 - late_p2p reads it
        found.append(one_step(schedule, stages, 6))
        time.sleep(0.4)  # the planner's time, which a real step takes
    schedules._batch_p2p = real
    return found, schedule.replanned


def test_a_link_that_turns_late_gets_another_plan() -> None:
    outcomes = run_ranks(4, turns_late)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-3000:] for o in outcomes)
    for outcome in outcomes:
        first, *others = outcome.value[0]
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
        assert [each.step for each in outcome.value[1]] == [each.step for each in outcomes[0].value[1]]
    changes = [each for each in outcomes[0].value[1] if each.links[1, 2] > 20]  # others are a loaded machine's
    assert changes, outcomes[0].value[1]
    assert changes[0].step >= 5
    assert changes[0].links[0, 1] < 20
    assert changes[0].after < changes[0].before


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
    outcomes = run_ranks(2, refusals)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-3000:] for o in outcomes)
    for rank, outcome in enumerate(outcomes):
        counts, placement, stages, channel, pipelines = outcome.value
        assert "the plan has 6 microbatches, n_microbatches is 4" in counts
        assert f"rank {rank} has stages" in placement
        assert "the plan has 2 stages on 2 ranks, torch has 4 stages on 2" in stages
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
