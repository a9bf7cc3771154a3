"""Which parameters a process answers for, under which names, and which of them are tied to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.parameters.tied import Tie, find_ties, merged, require_one_name
from penstock.runtime.stage.stage import Stage


def sees_gradients(parameter: Tensor, *, when_added: bool = True) -> bool:
    """Whether a hook is to see the gradients of a parameter: one on itself, or on its node in autograd's graph.

    Args:
        when_added: count those that are called when a gradient was added, too.
    """
    if parameter._backward_hooks or (when_added and parameter._post_accumulate_grad_hooks):
        return True
    if not parameter.requires_grad:
        return False
    node = get_gradient_edge(parameter).node
    handles = node.register_hook(_nothing), node.register_prehook(_nothing)
    found = any(len(handle.hooks_dict_ref() or ()) > 1 for handle in handles)
    for handle in handles:
        handle.remove()
    return found


def _nothing(*_: Any) -> None:
    """Sees a gradient and lets it be."""


def ties_of(
    sources: Sequence[Any], stages: Mapping[int, Stage], tied: Sequence[Sequence[str]], peers: Peers
) -> list[Tie]:
    """Parameters that several stages share: the same object in the model given, or named together in `tied`.

    The same on every rank: found on the whole model, before anything takes the place of a parameter.

    Args:
        stages: those built in this process.

    Raises:
        RuntimeFailure: a name in `tied` that is in no stage, or two of one stage.
    """
    whole: list[dict[str, Parameter]] = []
    for index, source in enumerate(sources):
        if isinstance(source, nn.Module) and index not in stages:
            prefix = "" if isinstance(source, Stage) else f"{index}."
            whole.append({prefix + name: p for name, p in source.named_parameters()})
        else:
            whole.append(dict(stages[index].named_parameters()) if index in stages else {})
    # Of functions each process calls those of its own stages, and sees what these share.
    ties = [Tie(names) for found in peers.gather([t.names for t in find_ties(whole)]) for names in found]
    if tied:
        first = {
            name: (stage, one) for part in peers.gather(_first_names(stages)) for name, (stage, one) in part.items()
        }
        for group in tied:
            if missing := [name for name in group if name not in first]:
                raise RuntimeFailure(f"tied parameter {missing[0]!r} is in no stage")
            names: dict[int, str] = {}
            for stage, name in sorted(first[name] for name in group):
                require_one_name(names.setdefault(stage, name), name, stage)
            if len(names) > 1:
                ties.append(Tie(names))
    return merged(ties)


def _first_names(stages: Mapping[int, Stage]) -> dict[str, tuple[int, str]]:
    """Of every name of a parameter here its stage, and the first name of the same parameter there."""
    found: dict[str, tuple[int, str]] = {}
    for index, stage in stages.items():
        first: dict[int, str] = {}
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            found[name] = index, first.setdefault(id(parameter), name)
    return found


def owned_parameters(
    stages: Mapping[int, Stage], ties: Sequence[Tie], answers: Callable[[int], bool]
) -> dict[str, Parameter]:
    """Name -> parameter, for those this process answers for: a tied one is its lowest stage's.

    Args:
        answers: whether it does for a stage here.
    """
    twins = {name for tie in ties for name in tie.twins}
    own: dict[str, Parameter] = {}
    for index, stage in stages.items():
        own.update((n, p) for n, p in stage.named_parameters() if n not in twins and answers(index))
    return own


def all_dtypes(stages: Mapping[int, Stage], own: Mapping[str, Parameter], peers: Peers) -> dict[str, torch.dtype]:
    """Name -> type of every parameter of the model, in its order."""
    by_stage: dict[int, dict[str, torch.dtype]] = {}
    mine = {i: {n: p.dtype for n, p in s.named_parameters() if n in own} for i, s in stages.items()}
    for part in peers.gather(mine):
        for stage, found in part.items():
            if len(found) >= len(by_stage.get(stage, ())):  # of processes that share a stage one has all its names
                by_stage[stage] = found
    return {name: dtype for stage in sorted(by_stage) for name, dtype in by_stage[stage].items()}
