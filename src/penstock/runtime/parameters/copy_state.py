"""What the copies of a stage have each for themselves, where one module of this process stands for several of them.

    pipeline 0   F0 B0 ..       B2       gradients 0, buffers 0     the module's own between steps
    pipeline 1         F1 B1 ..    B3    gradients 1, buffers 1     laid in their place for an op, and aside again

The modules and parameters are the user's own, so what is done to them between steps (loading values, freezing, hooks,
`eval()`) reaches every pipeline. Where updates are ops, copies have weights of their own as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.runtime.stage.recompute import Place, copy_of
from penstock.runtime.tensors.dtensor import is_sharded, local, memory


@dataclass
class _Aside:
    """What a copy has while another one's turn it is."""

    gradients: list[Tensor | None]
    weights: list[Tensor] = field(default_factory=list)
    buffers: dict[Place, Tensor | None] = field(default_factory=dict)


class CopyStates:
    """The copies of one stage in this process.

    Args:
        pipelines: that have one; the first is the owner.
        parameters: whose gradients they sum.
        kept: modules, by id, that other stages hold too; no copy has buffers of its own there.
    """

    def __init__(
        self, stage: nn.Module, pipelines: Sequence[int], parameters: Sequence[Parameter], kept: Collection[int]
    ) -> None:
        self._stage, self._kept = stage, kept
        self._parameters = list(parameters)
        self._owner, *self._others = pipelines
        self._selected = self._owner
        self._separate: list[Parameter] = []
        self._aside = {k: _Aside([None] * len(self._parameters)) for k in self._others}

    def separate_weights(self) -> None:
        """From now on every copy has weights of its own, of those parameters that are trained."""
        self._separate = [p for p in self._parameters if p.requires_grad]
        for aside in self._aside.values():
            aside.weights = [p.detach().clone() for p in self._separate]

    def share_weights(self) -> None:
        """Gives every copy the owner's weights."""
        self.select(self._owner)
        with torch.no_grad():
            for aside in self._aside.values():
                for weight, parameter in zip(aside.weights, self._separate, strict=True):
                    weight.copy_(parameter.data)

    def begin(self) -> None:
        """A training step begins: every copy starts from the owner's buffers."""
        found = {
            (module, name): buffer
            for module in self._stage.modules()
            if id(module) not in self._kept
            for name, buffer in module._buffers.items()
        }
        for aside in self._aside.values():
            copies = {id(b): None if b is None else copy_of(b) for b in found.values()}
            aside.buffers = {place: copies[id(buffer)] for place, buffer in found.items()}

    def end(self) -> None:
        """It is over, however it went: the module has what is the owner's."""
        self.select(self._owner)
        for aside in self._aside.values():
            aside.buffers = {}

    def select(self, pipeline: int) -> None:
        """Has the module hold what a copy has."""
        if pipeline == self._selected:
            return
        then = self._aside.pop(pipeline)
        buffers = {place: place[0]._buffers.get(place[1]) for place in then.buffers}
        weights = [p.data.clone() if is_sharded(p) else p.data for p in self._separate]
        before = _Aside([p.grad for p in self._parameters], weights, buffers)
        for parameter, weight in zip(self._separate, then.weights, strict=True):
            if is_sharded(parameter):  # cannot be pointed elsewhere
                memory(parameter).copy_(local(weight))
            else:
                parameter.data = weight
        for parameter, gradient in zip(self._parameters, then.gradients, strict=True):
            parameter.grad = gradient
        for (module, name), buffer in then.buffers.items():
            module._buffers[name] = buffer
        self._aside[self._selected] = before
        self._selected = pipeline

    def take_gradients(self) -> dict[int, list[Tensor | None]]:
        """By pipeline the copies' gradients; the owner's stay where they are."""
        self.select(self._owner)
        found = {self._owner: [p.grad for p in self._parameters]}
        found |= {k: aside.gradients for k, aside in self._aside.items()}
        self.drop_gradients()
        return found

    def drop_gradients(self) -> None:
        """Leaves none but the owner's."""
        self.select(self._owner)
        for aside in self._aside.values():
            aside.gradients = [None] * len(self._parameters)
