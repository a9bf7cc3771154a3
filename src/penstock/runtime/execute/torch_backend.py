"""The torch backend: the stages in this process, and the tables of handlers that run their ops.

TorchOps         F, B, I, W, R, on the stages that a rank hosts
RegisteredOps    a registered kind (REDUCE is one): calls the function that was given for it
TorchDevices     what the ranks here have in common: stages, their split backward, the device's queue
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.async_ops import RegisteredAsyncOp
from penstock.runtime.execute.gang import Gang
from penstock.runtime.execute.launched_ops import MOST_LAUNCHED_OPS, DeviceClock, DeviceQueue, LaunchedOps, queue_of
from penstock.runtime.execute.plan import ActivePlan, StepPlan
from penstock.runtime.execute.update_ops import UpdatingOps
from penstock.runtime.execute.worker import Backend, Handler
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.tied_gradients import TiedGradients
from penstock.runtime.parameters.updates import ScheduledUpdates
from penstock.runtime.split_backward import DeferredShare, prepare, unprepare
from penstock.runtime.stage.branches import Branches, has_many_ends, is_plain, loss_stage
from penstock.runtime.stage.host_memory import HostCopy, HostMemory, on_device
from penstock.runtime.stage.loss import LossFn
from penstock.runtime.stage.microbatches import Microbatches
from penstock.runtime.stage.ops import StageRunner, StepSettings
from penstock.runtime.stage.registered_ops import Calls, StageOutputs, name_of
from penstock.runtime.stage.stage import Copy
from penstock.runtime.tensors.message import Payload
from penstock.runtime.tensors.pytree import on_host
from penstock.runtime.transport.wiring import WiredOp, num_indices
from penstock.schedule import Op, Schedule
from penstock.schedule.op import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.schedule.updates import OWNER

LEAST_DEFERRED_SHARE = 0.5
_LITTLE = (
    "W has little to do, as layers are too small or of other kinds: the schedule runs much like 1f1b; "
    "pipe.deferred_share() and report.json say why"
)
"""A smaller share of a stage's work on weight gradients is worth a notice: W is planned to take all of it."""


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

    def start(self, op: Op, received: Sequence[Payload]) -> RegisteredAsyncOp:
        """Starts an asynchronous op."""
        started: RegisteredAsyncOp = self._once(op, self._started)
        return started

    def _started(self, op: Op) -> RegisteredAsyncOp:
        handle = self._call(op)
        queue = None if isinstance(handle, HostCopy) else self._queue  # copies know themselves when they have ended
        return RegisteredAsyncOp(op, handle, self._calls[self._rank, op][1].timeout, queue)

    def _once(self, op: Op, call: Callable[[Op], Any]) -> Any:
        """Calls a function on the first rank of those in this process that run it together; the others get what that
        returned."""
        gang, ranks = self._gang, self._calls[self._rank, op][1].ranks
        if gang is None or len(ranks) == 1:
            return call(op)
        return gang.once(op, self._rank == ranks[0], lambda: call(op))

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
            if not wired.output_edges:
                return ()
            if passes_on and outcome is not None and len(wired.output_edges) == 1 and not wired.output_edges[0].slot:
                return (outcome,)
            return self._outputs(wired, outcome)

        def run(op: Op, inputs: Sequence[Payload]) -> Payload | None:
            key = pipelines[op.microbatch], op.stage
            with nullcontext() if inside is None else inside(*key):
                return work(runners[key], op, inputs)

        def handle(wired: WiredOp, inputs: Sequence[Payload]) -> Sequence[Payload]:
            return self._outputs(wired, self._together(run, wired.op, inputs))

        return handle_alone if inside is None and not self._shared else handle

    def _together(
        self, run: Callable[[Op, Sequence[Payload]], Payload | None], op: Op, inputs: Sequence[Payload]
    ) -> Payload | None:
        """What came of an op that several ranks of this process may run: run by the first, found by the others."""
        if op.stage not in self._shared or self._gang is None:
            return run(op, inputs)
        is_first = (self._pipelines[op.microbatch], op.stage) in self._runners
        if self._branches is not None and op.kind == FORWARD and not is_first:
            self._branches.inputs(op, inputs)  # it must know how gradients are cut
        outcome: Payload | None = self._gang.once(op, is_first, lambda: run(op, inputs))
        return outcome

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
        for edge in wired.output_edges:
            if edge.slot:
                if self._tied is None:
                    raise RuntimeFailure(f"{wired.op} has no tied gradient to send to {edge.consumer}")
                found.append(self._tied.give(edge))
            elif outcome is None:
                raise RuntimeFailure(f"{edge.producer} has nothing to send to {edge.consumer}")
            else:
                found.append(outcome if self._branches is None else self._branches.share(edge, outcome))
        return found


class TorchDevices:
    """What runs the ops of the ranks here.

    Args:
        calls: of each registered op its function and what that is told.
        updating: the updates that are ops; None where there are none.
        most_ahead: ops that a rank may have under way on a device that queues them; see `LaunchedOps`.

    Attributes:
        runners: of the copies of stages here, by (pipeline, stage). ends: those whose output the loss takes.
        last: those of them that tell the losses. host: where activations of these stages go that are sent away.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: LocalModel,
        ranks: tuple[int, ...],
        loss_fn: LossFn,
        autocast: torch.dtype | None,
        calls: Calls,
        updating: ScheduledUpdates | None,
        most_ahead: int = MOST_LAUNCHED_OPS,
    ) -> None:
        self._model, self._ranks, self._calls, self._updating = model, ranks, calls, updating
        end = loss_stage(schedule.graph)
        by_ops = has_many_ends(schedule.graph)
        self._num_indices = num_indices(schedule)
        self._queue, self._most_ahead = queue_of(model.device), most_ahead
        self.host = HostMemory(model.device)
        self.runners: dict[Copy, StageRunner] = {
            key: StageRunner(
                stage, key[1], key[1] == end and not by_ops, model.device, loss_fn, autocast,
                len(schedule.graph.targets[key[1]]), model.tied.note_casts if model.ties else None,
                self.host, is_checked=True,
            )
            for key, stage in model.copies.here.items()
        }  # fmt: skip
        ends = {key: runner for key, runner in self.runners.items() if key[1] == end}
        self.ends = list(ends.values())
        # Of a shared stage one rank's alone: all of them have the same losses.
        self._outputs = StageOutputs(self.runners, end if by_ops else None)
        self.last = [runner for key, runner in ends.items() if schedule.placement.hosts(*key)[0] in ranks]
        self._settings: StepSettings
        self._clock: DeviceClock | None = None
        self._tables: dict[bool, tuple[StepPlan, Backend]] = {}
        """The handlers of the rank here, by whether a step is for training, and the plan that they are of."""
        self._known_signatures: tuple[tuple[Any, ...], list[str], int] = (), [], 0
        """For what purpose and shapes of microbatches the signatures are, and their digest."""

    @property
    def runs_ahead(self) -> bool:
        """Whether ranks launch ops behind others that have not ended."""
        return self._queue is not None and self._most_ahead > 1

    def close(self) -> None:
        """Ends the thread that waits for the device, if there is one."""
        if self._queue is not None:
            self._queue.close()

    @contextmanager
    def step(self, settings: StepSettings) -> Iterator[None]:
        """Around a step of some kind."""
        self._settings = settings
        self._clock = None if self._queue is None else DeviceClock(self._queue)
        try:
            yield
        finally:
            for runner in self.runners.values():
                runner.end()
            del self._settings  # with the batch

    def begin(self) -> None:
        """Before the ops of a step. What the user's loss says of the microbatches may raise."""
        if self._settings.training:
            self.host.begin()
        for runner in self.runners.values():
            runner.begin(self._settings)

    def complete(self) -> None:
        """After the ops of a step, if all of them ran."""
        for runner in self.runners.values():
            runner.complete()

    def table(self, rank: int, plan: StepPlan, training: bool, gang: Gang | None) -> Backend:
        """The handlers of a rank in a step: those of the step before, where they keep nothing of it."""
        known, table = self._tables.get(training, (None, None))
        if known is plan and table is not None:
            return table
        table = self._made_table(rank, plan, training, gang)
        keeps_nothing = self._updating is None and not plan.wiring.schedule.graph.registered and self._queue is None
        if len(self._ranks) == 1 and keeps_nothing:
            self._tables[training] = plan, table
        return table

    @property
    def signatures(self) -> tuple[list[str], int]:
        """What messages of each microbatch look like, in words, and a number for all of it."""
        shapes, purpose = self._settings.microbatches.signatures, self._settings.purpose
        known, signatures, digest = self._known_signatures
        if known != (purpose, shapes):
            texts = {shape: f"{purpose.value} {shape}" for shape in set(shapes)}
            signatures = [texts[shape] for shape in shapes]
            signatures += signatures[-1:] * (self._num_indices - len(signatures))  # tokens may have higher indices
            digest = zlib.crc32(" ".join(signatures).encode())
            self._known_signatures = (purpose, shapes), signatures, digest
        return signatures, digest

    def outputs(self, batch: Microbatches) -> dict[int, Any]:
        """Gives away what the model gave for each microbatch here, by its number in the whole batch."""
        first = batch.replica * len(batch)
        found: dict[int, Any] = {}
        for runner in self.ends:
            results, runner.results = runner.results, {}
            found |= {first + m: on_host(value) for m, value in results.items()}
        return found

    def split_stages(self, running: ActivePlan) -> list[str]:
        """Readies stages for what runs from the next step on, puts others back, and says which cannot be split."""
        notices = []
        for (pipeline, index), runner in self.runners.items():
            if not running.splits(index):
                unprepare(runner.stage)
                runner.may_split(None)
                continue
            report = prepare(runner.stage)
            reason = report.reason
            runner.may_split(report.shared if report.can_split else None, reason)
            if reason and pipeline == OWNER:
                notices.append(f"stage {index}: {reason}")
        return notices

    def deferred_shares(self) -> dict[int, DeferredShare]:
        """By stage, what the last step's split backward put off; of those here that are split."""
        found = {index: runner.deferred_share() for (_, index), runner in sorted(self.runners.items(), reverse=True)}
        return {index: share for index, share in found.items() if share is not None}

    def little_deferred(self) -> list[str]:
        """Says after a step that a stage's split backward put little off, in the same words for all stages."""
        shares = [runner.new_share() for runner in self.runners.values()]
        little = any(each is not None and each.reasons and each.share < LEAST_DEFERRED_SHARE for each in shares)
        return [_LITTLE] if little else []

    def _made_table(self, rank: int, plan: StepPlan, training: bool, gang: Gang | None) -> Backend:
        model, schedule = self._model, plan.wiring.schedule
        runners = {key: self.runners[key] for key in model.copies.of_rank(rank)}
        inside = model.inside if training and model.is_shared else None
        tied = model.tied if model.ties else None
        handlers = TorchOps(runners, tied, schedule, gang, inside).handlers
        launched = None if self._queue is None else LaunchedOps(self._queue, self._most_ahead, self._clock)
        if self._updating is not None and training:
            handlers = UpdatingOps(handlers, self._updating, rank, plan.wiring.tied_values, gang).handlers
        if model.device.type != "cpu":
            handlers = {kind: with_inputs_on(model.device, handler) for kind, handler in handlers.items()}
        if not schedule.graph.registered:
            return Backend(handlers, launched=launched)
        select = model.copies.select if training else None
        registered = RegisteredOps(rank, self._calls, self._outputs, self._queue, gang, select)
        return Backend({**handlers, **registered.handlers}, registered.start, launched)
