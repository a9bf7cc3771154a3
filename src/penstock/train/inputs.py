"""What a run starts from: schedule, model, data and optimizer, all read and checked beforehand."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.data import Corpus
from penstock.models import parallelize
from penstock.passes.reduce import REDUCE
from penstock.runtime import MuonAdamW, Pipeline, RuntimeFailure
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.arguments import ParallelOptions, PrecisionOptions
from penstock.runtime.parameters.optimizer import optimizer_of
from penstock.runtime.parameters.rules import rule_of
from penstock.runtime.stage.loss import adds_up, sizes_of, weights_of
from penstock.runtime.stage.registered_ops import require_round_trips
from penstock.schedule import Schedule
from penstock.schedule.async_ops import MOVES
from penstock.train.settings import Settings, SettingsError, check_precision, check_ties
from penstock.train.tasks.documents import recorded_batches
from penstock.train.tasks.open import open_task, schedule_of
from penstock.train.tasks.task import Task, TaskData
from penstock.unknown_names import did_you_mean


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run starts from, the same on every rank."""

    settings: Settings
    schedule: Schedule
    task: Task
    data: TaskData


def gather_inputs(settings: Settings, corpus: Corpus | None = None) -> Inputs:
    """Reads and checks everything a run needs before it starts. If `corpus` is given, it is not read again.

    Raises:
        SettingsError, ScheduleError, PartitionError, DataError, DecoderError: in one or two lines.
    """
    schedule = schedule_of(settings)
    _check_ops(settings, schedule)
    _check_transport(settings, device_of(settings))
    _check_rule(settings, schedule, optimizer_class(settings))
    task = open_task(settings, schedule)
    check_ties(schedule, task.tied)
    check_precision(settings.precision, schedule)
    data = task.read(corpus)
    if settings.record is not None and data.documents is not None:
        recorded_batches(Path(settings.record), data.documents, range(settings.steps))
    return Inputs(settings, schedule, task, data)


def mesh_of(settings: Settings) -> DeviceMesh | None:
    """Ranks, replicas and shards, by name; None for one pipeline of whole layers. All processes must call it."""
    if settings.is_flat or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    sizes = settings.ranks, settings.dp, settings.tp
    return init_device_mesh(device_of(settings).type, sizes, mesh_dim_names=("pp", "dp", "tp"))


def _check_ops(settings: Settings, schedule: Schedule) -> None:
    """Raises SettingsError for ops that need a function of the user's, since no option can give one."""
    require_round_trips(schedule)
    if own := sorted({registered.kind for registered in schedule.graph.registered} - {REDUCE, *MOVES}):
        raise SettingsError(
            f"--schedule {settings.schedule} has ops of kind {own[0]}; penstock train does not know what they do: "
            f"train it from a script, with ps.Pipeline(..., ops={{{own[0]!r}: function}})"
        )


def _check_transport(settings: Settings, device: torch.device) -> None:
    """Raises SettingsError for a transport that the device cannot use."""
    if settings.transport == "nccl" and device.type != "cuda":
        raise SettingsError(
            f"--transport nccl sends from GPU to GPU, and stages lie on {device.type}; give --device cuda, or another"
            " transport"
        )


def _check_rule(settings: Settings, schedule: Schedule, build: Callable[..., torch.optim.Optimizer]) -> None:
    """Raises SettingsError if the rule by which ops read weights has no formula for the optimizer."""
    if schedule.updates is None:
        return
    rule = rule_of(schedule.updates.rule)
    try:
        rule.require(build([torch.nn.Parameter(torch.zeros(1))]))
    except RuntimeFailure as error:
        raise SettingsError(f"{schedule.name} with --optimizer {settings.optimizer}: {error}") from None


def optimizer_class(settings: Settings) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer by name, with its options. Raises SettingsError if it can't train with them."""
    is_muon = settings.optimizer.lower() == "muon"
    found = MuonAdamW if is_muon else getattr(torch.optim, settings.optimizer, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
        names = [name for name, value in vars(torch.optim).items() if isinstance(value, type)]
        hint = did_you_mean(settings.optimizer, names, "AdamW, muon and SGD are three it has")
        raise SettingsError(f"torch.optim has no optimizer {settings.optimizer!r}; {hint}")
    defaults = {"betas": (0.9, 0.95), "weight_decay": 0.1} if settings.optimizer == "AdamW" else {}
    options = {**defaults, **settings.optimizer_options}
    if "lr" in options:
        raise SettingsError("optimizer_options has lr, which has an option of its own; give --lr")
    build: Callable[..., torch.optim.Optimizer] = functools.partial(found, lr=settings.lr, **options)  # type: ignore[call-arg]
    if is_muon and (settings.tp > 1 or settings.sharding == "fsdp"):
        cut = f"--tp {settings.tp}" if settings.tp > 1 else "--sharding fsdp"
        raise SettingsError(
            f"--optimizer {settings.optimizer} makes the singular values of whole matrices even, and with {cut} "
            "processes hold parts of them; leave that out (--sharding zero1 deals out whole parameters), or give "
            "--optimizer AdamW"
        )
    if (settings.optimizer, settings.optimizer_options) != (Settings.optimizer, {}):  # a trial takes a second
        _try(build, settings)
    return build


def over_trained(build: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """The same optimizer over those parameters that are trained, such as the adapters on a frozen model."""

    def made(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = optimizer_of(build, [parameter for parameter in parameters if parameter.requires_grad])
        assert optimizer is not None
        return optimizer

    return made


def _try(build: Callable[..., torch.optim.Optimizer], settings: Settings) -> None:
    """Makes an optimizer over a weight and a bias and runs it once. Raises SettingsError if it fails."""
    parameters = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        build(parameters).step()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        options = f" with {json.dumps(settings.optimizer_options)}" if settings.optimizer_options else ""
        raise SettingsError(
            f"optimizer {settings.optimizer}{options} can't be used: {reason}; "
            "torch.optim documents the options, and AdamW and SGD work without any"
        ) from None


def build_pipeline(inputs: Inputs, adapt: AdaptOptions | None = None) -> Pipeline:
    """The pipeline of a run, over torch.distributed if that is set up."""
    settings, task = inputs.settings, inputs.task
    return Pipeline(
        task.stages(),
        inputs.schedule,
        loss_fn=loss_of(inputs),
        optimizer=over_trained(optimizer_class(settings)),
        mesh=mesh_of(settings),
        dispatch=settings.dispatch,
        seed=settings.seed,
        timeout=settings.timeout,
        adapt=adapt,
        precision=PrecisionOptions(
            autocast=None if settings.precision == "float32" else getattr(torch, settings.precision),
            scaler=torch.amp.GradScaler(device_of(settings).type) if settings.precision == "float16" else None,
            clip_norm=settings.clip_norm(inputs.schedule),
        ),
        parallel=ParallelOptions(
            device=device_of(settings),
            tied=task.tied,
            parallelize=parallelize,
            sharding=settings.sharding,
            batches="replica" if inputs.data.is_dealt else "whole",
        ),
        transport=settings.transport_options(settings.link_conditions()),
    )


def loss_of(inputs: Inputs) -> Callable[..., torch.Tensor]:
    """The loss of a pass. If several passes fill a window, it is the pass's part of the window's loss."""
    num_passes = inputs.settings.passes.passes_a_window
    loss = inputs.task.loss
    return loss if num_passes == 1 else SharedLoss(loss, num_passes)


class SharedLoss:
    """A loss divided by the number of passes that fill a window: `loss / passes`. It is weighed as the loss is."""

    def __init__(self, loss: Callable[..., torch.Tensor], passes: int) -> None:
        self._loss, self._passes = loss, passes
        self.adds_up, self.by_microbatch = adds_up(loss), getattr(loss, "by_microbatch", False)
        if weights_of([], loss) is not None:
            self.weight = lambda targets: (weights_of([targets], loss) or sizes_of([targets]))[0]

    def __call__(self, output: Any, targets: Any) -> torch.Tensor:
        return self._loss(output, targets) / self._passes


def device_of(settings: Settings) -> torch.device:
    """The device on which stages run. Raises SettingsError if there is no such device."""
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingsError("device 'cuda' was asked for and torch finds no GPU; use --device cpu")
    return torch.device("cuda", torch.cuda.current_device())
