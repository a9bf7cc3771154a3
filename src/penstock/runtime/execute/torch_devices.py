"""The stages in this process, and the tables of handlers that run their ops with torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from penstock.runtime.execute.backend import OpTable
from penstock.runtime.execute.gang import Gang
from penstock.runtime.execute.launched_ops import AHEAD, DeviceClock, DeviceQueue, LaunchedOps, lanes_of, queue_of
from penstock.runtime.execute.plan import StepPlan
from penstock.runtime.execute.torch_ops import RegisteredOps, TorchOps, with_inputs_on
from penstock.runtime.execute.update_ops import UpdatingOps
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.scheduled_updates import ScheduledUpdates
from penstock.runtime.stage.branches import end_of, has_many_ends
from penstock.runtime.stage.host_memory import HostMemory
from penstock.runtime.stage.microbatches import LossFn, Microbatches
from penstock.runtime.stage.ops import StageRunner, StepSettings
from penstock.runtime.stage.registered_ops import Calls, StageOutputs
from penstock.runtime.stage.split_backward import is_compiled
from penstock.runtime.stage.stage import Copy
from penstock.runtime.tensors.pytree import on_host
from penstock.runtime.transport.wiring import num_indices
from penstock.schedule import Op, Schedule


class TorchDevices:
    """What runs the ops of the ranks here.

    Args:
        calls: of each registered op its function and what that is told.
        updating: the updates that are ops; None where there are none.
        most_ahead: ops that a rank may have under way on a device that queues them; see `LaunchedOps`.
        overlaps_pairs: whether the two of a pair may run at the same time on such a device.

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
        most_ahead: int = AHEAD,
        overlaps_pairs: bool = True,
    ) -> None:
        self._model, self._ranks, self._calls, self._updating = model, ranks, calls, updating
        end = end_of(schedule.graph)
        by_ops = has_many_ends(schedule.graph)
        self._num_indices = num_indices(schedule)
        self._queue, self._most_ahead = queue_of(model.device), most_ahead
        self._overlaps_pairs = overlaps_pairs
        self._lanes: tuple[Schedule | None, Mapping[int, int]] = None, {}
        """Of the stages of the schedule that ran last."""
        self.host = HostMemory(model.device)
        # Updates in the middle of a step change parameters, and replicas that keep parts put others in their place.
        watched = updating is None and model.sharded is None and schedule.num_microbatches > 1
        self.runners: dict[Copy, StageRunner] = {
            key: StageRunner(
                stage, key[1], key[1] == end and not by_ops, model.device, loss_fn, autocast,
                len(schedule.graph.targets[key[1]]), model.tied.note_casts if model.ties else None,
                self.host, watched,
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
        self._tables: dict[bool, tuple[StepPlan, OpTable]] = {}
        """The handlers of the rank here, by whether a step is for training, and the plan that they are of."""
        self._told: tuple[tuple[Any, ...], list[str], int] = (), [], 0
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
            if settings.away:
                self.host.begin()
            for runner in self.runners.values():
                runner.begin(settings)
            yield
            for runner in self.runners.values():
                runner.require_seen()
        finally:
            for runner in self.runners.values():
                runner.end()
            del self._settings  # with the batch

    def table(self, rank: int, plan: StepPlan, training: bool, gang: Gang | None) -> OpTable:
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
        known, signatures, digest = self._told
        if known != (purpose, shapes):
            texts = {shape: f"{purpose.value} {shape}" for shape in set(shapes)}
            signatures = [texts[shape] for shape in shapes]
            signatures += signatures[-1:] * (self._num_indices - len(signatures))  # tokens may have higher indices
            digest = zlib.crc32(" ".join(signatures).encode())
            self._told = (purpose, shapes), signatures, digest
        return signatures, digest

    def outputs(self, batch: Microbatches) -> dict[int, Any]:
        """What the model gave for each microbatch here, by its number in the whole batch."""
        first = batch.replica * len(batch)
        return {first + m: on_host(value) for runner in self.ends for m, value in runner.results.items()}

    def _made_table(self, rank: int, plan: StepPlan, training: bool, gang: Gang | None) -> OpTable:
        model, schedule = self._model, plan.wiring.schedule
        runners = {key: self.runners[key] for key in model.copies.of_rank(rank)}
        inside = model.inside if training and model.is_shared else None
        tied = model.tied if model.ties else None
        handlers = TorchOps(runners, tied, schedule, gang, inside).handlers
        launched = None if self._queue is None else self._launched_ops(self._queue, schedule)
        if self._updating is not None and training:
            handlers = UpdatingOps(handlers, self._updating, rank, plan.wiring.tied_values, gang).handlers
        if model.device.type != "cpu":
            handlers = {kind: with_inputs_on(model.device, handler) for kind, handler in handlers.items()}
        if not schedule.graph.registered:
            return OpTable(handlers, launched=launched)
        select = model.copies.select if training else None
        registered = RegisteredOps(rank, self._calls, self._outputs, self._queue, gang, select)
        return OpTable({**handlers, **registered.handlers}, registered.start, launched)

    def _launched_ops(self, queue: DeviceQueue, schedule: Schedule) -> LaunchedOps:
        """The ops of one rank in one step."""
        if not schedule.pairs or not self._overlaps_pairs:
            return LaunchedOps(queue, self._most_ahead, clock=self._clock)
        known, lanes = self._lanes
        if known is not schedule:
            # What torch.compile makes may replay graphs of CUDA, which have memory in common.
            compiled = {
                stage
                for stage, module in self._model.copies.stages.items()
                if any(map(is_compiled, module.modules()))
            }
            pairs = tuple(pair for pair in schedule.pairs if not compiled & {pair.forward.stage, pair.backward.stage})
            lanes = lanes_of(replace(schedule, pairs=pairs))
            self._lanes = schedule, lanes
        pipelines = schedule.microbatch_pipeline

        def state(op: Op) -> Sequence[Any]:
            return self.runners[pipelines[op.microbatch], op.stage].state()

        return LaunchedOps(queue, self._most_ahead, lanes, schedule.pairs, state, self._clock)
