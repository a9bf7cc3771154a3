"""What the runtime benchmark compares: the same stages run by penstock, by torch's pipelining, by a bare loop, in
turns, and alone.

Each side has the same weights, inputs and loss, and the same step: every forward and backward of the schedule,
the gradients of the mean over the batch in `.grad`, then those cleared. No optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.nn import Parameter

import penstock as ps
from penstock.models import CrossEntropy, GPTConfig, build_layers
from penstock.schedule import Op, Schedule
from penstock.schedule.dependencies import predecessors

VOCAB_SIZE = 256
SAMPLES = 2
"""A microbatch's samples."""


@dataclass(frozen=True)
class Size:
    """A GPT given by its width, its blocks a stage and its context."""

    width: int
    blocks_a_stage: int
    num_heads: int = 1
    context: int = 64

    def config(self, num_stages: int) -> GPTConfig:
        depth = self.blocks_a_stage * num_stages
        return GPTConfig(VOCAB_SIZE, self.context, depth, self.width, self.num_heads)


SIZES = {"tiny": Size(width=8, blocks_a_stage=1), "small": Size(width=128, blocks_a_stage=2, num_heads=2)}

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-v")

_TORCH_MULTI = {"interleaved-1f1b": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble}


@dataclass(frozen=True)
class SideTask:
    """What every side of one rank runs."""

    size: Size
    schedule: Schedule
    rank: int
    inputs: Tensor
    targets: Tensor

    @classmethod
    def of(cls, size: Size, schedule: Schedule, rank: int) -> SideTask:
        draws = torch.Generator().manual_seed(1)
        shape = SAMPLES * schedule.num_microbatches, size.context
        inputs, targets = (torch.randint(0, VOCAB_SIZE, shape, generator=draws) for _ in range(2))
        return cls(size, schedule, rank, inputs, targets)

    @property
    def stages(self) -> list[int]:
        """The stages of this rank, ascending."""
        return sorted(self.schedule.stages_of(self.rank))

    @property
    def last_stage(self) -> int:
        return self.schedule.num_stages - 1

    def build(self, stage: int) -> nn.Sequential:
        """The stage with its first weights; the first embeds and the last has the head, besides their blocks."""
        each, config = self.size.blocks_a_stage, self.size.config(self.schedule.num_stages)
        layers = list(range(1 + stage * each, 1 + (stage + 1) * each))
        if stage == 0:
            layers.insert(0, 0)
        if stage == self.last_stage:
            layers.append(config.num_layers - 1)
        return nn.Sequential(*build_layers(config, layers))


class Side(Protocol):
    """One way to run the task."""

    def run(self) -> Tensor | None:
        """Forwards and backwards; the batch's loss, where this side knows it on this rank."""

    def gradients(self) -> list[Tensor]:
        """Of this rank's parameters, by stage."""

    def clear(self) -> None:
        """Clears the gradients."""


class PenstockSide:
    """`ps.Pipeline`."""

    def __init__(self, task: SideTask, group: dist.ProcessGroup, transport: str) -> None:
        self._task = task
        self._pipe = ps.Pipeline(
            [partial(task.build, stage) for stage in range(task.schedule.num_stages)],
            task.schedule,
            loss_fn=CrossEntropy(),
            mesh=group,
            transport=transport,
        )

    def run(self) -> Tensor | None:
        return self._pipe.step(self._task.inputs, self._task.targets, update=False).loss

    def gradients(self) -> list[Tensor]:
        return _gradients(self._pipe.parameters())

    def clear(self) -> None:
        self._pipe.zero_grad()


class TorchSide:
    """`torch.distributed.pipelining`, through its public names."""

    def __init__(self, task: SideTask, group: dist.ProcessGroup) -> None:
        schedule = task.schedule
        self._modules = [task.build(stage) for stage in task.stages]
        stages = [
            PipelineStage(module, index, schedule.num_stages, torch.device("cpu"), group=group)
            for index, module in zip(task.stages, self._modules)
        ]
        self._args = (task.inputs,) if 0 in task.stages else ()
        self._losses: list[Tensor] | None = [] if task.last_stage in task.stages else None
        self._targets = None if self._losses is None else task.targets
        self._parameters = [p for module in self._modules for p in module.parameters()]
        self._schedule: Any
        if schedule.name == "1f1b":
            self._schedule = Schedule1F1B(stages[0], schedule.num_microbatches, CrossEntropy())
        else:
            kind = _TORCH_MULTI[schedule.name]
            self._schedule = kind(list(stages), schedule.num_microbatches, CrossEntropy())

    def run(self) -> Tensor | None:
        self._schedule.step(*self._args, target=self._targets, losses=self._losses, return_outputs=False)
        return None if self._losses is None else torch.stack(self._losses).detach().mean()

    def gradients(self) -> list[Tensor]:
        return _gradients(self._parameters)

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class ComputeOnlySide:
    """This rank's forwards and backwards with nothing around them: no order, no messages, no halves."""

    def __init__(self, task: SideTask) -> None:
        num, size = task.schedule.num_microbatches, task.size
        draws = torch.Generator().manual_seed(2)
        shape = SAMPLES, size.context, size.width
        self._activation, self._gradient = (torch.randn(shape, generator=draws) for _ in range(2))
        self._inputs, self._targets = task.inputs.chunk(num), task.targets.chunk(num)
        self._last, self._share, self._loss = task.last_stage, 1 / num, CrossEntropy()
        self._stages = [(stage, task.build(stage)) for stage in task.stages]
        self._modules = dict(self._stages)

    def run(self) -> Tensor | None:
        for stage, _ in self._stages:
            for microbatch in range(len(self._inputs)):
                self._backward(stage, self._forward(stage, microbatch))
        return None

    def _forward(self, stage: int, microbatch: int) -> Tensor:
        """The loss, or what the stage gives."""
        taken = self._inputs[microbatch] if stage == 0 else self._activation.detach().requires_grad_()
        output: Tensor = self._modules[stage](taken)
        if stage == self._last:
            output = self._loss(output, self._targets[microbatch]) * self._share
        return output

    def _backward(self, stage: int, output: Tensor) -> None:
        output.backward(None if stage == self._last else self._gradient)

    def gradients(self) -> list[Tensor]:
        return _gradients([p for _, module in self._stages for p in module.parameters()])

    def clear(self) -> None:
        for _, module in self._stages:
            module.zero_grad()


class OrderedComputeSide(ComputeOnlySide):
    """The same forwards and backwards in the schedule's order, each when its turn has come: the least that a rank can
    do which waits for others.

    One byte through a pipe says that an op has ended elsewhere. It carries no tensor, and nothing is checked,
    recorded or split in halves. What this takes above the computation alone, no runtime can save.

    Args:
        folder: where the pipes are; the same for all ranks.
    """

    def __init__(self, task: SideTask, folder: Path) -> None:
        super().__init__(task)
        schedule, here = task.schedule, set(task.schedule.order[task.rank])
        rank_of = {op: rank for rank, order in enumerate(schedule.order) for op in order}
        self._turns: list[tuple[Op, list[int], list[int]]] = []
        pipes: dict[tuple[str, int, int], int] = {}

        def pipe(before: Op, after: Op) -> int:
            key = before.kind, before.stage, after.stage
            if key not in pipes:
                path = folder / "-".join(map(str, key))
                with suppress(FileExistsError):
                    os.mkfifo(path)
                pipes[key] = os.open(path, os.O_RDWR)  # neither end waits for the other to open it
            return pipes[key]

        tells: dict[Op, list[int]] = {op: [] for op in here}
        for op in rank_of:
            for before in predecessors(op, schedule.graph, rank_of):
                if before in here and op not in here:
                    tells[before].append(pipe(before, op))
        for op in schedule.order[task.rank]:
            needed = [before for before in predecessors(op, schedule.graph, rank_of) if before not in here]
            self._turns.append((op, [pipe(before, op) for before in needed], tells[op]))

    def run(self) -> Tensor | None:
        outputs: dict[tuple[int, int], Tensor] = {}
        for (kind, stage, microbatch), waits, tells in self._turns:
            for pipe in waits:
                os.read(pipe, 1)
            if kind == "F":
                outputs[stage, microbatch] = self._forward(stage, microbatch)
            elif kind != "W":  # of a backward in halves the first does it all
                self._backward(stage, outputs.pop((stage, microbatch)))
            for pipe in tells:
                os.write(pipe, b" ")
        return None


class BareLoopSide(ComputeOnlySide):
    """The same forwards and backwards in the schedule's order, with tensors between ranks by the calls of gloo alone:
    the least that Python can do which runs a schedule over gloo.

    All receives of a step are posted before its first op, into buffers that stay from step to step, and what is sent
    is the tensor itself. Nothing is copied, checked, decided, timed or recorded, and only this rank's loss is known.
    """

    def __init__(self, task: SideTask, group: dist.ProcessGroup) -> None:
        super().__init__(task)
        schedule, self._group = task.schedule, group
        rank_of = {op: rank for rank, order in enumerate(schedule.order) for op in order}
        number = {op: place for place, op in enumerate(sorted(rank_of))}
        self._ops = [op for op in schedule.order[task.rank] if op.kind != "W"]  # of two halves the first does it all
        self._comes: dict[Op, tuple[Tensor, int, int]] = {}
        self._goes: dict[Op, tuple[int, int]] = {}
        for op, rank in rank_of.items():
            for before in predecessors(op, schedule.graph, rank_of):
                if rank_of[before] != rank == task.rank:
                    self._comes[op] = torch.empty_like(self._activation), rank_of[before], number[op]
                elif rank_of[before] == task.rank != rank:
                    self._goes[before] = rank, number[op]

    def run(self) -> Tensor | None:
        group = self._group
        due = {op: group.recv([buffer], source, tag) for op, (buffer, source, tag) in self._comes.items()}
        held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        here: dict[tuple[str, int, int], Tensor] = {}
        sent: list[tuple[Any, Tensor]] = []
        losses: list[Tensor] = []
        for op in self._ops:
            kind, stage, microbatch = op
            if op in due:
                due[op].wait()
                came = self._comes[op][0]
            else:
                came = here.pop(("F" if kind == "F" else "B", stage, microbatch), self._activation)
            if kind == "F":
                taken = self._inputs[microbatch] if stage == 0 else came.detach().requires_grad_()
                output: Tensor = self._modules[stage](taken)
                if stage == self._last:
                    output = self._loss(output, self._targets[microbatch]) * self._share
                    losses.append(output.detach())
                held[stage, microbatch] = taken, output
                gives, to = output.detach(), ("F", stage + 1, microbatch)
            else:
                taken, output = held.pop((stage, microbatch))
                output.backward(None if stage == self._last else came)
                if taken.grad is None:
                    continue
                gives, to = taken.grad, ("B", stage - 1, microbatch)
            if op in self._goes:
                target, tag = self._goes[op]
                sent.append((group.send([gives], target, tag), gives))
            else:
                here[to] = gives
        for work, _ in sent:
            work.wait()
        return torch.stack(losses).sum() if losses else None


def _gradients(parameters: Sequence[Parameter]) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def builders(
    task: SideTask, groups: dict[str, dist.ProcessGroup], transport: str, folder: Path
) -> dict[str, Callable[[], Side]]:
    """How to make each side, by its name. `folder` is the same for all ranks."""
    return {
        "ours": lambda: PenstockSide(task, groups["ours"], transport),
        "torch": lambda: TorchSide(task, groups["torch"]),
        "bare": lambda: BareLoopSide(task, groups["bare"]),
        "in turns": lambda: OrderedComputeSide(task, folder),
        "alone": lambda: ComputeOnlySide(task),
    }
