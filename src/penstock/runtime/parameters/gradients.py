"""Gradients of parameters, as lists: how they are added, and how several sums of them take turns in `.grad`.

    sum 0 in .grad, sum 1 aside --select(1)--> sum 1 in .grad, sum 0 aside

If copies of a stage are one module, each has a sum of its own (`pipeline_copies.py`). If updates are ops, so has each
window of microbatches: an input half (I) of the next window may run before a weight half (W) of this one. Autograd
and the split backward add to whatever is in `.grad`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.tensors.dtensor import local

Gradients = list[Tensor | None]
"""One for each parameter, in their order; None where there is none."""


class Accumulators:
    """Sums of the gradients of some parameters, by number; one of them lies in `.grad`.

    Args:
        selected: the number of the first that does.
    """

    def __init__(self, parameters: Sequence[Parameter], selected: int = 0) -> None:
        self._parameters = parameters
        self._selected = selected
        self._aside: dict[int, Gradients] = {}

    def select(self, number: int) -> None:
        """Makes `.grad` that of a sum; of one that is not there yet, nothing."""
        if number == self._selected:
            return
        before = self._exchange(self._aside.pop(number, None))
        if any(gradient is not None for gradient in before):  # of a sum that was taken nothing is left
            self._aside[self._selected] = before
        self._selected = number

    def take(self, number: int) -> Gradients:
        """A sum, of which nothing is left then."""
        if number == self._selected:
            return self._exchange(None)
        return self._aside.pop(number, None) or [None] * len(self._parameters)

    def drop_others(self) -> None:
        """Leaves the sum in `.grad` alone."""
        self._aside.clear()

    def now(self) -> Gradients:
        """The sum in `.grad`."""
        return [p.grad for p in self._parameters]

    def _exchange(self, gradients: Gradients | None) -> Gradients:
        before = self.now()
        for place, parameter in enumerate(self._parameters):
            parameter.grad = None if gradients is None else gradients[place]
        return before


class WindowGradients(Accumulators):
    """Those of the windows of one pass. Between passes `.grad` is that of a window left open, or None."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__(parameters)
        self.peak_bytes = 0

    def begin(self) -> None:
        """A pass begins; its first window adds to what is there."""
        self.peak_bytes = self._selected = 0
        self._aside.clear()

    def select(self, number: int) -> None:
        if number != self._selected:
            self._measure()
            super().select(number)

    def take(self, number: int) -> Gradients:
        self._measure()
        return super().take(number)

    def end(self, still_open: int | None) -> None:
        """A pass ended: only the gradients of a window still open stay."""
        self._measure()
        if still_open is None:
            self._exchange(None)
        else:
            self.select(still_open)
        self._aside.clear()
        self._selected = 0

    def _measure(self) -> None:
        """Sums only grow until they are taken, so this is called where they are, and where windows change."""
        held = [*self.now(), *(g for gradients in self._aside.values() for g in gradients)]
        self.peak_bytes = max(self.peak_bytes, num_bytes(g for g in held if g is not None))


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements that lie in this process, a tensor that is there twice counted once."""
    return sum(local(t).numel() * t.element_size() for t in {id(t): t for t in tensors}.values())
