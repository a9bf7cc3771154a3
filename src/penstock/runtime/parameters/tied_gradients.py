"""The gradients of tied parameters (`ties.py`), added up on their way with the backwards.

For each microbatch, a plain loop adds the contributions of every use of the parameter, the deepest use first. Here
that sum travels with the backward. Each stage's sum is taken before it reaches `.grad`, and is sent to the next stage
up that shares the parameter, whose backward starts from it. The topmost stage, the owner, adds the whole sum to the
gradient. So the gradient is the same to the bit.

    rank 3, I5 of stage 3 -> sum so far of microbatch 5 -> rank 0, I5 of stage 0 -> owner's gradient

While an op of any other stage runs, a stand-in takes the parameter's place there: a leaf on the same memory, whose
gradient is taken when the op has ended. So hooks on the parameter itself see whole gradients, once per microbatch. It
does not matter which of its stages are in one process, or in which pipelines.

If updates are ops, the owner's stage steps the parameter at its own updates. The new value goes to the other stages
with the first forward that passes after that (`transport/wiring.py`). Stand-ins then have memory of their own, one
for each copy of a stage, which holds what the copy's ops are to read (`versions.py`).

A tied parameter's gradient is never deferred to W: its hook makes the split backward compute it in I.

Under autocast a plain loop casts the parameter once, and adds up what all uses of that cast give in the low
precision. So the sum of a cast's gradient travels beside the sum of the other uses, such as lookups in an embedding,
and each stage's cast starts from it. The owner adds the two where autograd would. Only if two stages or more look the
parameter up, below the owner and above all casts, the last bits may differ.

    plain loop    w -> cast -> stage 3, stage 1     gradient of the cast: bfloat16(g3 + g1); of w: float32 of it
    pipeline      stage 3: w -> cast, g3 (bfloat16) -> stage 1: w -> cast, g3 + g1 (bfloat16) -> stage 0: owner
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.runtime.parameters.ties import Ties
from penstock.runtime.split_backward.autocast import autocast
from penstock.runtime.stage.stage import Copy
from penstock.runtime.tensors.autograd import added
from penstock.runtime.tensors.dtensor import as_shard, is_sharded, local, standing_for
from penstock.runtime.tensors.message import Edge, Payload
from penstock.schedule import Op


class Cast:
    """The cast that autocast made of a parameter in the forward of one microbatch. Make it inside the same autocast.

    Attributes:
        root: a tensor of the graph behind which only the cast lies; None if there is no cast.
        taken: the gradient of the cast, after a backward that `take` was called for.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.root, self._node = _cast_of(parameter)
        self.taken: Tensor | None = None

    def take(self) -> None:
        """From now on keeps the gradient of the cast in `taken`, so that none reaches the parameter."""

        def take(gradients: tuple[Tensor | None, ...]) -> tuple[None]:
            self.taken = gradients[0]
            return (None,)

        self._node.register_prehook(take)


def _cast_of(parameter: Tensor) -> tuple[Tensor | None, Any]:
    """Finds the cast that a forward made of a parameter: a tensor that only the cast lies behind, and its node."""
    if not parameter.requires_grad or parameter.dtype is not torch.float32 or is_sharded(parameter):
        return None, None
    with torch.enable_grad():
        mark = torch.zeros((), requires_grad=True, device="cpu") * 1
        root = autocast(parameter)  # finds the cast that is kept, and makes one where there is none
    node: Any = root.grad_fn
    while node is not None and type(node.next_functions[0][0]).__name__ != "AccumulateGrad":
        node = node.next_functions[0][0]
    if node is None or mark.grad_fn is None or node._sequence_nr() > mark.grad_fn._sequence_nr():
        return None, None
    return root, node


class TiedPlace:
    """A tied parameter in one copy of a stage.

    Args:
        is_owner: whether the stage owns the parameter. If not, a stand-in takes its place while an op runs.
        is_deepest: whether no sum comes from a deeper stage.

    Attributes:
        leaf: what ops of the copy read, and give a gradient: the parameter or its stand-in.
    """

    def __init__(self, slot: int, stage: nn.Module, parameter: Parameter, is_owner: bool, is_deepest: bool) -> None:
        self.slot, self.parameter = slot, parameter
        self.is_owner, self.is_deepest = is_owner, is_deepest
        self._modules = [
            (module, own) for module in stage.modules() for own, one in module._parameters.items() if one is parameter
        ]
        self._is_separate = False
        self.leaf = parameter if is_owner else self._made()
        self.casts: dict[int, Cast] = {}
        """By microbatch; empty without autocast."""
        self._came: Tensor | None = None
        """The sum of the cast's gradient in deeper stages."""

    def _made(self) -> Parameter:
        value = self.parameter.detach()
        leaf = standing_for(self.parameter, value.clone() if self._is_separate else value)
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(_nothing)
        return leaf

    def separate(self) -> None:
        """Gives the stand-in memory of its own."""
        if not self.is_owner:
            self._is_separate = True
            self.leaf = self._made()

    def begin(self) -> None:
        """Starts a step: the stand-in takes over the parameter's memory, type and `requires_grad`."""
        self.casts.clear()
        if self.is_owner:
            return
        known, now = self.leaf, self.parameter
        same_memory = local(known).data_ptr() == local(now).data_ptr() and known.shape == now.shape
        if self._is_separate:
            known.requires_grad_(now.requires_grad)
        elif not same_memory or known.requires_grad != now.requires_grad or known.dtype != now.dtype:
            self.leaf = self._made()
        self.leaf.grad = None

    def put(self, parameter: Parameter) -> None:
        """Puts the stand-in, or the parameter, into the modules of the stage."""
        for module, name in self._modules:
            setattr(module, name, parameter)  # by setattr, so that a recurrent layer notices

    def starts(self, m: int, direct: Tensor | None, cast: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Where the backward of a microbatch starts from the sums of deeper stages: (tensor, gradient).

        Args:
            direct: of uses of the parameter. cast: of uses of its cast.
        """
        mine, self._came = self.casts.get(m), cast
        root = None if mine is None else mine.root
        if not self.leaf.requires_grad:
            return []
        if mine is not None and root is not None and not self.is_owner:
            mine.take()
        if root is None and self.is_owner and cast is not None:
            direct, cast = added(direct, cast.float()), None  # autocast casts what is float32 alone
        found: list[tuple[Tensor, Tensor]] = []
        if direct is not None:
            found.append((self.leaf, as_shard(direct, self.leaf)))
        if root is not None and cast is not None:
            found.append((root, cast.to(root.dtype).reshape(root.shape)))
        return found

    def take(self, m: int) -> list[Tensor | None]:
        """The sums after this stage's backward, that of the cast only if a stage has cast."""
        mine, came = self.casts.pop(m, None), self._came
        direct, self.leaf.grad, self._came = self.leaf.grad, None, None
        cast = came if mine is None or mine.root is None else mine.taken
        direct = None if direct is None else local(direct)
        return [direct] if cast is None else [direct, cast]


class TiedGradients:
    """Takes, passes on and sums the gradients of tied parameters in this process.

    Args:
        stages: those in this process, by number. copies: (pipeline, stage) of their copies in this process.
    """

    def __init__(self, ties: Ties, stages: Mapping[int, nn.Module], copies: Iterable[Copy]) -> None:
        self._places: dict[Copy, list[TiedPlace]] = {}
        for k, index in copies:
            for slot, tie in ties.slots():
                if index in tie.names:
                    stage = stages[index]
                    parameter = stage.get_parameter(tie.names[index])
                    one = TiedPlace(slot, stage, parameter, index == tie.owner, index == tie.stages[-1])
                    self._places.setdefault((k, index), []).append(one)
        self._here: list[TiedPlace] = []
        """Those of the copy whose op runs."""
        self._sums: dict[tuple[int, int], list[Tensor | None]] = {}
        """By slot and stage, the sums that are still to be sent."""
        self._handles: dict[int, Any] = {}

    def _all(self) -> Iterator[TiedPlace]:
        return (place for places in self._places.values() for place in places)

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def separate(self) -> None:
        """Gives every copy of a stage its own values of the parameters that other stages own, as updates are ops."""
        for place in self._all():
            place.separate()

    def read_by(self, copy: Copy) -> dict[int, Parameter]:
        """By slot, the parameter that a copy reads in place of one that another stage owns."""
        return {place.slot: place.leaf for place in self._places.get(copy, ()) if not place.is_owner}

    def begin(self) -> None:
        """Starts a step."""
        self._sums.clear()
        for place in self._all():
            place.begin()
            parameter = place.parameter
            if parameter.requires_grad and id(parameter) not in self._handles:
                self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(_nothing)

    @contextmanager
    def inside(self, pipeline: int, stage: int) -> Iterator[None]:
        """Around an op of a copy of a stage."""
        self._here = self._places.get((pipeline, stage), [])
        try:
            for place in self._here:
                place.put(place.leaf)
            yield
        finally:
            for place in self._here:
                place.put(place.parameter)
            self._here = []

    def note_casts(self, stage: int, m: int) -> None:
        """Finds the casts of tied parameters that a forward made. Call it after the forward, inside its autocast."""
        for place in self._here:
            place.casts[m] = Cast(place.leaf)

    def sort(self, op: Op, received: Sequence[Payload]) -> tuple[Sequence[Payload], list[tuple[Tensor, Tensor]]]:
        """Separates the gradients of outputs from the tied sums, which follow them, by slot.

        Returns:
            The gradients of outputs, and more starts of the backward: (tensor of its graph, gradient).
        """
        main = len(received) - sum(not place.is_deepest for place in self._here)
        sums = iter(received[main:])
        starts: list[tuple[Tensor, Tensor]] = []
        for place in self._here:
            leaves = [None] if place.is_deepest else next(sums).leaves
            starts += place.starts(op.microbatch, leaves[0], leaves[1] if len(leaves) > 1 else None)
        return received[:main], starts

    def take(self, op: Op) -> None:
        """Takes this microbatch's sums after a backward, unless this stage is the owner, which keeps the gradient."""
        for place in self._here:
            if place.is_owner:
                place.casts.pop(op.microbatch, None)
            else:
                self._sums[place.slot, op.stage] = place.take(op.microbatch)

    def give(self, edge: Edge) -> Payload:
        """The sums so far, for the next stage up."""
        return Payload.gradients(self._sums.pop((edge.slot, edge.producer.stage), [None]))


def _nothing(_: Tensor) -> None:
    """A hook that does nothing. A parameter with a hook has its gradient computed in I."""
