"""What torch must not be set to around a call of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure


class _Probe(torch.autograd.Function):
    """Torch refuses such a function under each transform of `torch.func`: it has no `setup_context`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()


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
    try:
        probe = _Probe.apply(torch.empty(0, device="cpu"))
    except RuntimeError as error:
        raise RuntimeFailure(
            f"{call}() was called within a transform of torch.func (grad, vmap, jvp), and runs backwards of its own "
            "and sends messages, which torch can't transform; call it outside, or transform what a stage computes"
        ) from error
    if type(probe) is not Tensor:
        raise RuntimeFailure(
            f"{call}() was called in a mode of torch in which tensors are made as {type(probe).__name__} and have no "
            "numbers; leave it first"
        )
