"""Forwards that run a second time before their backward, and the state that the second run must find unchanged.

The first run gives the outputs and keeps only its input. The second run (op R) builds the graph that the backward
needs. Both must compute the same, to the bit:

- inputs: the first run works on copies, because the stage may change them in place;
- random draws: each layer draws from the seed of this step, microbatch and layer, both times;
- buffers (BatchNorm's statistics): the second run finds them as the first run did. Its changes to them are thrown
  away, so they are updated once;
- gradients are switched on in the first run, so that no layer takes another path. What it would keep is dropped; if
  it asks for gradients of its own, only at its end.

State that a forward changes otherwise is found in a stage's first training step, and refused, as no order of ops
could make it right:

    plain loop    forward 0, backward 0; forward 1, backward 1
    pipeline      forward 0, forward 1, forward 2; backward 0 ...

Between a forward and its backward other forwards run. Autograd sees that one of them has changed a tensor that the
backward needs, unless it was changed through `.data`. And a second run must find everything as it was: buffers are
kept for it, but not parameters, a random generator or a number of the module's own. Nor may it count or add up once
more what the first run did, such as an average in a plain attribute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.runtime.errors import BrokenContract, RuntimeFailure
from penstock.runtime.stage.module_state import (
    Description,
    alike,
    attributes_of,
    described,
    is_plain,
    measured,
    tensors_in,
)
from penstock.runtime.stage.stage import gathers_unseen
from penstock.runtime.tensors.digest import hash_of


def copy_of(tensor: Tensor) -> Tensor:
    """The same values in memory of their own, laid out alike."""
    tensor = tensor.detach()
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor  # an expanded tensor: nothing can be changed in place there
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


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
    raise GradientAskedFor("a forward that is to be recomputed asked for a gradient of its own")


@contextmanager
def keeping_to_the_end(stage: nn.Module) -> Iterator[None]:
    """As `keeping_nothing`, for forwards that ask for gradients of their own: what they save is dropped at the end.

    Raises:
        RuntimeFailure: the forward added to the gradients of parameters, which the second run would do again.
    """
    saved: list[Tensor] = []
    before = [(p, p.grad, None if p.grad is None else p.grad._version) for p in stage.parameters()]

    def save(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    def find(place: int) -> Tensor:
        if place < len(saved):
            return saved[place]
        raise RuntimeFailure(
            "a gradient was asked for through a forward that is to be recomputed, after that forward had ended, and "
            "nothing is kept for that; use a schedule without R for this model"
        )

    with torch.autograd.graph.saved_tensors_hooks(save, find):
        try:
            yield
        finally:
            saved.clear()
    if any(p.grad is not grad or (grad is not None and grad._version != version) for p, grad, version in before):
        raise RuntimeFailure(
            "a forward that is to be recomputed calls backward(), which adds to the gradients of its parameters, and "
            "would add to them twice; take gradients within a forward by torch.autograd.grad, or use a schedule "
            "without R for this model"
        )


Place = tuple[nn.Module, str]
"""A buffer: its module, its name there."""


class BufferHistory:
    """The buffers of a stage as each forward to be recomputed found them.

    Most buffers never change (masks, tables), and those need no copy. The first such forward of a step copies
    all and sees which it changes; the others copy these, and those that any step before has seen changing: a largest
    value, say, changes in some forwards alone.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._stage = stage
        self._known: set[Place] = set()
        self._changing: set[Place] | None = None
        self._found: dict[int, dict[Place, Tensor | None]] = {}

    def begin(self) -> None:
        """Starts a step."""
        self._changing = None
        self._found.clear()

    @contextmanager
    def noted(self, m: int) -> Iterator[None]:
        """Around the first run of microbatch `m`. If it fails with GradientAskedFor, buffers are as they were."""
        before = {
            (module, name): (buffer, None if buffer is None else buffer._version)
            for module in self._stage.modules()
            for name, buffer in module._buffers.items()
        }
        copies = {
            place: None if buffer is None else copy_of(buffer)
            for place, (buffer, _) in before.items()
            if self._changing is None or place in self._changing
        }
        try:
            yield
        except GradientAskedFor:
            for (module, name), copied in copies.items():
                module._buffers[name] = buffer = before[module, name][0]
                if buffer is not None and copied is not None:
                    buffer.data.copy_(copied)
            raise
        if self._changing is None:
            self._known |= {place for place, copied in copies.items() if _changed(place, before[place], copied)}
            self._changing = self._known & copies.keys()
        found = {place: copy for place, copy in copies.items() if place in self._changing}
        for place, (buffer, version) in before.items():
            now = place[0]._buffers.get(place[1])
            if place in self._changing:
                continue
            if now is not buffer:
                found[place] = buffer
            elif buffer is not None and buffer._version != version:
                raise RuntimeFailure(
                    f"buffer {place[1]!r} of {type(place[0]).__name__} changed in microbatch {m} and in none before, "
                    "so this forward cannot be run again as it was; use a schedule without R for this model"
                )
        self._found[m] = found

    @contextmanager
    def as_found(self, m: int) -> Iterator[None]:
        """Around the second run of microbatch `m`: buffers are as the first run found them, then as they are now."""
        found = self._found.pop(m)
        now = {(module, name): module._buffers.get(name) for module, name in found}
        try:
            for (module, name), buffer in found.items():
                module._buffers[name] = buffer
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


class WatchedTensor(NamedTuple):
    """A parameter or buffer, or a tensor in an attribute, as it was, with a hash of its elements."""

    module: nn.Module
    name: str
    held: Callable[[], Tensor | None]
    version: int
    hash: int

    @classmethod
    def of(cls, module: nn.Module, name: str, tensor: Tensor) -> WatchedTensor:
        """As it is now. One in an attribute may be let go of."""
        is_attribute = name not in module._parameters and name not in module._buffers
        held = weakref.ref(tensor) if is_attribute else lambda: tensor
        return cls(module, name, held, tensor._version, hash_of(tensor))

    @property
    def tensor(self) -> Tensor | None:
        return self.held()

    @property
    def kind(self) -> str:
        if self.name in self.module._parameters:
            return "parameter"
        return "buffer" if self.name in self.module._buffers else "attribute"

    @property
    def now(self) -> Tensor | None:
        """What is in its place; in a container, itself wherever it is there."""
        module = self.module
        if self.kind != "attribute":
            return (module._parameters if self.kind == "parameter" else module._buffers).get(self.name)
        own = self.tensor
        return next((each for each in tensors_in(vars(module).get(self.name)) if each is own), None)


Attributes = dict[tuple[nn.Module, str], Description]
"""By module and name."""


class FirstStep:
    """Watches a stage in its first training step, and in its first one with R.

    Args:
        stage, index: the stage and its number.
        watches: False for stages of which nothing is to be refused.

    Attributes:
        is_watching: whether this is such a step.
    """

    def __init__(self, stage: nn.Module, index: int, watches: bool = True) -> None:
        self._stage, self._index, self._watches = stage, index, watches
        self._ended = {False: False, True: False}
        self._repeats = self.is_watching = False
        self._before: list[WatchedTensor] = []
        self._outputs: dict[int, tuple[float, float]] = {}
        self._changed: list[tuple[WatchedTensor, int]] = []
        self._left: dict[int, Attributes] = {}
        """What the first run of a microbatch left in attributes."""
        self._found: Attributes = {}
        """What the second run finds there."""
        self._buffers: list[tuple[nn.Module, str, Tensor, int]] = []

    def begin(self, training: bool, repeats: bool) -> None:
        """A step begins; `repeats`: some forwards of the stage are run again."""
        self._outputs.clear()
        self._left.clear()
        self._repeats = repeats
        self.is_watching = self._watches and training and not self._ended[repeats]
        self._before = list(self._watched()) if self.is_watching else []

    def require_none(self) -> None:
        """At the end of a training step. Raises RuntimeFailure where a forward changed something through `.data`."""
        if not self.is_watching:
            return
        for known in self._before:
            now = known.now
            if now is None or now is not known.tensor or now._version != known.version:
                continue
            if hash_of(now) != known.hash:
                raise BrokenContract(
                    f"stage {self._index}: a forward changed {known.kind} {known.name!r} of "
                    f"{type(known.module).__name__} through .data, which autograd does not see, so that backwards of "
                    "earlier microbatches may compute with the changed values; change it in place under "
                    "torch.no_grad(), which autograd sees, or assign a new tensor to a buffer "
                    f"(self.{known.name} = ...), or change it between steps",
                    2,
                )
        self._before, self._changed, self._buffers = [], [], []
        self._ended[self._repeats] = True

    @contextmanager
    def backward(self, m: int) -> Iterator[None]:
        """Around the backward of a microbatch. Raises RuntimeFailure where it changed a parameter, as a hook may that
        calls an optimizer: forwards of later microbatches have run with what was there before.
        """
        before = [(known, now, now._version) for known in self._before if (now := known.now) is not None]
        yield
        for known, now, version in before:
            if known.kind == "parameter" and known.now is now and now._version != version:
                raise BrokenContract(
                    f"stage {self._index}: parameter {known.name!r} of {type(known.module).__name__} changed in the "
                    f"backward of microbatch {m}, as by a hook that calls an optimizer, and forwards of later "
                    "microbatches have run with its value before; let the pipeline update (optimizer=), or use a "
                    "schedule with updates as ops, or with one microbatch",
                    2,
                )

    def ran(self, m: int, result: Any) -> None:
        """Takes note of what the first run of a microbatch computed that runs again."""
        if self.is_watching:
            self._outputs[m] = measured(result)
            self._left[m] = self._attributes()

    def begin_again(self, m: int) -> None:
        """Before the second run: takes note of what it may change once more."""
        if m not in self._outputs:
            return
        self._changed = [(known, hash_of(known.now)) for known in self._changed_parameters() if known.now is not None]
        self._found = self._attributes()
        self._buffers = [
            (module, name, buffer, hash_of(buffer))
            for module in self._stage.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and is_plain(buffer)
        ]

    def ran_again(self, m: int, result: Any) -> None:
        """Raises RuntimeFailure where the second run changed something once more, or computed something else."""
        if m not in self._outputs:
            return
        for known, before in self._changed:
            if known.now is None or hash_of(known.now) != before:
                raise BrokenContract(
                    f"stage {self._index}: the forward of {type(known.module).__name__} changes its parameter "
                    f"{known.name!r}, so that it can't be run again (R) as it was; make it a buffer, or use a "
                    "schedule without R for this model",
                    2,
                )
        (size, weighed), (again, weighed_again) = self._outputs.pop(m), measured(result)
        if abs(again - size) > _SHARE * size or abs(weighed_again - weighed) > _SHARE * size:
            raise BrokenContract(
                f"stage {self._index}: the forward of microbatch {m} was run again (R) and computed something else: "
                "it draws from a random generator of its own or changes a number that it computes with; draw from "
                "torch's generator and keep numbers in buffers, or use a schedule without R for this model",
                1,
            )
        left = self._left.pop(m)
        for module, name, buffer, before in self._buffers:
            if hash_of(buffer) != before:
                raise self._changes_again(module, f"buffer {name!r}", f"assign a new tensor (self.{name} = ...)")
        for place, now in self._attributes().items():
            if not alike(now, self._found.get(place)) and not alike(now, left.get(place)):
                raise self._changes_again(place[0], f"attribute {place[1]!r}", "make it a buffer")

    def _changes_again(self, module: nn.Module, what: str, instead: str) -> RuntimeFailure:
        return BrokenContract(
            f"stage {self._index}: the forward of {type(module).__name__} changes its {what} once more when it runs "
            f"again (R), so that this counts twice; {instead}, or use a schedule without R for this model",
            1,
        )

    def _attributes(self) -> Attributes:
        return {
            (module, name): described(value)
            for module in self._stage.modules()
            for name, value in attributes_of(module).items()
        }

    def _changed_parameters(self) -> list[WatchedTensor]:
        """The parameters that forwards of this step have changed in place or replaced."""
        found = [
            (known, now) for known in self._before if known.kind == "parameter" and (now := known.now) is not None
        ]
        return [known for known, now in found if now is not known.tensor or now._version != known.version]

    def _watched(self) -> Iterator[WatchedTensor]:
        modules = list(self._stage.modules())
        found: list[tuple[nn.Module, str, Tensor | None]] = []
        for module in modules:
            buffers = {} if self._repeats or gathers_unseen(module) else module._buffers
            found += [(module, name, tensor) for name, tensor in (*module._parameters.items(), *buffers.items())]
        buffers_of_all = {id(buffer) for module in modules for buffer in module._buffers.values()}
        for module in () if self._repeats else modules:
            for name, value in attributes_of(module).items():
                found += [(module, name, one) for one in tensors_in(value) if id(one) not in buffers_of_all]
        seen: set[int] = set()
        for module, name, tensor in found:
            if tensor is None or id(tensor) in seen or not is_plain(tensor):
                continue
            seen.add(id(tensor))
            yield WatchedTensor.of(module, name, tensor)


_SHARE = 1e-2
"""The share by which sums of a forward's results may differ when it runs again: rounding, and not other numbers."""
