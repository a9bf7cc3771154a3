"""Modules whose weight gradients wait for W: which are prepared, and what a prepared module does when it is called.

    prepare(stage)     module.forward is replaced in each instance of a kind that has a rule (`rule_for`)
    F                  the tape records:  the module runs as a node of its own, whose weight gradients may wait, or
                                          as the plain module, where they would not be worth the delay
    otherwise          the module runs as the plain one
    I                  the node passes on the input's gradient and gives the tape what W needs; where it may not
                       wait, it passes on all gradients, as the plain module's nodes do
    unprepare(stage)   puts the modules back

Only instances are patched, and only those of the exact types of `rule_for`: a subclass may have another forward, and
a parametrized module another weight. Everything else stays as it is, and its gradients are computed in I.

The node carries the tape, instead of looking it up in `backward`, because several ranks may share a thread, and on
CUDA autograd calls `backward` from a thread of its own. If the graph runs in another way than through the tape's I
(by a plain `backward()`, or `torch.autograd.grad` inside the forward), every gradient is computed at once. If
gradients are to be differentiated again (`create_graph`), the module's own op runs again and autograd computes them.

A prepared module decides once for each tape whether its weight gradients may wait. The search of the graph before I
may still decide otherwise. A module may change from "computed in I" (too little work) to "waits for W", but not back:
a later microbatch's I would then find an earlier one's W outstanding, and would run it first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules import module as of_all_modules

from penstock.cost.costs import MERGE_WORK
from penstock.runtime.split_backward.autocast import autocast, without_autocast
from penstock.runtime.split_backward.compiled import COMPILED_MERGE_WORK, call_in_graph, tap_for
from penstock.runtime.split_backward.rules import SplitRule, rule_for
from penstock.runtime.split_backward.stage import (
    COMPILED,
    HOOKED,
    HOOKED_MODULE,
    TOO_SMALL,
    UNKNOWN,
    HeldCall,
    SplitStage,
)
from penstock.runtime.tensor_parallel import ShardedModule
from penstock.runtime.tensors.dtensor import as_shard, is_sharded, local

if TYPE_CHECKING:
    from penstock.runtime.split_backward.tape import Tape

P = ParamSpec("P")
R = TypeVar("R")

_ABSENT = object()

recording: ContextVar[Tape | None] = ContextVar("penstock_split_recording", default=None)


def unrecorded(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function that runs prepared modules for something else than the microbatch whose tape records."""
    token = recording.set(None)
    try:
        return function(*args, **kwargs)
    finally:
        recording.reset(token)


class PreparedFor(weakref.WeakSet[nn.Module]):
    """The stages that have prepared a module. One that is dropped without being closed leaves it by itself."""

    def __reduce__(self) -> tuple[type[PreparedFor], tuple[()]]:
        return PreparedFor, ()  # no stage has prepared a copy of the module, or a pickled one


class PreparedModule:
    """A prepared module's rule and its standing decision.

    Args:
        name: of the module in its stage.
        around: the module and those it lies in.
        is_compiled: whether one of these is compiled by torch.compile.

    Attributes:
        module: the prepared one.
        reason: why its weight gradients were last computed in I.
        stages: those that have prepared it, such as of several pipelines of one model.
        tap: of a module in a compiled part, while a tape records: the weight, cut off from autograd, and what stands
            for it in the compiled graphs. None where nothing is to wait.
        defer_small: whether all that can wait in the compiled part does.
    """

    def __init__(
        self, rule: SplitRule, stage: SplitStage, name: str, around: tuple[nn.Module, ...], is_compiled: bool
    ) -> None:
        self.rule, self.stage, self.name, self.is_compiled = rule, stage, name, is_compiled
        self.reason = COMPILED if is_compiled else TOO_SMALL
        self.stages = PreparedFor()
        self.tap: tuple[Tensor, Tensor] | None = None
        self.defer_small = False
        self.module, self._around = around[-1], around
        self._has_rule = True
        self._is_worth_it = False
        """Whether an input large enough to be worth deferring was seen."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Those whose gradients may wait, by their names in the stage."""
        own = self.module._parameters
        prefix = f"{self.name}." if self.name else ""
        names = ("weight", "bias") if self.rule.biased and not self.is_compiled else ("weight",)
        return {prefix + name: p for name in names if (p := own.get(name)) is not None}

    def follow_options(self) -> None:
        """Makes the rule anew, with the options that the module has now. One that no rule knows is plain."""
        rule = rule_for(self.module)
        self._has_rule = rule is not None
        if rule is not None and vars(rule) != vars(self.rule):  # another object might be compiled anew
            self.rule = rule

    def call(self, module: nn.Module, tape: Tape, x: Tensor) -> Tensor:
        """The module's forward while `tape` records, or while a checkpoint recomputes it during I."""
        rule = self.rule
        own = module._parameters
        weight: Any = own.get("weight")
        bias: Any = own.get("bias", _ABSENT) if rule.biased else None
        if not torch.is_grad_enabled():
            tape.note_without_graph(own.values())
        elif (
            _is_own(weight, module)
            and (bias is None or _is_own(bias, module))
            and type(x) in (Tensor, Parameter)
            and weight.requires_grad
        ):
            part = local(weight)
            if not self._has_rule:
                self.reason = UNKNOWN
            elif self._may_wait(tape, x, part):
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
                self.stage.at_once[self] += rule.work(x, part)
        return rule.plain(module, x)

    def _may_wait(self, tape: Tape, x: Tensor, weight: Tensor) -> bool:
        """Whether the weight gradients of a microbatch may wait, as its first call of the module decides."""
        known = tape.routes.get(self)
        if known is not None:
            return known
        if not (self._is_worth_it or tape.defer_small):
            self._is_worth_it = self.rule.work(x, weight) >= MERGE_WORK
            self.reason = TOO_SMALL
        return tape.choose(self, self._is_worth_it or tape.defer_small)

    def _deferred(self, tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The op, as one whose weight gradients may wait; None where its rule is not for these types."""
        rule, w, b = self.rule, weight, bias
        casts: tuple[Any, Any] = (None, None)
        is_turned = rule.turns and type(weight) is Parameter
        if rule.pads:
            x = rule.pad(x)
        is_cast = rule.autocasts and torch.is_autocast_enabled(x.device.type)
        if is_cast:
            x = autocast(x)
        if type(weight) is Parameter:
            if is_cast:
                w, b = autocast(weight), None if bias is None else autocast(bias)
                casts = None if w is weight else w.grad_fn, None if b is bias or b is None else b.grad_fn
            if not rule.takes(x, w, b):
                return None
            if is_turned:
                w = w.t()
        y: Tensor = _run_deferred(x, w, b, ModuleCall(self, tape, weight, bias, casts, is_turned))
        return y.view_as(y) if rule.gives_view(x, b) else y

    def new_tap(self, tape: Tape) -> tuple[Tensor, Tensor] | None:
        """What compiled parts are given in one microbatch; None where the weight's gradient is not to wait."""
        weight = self.module._parameters.get("weight")
        if type(weight) is not Parameter or not weight.requires_grad:
            return None
        return weight.detach(), tap_for(self, tape, weight)

    def call_compiled(self, module: nn.Module, x: Tensor) -> Tensor:
        """The module's forward as torch.compile traces it: nothing here may depend on the tape."""
        rule, standing = self.rule, self.tap
        if standing is None or not self._has_rule or not torch.is_grad_enabled():
            return rule.plain(module, x)
        weight, tap = standing  # the parameter itself would become an input of the compiled graph, used or not
        if weight.dtype not in rule.dtypes or not (self.defer_small or rule.work(x, weight) >= COMPILED_MERGE_WORK):
            return rule.plain(module, x)
        return call_in_graph(rule, x, weight, module._parameters.get("bias") if rule.biased else None, tap)

    def is_awaited(self, parameters: Collection[int]) -> bool:
        """Whether somebody is to see a gradient of its watched parameters, by id, at the moment autograd has it."""
        if self.stage.hooked(parameters):
            self.reason = HOOKED
            return True
        hooked = any(module._backward_hooks or module._backward_pre_hooks for module in self._around)
        if hooked or of_all_modules._global_backward_hooks or of_all_modules._global_backward_pre_hooks:
            self.reason = HOOKED_MODULE
            return True
        return False


def _is_own(p: Any, module: nn.Module) -> bool:
    """Whether it is a parameter; a DTensor only in a module that computes with this rank's part of it."""
    return type(p) is Parameter or (isinstance(module, ShardedModule) and is_sharded(p))


# -- the node ----------------------------------------------------------------------------------------------------


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


Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None]


class _DeferredOp(torch.autograd.Function):
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
            prepared.stage.at_once[prepared] += rule.work(x, weight)
        gw, gb = rule.weight_grads(g, x, weight, bias, needs)
        if gw is not None:
            gw = gw.t() if is_turned else as_shard(gw, parameter)
        return gx, gw, None if gb is None else as_shard(gb, bias), None


# Past what `Function.apply` looks for in Python. Under torch.func's transforms, which it looks for, this one raises.
_run_deferred: Any = super(torch.autograd.Function, _DeferredOp).apply


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


# -- stages ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitReport:
    """What can be split in a stage.

    Attributes:
        deferred: the parameters whose gradients may wait for W.
        shared: what the stage's prepared modules share, and the parameters whose gradients are computed in I.
    """

    deferred: tuple[str, ...]
    shared: SplitStage = field(repr=False, compare=False)

    @property
    def can_split(self) -> bool:
        """False: I runs the full backward and W does nothing."""
        return bool(self.deferred)

    @property
    def reason(self) -> str:
        """Why not, in a sentence; empty if it can."""
        if self.can_split:
            return ""
        return (
            "the stage has no linear, convolution or embedding module that can be split, "
            "so I runs the full backward and W does nothing"
        )


_PREPARED = "_penstock_split"


def prepare(stage: nn.Module) -> SplitReport:
    """Patches the modules of `stage` whose weight gradients can wait for W; doing it again is harmless."""
    found = list(_modules(stage, SplitStage()))
    earlier = [known for each in found if (known := each.module.__dict__.get(_PREPARED)) is not None]
    shared = (earlier or found)[0].stage if found else SplitStage()
    deferred: dict[str, Tensor] = {}
    for each in found:
        each.stage = shared
        own: PreparedModule = each.module.__dict__.setdefault(_PREPARED, each)  # several stages may have it
        own.stages.add(stage)
        each.module.__dict__[_patched(each.module)] = MethodType(forward, each.module)
        deferred |= each.parameters
        if own.rule.has_options:
            shared.with_options[own] = None
        if each.is_compiled:
            shared.compiled[own] = None
            shared.compiled_biases.add(f"{each.name}.bias" if each.name else "bias")
    waiting = set(map(id, deferred.values()))
    parameters = dict(stage.named_parameters())
    shared.parameters |= parameters
    shared.others |= {name: p for name, p in parameters.items() if id(p) not in waiting}
    return SplitReport(tuple(deferred), shared)


def unprepare(stage: nn.Module) -> None:
    """Puts back every module of `stage` that `prepare` patched, unless another stage has prepared it too."""
    for module in stage.modules():
        prepared: PreparedModule | None = module.__dict__.get(_PREPARED)
        if prepared is None or getattr(vars(module).get(_patched(module)), "__func__", None) is not forward:
            continue
        prepared.stages.discard(stage)
        if not prepared.stages:
            prepared.stage.with_options.pop(prepared, None)
            prepared.stage.release()
            del module.__dict__[_PREPARED], module.__dict__[_patched(module)]


def forward(self: nn.Module, input: Tensor) -> Tensor:
    """A prepared module's forward, or `on_shard`; named so that a pickled module finds its plain one."""
    prepared: PreparedModule = self.__dict__[_PREPARED]
    if torch.compiler.is_compiling():
        return prepared.call_compiled(self, input)
    tape = prepared.stage.recomputing or recording.get()
    return prepared.rule.plain(self, input) if tape is None else prepared.call(self, tape, input)


def _modules(
    module: nn.Module, stage: SplitStage, path: str = "", around: tuple[nn.Module, ...] = (), compiled: bool = False
) -> Iterator[PreparedModule]:
    """The module and those below it, as far as they can be split."""
    around = (*around, module)
    compiled = compiled or is_compiled(module)
    if _is_plain_or_ours(module) and (rule := rule_for(module)) is not None:
        yield PreparedModule(rule, stage, path, around, compiled)
    for name, child in module.named_children():
        yield from _modules(child, stage, f"{path}.{name}" if path else name, around, compiled)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has taken the module over."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or type(module).__name__ == "OptimizedModule"


def _patched(module: nn.Module) -> str:
    """The method that is replaced: all of a module, or what it does between two words to other ranks."""
    return "on_shard" if isinstance(module, ShardedModule) else "forward"


def _is_plain_or_ours(module: nn.Module) -> bool:
    """Whether nobody else has replaced the method in this instance."""
    method = _patched(module)
    own = module.__dict__.get(method)
    return own is None or getattr(own, "__func__", None) in (forward, getattr(type(module), method))
