"""One prepared module: how its calls reach the tape, and what is remembered of it from call to call.

Whether a module's weight gradients wait for W is decided here, once a tape. While microbatches pass, the
decision goes only from "computed in I" to "waits for W", not back: else a later microbatch's I would add to
`.grad` before an earlier one's W, and the sum would round differently.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from penstock.runtime.sharded import OnShard
from penstock.runtime.shards import is_sharded, local
from penstock.runtime.split.defer import Deferred
from penstock.runtime.split.rule import Rule

if TYPE_CHECKING:
    from penstock.runtime.split.tape import Tape

# A weight gradient of fewer multiply-adds is computed in I: waiting for W would cost about what it moves.
# Measured on one core of an AMD EPYC: a deferred linear takes 8 us more in F, and 6 us more in I and W together;
# 2**20 multiply-adds of a float32 weight gradient take 23 us.
MERGE_WORK = 1 << 20

_ABSENT = object()

recording: ContextVar[Tape | None] = ContextVar("penstock_split_recording", default=None)


class Stage:
    """What the prepared modules of one stage share."""

    def __init__(self) -> None:
        # The tape whose I is running. A checkpoint inside the stage then calls the modules again: on CUDA from
        # autograd's own thread, where no context variable of ours is seen.
        self.recomputing: Tape | None = None
        # The parameters of no slot: their gradients are computed in I.
        self.others: list[nn.Parameter] = []


class Slot:
    """A prepared module's rule and its standing decision."""

    def __init__(self, rule: Rule, stage: Stage) -> None:
        self.rule = rule
        self.stage = stage
        # An input large enough to be worth deferring was seen.
        self.worth = False
        # The graph was searched for other uses of the parameters.
        self.checked = False
        # A parameter is also used in a way that cannot be deferred: all of it is computed in I.
        self.at_once = False

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
                deferred = tape.choose(self, self._is_deferrable(x, weight, bias, tape.defer_small))
            if deferred:
                try:
                    if rule.pads:
                        x = rule.pad(x)
                    if rule.autocasts and torch.is_autocast_enabled(x.device.type):
                        x = tape.autocast(x)
                    y: Tensor = Deferred.apply(x, weight, bias, self, tape)
                    return y
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:
                    # Under torch.func's transforms and forward-mode AD no plain custom function runs: the
                    # module itself does. Where the input is at fault, it raises the error the user expects.
                    pass
        return rule.plain(module, x)

    def _is_deferrable(self, x: Tensor, weight: Tensor, bias: Tensor | None, small: bool) -> bool:
        if self.at_once or hooked(weight) or (bias is not None and hooked(bias)):
            return False
        if small:
            return True
        self.worth = self.worth or self.rule.work(x, local(weight).detach()) >= MERGE_WORK
        return self.worth


def _is_known(p: object, module: nn.Module) -> TypeGuard[nn.Parameter]:
    """True for a plain parameter, and for a DTensor in a module that computes with this rank's part of it."""
    return type(p) is nn.Parameter or (isinstance(module, OnShard) and is_sharded(p))


def hooked(p: Tensor) -> bool:
    """True if somebody is to see the parameter's gradient at the moment autograd has it."""
    return bool(p._backward_hooks) or bool(p._post_accumulate_grad_hooks)
