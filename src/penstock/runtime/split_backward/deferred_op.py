"""The node of a prepared module in autograd's graph: I passes through it and leaves weight and bias for W.

    F    y = run_deferred(x, weight, bias, call)     the op of the plain module; the node keeps x and the weight
    I    the tape lets it wait:   gx, and the tape keeps (g, x)
         it does not:             gx, gw, gb, as the plain module's nodes give them
    W    gw, gb of the tensors that the tape has kept

The node carries the tape, instead of looking it up in `backward`, because several ranks may share a thread, and on
CUDA autograd calls `backward` from a thread of its own. If the graph runs in another way than through the tape's I
(by a plain `backward()`, or `torch.autograd.grad` inside the forward), every gradient is computed at once. If
gradients are to be differentiated again (`create_graph`), the module's own op runs again and autograd computes them.

Under autocast the node is given the parameters as the plain module's op would be (`autocast`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from penstock.runtime.split_backward.rules import Needs, SplitRule
from penstock.runtime.tensors.dtensor import as_shard, is_sharded, local

if TYPE_CHECKING:
    from penstock.runtime.split_backward.prepared import PreparedModule
    from penstock.runtime.split_backward.tape import Tape


class ModuleCall(NamedTuple):
    """One call of a prepared module, as its node in the graph keeps it.

    Attributes:
        weight, bias: the parameters themselves.
        casts: the nodes that cast them for autocast.
        is_turned: whether the op is given the weight's transpose, which has a node of its own.
    """

    prepared: PreparedModule
    tape: Tape
    weight: Tensor
    bias: Tensor | None
    casts: tuple[Any, Any]
    is_turned: bool


class HeldCall(NamedTuple):
    """The tensors of one call from which W computes: the output's gradient, the input, and the op's own weight.

    Attributes:
        weight, bias: the parameters whose gradients are computed.
        needs: which of the two.
        g_version, x_version: by which a change in place since I is noticed.
    """

    rule: SplitRule
    weight: Tensor
    bias: Tensor | None
    casts: tuple[Any, Any]
    g: Tensor
    x: Tensor
    used_weight: Tensor
    needs: Needs
    g_version: int
    x_version: int


Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None]


class DeferredOp(torch.autograd.Function):
    """A module's op whose weight gradients may wait.

    The inputs are those of the plain module's op: of a weight its cast and its transpose, so that the nodes of these
    are part of the graph too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: ModuleCall) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.prepared, ctx.call, ctx.bias = call.prepared, call, bias
        rule = call.prepared.rule
        if type(call.weight) is not Parameter:
            weight, bias = _part(rule, x, weight), None if bias is None else _part(rule, x, bias)
        # Saved, not merely held: a checkpoint can then drop and recompute them, and a change in place is
        # noticed when they are read.
        ctx.save_for_backward(x, weight)
        return rule.forward(x, weight.t() if call.is_turned else weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Grads:
        if g is None:
            return None, None, None, None
        x, given = ctx.saved_tensors
        prepared, tape, parameter, bias, casts, is_turned = ctx.call
        if torch.is_grad_enabled():
            gx, gw, gb = _differentiable(ctx, g, x, given)
            return gx, gw, gb, None
        rule, weight = prepared.rule, given.t() if is_turned else given
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gx = rule.input_grad(g, x, weight, bias) if needs_x else None
        if not (needs_weight or needs_bias):
            return gx, None, None, None
        needs = needs_weight, needs_bias
        if tape.defers(prepared):
            # `g` itself, no view of it: nobody then takes it over. `x` without its graph, which I frees.
            x = x.detach()
            held = HeldCall(rule, parameter, bias, casts, g, x, weight, needs, g._version, x._version)
            tape.hold(prepared, held)
            return gx, None, None, None
        if not tape.records:
            prepared.stage.work.at_once[prepared] += rule.work(x, weight)
        gw, gb = rule.weight_grads(g, x, weight, bias, needs)
        if gw is not None:
            gw = gw.t() if is_turned else as_shard(gw, parameter)
        return gx, gw, None if gb is None else as_shard(gb, bias), None


# Past what `Function.apply` looks for in Python. Under torch.func's transforms, which it looks for, this one raises.
run_deferred: Any = super(torch.autograd.Function, DeferredOp).apply


def _part(rule: SplitRule, x: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a sharded parameter, in the type that the op computes in."""
    part = local(p)
    return autocast(part) if rule.autocasts and torch.is_autocast_enabled(x.device.type) else part


def _differentiable(ctx: Any, g: Tensor, x: Tensor, weight: Tensor) -> list[Tensor | None]:
    """The gradients of the inputs, as part of a graph that is exactly that of the plain module's backward."""
    owner, bias, rule = ctx.call.weight, ctx.bias, ctx.prepared.rule
    # Views, as `x` may itself come from the same weight: its own history is no part of this backward.
    weight = owner if is_sharded(owner) else weight
    weight = weight.view_as(weight)
    bias = None if bias is None else bias.view_as(bias)
    wanted = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad) if needed and t is not None]
    with without_autocast(x.device.type):
        if is_sharded(owner):
            dtype = x.dtype if rule.autocasts else owner.dtype
            weight, bias = local(weight).to(dtype), None if bias is None else local(bias).to(dtype)
        y = rule.op(x, weight.t() if ctx.call.is_turned else weight, bias)
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=True, allow_unused=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


# -- autocast ----------------------------------------------------------------------------------------------------

_PRODUCTS: list[tuple[Any, str]] = [(torch.matmul, "_saved_vec"), (torch.mm, "_saved_mat2")]
_PRODUCTS += [(conv, "_saved_weight") for conv in (F.conv1d, F.conv2d, F.conv3d)]
"""For a parameter of one dimension, two and so on, an op that takes it second, and where that op's node keeps it."""


def autocast(t: Tensor) -> Tensor:
    """`t` in the type of the autocast region that is entered, as part of the graph.

    While a region of autocast lasts, torch casts a parameter once, and every op in the region uses that one copy:
    their gradients meet at it, in the lower precision. A copy of our own beside it would round otherwise. Nothing
    public asks for autocast's copy, so a product with nothing is made of it, whose node keeps what it was given.

    Raises:
        RuntimeError: the product has no node, as under torch.func's transforms.
    """
    if not t.is_floating_point() or t.dtype is torch.float64:
        return t
    dtype = torch.get_autocast_dtype(t.device.type)
    if t.dtype is dtype:
        return t
    if not _is_kept(t) or not 1 <= t.dim() <= 5 or not torch.is_grad_enabled():
        return t.to(dtype)
    # Without the hooks of a checkpoint around, which would take what is kept here for an activation.
    with saved_tensors_hooks(_same, _same):
        # Made for each call: one that was made under a transform is of no use after it.
        shape = t.shape[:1] if t.dim() <= 2 else t.shape[1:]
        nothing = torch.empty(0, *shape, dtype=dtype, device=t.device, requires_grad=True)
        product, kept = _PRODUCTS[t.dim() - 1]
        node = product(nothing, t).grad_fn
        if node is None:
            raise RuntimeError("nothing is recorded for autograd here")
        cast: Tensor = getattr(node, kept)
    return cast


@contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Within it autocast is off, and at its end no copy of a parameter is dropped.

    A region of autocast that ends drops all copies, of whatever thread, unless its thread is in another region. A
    backward on a GPU runs in a thread of autograd's, which is in none, and may run in the middle of a forward whose
    copies are still wanted.
    """
    torch.autocast_increment_nesting()
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.autocast_decrement_nesting()


def _is_kept(t: Tensor) -> bool:
    """Whether autocast keeps its copy of a tensor to the end of the region."""
    return (
        t.is_leaf
        and t.requires_grad
        and t.dtype is torch.float32
        and not t._is_view()
        and torch.is_autocast_cache_enabled()
    )


def _same(t: Tensor) -> Tensor:
    return t
