"""Which parameters a process answers for, under which names, and which of them are tied to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.peers import Peers
from penstock.runtime.stage import Stage
from penstock.runtime.tied import Tie, TiedGradients, find_ties


def ties_of(
    sources: Sequence[Any], stages: Mapping[int, Stage], tied: Sequence[Sequence[str]], peers: Peers
) -> list[Tie]:
    """Parameters that several stages share: the same object in the model given, or named together in `tied`.

    Raises:
        RuntimeFailure: a name that is in no stage.
    """
    whole = [
        dict(s.named_parameters()) if isinstance(s, Stage) else
        {f"{i}.{n}": p for n, p in s.named_parameters()} if isinstance(s, nn.Module) else {}
        for i, s in enumerate(sources)
    ]  # fmt: skip
    ties = find_ties(whole)
    if not tied:
        return ties
    own = [(index, [n for n, _ in stage.named_parameters(remove_duplicate=False)]) for index, stage in stages.items()]
    by_name = {n: s for part in peers.gather(own) for s, names in part for n in names}
    for group in tied:
        if missing := [name for name in group if name not in by_name]:
            raise RuntimeFailure(f"tied parameter {missing[0]!r} is in no stage")
        names = dict(sorted((by_name[name], name) for name in group))
        if len(names) > 1 and all(t.names != names for t in ties):
            ties.append(Tie(names))
    return ties


def tied_gradients(ties: Sequence[Tie], stages: Mapping[int, Stage]) -> TiedGradients:
    """What catches the gradients of tied parameters of the stages here."""
    local = {
        (slot, stage): dict(stages[stage].named_parameters())[name]
        for slot, tie in enumerate(ties, start=1)
        for stage, name in tie.names.items()
        if stage in stages
    }
    return TiedGradients(ties, local)


def owned_parameters(
    stages: Mapping[int, Stage], ties: Sequence[Tie], answers: Callable[[int], bool]
) -> dict[str, Parameter]:
    """Name -> parameter, for those this process answers for: a tied one is its lowest stage's.

    Args:
        answers: whether it does for a stage here.
    """
    twins = {name for tie in ties for stage, name in tie.names.items() if stage != tie.owner}
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
