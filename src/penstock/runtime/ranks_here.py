"""The ranks in this process as they run a step: a worker each, with the devices that its ops need."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.dispatch import Dispatch, Dispatcher
from penstock.runtime.copies import Copy
from penstock.runtime.devices.registered import RegisteredDevice
from penstock.runtime.devices.torch_device import TorchDevice
from penstock.runtime.executors.group import run_rank
from penstock.runtime.executors.local import run_local
from penstock.runtime.held_model import HeldModel
from penstock.runtime.junctions import end_of
from penstock.runtime.meeting import Meeting
from penstock.runtime.plan import StepPlan
from penstock.runtime.registered import OpCall, OpFunction
from penstock.runtime.running import Running
from penstock.runtime.stage_runner import StageRunner, StepSettings
from penstock.runtime.transport_choice import TransportChoice
from penstock.runtime.transports.conditioned import Conditions, local_transports
from penstock.runtime.updating import Updating
from penstock.runtime.wiring import num_indices
from penstock.runtime.worker import Device, Worker
from penstock.schedule import Op, Schedule


class RanksHere:
    """What runs the steps of a pipeline.

    Args:
        calls: of each registered op its function and what that is told.
        updating: the updates that are ops; None where there are none.
        choice, conditions: how messages travel, and what is injected into links.

    Attributes:
        runners: of the copies of stages here, by (pipeline, stage). ends: those whose output the loss takes.
        last: those of them that tell the losses.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: HeldModel,
        ranks: tuple[int, ...],
        loss_fn: Callable[..., Tensor] | None,
        autocast: torch.dtype | None,
        calls: Mapping[Op, tuple[OpFunction, OpCall]],
        updating: Updating | None,
        choice: TransportChoice,
        conditions: Conditions | None,
    ) -> None:
        self._model, self._ranks, self._calls, self._updating = model, ranks, calls, updating
        self._choice, self._conditions = choice, conditions
        self._num_ranks, end = schedule.num_ranks, end_of(schedule.graph)
        self._num_indices = num_indices(schedule)
        self.runners: dict[Copy, StageRunner] = {
            key: StageRunner(stage, key[1], key[1] == end, model.device, loss_fn, autocast, False)
            for key, stage in model.copies.here.items()
        }
        ends = {key: runner for key, runner in self.runners.items() if key[1] == end}
        self.ends = list(ends.values())
        # Of a shared stage one rank's alone: all of them have the same losses.
        self.last = [runner for key, runner in ends.items() if schedule.placement.hosts(*key)[0] in ranks]

    def run(self, settings: StepSettings, running: Running, plan: StepPlan, transport: Any) -> list[Worker]:
        """Runs a step of some kind to its end.

        Args:
            running: the configuration. plan: of this kind of step.
            transport: between processes; None where all ranks are here.
        """
        # Forwards alone hold nothing, so nothing would keep a dynamic rank from taking in all messages at once.
        dispatch = running.dispatch if settings.training else Dispatch.FROZEN
        local_transport, pause = local_transports(self._num_ranks, self._conditions)
        graph = plan.wiring.graph
        meeting = Meeting(graph) if transport is None and graph.gang_ops else None
        workers = []
        for rank in self._ranks:
            dispatcher = Dispatcher(graph, rank, dispatch, plan.memory_change, plan.caps[rank])
            device = self._device(rank, plan, settings.training, meeting)
            workers.append(Worker(plan.wiring, rank, dispatcher, device, transport or local_transport(rank), meeting))
        try:
            for runner in self.runners.values():
                runner.begin(settings)
            if transport is None:
                run_local(workers, pause)
            else:
                signatures = self._signatures(settings)
                threaded = dispatch is Dispatch.DYNAMIC
                digest = zlib.crc32(" ".join(signatures).encode())
                self._choice.route(transport, running.configuration.delegated)
                transport.begin(plan.expected, signatures, digest, threaded, plan.window)
                run_rank(workers[0], transport)
                transport.end()
        finally:
            for runner in self.runners.values():
                runner.end()
        return workers

    def _device(self, rank: int, plan: StepPlan, training: bool, meeting: Meeting | None) -> Device:
        model, schedule = self._model, plan.wiring.schedule
        runners = {key: self.runners[key] for key in model.copies.of_rank(rank)}
        device: Device = TorchDevice(runners, model.tied, schedule, model.device, meeting)
        if self._updating is not None and training:
            device = self._updating.device(device, rank)
        if schedule.graph.registered or schedule.graph.needs:
            device = RegisteredDevice(device, self._calls, plan.wiring.num_tokens(rank), model.device)
        return device

    def _signatures(self, settings: StepSettings) -> list[str]:
        shapes = settings.microbatches.signatures
        texts = {shape: f"{settings.purpose.value} {shape}" for shape in set(shapes)}
        signatures = [texts[shape] for shape in shapes]
        return signatures + signatures[-1:] * (self._num_indices - len(signatures))  # tokens may have higher indices
