"""Prepared modules: which modules of a stage are prepared, and how one of them takes part in a split backward.

Only instances are patched, and only of the exact types of `_rule`, because a subclass may have another forward,
and a parametrized module another weight. Everything else stays as it is; its gradients are computed in I.

A prepared module decides, once per tape, whether its weight gradients wait for W. The search of the graph before I
may still decide otherwise. It may change from "computed in I" (too little work) to "waits for W", but not back: a
later microbatch's I would then find an earlier one's W outstanding, and would run it first.

`DeferredOp` is the module's node in the graph: I passes through it, and leaves weight and bias for W. The node
carries the tape, instead of looking it up in `backward`, because several ranks may share a thread, and on CUDA
autograd calls `backward` from a thread of its own. If the graph runs in another way than through the tape's I (by a
plain `backward()`, or `torch.autograd.grad` inside the forward), every gradient is computed at once, as by the plain
module. If gradients are to be differentiated again (`create_graph`), the module's own op runs again and computes
them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.nn.modules import module as of_all_modules

from penstock.cost.costs import MERGE_WORK
from penstock.runtime.stage.split_backward.compiled import COMPILED_MERGE_WORK, call_in_graph, tap_for
from penstock.runtime.stage.split_backward.rules import (
    Conv1DRule,
    ConvRule,
    EmbeddingRule,
    LinearRule,
    SplitRule,
    plain,
)
from penstock.runtime.stage.split_backward.stage import (
    COMPILED,
    HOOKED,
    HOOKED_MODULE,
    TOO_SMALL,
    UNKNOWN,
    SplitStage,
)
from penstock.runtime.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    ShardedModule,
    VocabularyEmbedding,
    VocabularyLinear,
)
from penstock.runtime.tensors.dtensor import as_shard, is_sharded, local

if TYPE_CHECKING:
    from penstock.runtime.stage.split_backward.tape import Tape

P = ParamSpec("P")
R = TypeVar("R")
_PRODUCTS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def autocast(t: Tensor) -> Tensor:
    """`t` in the type of the autocast region that is entered, as part of the graph.

    While a region of autocast lasts, torch casts a parameter once, and every op in the region uses that one copy:
    their gradients meet at it, in the lower precision. A copy of our own beside it would round otherwise. Nothing
    public asks for autocast's copy, so a product with nothing is made of it, whose node keeps what it was given.
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
        kept: Tensor
        if t.dim() == 2:
            kept = torch.mm(_nothing(dtype, t.device, t.shape[0]), t).grad_fn._saved_mat2  # type: ignore[union-attr]
        elif t.dim() == 1:
            kept = torch.matmul(_nothing(dtype, t.device, t.shape[0]), t).grad_fn._saved_vec  # type: ignore[union-attr]
        else:
            nothing = _nothing(dtype, t.device, *t.shape[1:])
            kept = _PRODUCTS[t.dim()](nothing, t).grad_fn._saved_weight  # type: ignore[union-attr]
    return kept


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


@lru_cache(maxsize=64)
def _nothing(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """No rows of a shape; autograd keeps what they are multiplied with."""
    return torch.empty(0, *shape, dtype=dtype, device=device, requires_grad=True)


def _same(t: Tensor) -> Tensor:
    return t


Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None]


class ModuleCall(NamedTuple):
    """One call of a prepared module, as its node in the graph keeps it.

    Attributes:
        rule: of the module as it was called.
        weight, bias: the parameters themselves.
        casts: the nodes that cast them.
        turned: whether the weight's transpose has a node of its own.
        waits: whether its weight gradients may wait. What a checkpoint runs again in I is differentiated, if at all,
            by a backward of its own, in I.
    """

    prepared: PreparedModule
    rule: SplitRule
    tape: Tape
    weight: Tensor
    bias: Tensor | None
    casts: tuple[Any, Any] | None
    turned: bool
    waits: bool


class DeferredOp(torch.autograd.Function):
    """A module's op whose weight gradients may wait.

    The inputs are what the plain module's op would get, of a weight its cast and its transpose, so that these are
    part of the graph.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: ModuleCall) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.prepared, ctx.call, ctx.bias = call.prepared, call, bias
        if type(call.weight) is not Parameter:
            weight, bias = _part(call.rule, x, weight), None if bias is None else _part(call.rule, x, bias)
        # Saved, not merely held: a checkpoint can then drop and recompute them, and a change in place is
        # noticed when they are read.
        ctx.save_for_backward(x, weight)
        return call.rule.forward(x, weight.t() if call.turned else weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Grads:
        if g is None:
            return _NOTHING
        x, given = ctx.saved_tensors
        prepared, rule, tape, parameter, bias, casts, turned, waits = ctx.call
        if torch.is_grad_enabled():
            prepared.is_differentiated = True
            gx, gw, gb = _differentiable(ctx, g, x, given)
            return gx, gw, gb, None
        weight = given.t() if turned else given
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gx = rule.input_grad(g, x, weight, bias) if needs_x else None
        if not (needs_weight or needs_bias):
            return gx, None, None, None
        needs = needs_weight, needs_bias
        if waits and tape.defers(prepared):
            tape.hold(prepared, rule, parameter, bias, g, x, weight, casts, needs)
            return gx, None, None, None
        if not tape.records:
            prepared.stage.call_counts.at_once(prepared, x)
        gw, gb = rule.weight_grads(g, x, weight, bias, needs)
        if gw is not None:
            gw = gw.t() if turned else as_shard(gw, parameter)
        return gx, gw, None if gb is None else as_shard(gb, bias), None


_NOTHING: Grads = (None, None, None, None)
# Past what `Function.apply` looks for in Python. Under torch.func's transforms, which it looks for, this one raises.
_apply: Any = super(torch.autograd.Function, DeferredOp).apply


def _part(rule: SplitRule, x: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a sharded parameter, in the type that the op computes in."""
    part = local(p)
    return autocast(part) if rule.autocasts and torch.is_autocast_enabled(x.device.type) else part


def _differentiable(ctx: Any, g: Tensor, x: Tensor, weight: Tensor) -> list[Tensor | None]:
    """The gradients of the inputs, as part of a graph that is exactly that of the plain module's backward."""
    call: ModuleCall = ctx.call
    owner, bias, rule = call.weight, ctx.bias, call.rule
    # Views, as `x` may itself come from the same weight: its own history is no part of this backward.
    weight = owner if is_sharded(owner) else weight
    weight = weight.view_as(weight)
    bias = None if bias is None else bias.view_as(bias)
    wanted = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad) if needed and t is not None]
    with without_autocast(x.device.type):
        if is_sharded(owner):
            dtype = x.dtype if rule.autocasts else owner.dtype
            weight, bias = local(weight).to(dtype), None if bias is None else local(bias).to(dtype)
        elif call.turned:
            weight = weight.t()
        y = rule.op(x, weight, bias)
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=True, allow_unused=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


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
        compiled: whether one of these is compiled by torch.compile.

    Attributes:
        reason: why its weight gradients were last computed in I.
        stages: those that have prepared it, such as of several pipelines of one model.
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
        self.stages = PreparedFor()

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

    def rule_of(self, module: nn.Module) -> SplitRule | None:
        """The rule of the module as it is now: it, or whoever has it, may have set options of it since the last call.
        None where it cannot be split as it is. What waits for W goes by the rule that it was called with.
        """
        if self.rule.fits(module):
            return self.rule
        found = None if self.compiled else _rule(module)
        self.rule = found or self.rule
        return found

    def call(self, module: nn.Module, tape: Tape, x: Tensor) -> Tensor:
        """The module's forward while `tape` records, or while a checkpoint recomputes it during I."""
        rule, own = self.rule_of(module), module._parameters
        if rule is None:
            self.reason = UNKNOWN
            if tape.records:
                self.stage.call_counts.at_once(self, x)
            return plain(module, x)
        weight = own.get("weight")
        bias = own.get("bias", _ABSENT) if rule.biased else None
        if (
            (type(weight) is Parameter or _is_part(weight, module))
            and (bias is None or type(bias) is Parameter or _is_part(bias, module))
            and (type(x) is Tensor or type(x) is Parameter)
            and weight.requires_grad
            and torch.is_grad_enabled()
        ):
            deferred = tape.routes.get(self)
            if deferred is None:
                deferred = self._choose(tape, x, weight)
            elif tape.records:
                self._is_shared = True
            if deferred:
                try:
                    y = self._deferred(rule, tape, x, weight, bias)
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
                self.stage.call_counts.at_once(self, x)
        return rule.plain(module, x)

    def call_compiled(self, module: nn.Module, x: Tensor) -> Tensor:
        """The module's forward as torch.compile traces it: nothing here may depend on the tape."""
        rule, standing = self.rule, self.tap
        if standing is None or not torch.is_grad_enabled() or not rule.fits(module):
            return plain(module, x)
        weight, tap = standing  # the parameter itself would become an input of the compiled graph, used or not
        if weight.dtype not in rule.dtypes or not (self.defer_small or rule.work(x, weight) >= COMPILED_MERGE_WORK):
            return rule.plain(module, x)
        return call_in_graph(rule, x, weight, module._parameters.get("bias") if rule.biased else None, tap)

    def _deferred(self, rule: SplitRule, tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The op, as one whose weight gradients may wait; None where its rule is not for these types."""
        w, b = weight, bias
        if rule.pads:
            x = rule.pad(x)
        casts = None
        if rule.autocasts and torch.is_autocast_enabled(x.device.type):
            x = autocast(x)
            if type(weight) is Parameter:
                w, b = autocast(weight), None if bias is None else autocast(bias)
                casts = None if w is weight else w.grad_fn, None if b is bias or b is None else b.grad_fn
        turned = False
        if type(weight) is Parameter:
            if not rule.takes(x, w, b):
                return None
            turned = rule.turns and self in tape.turned
            if turned:
                w = w.t()
        y: Tensor = _apply(x, w, b, ModuleCall(self, rule, tape, weight, bias, casts, turned, tape.records))
        return y.view_as(y) if rule.gives_view(x, b) else y

    def _choose(self, tape: Tape, x: Tensor, weight: Tensor) -> bool:
        if not (self._worth or tape.defer_small):
            self._worth = self.rule.work(x, local(weight)) >= MERGE_WORK
            self.reason = TOO_SMALL
        # A first microbatch may well differentiate the weight's gradient and use the weight more than once.
        turned = not self._was_called or self._is_shared or self.is_differentiated
        self._was_called = True  # not a count: torch.compile compiles every value
        return tape.choose(self, self._worth or tape.defer_small, turned)

    def new_tap(self, tape: Tape) -> tuple[Tensor, Tensor] | None:
        """What compiled parts are given in one microbatch; None where the weight's gradient is not to wait."""
        weight = self._around[-1]._parameters.get("weight")
        if type(weight) is not Parameter or not weight.requires_grad:
            return None
        return weight.detach(), tap_for(self, tape, weight)

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


def _is_part(p: object, module: nn.Module) -> TypeGuard[Parameter]:
    """Whether it is a DTensor, in a module that computes with this rank's part of it."""
    return isinstance(module, ShardedModule) and is_sharded(p)


_PREPARED = "_penstock_split"


class FoundModule(NamedTuple):
    """A module that can be split, by its path, with those that it lies in; and whether it is compiled."""

    path: str
    around: tuple[nn.Module, ...]
    rule: SplitRule
    compiled: bool


@dataclass(frozen=True)
class SplitReport:
    """What can be split in a stage."""

    deferred: tuple[str, ...]
    """Parameters whose gradients may wait for W."""
    shared: SplitStage = field(repr=False, compare=False)
    """What the stage's prepared modules share, and the parameters whose gradients are computed in I (`others`)."""

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


def prepare(stage: nn.Module) -> SplitReport:
    """Patch the modules of `stage` whose weight gradients can wait for W; doing it again is harmless."""
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    found = list(_modules(stage))
    earlier = [prepared for each in found if (prepared := each.around[-1].__dict__.get(_PREPARED)) is not None]
    shared = earlier[0].stage if earlier else SplitStage()
    deferred: list[str] = []
    for path, around, rule, compiled in found:
        module = around[-1]
        prepared = PreparedModule(rule, shared, path, around, compiled)
        own: PreparedModule = module.__dict__.setdefault(_PREPARED, prepared)  # several stages may have the module
        own.stages.add(stage)
        module.__dict__[_patched(module)] = MethodType(forward, module)
        deferred.extend(prepared.parameters)
        if compiled:
            shared.compiled[own] = None
            shared.compiled_biases.add(f"{path}.bias" if path else "bias")
    waiting = {id(parameters[name]) for name in deferred}
    shared.others.update((name, p) for name, p in stage.named_parameters() if id(p) not in waiting)
    return SplitReport(tuple(deferred), shared)


def unprepare(stage: nn.Module) -> None:
    """Restore every module of `stage` that `prepare` patched, unless another stage has prepared it too."""
    for module in stage.modules():
        prepared: PreparedModule | None = module.__dict__.get(_PREPARED)
        if prepared is None or not _is_ours(module):
            continue
        prepared.stages.discard(stage)
        if not prepared.stages:
            prepared.stage.release()
            del module.__dict__[_PREPARED], module.__dict__[_patched(module)]


def forward(self: nn.Module, input: Tensor) -> Tensor:
    """A prepared module's forward, or `on_shard`; named so that a pickled module finds its plain one."""
    prepared: PreparedModule = self.__dict__[_PREPARED]
    if torch.compiler.is_compiling():
        return prepared.call_compiled(self, input)
    tape = prepared.stage.recomputing or recording.get()
    if tape is not None:
        return prepared.call(self, tape, input)
    rule = prepared.rule_of(self)
    return plain(self, input) if rule is None else rule.plain(self, input)


def _rule(module: nn.Module) -> SplitRule | None:
    """The rule of a module as it is now; None where it has none, or its class has been given another forward."""
    rule = _rule_of_kind(module)
    return rule if rule is not None and rule.fits(module) else None


def _rule_of_kind(module: nn.Module) -> SplitRule | None:
    method = _patched(module)
    own = module.__dict__.get(method)
    if own is not None and getattr(own, "__func__", None) not in (forward, getattr(type(module), method)):
        return None  # somebody else has patched this instance
    kind = type(module)
    if kind in (nn.Linear, ColumnLinear, VocabularyLinear):
        return LinearRule()
    if Conv1DRule.is_for(module):
        return Conv1DRule()
    if kind is RowLinear:
        return LinearRule(biased=False)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return ConvRule(module) if ConvRule.knows(module) else None
    if isinstance(module, nn.Embedding) and kind in (nn.Embedding, VocabularyEmbedding):
        return EmbeddingRule(module) if EmbeddingRule.knows(module) else None
    return None


def _patched(module: nn.Module) -> str:
    """The method that is replaced: all of a module, or what it does between two words to other ranks."""
    return "on_shard" if isinstance(module, ShardedModule) else "forward"


def _is_ours(module: nn.Module) -> bool:
    return getattr(module.__dict__.get(_patched(module)), "__func__", None) is forward


def _modules(
    module: nn.Module, path: str = "", around: tuple[nn.Module, ...] = (), compiled: bool = False
) -> Iterator[FoundModule]:
    """Of the module and those below it what can be split, without what torch's data parallelism has taken over."""
    if _reduces(module):
        return
    around = (*around, module)
    compiled = compiled or is_compiled(module)
    if (rule := _rule(module)) is not None:
        yield FoundModule(path, around, rule, compiled)
    for name, child in module.named_children():
        yield from _modules(child, f"{path}.{name}" if path else name, around, compiled)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has taken the module over."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or type(module).__name__ == "OptimizedModule"


def _reduces(module: nn.Module) -> bool:
    """Whether a module takes gradients from autograd itself, to add them up over processes."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel)
