"""The torch handlers of one rank: ops on the stages that it hosts, and ops of registered kinds.

A registered kind (REDUCE is one) calls the function that was given for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.async_ops import AsyncOpHandle, AwaitableOpHandle
from penstock.runtime.execute.backend import Handler
from penstock.runtime.execute.gang import Gang
from penstock.runtime.execute.launched_ops import DeviceOpHandle, DeviceQueue
from penstock.runtime.parameters.tied_gradients import TiedGradients
from penstock.runtime.stage.branches import Branches, is_plain
from penstock.runtime.stage.host_memory import HostCopy, on_device
from penstock.runtime.stage.ops import StageRunner
from penstock.runtime.stage.registered_ops import Calls, StageOutputs, name_of
from penstock.runtime.stage.stage import Copy
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.wiring import WiredOp
from penstock.schedule import Op, Schedule
from penstock.schedule.op import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.schedule.updates import OWNER


class RegisteredOps:
    """The registered ops of one rank.

    Args:
        rank: whose they are.
        calls: of each registered op its function and what that is told.
        outputs: what forwards made here.
        queue: in which the stages' device has its work, so that an op may go on there when its function has returned;
            None for a device that has none.
        gang: where ranks of this process meet; the first of an op's ranks calls its function for all of them.
        select: has a stage hold what its copy of a pipeline has; a function sees what the owner's has.
    """

    def __init__(
        self,
        rank: int,
        calls: Calls,
        outputs: StageOutputs,
        queue: DeviceQueue | None = None,
        gang: Gang | None = None,
        select: Callable[[int, int], None] | None = None,
    ) -> None:
        self._rank, self._calls, self._select = rank, calls, select
        self._outputs, self._gang = outputs, gang
        self._queue = queue
        kinds = {op.kind for host, op in calls if host == rank}
        self.handlers: dict[str, Handler] = dict.fromkeys(kinds, self._run)

    def _run(self, wired: WiredOp, inputs: Sequence[Payload]) -> tuple[()]:
        self._once(wired.op, self._call)
        return ()

    def start(self, op: Op, received: Sequence[Payload]) -> AsyncOpHandle:
        """Starts an asynchronous op."""
        started: AsyncOpHandle = self._once(op, self._started)
        return started

    def _started(self, op: Op) -> AsyncOpHandle:
        handle = self._call(op)
        known = handle is None or hasattr(handle, "wait") or hasattr(handle, "result")
        if self._queue is not None and known and not isinstance(handle, HostCopy):
            handle = DeviceOpHandle(self._queue, handle)
        return AwaitableOpHandle(op, handle, self._calls[self._rank, op][1].timeout)

    def _once(self, op: Op, call: Callable[[Op], Any]) -> Any:
        """Calls a function on the first rank of those in this process that run it together; the others get what that
        returned."""
        gang, ranks = self._gang, self._calls[self._rank, op][1].ranks
        if gang is None or len(ranks) == 1:
            return call(op)
        if self._rank != ranks[0]:
            return gang.find(op)
        outcome = call(op)
        gang.leave(op, outcome)
        return outcome

    def _call(self, op: Op) -> Any:
        function, call = self._calls[self._rank, op]
        if self._select is not None:
            self._select(OWNER, op.stage)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # left as it was, whatever the function does
                return function(replace(call, _outputs=self._outputs))
        except Exception as error:
            error.add_note(f"in function {name_of(function)}, which ops= has for kind {op.kind}")
            raise


def with_inputs_on(device: torch.device, handler: Handler) -> Handler:
    """A handler whose op finds all that came on the stages' device.

    Most transports bring it into host memory, and what an op adds it to, or joins it with, may never have left the
    device.
    """

    def handle(wired: WiredOp, inputs: Sequence[Payload]) -> Sequence[Payload]:
        return handler(wired, [on_device(device, payload) for payload in inputs])

    return handle


class TorchOps:
    """Runs ops with torch. The runners must have begun a step.

    Args:
        runners: of the copies of stages that the rank hosts, by (pipeline, stage).
        tied: gradients of parameters that stages share; None where they share none. schedule: what runs.
        inside: around an op of a copy of a stage, by pipeline and stage; None where nothing is to be done there.
        gang: where ranks of this process meet for the stages that they share: the first of them has the stage, and
            what it leaves there is what came of the op on the others.

    A device may still run an op when its handler returns; `LaunchedOps` knows when it has ended.
    """

    def __init__(
        self,
        runners: Mapping[Copy, StageRunner],
        tied: TiedGradients | None,
        schedule: Schedule,
        gang: Gang | None = None,
        inside: Callable[[int, int], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._runners, self._inside = runners, inside
        self._tied, self._pipelines = tied, schedule.microbatch_pipeline
        self._branches = None if is_plain(schedule) else Branches(schedule)
        self._shared = {} if gang is None else {stage for stage, _ in schedule.placement.shared}
        self._gang = gang
        works = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            INPUT: self._backward,
            WEIGHT: self._weight,
            RECOMPUTE: self._recompute,
        }
        self.handlers: dict[str, Handler] = {kind: self._handler(work) for kind, work in works.items()}

    def _handler(self, work: Callable[[StageRunner, Op, Sequence[Payload]], Payload | None]) -> Handler:
        runners, pipelines, inside = self._runners, self._pipelines, self._inside
        passes_on = self._tied is None and self._branches is None  # what comes of an op as it is

        def handle_alone(wired: WiredOp, inputs: Sequence[Payload]) -> Sequence[Payload]:
            op = wired.op
            outcome = work(runners[pipelines[op.microbatch], op.stage], op, inputs)
            if not wired.given:
                return ()
            if passes_on and outcome is not None and len(wired.given) == 1 and not wired.given[0].slot:
                return (outcome,)
            return self._outputs(wired, outcome)

        def run(op: Op, inputs: Sequence[Payload]) -> Payload | None:
            key = pipelines[op.microbatch], op.stage
            if inside is None:
                return work(runners[key], op, inputs)
            with inside(*key):
                return work(runners[key], op, inputs)

        def handle(wired: WiredOp, inputs: Sequence[Payload]) -> Sequence[Payload]:
            outcome = run(wired.op, inputs)
            return self._outputs(wired, outcome) if wired.given else ()

        def handle_together(wired: WiredOp, inputs: Sequence[Payload]) -> Sequence[Payload]:
            return self._outputs(wired, self._together(run, wired.op, inputs))

        if self._shared:
            return handle_together
        return handle_alone if inside is None else handle

    def _together(
        self, run: Callable[[Op, Sequence[Payload]], Payload | None], op: Op, inputs: Sequence[Payload]
    ) -> Payload | None:
        """What came of an op that several ranks of this process may run: run by the first, found by the others."""
        if op.stage not in self._shared or self._gang is None:
            return run(op, inputs)
        if (self._pipelines[op.microbatch], op.stage) in self._runners:
            outcome = run(op, inputs)
            self._gang.leave(op, outcome)
            return outcome
        if self._branches is not None and op.kind == FORWARD:
            self._branches.inputs(op, inputs)  # it must know how gradients are cut
        found: Payload | None = self._gang.find(op)
        return found

    def _forward(self, runner: StageRunner, op: Op, inputs: Sequence[Payload]) -> Payload:
        branches = self._branches
        if branches is None:
            return runner.forward(op.microbatch, inputs[0] if inputs else None)
        entering = branches.inputs(op, inputs)
        try:
            return runner.forward(op.microbatch, entering)
        except Exception as error:
            if words := branches.arguments(op.stage):
                error.add_note(words)
            raise

    def _backward(self, runner: StageRunner, op: Op, inputs: Sequence[Payload]) -> Payload:
        came: Sequence[Payload] = inputs
        sums: Sequence[tuple[Tensor, Tensor]] = ()
        if self._tied is not None:
            came, sums = self._tied.sort(op, inputs)
        main = came[0] if came else None
        if self._branches is not None:
            main = self._branches.gradients(op, came)
        outcome = runner.backward(op.kind, op.microbatch, main, sums)
        if self._tied is not None:
            self._tied.take(op)
        return outcome

    def _weight(self, runner: StageRunner, op: Op, inputs: Sequence[Payload]) -> None:
        runner.backward_weight(op.microbatch)

    def _recompute(self, runner: StageRunner, op: Op, inputs: Sequence[Payload]) -> None:
        runner.recompute(op.microbatch)

    def _outputs(self, wired: WiredOp, outcome: Payload | None) -> list[Payload]:
        """What goes out along each edge: what came of the op, or its part of that, and sums of tied gradients."""
        found = []
        for edge in wired.given:
            if edge.slot:
                if self._tied is None:
                    raise RuntimeFailure(f"{wired.op} has no tied gradient to send to {edge.consumer}")
                found.append(self._tied.give(edge))
            elif outcome is None:
                raise RuntimeFailure(f"{edge.producer} has nothing to send to {edge.consumer}")
            else:
                found.append(outcome if self._branches is None else self._branches.share(edge, outcome))
        return found
