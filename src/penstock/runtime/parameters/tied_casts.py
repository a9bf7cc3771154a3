"""The uses of a tied parameter under autocast, in the graph of one microbatch.

Autocast casts a parameter once and keeps the cast for the rest of the forward. So in a plain loop all uses of the
cast, in all stages, are uses of one tensor. Its gradient is added up in low precision, the deepest use first, and is
added to the parameter's gradient once, as float32, in the place of the cast in autograd's order. Other uses, such as
lookups in an embedding, are direct: each adds to the parameter's gradient by itself.

    plain loop    w -> cast -> stage 3, stage 1     gradient of the cast: bfloat16(g3 + g1); of w: float32 of it
    pipeline      stage 3: w -> cast, g3 (bfloat16) -> stage 1: w -> cast, g3 + g1 (bfloat16) -> stage 0: owner

So the sum for the cast travels beside the sum of the direct uses. Which stage is the shallowest with a cast is known
at the owner alone. Until then the sum of the direct uses is kept both without the cast's part and with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.stage.autograd import added
from penstock.runtime.tensors.dtensor import is_sharded, local
from penstock.runtime.tensors.message import Payload
from penstock.runtime.tensors.pytree import flatten


class AutocastUses:
    """The cast of a tied parameter in the graph of one microbatch, and the direct uses of the parameter there.

    Make it after the forward, inside the same autocast.

    Args:
        output: of the forward. None: direct uses do not matter, as in the stage that owns the parameter.

    Attributes:
        has_cast: whether the forward has cast the parameter.
        num_direct: of the direct uses.
        taken: the gradient of the cast, after a backward that `take_cast` was called for.
    """

    def __init__(self, parameter: Tensor, output: Any = None) -> None:
        self._root, self._cast = _cast_of(parameter)
        self.has_cast = self._cast is not None
        self.taken: Tensor | None = None
        self.num_direct = 0
        self._parts: list[tuple[int, Tensor]] = []
        """The gradients of direct uses in autograd's order, each with the number of its node."""
        if output is not None and parameter.requires_grad:
            self._watch_direct_uses(get_gradient_edge(parameter).node, output)

    def start(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Where a backward is to start so that the cast gets a gradient from deeper stages: (tensor, gradient)."""
        assert self._root is not None, "there is a cast"
        return self._root, gradient.to(self._root.dtype).reshape(self._root.shape)

    def take_cast(self) -> None:
        """Sends the cast's gradient to `taken` from now on, and none to the parameter."""

        def take(gradients: tuple[Tensor | None, ...]) -> tuple[None]:
            self.taken = gradients[0]
            return (None,)

        if self._cast is not None:
            self._cast.register_prehook(take)

    def with_direct(self, start: Tensor | None, part: Tensor | None = None) -> Tensor | None:
        """Adds the gradients of the direct uses to a sum, in autograd's order; `part` comes in the cast's place."""
        cast_number = -1 if self._cast is None else int(self._cast._sequence_nr())
        total, left = start, part
        for number, each in self._parts:
            # Autograd runs the nodes of a graph in the reverse of the order in which they were made.
            if left is not None and number < cast_number:
                total, left = added(total, left), None
            total = added(total, each)
        return added(total, left)

    def _watch_direct_uses(self, leaf: Any, output: Any) -> None:
        outputs, _ = flatten(output)
        seen: set[Any] = {each.grad_fn for each in outputs if each.grad_fn is not None}
        pending: list[Any] = list(seen)
        for node in pending:  # runs for every microbatch, since each may use the parameter elsewhere: keep it short
            for place, (following, _) in enumerate(node.next_functions):
                if following is leaf:
                    if node is not self._cast:
                        self.num_direct += 1
                        self._watch(node, place)
                elif following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)

    def _watch(self, node: Any, place: int) -> None:
        def note(inputs: tuple[Tensor | None, ...], _: Any) -> None:
            if (part := inputs[place]) is not None:
                self._parts.append((int(node._sequence_nr()), part))

        node.register_hook(note)


def _cast_of(parameter: Tensor) -> tuple[Tensor | None, Any]:
    """Finds the cast that a forward made of a parameter, if there is one.

    Returns:
        A tensor of the graph behind which only the cast lies, and the cast's node.
    """
    if not parameter.requires_grad or parameter.dtype is not torch.float32 or is_sharded(parameter):
        return None, None
    if parameter.dim() == 0 or not torch.is_autocast_cache_enabled():
        return None, None
    with torch.enable_grad():
        mark = torch.zeros((), requires_grad=True, device="cpu") * 1
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
        return None, None
    return root, node


@dataclass(frozen=True)
class TiedGradientSum:
    """The gradient of a tied parameter in one microbatch, as far as stages have added to it.

    Attributes:
        direct: of the direct uses; without autocast, of all uses.
        cast: of the cast.
        both: of the direct uses, with the cast's part in the place that it has if no stage above has a cast; None if
            the cast's part comes last.
    """

    direct: Tensor | None = None
    cast: Tensor | None = None
    both: Tensor | None = None

    @classmethod
    def of(cls, payload: Payload) -> TiedGradientSum:
        return cls(*payload.leaves)

    def payload(self) -> Payload:
        direct = None if self.direct is None else local(self.direct)
        return Payload.gradients([direct] if self.cast is None else [direct, self.cast, self.both])

    def whole(self) -> Tensor | None:
        """The gradient of the parameter, if no stage above has a cast."""
        if self.cast is None or self.both is not None:
            return self.direct if self.cast is None else self.both
        return added(self.direct, self.cast.float())  # autocast casts what is float32 alone

    def after(self, direct: Tensor | None, uses: AutocastUses, where: str) -> TiedGradientSum:
        """Returns the sum after a stage's backward.

        Args:
            direct: the sum to which autograd has added the stage's direct uses.
            where: the parameter and the stage, in words.

        Raises:
            RuntimeFailure: the stage has uses that the graph of its forward does not show.
        """
        expected = uses.with_direct(self.direct)
        as_seen = torch.equal(expected, direct) if expected is not None and direct is not None else expected is direct
        if not as_seen:
            raise RuntimeFailure(
                f"{where} uses it under autocast in a way that the graph of its forward does not show (as its "
                "output, say), and its gradient would be added up in another order than in a plain loop; untie it, "
                "or keep its uses out of autocast"
            )
        if uses.has_cast:
            both = None
            if uses.num_direct and uses.taken is not None:
                both = uses.with_direct(self.direct, uses.taken.float())
            return TiedGradientSum(direct, uses.taken, both)
        both = self.both
        if uses.num_direct and self.cast is not None:
            both = uses.with_direct(self.whole())
        return TiedGradientSum(direct, self.cast, both)
