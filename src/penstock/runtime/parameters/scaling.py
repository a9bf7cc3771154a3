"""Loss scaling: gradients too small for float16 are computed of a larger loss, and divided again before the update.

    loss * scale -> backward -> gradients * scale -> are all finite, in every process?
                                                     yes: divide by the scale, clip, update; grow now and then
                                                     no:  leave the update out, in every process; the scale shrinks

The numbers are those of a `torch.amp.GradScaler`: its scale, its factors, and how many updates in a row had no
overflow. It does not scale or step anything itself, because of several processes only one may find an overflow.

Without a scaler (`PrecisionOptions(skip_not_finite=True)`) nothing is scaled. The question is the same, and so are
the updates that are left out.

References:
    Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.tensors.dtensor import local

_IN_A_ROW = "_growth_tracker"
"""What a scaler's state calls the number of updates without an overflow since the scale last changed."""


class LossScaling:
    """What losses are multiplied by, and whether gradients are divided by it yet.

    Args:
        scaler: whose numbers count, and are kept up to date. None: nothing is scaled.
        everyone: all processes of the run, which leave out the same updates.

    Attributes:
        has_divided: whether the gradients that are there were divided by the scale.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, everyone: Peers) -> None:
        self._scaler, self._everyone = scaler, everyone
        self.has_divided = False
        self._are_finite = True

    @property
    def scale(self) -> float | None:
        """What the loss is multiplied by in the next step; a number of float32. None: it stays as it is."""
        return None if self._scaler is None else float(_float32(self._scaler.get_scale()))

    def begin(self) -> None:
        """A step begins. Raises RuntimeFailure where its gradients can't be added to those that are there."""
        if self.has_divided:
            raise RuntimeFailure(
                "gradients were clipped, and so divided by the loss scale, and those of another step would be added "
                "to them; call update() or zero_grad() after clip()"
            )

    def divide(self, parameters: Iterable[Parameter]) -> bool:
        """Divides gradients by the scale, once. Returns whether they are finite in every process, which must all call
        it; if not, no update may follow.
        """
        if self.has_divided:
            return self._are_finite
        gradients = [local(g) for g in {id(p.grad): p.grad for p in parameters}.values() if g is not None]
        values = (gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients)
        overflows = sum(not torch.isfinite(each).all() for each in values)
        if (scale := self.scale) is not None:
            factor = _float32(1.0 / scale)
            for gradient in gradients:
                gradient.mul_(factor)
        counted = self._everyone.sum(torch.tensor([float(overflows)], dtype=torch.float64))
        self.has_divided, self._are_finite = scale is not None, not counted.item()
        return self._are_finite

    def updated(self) -> None:
        """The update was made, or left out: sets the scale of the next step."""
        if self._scaler is None:
            return
        state = self.state()
        scale, in_a_row = state["scale"], 0
        if not self._are_finite:
            scale = float(_float32(scale * state["backoff_factor"]))
        elif state[_IN_A_ROW] + 1 < state["growth_interval"]:
            in_a_row = state[_IN_A_ROW] + 1
        elif math.isfinite(grown := float(_float32(scale * state["growth_factor"]))):
            scale = grown
        self.begin_again({**state, "scale": scale, _IN_A_ROW: in_a_row})

    def begin_again(self, state: Mapping[str, Any] | None = None) -> None:
        """What gradients there are, if any, are multiplied by the scale.

        Args:
            state: the numbers to go on with; those at hand where not given.
        """
        if state is not None and self._scaler is not None:
            self._scaler.load_state_dict(dict(state))
        self.has_divided, self._are_finite = False, True

    def state(self) -> dict[str, Any]:
        """The scaler's numbers; none without a scaler."""
        return {} if self._scaler is None else self._scaler.state_dict()


def _float32(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32)


def require_scalable(scaler: torch.amp.GradScaler, dtypes: Mapping[str, torch.dtype]) -> None:
    """Raises RuntimeFailure where gradients are float16 themselves: divided by the scale, they would be 0 again.

    Args:
        dtypes: of every parameter of the model, by name.
    """
    for name, dtype in dtypes.items():
        if dtype is torch.float16:
            raise RuntimeFailure(
                f"parameter {name} is torch.float16, and so is its gradient, which is too small for that once it is "
                f"divided by the loss scale ({scaler.get_scale():g}); keep parameters in float32 and give "
                "PrecisionOptions(autocast=torch.float16, scaler=...)"
            )
