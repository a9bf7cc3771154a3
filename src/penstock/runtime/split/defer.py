"""The node that stands in the graph for a prepared module: I passes it, and leaves weight and bias for W.

The tape travels with the node rather than being looked up in `backward`: several ranks may share a thread, and
on CUDA autograd calls `backward` from a thread of its own. Whoever runs the graph otherwise than through the
tape's I (a plain `backward()`, `torch.autograd.grad` inside the forward) gets every gradient at once, as from
the plain module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.runtime.shards import as_shard, local

if TYPE_CHECKING:
    from penstock.runtime.split.slot import Slot
    from penstock.runtime.split.tape import Tape

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None, None]


class Deferred(torch.autograd.Function):
    """A module's op whose weight gradients may wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, slot: Slot, tape: Tape) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.slot, ctx.owners = slot, (tape, weight, bias)
        rule = slot.rule
        weight, bias = local(weight), None if bias is None else local(bias)
        if rule.autocasts and torch.is_autocast_enabled(x.device.type):
            weight = tape.autocast(weight)
            bias = None if bias is None else tape.autocast(bias)
        # Saved, not merely held: a checkpoint can then drop and recompute them, and a change in place is
        # noticed when they are read.
        ctx.save_for_backward(x, weight)
        return rule.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Grads:
        if g is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        slot = ctx.slot
        tape, parameter, bias = ctx.owners
        needs_x, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        gx = slot.rule.input_grad(g, x, weight, bias) if needs_x else None
        if not (needs_weight or needs_bias):
            return gx, None, None, None, None
        needs = needs_weight, needs_bias
        if tape.defers(slot):
            tape.hold(slot.rule, parameter, bias, g, x, weight, needs)
            return gx, None, None, None, None
        gw, gb = slot.rule.weight_grads(g, x, weight, bias, needs)
        gw, gb = None if gw is None else as_shard(gw, parameter), None if gb is None else as_shard(gb, bias)
        return gx, gw, gb, None, None
