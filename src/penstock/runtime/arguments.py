"""What `ps.Pipeline` was given, looked at before anything is made of it: one clear error for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.given_optimizer import require_steps_alone
from penstock.schedule import Schedule


def require_arguments(
    model: Any,
    schedule: Any,
    loss_fn: Any,
    optimizer: Any,
    device: Any,
    autocast: Any,
    clip_norm: Any,
    costs: Any,
    tied: Any,
    seed: Any,
    timeout: Any,
    ops: Any,
) -> None:
    """Raises RuntimeFailure for an argument of another type, or a number, that makes no sense."""
    if isinstance(schedule, str):
        raise RuntimeFailure(
            f"the schedule is the text {schedule!r}; build it first: "
            f'ps.build("{schedule}", num_ranks=..., num_microbatches=...), or ps.parse(text)'
        )
    _require(isinstance(schedule, Schedule), "schedule", schedule, "a ps.Schedule, which ps.build(...) makes")
    _require_model(model)
    _require(loss_fn is None or callable(loss_fn), "loss_fn", loss_fn, "a function (output, targets) -> loss")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        _require(callable(optimizer), "optimizer", optimizer, "an optimizer, or a function from parameters to one")
    require_steps_alone(optimizer)
    _require_its_parameters(optimizer, [model] if isinstance(model, nn.Module) else model)
    if clip_norm is not None:
        fits = _is_number(clip_norm) and clip_norm >= 0
        _require(fits, "clip_norm", clip_norm, "a number, at least 0, or None")
    _require(_is_number(timeout) and 0 < timeout < math.inf, "timeout", timeout, "seconds, above 0")
    _require(isinstance(seed, Integral) and not isinstance(seed, bool), "seed", seed, "an integer")
    _require(
        autocast is None or isinstance(autocast, torch.dtype), "autocast", autocast, "a type like torch.bfloat16"
    )
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, TypeError) as error:
            first = str(error).splitlines()[0]
            raise RuntimeFailure(f'device is {device!r}: {first}; give one like "cpu" or "cuda:0"') from None
    if costs is not None:
        fits = hasattr(costs, "__len__") and hasattr(costs, "__iter__") and all(map(_is_number, costs))
        _require(fits, "costs", costs, "a number for each layer")
    groups = isinstance(tied, Sequence) and not isinstance(tied, str)
    fits = groups and all(
        isinstance(group, Sequence) and not isinstance(group, str) and all(isinstance(name, str) for name in group)
        for group in tied
    )
    _require(fits, "tied", tied, 'groups of names of parameters that are one: [("0.weight", "3.weight")]')
    fits = ops is None or isinstance(ops, Mapping)
    _require(fits, "ops", ops, "a function for each registered kind of op, by its name")


def _require_model(model: Any) -> None:
    if isinstance(model, nn.Module):
        return
    wanted = "a module, or a list with one module, or function that makes one, for each stage"
    _require(isinstance(model, Sequence) and not isinstance(model, str), "model", model, wanted)
    for stage, source in enumerate(model):
        fits = isinstance(source, nn.Module) or callable(source)
        _require(fits, f"stage {stage} of the model", source, "a module, or a function that makes one")


def _require_its_parameters(optimizer: Any, sources: Sequence[Any]) -> None:
    """Raises RuntimeFailure where an optimizer has parameters that no stage has, and that would not be stepped."""
    if not isinstance(optimizer, Optimizer) or not all(isinstance(source, nn.Module) for source in sources):
        return
    known = {id(p) for source in sources for p in source.parameters()}
    strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strange:
        raise RuntimeFailure(
            f"the optimizer ({type(optimizer).__name__}) has {len(strange)} parameters that are not in the model, "
            f"the first of shape {tuple(strange[0].shape)}; make it of the modules that ps.Pipeline is given, or "
            "give a function that makes one"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def _require(fits: bool, what: str, given: Any, wanted: str) -> None:
    if not fits:
        text = repr(given)
        shown = text if len(text) <= 60 else f"a {type(given).__name__}"
        raise RuntimeFailure(f"{what} is {shown}; give {wanted}")
