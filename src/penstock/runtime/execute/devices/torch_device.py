"""The torch device of one rank: runs ops on the stages it hosts and hands their results to the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.gang import Gang
from penstock.runtime.parameters.tied import TiedGradients
from penstock.runtime.stage.branches import Junctions, is_plain
from penstock.runtime.stage.ops import StageRunner
from penstock.runtime.stage.stage import Copy
from penstock.runtime.tensors.message import Edge, Payload
from penstock.schedule import Op, Schedule


class TorchDevice:
    """Runs ops with torch. The runners must have begun a step.

    Args:
        runners: of the copies of stages that the rank hosts, by (pipeline, stage).
        tied: gradients of parameters that stages share. schedule: what runs.
        inside: around an op of a copy of a stage, by pipeline and stage; None outside of training.
        meeting: where ranks of this process meet for the stages that they share: the first of them has the stage, and
            what it leaves there is what came of the op on the others.

    On a GPU an op ends when its work is done: its message leaves through host memory and would wait for it
    anyway, and the measured times are then those of the work, not of its launch.
    """

    def __init__(
        self,
        runners: Mapping[Copy, StageRunner],
        tied: TiedGradients,
        schedule: Schedule,
        device: torch.device,
        meeting: Gang | None = None,
        inside: Callable[[int, int], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._runners, self._inside = runners, inside
        self._gpu = device if device.type == "cuda" else None
        self._tied, self._pipelines = tied, schedule.microbatch_pipeline
        self._junctions = None if is_plain(schedule) else Junctions(schedule)
        self._shared = {} if meeting is None else {stage for stage, _ in schedule.placement.shared}
        self._meeting = meeting
        self._outcome: Payload | None = None
        self._op: Op | None = None

    def run(self, op: Op, received: Sequence[Payload]) -> None:
        self._op = op
        if self._meeting is None or op.stage not in self._shared:
            self._run(op, received)
        elif (self._pipelines[op.microbatch], op.stage) in self._runners:
            self._run(op, received)
            self._meeting.leave(op, self._outcome)
        else:
            if self._junctions is not None and op.kind == "F":
                self._junctions.inputs(op, received)  # it must know how gradients are cut
            self._outcome = self._meeting.find(op)

    def _run(self, op: Op, received: Sequence[Payload]) -> None:
        pipeline = self._pipelines[op.microbatch]
        runner = self._runners[pipeline, op.stage]
        if self._inside is None:
            self._outcome = self._forward(op, received, runner)
        else:
            with self._inside(pipeline, op.stage):
                self._train(op, received, runner)
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)

    def _forward(self, op: Op, received: Sequence[Payload], runner: StageRunner) -> Payload:
        entering = self._entering(op, received)
        try:
            return runner.forward(op.microbatch, entering)
        except Exception as error:
            if self._junctions is not None and (words := self._junctions.arguments(op.stage)):
                error.add_note(words)
            raise

    def _train(self, op: Op, received: Sequence[Payload], runner: StageRunner) -> None:
        if op.kind == "F":
            self._outcome = self._forward(op, received, runner)
        elif op.kind == "W":
            runner.backward_weight(op.microbatch)
            self._outcome = None
        elif op.kind == "R":
            runner.recompute(op.microbatch)
            self._outcome = None
        else:
            came, sums = self._tied.sort(op, received)
            main = came[0] if came else None
            if self._junctions is not None:
                main = self._junctions.gradients(op, came)
            self._outcome = runner.backward(op.kind, op.microbatch, main, sums)
            self._tied.take(op)

    def _entering(self, op: Op, received: Sequence[Payload]) -> Payload | None:
        """What a forward gets; None where the batch goes in."""
        if self._junctions is not None:
            return self._junctions.inputs(op, received)
        return received[0] if received else None

    def give(self, edge: Edge) -> Payload:
        if edge.slot:
            return self._tied.give(edge)
        outcome = self._outcome
        if outcome is None or edge.producer != self._op:
            raise RuntimeFailure(f"{edge.producer} has nothing to send to {edge.consumer}")
        if self._junctions is not None:
            return self._junctions.share(edge, outcome)
        self._outcome = None
        return outcome
