"""Prepares a stage for split backward, and restores it.

Only instances are patched, and only of the exact types below, because a subclass may have another forward, and a
parametrized module another weight. Everything else stays as it is; its gradients are computed in I.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.runtime.stage.split_backward.prepared_module import PreparedModule, recording
from penstock.runtime.stage.split_backward.rules import Conv1DRule, ConvRule, EmbeddingRule, LinearRule, SplitRule
from penstock.runtime.stage.split_backward.stage import SplitStage
from penstock.runtime.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    ShardedModule,
    VocabularyEmbedding,
    VocabularyLinear,
)

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

    can_split: bool
    """False: I runs the full backward and W does nothing."""
    reason: str
    """Why not, in a sentence; empty if it can."""
    deferred: tuple[str, ...]
    """Parameters whose gradients may wait for W."""
    at_once: tuple[str, ...]
    """Parameters whose gradients are computed in I."""
    shared: SplitStage = field(repr=False, compare=False)
    """What the stage's prepared modules share."""


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
        own = module.__dict__.setdefault(_PREPARED, prepared)  # several stages may have the module
        module.__dict__[_patched(module)] = MethodType(forward, module)
        deferred.extend(prepared.parameters)
        if compiled:
            shared.compiled[own] = None
            shared.compiled_biases.add(f"{path}.bias" if path else "bias")
    waiting = {id(parameters[name]) for name in deferred}
    shared.others.update((name, p) for name, p in stage.named_parameters() if id(p) not in waiting)
    if deferred:
        reason = ""
    else:
        reason = (
            "the stage has no linear, convolution or embedding module that can be split, "
            "so I runs the full backward and W does nothing"
        )
    at_once = tuple(name for name, p in parameters.items() if id(p) not in waiting)
    return SplitReport(bool(deferred), reason, tuple(deferred), at_once, shared)


def unprepare(stage: nn.Module) -> None:
    """Restore every module of `stage` that `prepare` patched."""
    for module in stage.modules():
        if _PREPARED in module.__dict__ and _is_ours(module):
            module.__dict__.pop(_PREPARED).stage.release()
            del module.__dict__[_patched(module)]


def forward(self: nn.Module, input: Tensor) -> Tensor:
    """A prepared module's forward, or `on_shard`; named so that a pickled module finds its plain one."""
    prepared: PreparedModule = self.__dict__[_PREPARED]
    if torch.compiler.is_compiling():
        return prepared.call_compiled(self, input)
    tape = prepared.stage.recomputing or recording.get()
    if tape is not None:
        return prepared.call(self, tape, input)
    return prepared.rule.plain(self, input)


def _rule(module: nn.Module) -> SplitRule | None:
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
