"""A loss that counts for a part of its window: what several passes gather adds up to the mean over the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class SharedLoss:
    """`loss / passes`, and weighed the same."""

    def __init__(self, loss: Callable[..., Tensor], passes: int) -> None:
        self._loss, self._passes = loss, passes
        if hasattr(loss, "weight"):
            self.weight = loss.weight

    def __call__(self, output: Any, targets: Any) -> Tensor:
        return self._loss(output, targets) / self._passes
