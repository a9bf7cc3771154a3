"""Forwards that run a second time before their backward, and the state that the second run must find unchanged.

The first run gives the outputs and keeps only its input. The second run (op R) builds the graph that the backward
needs. Both must compute the same, to the bit:

- inputs: the first run works on copies, because the stage may change them in place;
- random draws: each layer draws from the seed of this step, microbatch and layer, both times;
- buffers (BatchNorm's statistics, and those of a loss that is a module): the second run finds them as the first run
  did. Its changes to them are thrown away, so they are updated once;
- gradients are switched on in the first run, so that no layer takes another path. What it would keep is dropped. A
  stage whose forward asks for gradients of its own keeps all from then on, and its forwards run once.

State that a forward changes otherwise is not kept: parameters, a random generator or a number of the module's own. A
model that changes such state breaks the contract (docs/contract.md), and `Pipeline.verify` finds that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.storage import copy_of


class GradientAskedFor(RuntimeFailure):
    """A forward asked for a gradient of what it computed, and nothing was kept for that."""


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Forwards in here have gradients switched on, yet hold no activation for a backward.

    A forward that asks for gradients of its own fails with GradientAskedFor.
    """
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _asked_for):
        yield


def _asked_for(nothing: Any) -> Tensor:
    raise GradientAskedFor(
        "a gradient was asked for through a forward that is to be recomputed, and nothing is kept for that; use a "
        "schedule without R for this model"
    )


Place = tuple[nn.Module, str]
"""A buffer: its module, its name there."""
Buffers = dict[Place, Tensor | None]


class BufferHistory:
    """The buffers of some modules as each forward to be recomputed found them.

    Most buffers never change (masks, tables), and those need no copy. The first such forward of a step copies
    all and sees which it changes; the others copy these, and those that any step before has seen changing: a largest
    value, say, changes in some forwards alone.
    """

    def __init__(self, *roots: nn.Module | None) -> None:
        self._roots = [root for root in roots if root is not None]
        self._known: set[Place] = set()
        self._changing: set[Place] | None = None

    def begin(self) -> None:
        """Starts a step."""
        self._changing = None

    @contextmanager
    def noted(self) -> Iterator[Buffers]:
        """Around the first run of a forward. Gives the buffers that it found, which are complete once it has run.

        If the run fails with GradientAskedFor, buffers are as they were.
        """
        found: Buffers = {}
        before = {
            (module, name): (buffer, None if buffer is None else buffer._version)
            for root in self._roots
            for module in root.modules()
            for name, buffer in module._buffers.items()
        }
        copies = {
            place: None if buffer is None else copy_of(buffer)
            for place, (buffer, _) in before.items()
            if self._changing is None or place in self._changing
        }
        try:
            yield found
        except GradientAskedFor:
            for (module, name), copied in copies.items():
                module._buffers[name] = buffer = before[module, name][0]
                if buffer is not None and copied is not None:
                    buffer.data.copy_(copied)
            raise
        if self._changing is None:
            self._known |= {place for place, copied in copies.items() if _changed(place, before[place], copied)}
            self._changing = self._known & copies.keys()
        for place, (buffer, version) in before.items():
            if place in self._changing:
                found[place] = copies[place]
            elif place[0]._buffers.get(place[1]) is not buffer:
                found[place] = buffer
            elif buffer is not None and buffer._version != version:
                raise RuntimeFailure(
                    f"buffer {place[1]!r} of {type(place[0]).__name__} changed in a forward and in none before, so "
                    "this forward cannot be run again as it was; use a schedule without R, or leave out --recompute"
                )

    @contextmanager
    def as_found(self, found: Buffers) -> Iterator[None]:
        """Around another run of a forward: buffers are as the first run found them, then as they are now."""
        now = {(module, name): module._buffers.get(name) for module, name in found}
        try:
            for (module, name), buffer in found.items():
                module._buffers[name] = None if buffer is None else copy_of(buffer)
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer


def _changed(place: Place, before: tuple[Tensor | None, int | None], copied: Tensor | None) -> bool:
    """Whether a buffer is another tensor now, or holds other values (some kernels change it unnoticed)."""
    module, name = place
    now, (buffer, version) = module._buffers.get(name), before
    if now is None or buffer is None or copied is None:
        return now is not buffer
    return now is not buffer or now._version != version or not torch.equal(now, copied)
