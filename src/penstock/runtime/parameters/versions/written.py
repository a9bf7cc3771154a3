"""One memory for a copy's weights, into which is written what ops read: for rules whose backward may read other
values than its forward.

Autograd saves some parameters themselves and views on the memory of others. The memory never changes, so both show a
backward what was written last. It is written through `.data`, and the optimizer steps a master, another parameter on
the same memory or on its own: neither counts as a change in place of what a forward has saved, though it is one, and
the rule wants it so. Copies that autocast made in a forward stay in its graph: their backward reads those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.parameters.versions.rule import Read
from penstock.runtime.tensors.dtensor import is_sharded, local, memory

Predict = Callable[[Tensor, Parameter, int], None]
"""Writes into a tensor where a master will be after so many more updates."""


class WrittenVersion:
    """The newest version of one copy, and what its parameters hold.

    Args:
        parameters: the module's, those with gradients.
        masters: what the optimizer steps, in the same order; none on a copy without its state.
        predict: where ops read predictions, what makes them; masters then have memory of their own, shards from the
            start.
    """

    def __init__(
        self, parameters: Sequence[Parameter], masters: Sequence[Parameter], predict: Predict | None = None
    ) -> None:
        self.newest = 0
        self._parameters = parameters
        self._masters = masters
        self._predict = predict
        self._holds = Read(0)
        if predict is not None:
            for master in masters:
                if not is_sharded(master):
                    master.data = master.data.clone()

    @property
    def oldest(self) -> int:
        return self.newest

    @property
    def most(self) -> int:
        """Sets of weights held at most."""
        return 1 + self.num_beside

    @property
    def num_beside(self) -> int:
        return 0 if self._predict is None else 1

    def begin(self) -> None:
        """A pass begins: what the parameters hold by now is the newest version."""
        self.bind(Read(self.newest))
        for parameter, master in zip(self._parameters, self._masters, strict=False):
            if self._predict is not None:
                memory(master).copy_(memory(parameter))
            elif not is_sharded(parameter):  # a shard's memory never moves
                master.data = parameter.data
        self._holds = Read(self.newest)

    def bind(self, read: Read) -> None:
        """Writes what an op reads, unless it is there."""
        if self._predict is None or read == self._holds:
            return
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if read.steps:
                    self._predict(memory(parameter), master, read.steps)
                else:
                    memory(parameter).copy_(memory(master))
        self._holds = read

    def hold(self, read: Read) -> None:
        """Nothing is held for a microbatch."""

    def release(self, read: Read, oldest: int) -> None:
        """Nothing was held."""

    def advance(self, oldest: int, values: Sequence[Tensor] | None = None) -> None:
        """The next version: `values`, or what the optimizer makes of the newest one."""
        self.newest += 1
        if values is not None:
            for parameter, value in zip(self._parameters, values, strict=True):
                memory(parameter).copy_(local(value))

    def newest_values(self) -> list[Tensor]:
        return [memory(each) for each in (self._masters or self._parameters)]

    def end(self, oldest: int) -> None:
        """A pass ended: the parameters hold the newest version."""
        self.bind(Read(self.newest))

    def fill(self, values: Sequence[Tensor], oldest: int) -> None:
        """Between passes, even after one that broke off: the newest version has these values."""
        for each in (self._parameters, self._masters):
            for parameter, value in zip(each, values, strict=False):
                memory(parameter).copy_(local(value))
        self._holds = Read(self.newest)

    def older(self) -> list[Tensor] | None:
        return None

    def set_older(self, values: Sequence[Tensor] | None) -> None:
        """There is none."""

    def renumber(self, newest: int) -> None:
        """Between passes: counts on from `newest` updates."""
        self.newest, self._holds = newest, Read(newest)
