"""The node that stands in the graph for a prepared module: I passes it, and leaves weight and bias for W.

The tape travels with the node rather than being looked up in `backward`: several ranks may share a thread, and
on CUDA autograd calls `backward` from a thread of its own. Whoever runs the graph otherwise than through the
tape's I (a plain `backward()`, `torch.autograd.grad` inside the forward) gets every gradient at once, as from
the plain module; whoever is to differentiate the gradients once more (`create_graph`) gets them from the module's
own op, run again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.runtime.stage.split_backward.cast import autocast
from penstock.runtime.tensors.dtensor import as_shard, is_sharded, local

if TYPE_CHECKING:
    from penstock.runtime.stage.split_backward.slot import Slot
    from penstock.runtime.stage.split_backward.tape import Tape

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None, None]


class Deferred(torch.autograd.Function):
    """A module's op whose weight gradients may wait.

    The inputs are what the plain module's op would get, of a weight its cast and its transpose, so that these are
    part of the graph; `owners` are the parameters themselves, and `casts` the nodes that cast them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        slot: Slot,
        tape: Tape,
        owners: tuple[Tensor, Tensor | None],
        casts: tuple[Any, Any] | None,
        turned: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.slot, ctx.tape, ctx.owners, ctx.casts, ctx.bias, ctx.turned = slot, tape, owners, casts, bias, turned
        # What a checkpoint runs again in I is differentiated, if at all, by a backward of its own, in I.
        ctx.waits = tape.records
        if type(owners[0]) is not nn.Parameter:
            weight, bias = _part(slot, x, weight), None if bias is None else _part(slot, x, bias)
            ctx.save_for_backward(x, weight)
            return slot.rule.forward(x, weight, bias)
        # Saved, not merely held: a checkpoint can then drop and recompute them, and a change in place is
        # noticed when they are read.
        ctx.save_for_backward(x, weight)
        return slot.rule.forward(x, weight.t() if turned else weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Grads:
        if g is None:
            return _NOTHING
        x, given = ctx.saved_tensors
        slot, tape, (parameter, bias) = ctx.slot, ctx.tape, ctx.owners
        if torch.is_grad_enabled():
            slot.is_differentiated = True
            gx, gw, gb = _differentiable(ctx, g, x, given)
            return gx, gw, gb, None, None, None, None, None
        weight = given.t() if ctx.turned else given
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gx = slot.rule.input_grad(g, x, weight, bias) if needs_x else None
        if not (needs_weight or needs_bias):
            return gx, *_NOTHING[1:]
        needs = needs_weight, needs_bias
        if ctx.waits and tape.defers(slot):
            tape.hold(slot, parameter, bias, g, x, weight, ctx.casts, needs)
            return gx, *_NOTHING[1:]
        if not tape.records:
            slot.stage.tally.at_once(slot, x)
        gw, gb = slot.rule.weight_grads(g, x, weight, bias, needs)
        if gw is not None:
            gw = gw.t() if ctx.turned else as_shard(gw, parameter)
        return gx, gw, None if gb is None else as_shard(gb, bias), None, None, None, None, None


_NOTHING: Grads = (None, None, None, None, None, None, None, None)


def _part(slot: Slot, x: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a sharded parameter, in the type that the op computes in."""
    part = local(p)
    return autocast(part) if slot.rule.autocasts and torch.is_autocast_enabled(x.device.type) else part


def _differentiable(ctx: Any, g: Tensor, x: Tensor, weight: Tensor) -> list[Tensor | None]:
    """The gradients of the inputs, as part of a graph that is exactly that of the plain module's backward."""
    (owner, _), bias, rule = ctx.owners, ctx.bias, ctx.slot.rule
    # Views, as `x` may itself come from the same weight: its own history is no part of this backward.
    weight = owner if is_sharded(owner) else weight
    weight = weight.view_as(weight)
    bias = None if bias is None else bias.view_as(bias)
    wanted = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad) if needed and t is not None]
    with torch.autocast(x.device.type, enabled=False):
        if is_sharded(owner):
            dtype = x.dtype if rule.autocasts else owner.dtype
            weight, bias = local(weight).to(dtype), None if bias is None else local(bias).to(dtype)
        elif ctx.turned:
            weight = weight.t()
        y = rule.op(x, weight, bias)
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=True, allow_unused=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]
