"""A prepared module inside a part of a stage that the user compiled with `torch.compile`.

The compiler makes one graph of the part's forward and one of its backward, and none of our Python runs between their
ops. So the graphs are given another backward to compile: the weight itself takes no part in it. In its place is a
*tap*, a few numbers that autograd considers differentiable. Around the graphs everything is eager as usual.

             the tap's node           graph of F                       graph of I
    weight --> tap --------------> y = x @ weight.T + bias        gx, gb as the compiler makes them
                                   (weight without gradient)      hold(g, x, tap): copies of g and x are kept
           <--------------- which calls of `hold` were for it <---------------------
           keeps (g, x) for W, or computes the gradient at once and passes it on

The tap's node decides as `_DeferredOp` does for an eager module. It is a node of the stage's own graph, so the search
before I finds it. If the graph runs in another way than through the tape's I, the weight's gradient is computed at
once, and hooks see it. The bias is left to the graph: its gradient is a sum, and the compiler writes its own sum, in
an order of its own. A weight's gradient is a matrix product, which the same library computes in the graph and in W.

`g` and `x` are copied, because the compiler may reuse their memory within the graph.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from penstock.runtime.split_backward.stage import HeldCall, SplitError

if TYPE_CHECKING:
    from penstock.runtime.split_backward.prepared import PreparedModule
    from penstock.runtime.split_backward.rules import SplitRule
    from penstock.runtime.split_backward.tape import Tape

# A weight gradient of fewer multiply-adds stays in the compiled graph. Measured on one core of an AMD EPYC: a call
# that waits takes about 60 us more besides its copies; 2**24 multiply-adds of a float32 weight gradient take 400 us.
COMPILED_MERGE_WORK = 1 << 24

_MOST_CALLS = 256
"""Calls of a module in one microbatch. A tap has a number for each: its gradient says which calls it is of, and how
often, as a compiler that finds two calls alike makes one of them and adds what that gives twice."""


class WeightTap:
    """What stands for one module's weight in the compiled graphs of one microbatch.

    It lives as long as the node in the graph.

    Attributes:
        calls: of each call that a compiled backward made, the output's gradient and the input.
    """

    def __init__(self, prepared: PreparedModule, tape: Tape, weight: Tensor) -> None:
        self.prepared, self.tape, self.weight = prepared, weakref.ref(tape), weight
        self.calls: list[tuple[Tensor, Tensor] | None] = []
        self.number = next(_NUMBERS)
        _TAPS[self.number] = self

    def take(self, token: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The calls that a gradient of the tap is of, in the order in which they were made."""
        found = []
        for place in token.nonzero().flatten().tolist():
            call = self.calls[place] if place < len(self.calls) else None
            if call is None:
                raise self._lost()
            self.calls[place] = None
            found += [call] * int(token[place])
        return found

    def _lost(self) -> SplitError:
        name = self.prepared.name or "the stage itself"
        return SplitError(
            f"the compiled backward around {name!r} ran without calling back, so its weight gradient is lost: a "
            "graph that is replayed (CUDA graphs, mode='reduce-overhead') cannot be split; compile with another "
            "mode, or use a schedule without W"
        )


def tap_for(prepared: PreparedModule, tape: Tape, weight: Tensor) -> Tensor:
    """What the compiled forward is given of a module in one microbatch."""
    tap: Tensor = _TapNode.apply(_NO_INPUT, weight, WeightTap(prepared, tape, weight))
    return tap


_NO_INPUT = torch.empty(0)
_ZEROS = torch.zeros(_MOST_CALLS, dtype=torch.float64)
_NUMBERS = count(1)
_TAPS: weakref.WeakValueDictionary[int, WeightTap] = weakref.WeakValueDictionary()


def call_in_graph(rule: SplitRule, x: Tensor, weight: Tensor, bias: Tensor | None, tap: Tensor) -> Tensor:
    """The module's op as the compiler is to see it; the weight has no gradient here, the tap has."""
    if rule.pads:
        x = rule.pad(x)
    if rule.autocasts and torch.is_autocast_enabled(x.device.type) and x.dtype is torch.float32:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    y: Tensor = _Mark.apply(rule.op(x, weight, bias), x.detach(), tap)
    return y


class _Mark(torch.autograd.Function):
    """Changes nothing; its backward has the gradient of a module's output.

    What it gives is a copy and no view: a stage's output must not depend on whether its backward is split, or a
    forward that is run again would give another one. A compiler that writes code of its own leaves the copy out.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, tap: Tensor) -> Tensor:
        ctx.save_for_backward(x, tap)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, Tensor]:
        x, tap = ctx.saved_tensors
        return g, None, torch.ops.penstock.hold(g, x, tap)


class _TapNode(torch.autograd.Function):
    """Stands in the stage's graph between a weight and the compiled graphs that use it.

    Its first input is empty, as a node's first input is what the search before I follows.
    """

    @staticmethod
    def forward(ctx: Any, no_input: Tensor, weight: Tensor, tap: WeightTap) -> Tensor:
        ctx.prepared, ctx.tap, ctx.ran = tap.prepared, tap, False
        return _ZEROS + tap.number

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[None, Tensor | None, None]:
        tap: WeightTap = ctx.tap
        prepared, tape, weight = tap.prepared, tap.tape(), tap.weight
        if torch.is_grad_enabled():
            raise SplitError(
                f"gradients through {prepared.name!r} are to be differentiated again (create_graph), and it lies in "
                "a compiled part of a stage whose backward is split; leave this part uncompiled, or use a schedule "
                "without W"
            )
        calls = tap.take(token)
        # A second run, of a checkpoint's own backward say, is added by autograd as one of its own.
        first, ctx.ran = not ctx.ran, True
        plain, rule, needs = weight.detach(), prepared.rule, (True, False)
        if first and tape is not None and tape.defers(prepared):
            for g, x in calls:
                held = HeldCall(rule, weight, None, (tap, None), g, x, _like(plain, g), needs, g._version, x._version)
                tape.hold(prepared, held)
            return None, None, None
        total: Tensor | None = None
        for g, x in calls:
            prepared.stage.at_once[prepared] += rule.work(x, plain)
            gw, _ = rule.weight_grads(g, x, _like(plain, g), None, needs)
            total = gw if total is None or gw is None else total + gw
        return None, None if total is None else total.to(weight.dtype), None


def _like(weight: Tensor, g: Tensor) -> Tensor:
    return weight if weight.dtype is g.dtype else weight.to(g.dtype)


def _hold(g: Tensor, x: Tensor, tap: Tensor) -> Tensor:
    here = _TAPS.get(int(tap[0]))
    if here is None:
        raise SplitError("a compiled backward ran again after its microbatch's graph was gone")
    place = len(here.calls)
    if place >= _MOST_CALLS:
        raise SplitError(
            f"{here.prepared.name!r} is called more than {_MOST_CALLS} times in one microbatch by a compiled part of "
            "a stage whose backward is split; leave this part uncompiled, or use a schedule without W"
        )
    here.calls.append((g.clone(), x.clone()))
    token = torch.zeros_like(_ZEROS)
    token[place] = 1
    return token


_OPS = Library("penstock", "FRAGMENT")
_OPS.define("hold(Tensor g, Tensor x, Tensor tap) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
_OPS.impl("hold", _hold, "CompositeExplicitAutograd")


@register_fake("penstock::hold")
def _held_shape(g: Tensor, x: Tensor, tap: Tensor) -> Tensor:
    return torch.empty((_MOST_CALLS,), dtype=torch.float64)
