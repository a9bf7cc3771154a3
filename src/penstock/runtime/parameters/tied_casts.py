"""Tied parameters under autocast: the cast that a plain loop makes once, for all the stages that use it.

Autocast keeps a parameter's cast for the rest of the forward, so its uses in all stages are uses of one tensor, whose
gradient is added up in low precision, deepest use first, and becomes float32 once, at the shallowest of them:

    plain loop    w -> cast -> stage 3, stage 1         gradient of the cast: bfloat16(g3 + g1); of w: float32 of it
    pipeline      stage 3: w -> cast, g3 (bfloat16) -> stage 1: w -> cast, g3 + g1 (bfloat16) -> stage 0, the owner

So the sum for the cast travels beside the sum for the parameter, which has what uses without a cast give (lookups in
an embedding). Which stage is the shallowest with a cast is known at the owner alone: until then the sum for the
parameter is kept both without the cast's part and with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.gradients import added
from penstock.runtime.tensors.dtensor import is_sharded, local
from penstock.runtime.tensors.message import Payload
from penstock.runtime.tensors.pytree import flatten


class Cast:
    """The cast of a parameter in the graph of one microbatch.

    Attributes:
        root: a tensor of the graph behind which lies the cast and nothing else: gradients of the cast enter there.
    """

    def __init__(self, root: Tensor, node: Any) -> None:
        self.root, self._node = root, node
        self._taken: Tensor | None = None

    def gradient(self, part: Tensor) -> Tensor:
        """A gradient of the cast as one of `root`."""
        return part.to(self.root.device, self.root.dtype).reshape(self.root.shape)

    def take(self) -> None:
        """From now on the cast's gradient goes to `taken` and not to the parameter."""

        def taken(gradients: tuple[Tensor | None, ...]) -> tuple[None]:
            self._taken = gradients[0]
            return (None,)

        self._node.register_prehook(taken)

    @property
    def taken(self) -> Tensor | None:
        return self._taken

    @property
    def node(self) -> Any:
        """The cast in the graph."""
        return self._node


class DirectUses:
    """The uses of a parameter in the graph of one microbatch that are not of its cast.

    Autograd runs the nodes of a graph in the reverse of the order in which they were made.
    """

    def __init__(self, parameter: Tensor, output: Any, cast: Cast | None) -> None:
        self._cast_number = -1 if cast is None else int(cast.node._sequence_nr())
        self._parts: list[tuple[int, Tensor]] = []
        self.num = 0
        leaf = get_gradient_edge(parameter).node
        outputs, _ = flatten(output)
        seen: set[Any] = {each.grad_fn for each in outputs if each.grad_fn is not None}
        pending: list[Any] = list(seen)
        for node in pending:  # in every microbatch, as what one does not use the next one may: keep this short
            for place, (following, _) in enumerate(node.next_functions):
                if following is leaf:
                    if cast is None or node is not cast.node:
                        self.num += 1
                        self._watch(node, place)
                elif following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)

    def _watch(self, node: Any, place: int) -> None:
        def note(inputs: tuple[Tensor | None, ...], _: Any) -> None:
            if (part := inputs[place]) is not None:
                self._parts.append((int(node._sequence_nr()), part))

        node.register_hook(note)

    def with_uses(self, start: Tensor | None, part: Tensor | None = None) -> Tensor | None:
        """A sum and what these uses gave, as autograd adds them up; with the cast's part in its place."""
        total, left = start, part
        for number, each in self._parts:
            if left is not None and number < self._cast_number:
                total, left = added(total, left), None
            total = added(total, each)
        return added(total, left)


@dataclass(frozen=True)
class Sum:
    """Of one microbatch what the uses of a tied parameter so far have given it.

    Attributes:
        direct: for the parameter itself. cast: for its cast.
        both: for the parameter, with the cast's part where that is if no stage above has a cast; None where it comes
            last.
        apart: what backwards inside the backward (of checkpoints with use_reentrant=True) have given: a plain loop
            adds each to the gradient as it comes, ahead of the sum. Where there is any, the rest is None.
    """

    direct: Tensor | None = None
    cast: Tensor | None = None
    both: Tensor | None = None
    apart: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, payload: Payload) -> Sum:
        direct, cast, both = [*payload.leaves, None, None][:3]
        return cls(direct, cast, both, tuple(part for part in payload.leaves[3:] if part is not None))

    def payload(self) -> Payload:
        direct = None if self.direct is None else local(self.direct)
        if self.apart:
            return Payload.gradients([None, None, None, *map(local, self.apart)])
        return Payload.gradients([direct] if self.cast is None else [direct, self.cast, self.both])

    def whole(self) -> Tensor | None:
        """What the parameter has got, where no stage above has a cast."""
        if self.cast is None or self.both is not None:
            return self.direct if self.cast is None else self.both
        return added(self.direct, self.cast.float())  # autocast casts what is float32 alone

    def after(self, direct: Tensor | None, cast: Cast | None, uses: DirectUses | None, name: str, stage: int) -> Sum:
        """The sum once a stage's backward has run.

        Args:
            direct: with what the stage's direct uses have added. cast: that of the stage.
            name: of the parameter there.

        Raises:
            RuntimeFailure: uses that the graph of the forward does not show.
        """
        expected = self.direct if uses is None else uses.with_uses(self.direct)
        as_seen = torch.equal(expected, direct) if expected is not None and direct is not None else expected is direct
        if not as_seen:
            raise RuntimeFailure(
                f"{name} is shared by stages, and stage {stage} uses it under autocast in a way that the graph of "
                "its forward does not show (as its output, say), and its gradient would be added up in another order "
                "than in a plain loop; untie it, or keep its uses out of autocast"
            )
        if cast is None:
            both = self.both
            if uses is not None and uses.num and self.cast is not None:
                both = uses.with_uses(self.whole())
            return Sum(direct, self.cast, both)
        if uses is None or not uses.num or cast.taken is None:
            return Sum(direct, cast.taken)
        return Sum(direct, cast.taken, uses.with_uses(self.direct, cast.taken.float()))


def cast_of(parameter: Tensor) -> Cast | None:
    """The cast that the forward just run has made of a parameter, if any; inside the same `torch.autocast`."""
    if not parameter.requires_grad or parameter.dtype is not torch.float32 or is_sharded(parameter):
        return None
    if parameter.dim() == 0 or not torch.is_autocast_cache_enabled():
        return None
    with torch.enable_grad():
        mark = torch.zeros((), requires_grad=True) * 1
        # An op of lower precision finds the cast that is kept, and makes one where there is none.
        shape = (parameter.shape[-1],) if parameter.dim() == 1 else (parameter.shape[-1], 0)
        probe = torch.matmul(parameter, torch.zeros(shape, device=parameter.device, requires_grad=True))
    node: Any = probe.grad_fn
    while not hasattr(node, "_saved_self"):
        node = node.next_functions[0][0]
    root: Tensor = node._saved_self
    node = root.grad_fn
    while node is not None and type(node.next_functions[0][0]).__name__ != "AccumulateGrad":
        node = node.next_functions[0][0]
    if node is None or mark.grad_fn is None or node._sequence_nr() > mark.grad_fn._sequence_nr():
        return None
    return Cast(root, node)
