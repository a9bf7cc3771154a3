"""A loss that counts for a part of its window: what several passes gather adds up to the mean over the window."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeighedLoss(Protocol):
    """A mean loss that says over how much it is one."""

    def __call__(self, output: Tensor, targets: Tensor, /) -> Tensor: ...

    def weight(self, targets: Tensor) -> int: ...


class SharedLoss:
    """`loss / passes`, and weighed the same."""

    def __init__(self, loss: WeighedLoss, passes: int) -> None:
        self._loss, self._passes = loss, passes

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return self._loss(output, targets) / self._passes

    def weight(self, targets: Tensor) -> int:
        return self._loss.weight(targets)
