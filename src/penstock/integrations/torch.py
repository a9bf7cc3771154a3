"""Plans in `torch.distributed.pipelining`: a schedule class of torch's kind that runs a plan, and changes it.

    from penstock.integrations.torch import PlannedSchedule

    schedule = PlannedSchedule(stages, ps.load("plan.json"), loss_fn=loss_fn)
    schedule.step(x, target=y, losses=losses)                  # as any schedule of torch's

torch's own runtime runs the rows; this class puts the messages where the channel wants them and proves the rows.
With `replan=True` it also measures ops and messages, and plans anew when links have changed:

    step k        each rank notes when ops ran, and when messages were sent and arrived
    step k + 1    the notes of all ranks travel beside the step
    after it      rank 0 compares the links with those of the plan, and plans in a thread if they differ
    then          all ranks take the new rows between two steps, or none does

Losses and gradients stay the same to the bit, since each stage still adds up its microbatches in the same order.

Names of torch that begin with an underscore are used here, because torch has no public way to run a list of actions:
`_PipelineScheduleRuntime` and its `_prepare_schedule_with_comms`, and `_Action`. Tests pin what they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules as torchs
from torch.nn.parallel import DistributedDataParallel

from penstock.cost import Costs, Links
from penstock.formats import load, to_torch_csv
from penstock.integrations.torch_replanning import Replanned, Replanner, StepRecorder
from penstock.passes import add_communication
from penstock.planning import Plan
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.messages import GLOO, NCCL, has_communication, require_channel

__all__ = ["PlannedSchedule", "Replanned", "Replanner", "costs_in_torch", "to_torch"]

_WAITS = hasattr(torchs, "WAIT_SEND_F")
"""Whether this torch (2.15 and newer) wants rows that say when sends are waited for."""


def costs_in_torch(costs: Costs) -> Costs:
    """The costs as torch's runtime has them: `I` of the first stage does nothing, and its `W` the whole backward.

    Args:
        costs: of each stage, by Penstock's own meaning of I and W.

    Examples:
        >>> import penstock as ps
        >>> costs = costs_in_torch(ps.Costs.uniform(2, f=10, i=10, w=10))
        >>> costs.i, costs.w
        ((0.0, 10.0), (20.0, 10.0))
    """
    return replace(costs, i=(0.0, *costs.i[1:]), w=(costs.i[0] + costs.w[0], *costs.w[1:]), b=costs.b)


def to_torch(
    schedule: Schedule,
    *,
    channels: str = NCCL,
    costs: Costs | None = None,
    links: Links | None = None,
) -> dict[int, list[Any]]:
    """The rows of a schedule as torch's actions, for `_prepare_schedule_with_comms(rows, "compute_comms")`.

    Args:
        schedule: one chain of stages, each on one rank. Its messages stay where they are if it has them.
        channels: what carries the messages, see `ps.passes.add_communication`.
        costs, links: for which messages are placed.

    Raises:
        ScheduleError: torch's pipelining lacks what the schedule needs, or its messages would hang on the channel.
    """
    if not has_communication(schedule):
        schedule = add_communication(schedule, costs, links, channels=channels)
    text = to_torch_csv(schedule, "compute_comms_waits" if _WAITS else "compute_comms", channels)
    return {
        rank: [torchs._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(text.splitlines())
    }


class PlannedSchedule(torchs._PipelineScheduleRuntime):
    """A schedule of `torch.distributed.pipelining` that runs a plan of Penstock's.

    Args:
        stages: this rank's `PipelineStage`s, as torch's multi-stage schedules take them; one stage may stand alone.
        plan: a schedule, with or without messages as ops; a `ps.plan` result; or the path of a file (.json, .csv,
            .txt).
        n_microbatches: into how many a batch is cut; as the plan has them, so it may be left out.
        loss_fn: as torch takes it.
        channels: what carries messages: "gloo", "nccl", "nccl-pair" or "nccl-edge". Default: by the group's backend,
            "gloo" or "nccl".
        costs, links: for which messages are placed, where the plan has none. Rows for gloo need neither.
        replan: True, or a `Replanner`: measure, and plan anew when links change. Needs gloo and stages on the CPU,
            where a message's arrival can be seen without streams of our own. Where stages have replicas in other
            pipelines, give a `Replanner` the group of all.
        options: other arguments of torch's schedules, such as `scale_grads`, or since torch 2.15
            `max_outstanding_sends`.

    Attributes:
        plan: the schedule that runs.
        replanned: a record of each change.

    Raises:
        ScheduleError: torch lacks what the plan needs, the plan hangs on the channel, or has other counts or another
            placement than the stages.
    """

    def __init__(
        self,
        stages: Any,
        plan: Schedule | Plan | str | Path,
        n_microbatches: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        channels: str | None = None,
        costs: Costs | None = None,
        links: Links | None = None,
        replan: bool | Replanner = False,
        **options: Any,
    ) -> None:
        given = list(stages) if isinstance(stages, Sequence) else [stages]
        schedule = as_schedule(plan)
        num = schedule.num_microbatches if n_microbatches is None else n_microbatches
        self._own_loss = loss_fn
        super().__init__(given, num, self._timed_loss if replan and loss_fn is not None else loss_fn, **options)
        group = given[0].group
        self.channels = require_channel(channels or (GLOO if dist.get_backend(group) == "gloo" else NCCL))
        self.replanned: list[Replanned] = []
        self.load(schedule, costs, links)
        self._recorder: StepRecorder | None = None
        if replan:
            replanner = replan if isinstance(replan, Replanner) else Replanner()
            self._require_replannable(replanner)
            self._recorder = StepRecorder(self, group, replanner)

    def _require_replannable(self, replanner: Replanner) -> None:
        """Raises ScheduleError if messages can't be measured, or replicas would take different plans."""
        group = self._stages[0].group
        votes = group if replanner.group is None else replanner.group
        for each in (group, votes):
            if dist.get_backend(each) != "gloo" or any(stage.device.type != "cpu" for stage in self._stages):
                raise ScheduleError(
                    f"replan measures messages on gloo between CPUs; this group is {dist.get_backend(each)} on "
                    f"{self._stages[0].device.type}. Leave replan out, and call load(plan) between steps",
                    rule="torch",
                )
        members = dist.get_process_group_ranks(votes)
        if missing := sorted(set(dist.get_process_group_ranks(group)) - set(members)):
            raise ScheduleError(
                f"processes {missing} of the pipeline are not in Replanner's group, {members}; give a group with all "
                "processes of all pipelines",
                rule="torch",
            )
        if replanner.group is None and dist.get_world_size() > self.pp_group_size:
            for stage in self._stages:
                if isinstance(stage.submod, (DistributedDataParallel, FSDPModule)):
                    raise ScheduleError(
                        f"stage {stage.stage_index} has replicas in other pipelines, which would change their plans "
                        "by themselves, and then sum gradients in another order. Give Replanner(group=...) the group "
                        "of all pipelines, such as dist.group.WORLD",
                        rule="torch",
                    )

    def load(
        self, plan: Schedule | Plan | str | Path, costs: Costs | None = None, links: Links | None = None
    ) -> None:
        """Takes another plan, from the next step on. All ranks must call it between the same two steps.

        Args and Raises: as of the class.
        """
        schedule = as_schedule(plan)
        mine = sorted(stage.stage_index for stage in self._stages)
        planned = schedule.num_stages, schedule.num_ranks, schedule.num_microbatches
        have = self._num_stages, self.pp_group_size, self._n_microbatches
        if planned != have:
            raise ScheduleError(
                f"the plan has {planned} stages, ranks and microbatches, torch has {have}; plan for these, or give "
                "torch the stages of the plan and leave n_microbatches out",
                rule="torch",
            )
        if sorted(schedule.stages_of(self.rank)) != mine:
            raise ScheduleError(
                f"rank {self.rank} has stages {mine}, the plan puts {sorted(schedule.stages_of(self.rank))} there; "
                "give each rank the stages of the plan, plan.stages_of(rank)",
                rule="torch",
            )
        rows = to_torch(schedule, channels=self.channels, costs=costs, links=links)
        before = getattr(self, "pipeline_order_with_comms", None)
        try:
            self._prepare_schedule_with_comms(rows, "compute_comms")
        except ValueError as error:
            self.pipeline_order_with_comms = before  # type: ignore[assignment]
            hint = '; max_outstanding_sends asks for channels="nccl", whose rows post no receive before its send'
            limited = getattr(self, "_max_outstanding_sends", None) is not None
            raise ScheduleError(f"torch refuses the plan: {error}{hint * limited}", rule="torch") from error
        self.plan = schedule

    def _timed_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss. Its time counts as part of the forward of the last stage, which torch has just run.

        torch calls the loss once before all forwards, to find out shapes.
        """
        begun = time.perf_counter()
        loss = self._own_loss(*args, **kwargs)  # type: ignore[misc]
        if forwards := self._recorder.notes.took.get(("F", self._num_stages - 1)):  # type: ignore[union-attr]
            forwards[-1] += (time.perf_counter() - begun) * 1e3
        return loss

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One step, as torch's `step`; between steps a plan that all ranks know of is taken."""
        if self._recorder is None or not self._has_backward:  # `eval` steps say nothing of backwards
            return super().step(*args, **kwargs)
        self._recorder.begin_step()
        result = super().step(*args, **kwargs)
        self._recorder.end_step()
        return result


def as_schedule(plan: Schedule | Plan | str | Path) -> Schedule:
    """The schedule of a plan: the plan's own, the given one, or the one in a file."""
    if isinstance(plan, Plan):
        return plan.schedule
    return plan if isinstance(plan, Schedule) else load(plan)
