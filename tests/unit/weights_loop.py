"""Drives the weights of a schedule's copies by hand: its ops through torch's autograd, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.parameters.rules import rule_of
from penstock.runtime.parameters.versions import CopyWeights, summed
from penstock.runtime.split_backward import Tape
from penstock.schedule import Op, Schedule

Loss = Callable[[Tensor, Tensor], Tensor]


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Loop:
    """All copies of all stages: `copies[pipeline][stage]` is a module."""

    def __init__(
        self,
        copies: Sequence[Sequence[nn.Module]],
        schedule: Schedule,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        zero: bool = True,
        loss: Loss = squared,
    ) -> None:
        assert schedule.updates is not None
        rule = rule_of(schedule.updates.rule)
        self.copies, self.schedule, self.zero, self.loss = copies, schedule, zero, loss
        self.weights = {
            (j, i): CopyWeights(stage, schedule, i, rule, owns=j == 0 or not zero)
            for j, stages in enumerate(copies)
            for i, stage in enumerate(stages)
        }
        # As in one process: the owners' parameters of all stages share an optimizer.
        self.optimizers = [
            optimizer([p for (j, _), w in self.weights.items() if j == pipeline for p in w.masters.values()])
            for pipeline in range(len(copies))
            if pipeline == 0 or not zero
        ]
        rule.require(self.optimizers[0])

    def run(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        rates: Sequence[float] | None = None,
        clip_norm: float | None = None,
        open_window: bool = False,
    ) -> None:
        """One pass: every op of the schedule when what it waits for is done."""
        for (j, _), weights in self.weights.items():
            optimizer = self.optimizers[0 if self.zero else j] if j == 0 or not self.zero else None
            weights.begin(optimizer, rates, clip_norm, open_window)
        self.held: dict[Any, Any] = {}
        self.inputs, self.targets = inputs, targets
        for op in run_order(self.schedule):
            getattr(self, f"_{op.kind.lower()}")(op, *self._copy(op))
        for weights in self.weights.values():
            weights.end()

    def _copy(self, op: Op) -> tuple[nn.Module, CopyWeights]:
        pipeline = self.schedule.pipeline_of(op)
        return self.copies[pipeline][op.stage], self.weights[pipeline, op.stage]

    def _f(self, op: Op, stage: nn.Module, weights: CopyWeights) -> None:
        i, m = op.stage, op.microbatch
        x = self.inputs[m] if i == 0 else self.held.pop(("y", i - 1, m)).detach().requires_grad_()
        tape = Tape() if self.schedule.splits_backward() else None
        weights.before_forward(m)
        if tape is None:
            y = stage(x)
        else:
            with tape.recording():
                y = stage(x)
        if i == self.schedule.num_stages - 1:
            windows = self.schedule.windows
            assert windows is not None
            y = self.loss(y, self.targets[m]) / len(windows.microbatches(m // windows.window))
        else:
            self.held["y", i, m] = y
        self.held["graph", i, m] = x, y, tape

    def _b(self, op: Op, stage: nn.Module, weights: CopyWeights) -> None:
        i, m = op.stage, op.microbatch
        x, y, tape = self.held.pop(("graph", i, m))
        gradient = None if i == self.schedule.num_stages - 1 else self.held.pop(("g", i + 1, m))
        weights.before_backward(m)
        if tape is None:
            torch.autograd.backward(y, gradient)
        else:
            tape.backward_input([y], [gradient])
        weights.done(m)
        self.held["g", i, m] = x.grad
        self.held["tape", i, m] = tape

    _i = _b

    def _w(self, op: Op, stage: nn.Module, weights: CopyWeights) -> None:
        weights.before_weight(op.microbatch)
        self.held.pop(("tape", op.stage, op.microbatch)).backward_weight()

    def _u(self, op: Op, stage: nn.Module, weights: CopyWeights) -> None:
        windows, i = self.schedule.windows, op.stage
        assert windows is not None
        update, pipeline = windows.update_of(op.microbatch)
        if pipeline == 0:
            parts = [self.weights[j, i].gradients(update) for j in range(len(self.copies))]
            self.held["sum", i, update] = summed(parts)
            weights.apply(update, parts)
            self.held["values", i, update] = weights.versions.copies()
        elif self.zero:
            weights.take_over(update, self.held["values", i, update])
        else:
            weights.apply(update, [self.held["sum", i, update]])


def run_order(schedule: Schedule) -> list[Op]:
    """An order in which one process can run all ops: each rank's own, as far as it gets, in turn."""
    rows = [list(row) for row in schedule.order]
    present = {op: 0 for row in rows for op in row}
    done: set[Op] = set()
    order: list[Op] = []
    while any(rows):
        before = len(order)
        for row in rows:
            while row and _is_ready(schedule, row[0], present, done):
                done.add(row[0])
                order.append(row.pop(0))
        assert len(order) > before, "the schedule is stuck"
    return order


def _is_ready(schedule: Schedule, op: Op, present: Mapping[Op, int], done: set[Op]) -> bool:
    kind, i, m = op
    if kind == "F":
        return i == 0 or Op("F", i - 1, m) in done
    if kind in "BI":
        last = i == schedule.num_stages - 1
        return last or Op("B", i + 1, m) in done or Op("I", i + 1, m) in done
    if kind == "W":
        return Op("I", i, m) in done
    assert kind == "U"
    assert schedule.windows is not None
    return all(each in done for each in schedule.windows.needed(op, present))
