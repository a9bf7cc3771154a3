"""The gradients of one copy, added up window by window.

An input half (I) of the next window may run before a weight half (W) of this one. So each window has accumulators of
its own; `.grad` of the parameters is that of the window selected, to which autograd and the split backward add.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.tensors.dtensor import local

Gradients = list[Tensor | None]
"""One a parameter, in their order; None where a window gave none."""


class WindowGradients:
    """Accumulators of the windows of one pass. Between passes `.grad` is that of a window left open, or None."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.peak_bytes = 0
        self._parameters = parameters
        self._selected = 0
        self._aside: dict[int, Gradients] = {}

    def begin(self) -> None:
        """A pass begins; its first window adds to what is there."""
        self.peak_bytes = self._selected = 0
        self._aside.clear()

    def select(self, window: int) -> None:
        """Makes `.grad` that of a window of the pass."""
        if window == self._selected:
            return
        self._measure()
        self._aside[self._selected] = self._exchange(self._aside.pop(window, None))
        self._selected = window

    def take(self, window: int) -> Gradients:
        """The sum over a window, whose accumulators are empty then."""
        self._measure()
        if window == self._selected:
            return self._exchange(None)
        return self._aside.pop(window, None) or [None] * len(self._parameters)

    def end(self, still_open: int | None) -> None:
        """A pass ended: only the gradients of a window still open stay."""
        self._measure()
        if still_open is None:
            self._exchange(None)
        else:
            self.select(still_open)
        self._aside.clear()
        self._selected = 0

    def now(self) -> Gradients:
        """Those of the window selected."""
        return [p.grad for p in self._parameters]

    def _exchange(self, gradients: Gradients | None) -> Gradients:
        before = self.now()
        for place, parameter in enumerate(self._parameters):
            parameter.grad = None if gradients is None else gradients[place]
        return before

    def _measure(self) -> None:
        """Sums only grow until they are taken, so this is called where they are, and where windows change."""
        held = [*self.now(), *(g for gradients in self._aside.values() for g in gradients)]
        self.peak_bytes = max(self.peak_bytes, num_bytes(g for g in held if g is not None))


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements of tensors that lie in this process."""
    return sum(local(t).numel() * t.element_size() for t in tensors)
