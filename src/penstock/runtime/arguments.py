"""The arguments of `ps.Pipeline`, checked before anything is built: a wrong one is a clear error."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.errors import RuntimeFailure, is_number, require_value
from penstock.runtime.parameters.optimizer import GivenOptimizer
from penstock.runtime.parameters.shared import Parallelize
from penstock.runtime.stage.batch_rules import BatchRules
from penstock.runtime.stage.loss import module_of
from penstock.runtime.stage.registered_ops import OpFunction
from penstock.runtime.stage.stage import StageSource
from penstock.runtime.transport.choose import TransportOptions
from penstock.schedule import Schedule
from penstock.schedule.short_repr import short_repr
from penstock.schedule.weight_versions import SHARDINGS
from penstock.unknown_names import refuse_unknown

BATCHES = ("whole", "replica")


@refuse_unknown(RuntimeFailure)
@dataclass(frozen=True)
class PrecisionOptions:
    """The number type that ops compute in, loss scaling, and gradient clipping.

    Attributes:
        autocast: a type, such as torch.bfloat16, for `torch.autocast` around forwards and the loss. None: no
            autocast. With torch.float16 the smallest gradients become 0 unless a `scaler` is given.
        scaler: a `torch.amp.GradScaler`. Losses are multiplied by its scale, and an update divides gradients by it.
            If a gradient is not finite in one process, all processes leave the update out: `num_updates` stays, and
            `StepResult.grad_norm` is None. Then the scale changes as the scaler's options say; checkpoints have it.
            Until the update, `.grad` is multiplied by the scale. None, or one with `enabled=False`: no scaling.
        clip_norm: the largest norm that the whole model's gradient may have at an update. If updates are ops of the
            schedule, it limits the gradient of each stage separately. None: no clipping.
        skip_not_finite: True leaves an update out if a gradient is not finite in some process, as a scaler does. All
            processes leave it out: weights and `num_updates` stay, and `StepResult.skipped` is True.

    Raises:
        RuntimeFailure: `autocast` is no type of floating-point numbers, or a norm below 0.

    Examples:
        >>> import penstock as ps, torch
        >>> options = ps.PrecisionOptions(autocast=torch.bfloat16, clip_norm=1.0)
        >>> options.autocast
        torch.bfloat16
    """

    autocast: torch.dtype | None = None
    clip_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    skip_not_finite: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        fits = self.autocast is None or (isinstance(self.autocast, torch.dtype) and self.autocast.is_floating_point)
        require_value(fits, "autocast", self.autocast, "a type like torch.bfloat16")
        if self.clip_norm is not None:
            require_norm(self.clip_norm, "clip_norm")

    @property
    def enabled_scaler(self) -> torch.amp.GradScaler | None:
        """The scaler, if it is to scale anything."""
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None


@refuse_unknown(RuntimeFailure)
@dataclass(frozen=True)
class ParallelOptions:
    """How a model is cut into stages, where they run, and what is sharded.

    Attributes:
        sharding: what the copies and replicas of a stage keep only in part. "none": nothing; each keeps and updates
            all of it. "copies": if a stage has copies in several pipelines, only one has the optimizer's state and
            sends the others its parameters (ZeRO over pipelines). "zero1": as "copies", and the replicas of a mesh
            shard the optimizer's state. "fsdp": as "zero1", and replicas shard parameters and gradients too, and
            gather them while a step runs.
        parallelize: a function `(stage, device mesh)` that turns a whole stage into this process's shard, if the mesh
            has tp or ranks share a stage. For the models of this package: `penstock.models.parallelize`.
        device: where stages run. None: where the model's parameters are.
        costs: cost of each layer of a module, in the order of the calls, for cutting it into stages. None: the
            number of its parameters.
        tied: for stages that functions build: groups of parameter names that stand for one parameter.
        batches: "whole": every process gives the whole batch of all replicas. "replica": each replica gives its own
            part, and processes with neither the first stage nor the last may give None.

    Raises:
        RuntimeFailure: an unknown sharding or `batches`, or `tied` names that are in no group.

    Examples:
        >>> import penstock as ps
        >>> ps.ParallelOptions(sharding="zero1").sharding
        'zero1'

    References:
        AMDP, section 3.4: optimizer state over several pipelines.
    """

    sharding: str = "copies"
    parallelize: Parallelize | None = None
    device: torch.device | str | None = None
    costs: Sequence[float] | None = None
    tied: Sequence[Sequence[str]] = ()
    batches: str = "whole"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        require_value(self.sharding in SHARDINGS, "sharding", self.sharding, f"one of {', '.join(SHARDINGS)}")
        require_value(self.batches in BATCHES, "batches", self.batches, f"one of {', '.join(BATCHES)}")
        fits = not isinstance(self.tied, str) and not any(isinstance(group, str) for group in self.tied)
        wanted = 'groups of names of parameters that are one: [("0.weight", "3.weight")]'
        require_value(fits, "tied", self.tied, wanted)

    @property
    def one_copy_steps(self) -> bool:
        """Whether only one copy of a stage has the optimizer's state, if several pipelines have copies of it."""
        return self.sharding != "none"


@dataclass(frozen=True, eq=False)
class PipelineArguments:
    """All arguments of a pipeline except its mesh and its dispatch.

    Raises:
        RuntimeFailure: one of another type, or one that does not fit the others.
    """

    model: nn.Module | Sequence[StageSource]
    schedule: Schedule
    loss_fn: Callable[..., Tensor] | None
    optimizer: GivenOptimizer
    ops: Mapping[str, OpFunction]
    seed: int
    timeout: float
    precision: PrecisionOptions
    parallel: ParallelOptions
    transport: TransportOptions
    adapt: AdaptOptions | None
    batch: BatchRules | None

    def __post_init__(self) -> None:
        loss_fn, optimizer = self.loss_fn, self.optimizer
        wanted = "a schedule: ps.build(name, num_ranks=..., num_microbatches=...), or ps.parse(text)"
        require_value(isinstance(self.schedule, Schedule), "schedule", self.schedule, wanted)
        fits = isinstance(self.model, nn.Module | Sequence)
        require_value(fits, "model", self.model, "an instance of a module, or a list of stages")
        wanted = (
            "a function (output, targets) -> loss; have a stage with a loss of its own return it beside its output, "
            "and add the losses up in one function"
        )
        require_value(loss_fn is None or callable(loss_fn), "loss_fn", loss_fn, wanted)
        if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
            raise RuntimeFailure(f"loss_fn is the class {loss_fn.__name__}; give an instance: {loss_fn.__name__}()")
        sources: Sequence[Any] = [self.model] if isinstance(self.model, nn.Module) else self.model
        if optimizer is not None and all(isinstance(source, nn.Module) for source in sources):
            known = {id(p) for source in sources for p in source.parameters()}
            groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else ()
            updated = [(f"of shape {tuple(p.shape)}", p) for group in groups for p in group["params"]]
            instead = "make it of the modules that ps.Pipeline is given, or give a function that makes one"
            _require_known(f"the optimizer ({type(optimizer).__name__})", updated, known, "the model", instead)
            self.require_loss_within(known, "the model")
        fits = is_number(self.timeout) and 0 < self.timeout < math.inf
        require_value(fits, "timeout", self.timeout, "seconds, above 0")

    def require_loss_within(self, known: Collection[int], where: str) -> None:
        """Raises RuntimeFailure if the loss trains parameters whose ids are not known. Without an optimizer, those
        that no stage has are the user's to update.

        Args:
            where: the owner of those that are known, in words.
        """
        loss, has_optimizer = module_of(self.loss_fn), self.optimizer is not None
        sources: Sequence[Any] = [self.model] if isinstance(self.model, nn.Module) else self.model
        of_model = {id(p) for source in sources if isinstance(source, nn.Module) for p in source.parameters()}
        named = () if loss is None else loss.named_parameters()
        trained = [(name, p) for name, p in named if p.requires_grad and (has_optimizer or id(p) in of_model)]
        instead = "put them into the last stage, which can return what the loss needs of them, or freeze them"
        _require_known(f"loss_fn ({type(loss).__name__})", trained, known, where, instead)


def require_norm(norm: Any, what: str) -> None:
    """Raises RuntimeFailure for what gradients can't be clipped to: a negative one would turn them round."""
    require_value(is_number(norm) and norm >= 0, what, norm, "a number, at least 0")


def _require_known(
    owner: str, parameters: Sequence[tuple[str, Parameter]], known: Collection[int], where: str, instead: str
) -> None:
    """Raises RuntimeFailure if an owner has parameters that are not known; they would not be updated.

    Args:
        known: ids of parameters. where: the owner of these. instead: what to do.
    """
    others = [name for name, p in parameters if id(p) not in known]
    if others:
        raise RuntimeFailure(
            f"{owner} has {len(others)} parameters that are not in {where}, the first is {others[0]}, and nothing "
            f"would update them; {instead}"
        )


def require_plain_modes(device: torch.device, call: str, trains: bool = False) -> None:
    """Raises RuntimeFailure where torch computes something else than a plain call would.

    Args:
        device: on which the stages lie.
        call: the method of `Pipeline` that is called. trains: whether it needs gradients.
    """
    if trains and torch.is_inference_mode_enabled():
        raise RuntimeFailure(
            f"{call}() was called under torch.inference_mode(), where nothing trains; leave it first"
        )
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        raise RuntimeFailure(
            f"{call}() was called under torch.autocast, which would go on computing with the casts that it made "
            f"before an update; leave it, and give ps.Pipeline(precision=ps.PrecisionOptions(autocast={dtype}))"
        )
