"""One prepared module: how its calls reach the tape, and what is remembered of it from call to call.

Whether a module's weight gradients wait for W is decided here, once a tape; the graph, searched before I, may decide
otherwise. From "computed in I" for too little work it goes only to "waits for W", and not back: else a later
microbatch's I would find an earlier one's W to come, and run it first.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from penstock.runtime.stage.split_backward.compiled import COMPILED_MERGE_WORK, call_in_graph, tap_for
from penstock.runtime.stage.split_backward.defer import Deferred, autocast
from penstock.runtime.stage.split_backward.rules import SplitRule
from penstock.runtime.stage.split_backward.share import COMPILED, HOOKED, HOOKED_MODULE, TOO_SMALL, UNKNOWN
from penstock.runtime.stage.split_backward.stage import SplitStage
from penstock.runtime.tensor_parallel import OnShard
from penstock.runtime.tensors.dtensor import is_sharded, local

if TYPE_CHECKING:
    from penstock.runtime.stage.split_backward.tape import Tape

# A weight gradient of fewer multiply-adds is computed in I: waiting for W would cost about what it moves.
# Measured on one core of an AMD EPYC: a deferred linear takes 8 us more in F, and 6 us more in I and W together;
# 2**20 multiply-adds of a float32 weight gradient take 23 us.
MERGE_WORK = 1 << 20

_ABSENT = object()

recording: ContextVar[Tape | None] = ContextVar("penstock_split_recording", default=None)


class Slot:
    """A prepared module's rule and its standing decision.

    Args:
        name: of the module in its stage.
        around: the module and those it lies in.
        compiled: whether one of these is compiled by torch.compile.

    Attributes:
        reason: why its weight gradients were last computed in I.
    """

    def __init__(
        self, rule: SplitRule, stage: SplitStage, name: str, around: tuple[nn.Module, ...], compiled: bool = False
    ) -> None:
        self.rule, self.stage, self.name, self.compiled = rule, stage, name, compiled
        self.reason = COMPILED if compiled else TOO_SMALL
        self._around = around
        # An input large enough to be worth deferring was seen.
        self._worth = False
        # The nodes that transpose the weight matter where gradients are differentiated and the weight has other uses.
        # Until a microbatch was seen whole, it may be so.
        self.is_differentiated = False
        self._is_shared = False
        self._was_called = False
        self.tap: tuple[Tensor, Tensor] | None = None
        """For compiled parts: the weight, cut off from autograd, and its tap; None where nothing is to wait."""
        self.defer_small = False
        """Whether all that can wait there do."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Those that the rule is for, by their names in the stage."""
        own = self._around[-1]._parameters
        prefix = f"{self.name}." if self.name else ""
        names = ("weight", "bias") if self.rule.biased and not self.compiled else ("weight",)
        return {prefix + name: p for name in names if (p := own.get(name)) is not None}

    @property
    def weight(self) -> Tensor:
        """As it is now; of a sharded one this rank's part."""
        return local(self._around[-1]._parameters["weight"]).detach()

    def call(self, module: nn.Module, tape: Tape, x: Tensor) -> Tensor:
        """The module's forward while `tape` records, or while a checkpoint recomputes it during I."""
        rule, own = self.rule, module._parameters
        weight = own.get("weight")
        bias = own.get("bias", _ABSENT) if rule.biased else None
        if (
            _is_known(weight, module)
            and (bias is None or _is_known(bias, module))
            and (type(x) is Tensor or type(x) is nn.Parameter)
            and weight.requires_grad
            and torch.is_grad_enabled()
        ):
            deferred = tape.routes.get(self)
            if deferred is None:
                deferred = self._choose(tape, x, weight, bias)
            elif tape.records:
                self._is_shared = True
            if deferred:
                try:
                    y = self._deferred(tape, x, weight, bias)
                    if y is not None:
                        return y
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:
                    # Under torch.func's transforms and forward-mode AD no plain custom function runs: the
                    # module itself does. Where the input is at fault, it raises the error the user expects.
                    pass
                self.reason = UNKNOWN
            if tape.records:
                self.stage.tally.at_once(self, x)
        return rule.plain(module, x)

    def call_compiled(self, module: nn.Module, x: Tensor) -> Tensor:
        """The module's forward as torch.compile traces it: nothing here may depend on the tape."""
        rule, standing = self.rule, self.tap
        if standing is None or not torch.is_grad_enabled():
            return rule.plain(module, x)
        weight, tap = standing  # the parameter itself would become an input of the compiled graph, used or not
        if weight.dtype not in rule.dtypes or not (self.defer_small or rule.work(x, weight) >= COMPILED_MERGE_WORK):
            return rule.plain(module, x)
        return call_in_graph(rule, x, weight, module._parameters.get("bias") if rule.biased else None, tap)

    def _deferred(self, tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The op, as one whose weight gradients may wait; None where its rule is not for these types."""
        rule, w, b = self.rule, weight, bias
        if rule.pads:
            x = rule.pad(x)
        casts = None
        if rule.autocasts and torch.is_autocast_enabled(x.device.type):
            x = autocast(x)
            if type(weight) is nn.Parameter:
                w, b = autocast(weight), None if bias is None else autocast(bias)
                casts = None if w is weight else w.grad_fn, None if b is bias or b is None else b.grad_fn
        turned = False
        if type(weight) is nn.Parameter:
            if not rule.takes(x, w, b):
                return None
            turned = rule.turns and self in tape.turned
            if turned:
                w = w.t()
        y: Tensor = Deferred.apply(x, w, b, self, tape, (weight, bias), casts, turned)
        return y.view_as(y) if rule.gives_view(x, b) else y

    def _choose(self, tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        # A first microbatch may well differentiate the weight's gradient and use the weight more than once.
        turned = not self._was_called or self._is_shared or self.is_differentiated
        self._was_called = True  # not a count: torch.compile compiles every value
        return tape.choose(self, self._is_deferrable(x, weight, bias, tape.defer_small), turned)

    def new_tap(self, tape: Tape) -> tuple[Tensor, Tensor] | None:
        """What compiled parts are given in one microbatch; None where the weight's gradient is not to wait."""
        weight = self._around[-1]._parameters.get("weight")
        if type(weight) is not nn.Parameter or not weight.requires_grad or self._is_awaited(weight, None):
            return None
        return weight.detach(), tap_for(self, tape, weight)

    def _is_awaited(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether somebody is to see a gradient at the moment autograd has it."""
        if self.stage.is_hooked(weight) or (bias is not None and self.stage.is_hooked(bias)):
            self.reason = HOOKED
            return True
        for module in self._around:
            if module._backward_hooks or module._backward_pre_hooks:
                self.reason = HOOKED_MODULE
                return True
        return False

    def _is_deferrable(self, x: Tensor, weight: Tensor, bias: Tensor | None, small: bool) -> bool:
        if self._is_awaited(weight, bias):
            return False
        if small:
            return True
        if not self._worth:
            self._worth = self.rule.work(x, local(weight).detach()) >= MERGE_WORK
            self.reason = TOO_SMALL
        return self._worth


def _is_known(p: object, module: nn.Module) -> TypeGuard[nn.Parameter]:
    """True for a plain parameter, and for a DTensor in a module that computes with this rank's part of it."""
    return type(p) is nn.Parameter or (isinstance(module, OnShard) and is_sharded(p))
