"""Tied parameters: parameters of the model that are in several stages, like a GPT's embedding and head.

    the same object in the model given      0.weight is head.weight
    named together by `tied=`               ("0.weight", "5.weight")          where functions make the stages
    several names within one stage          such names stay one parameter, too, when stages are cut

They are found on the whole model, before any parameter is replaced, and in the same way on every rank. Then a tied
parameter is made one object in each process, whoever made its stages (`keep_as_one`). The lowest stage owns a tied
parameter: that one is saved, clipped and named. `tied_gradients.py` adds up its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.stage.stage import Stage
from penstock.runtime.tensors.dtensor import placements_of
from penstock.schedule import Placement


@dataclass(frozen=True)
class Tie:
    """One parameter under several names.

    Attributes:
        names: stage -> plain name of the parameter there; ascending stages.
    """

    names: Mapping[int, str]

    @property
    def stages(self) -> list[int]:
        return list(self.names)

    @property
    def owner(self) -> int:
        """The lowest stage."""
        return min(self.names)

    @property
    def name(self) -> str:
        """Its name in the stage that owns it."""
        return self.names[self.owner]


class Ties(tuple[Tie, ...]):
    """All ties of a model; slot k of a message is that of number k - 1.

    Attributes:
        buffers: for each name of a buffer that several stages share, its name in the lowest of them.
    """

    buffers: Mapping[str, str] = {}

    @cached_property
    def _owned(self) -> dict[str, str]:
        """By each name in a stage that is not the owner, the name in the owner's stage."""
        return {name: tie.name for tie in self for stage, name in tie.names.items() if stage != tie.owner}

    def is_elsewhere(self, stage: int, name: str) -> bool:
        """Whether another stage owns the parameter that has this name in the stage, under whatever name."""
        return any(tie.names.get(stage) == name and stage != tie.owner for tie in self)

    def owned_name(self, name: str) -> str:
        """The name that a parameter or buffer has in the stage that owns it: the lowest."""
        return self._owned.get(name, self.buffers.get(name, name))

    @property
    def stages(self) -> list[list[int]]:
        """Of each tie, ascending."""
        return [tie.stages for tie in self]

    def slots(self) -> Iterator[tuple[int, Tie]]:
        return enumerate(self, start=1)


def ties_of(sources: Sequence[Any], stages: Mapping[int, Stage], tied: Sequence[Sequence[str]], peers: Peers) -> Ties:
    """Parameters that several stages share: the same object in the model given, or named together in `tied`. Buffers
    that several stages share: the same object.

    Args:
        stages: those built in this process.

    Raises:
        RuntimeFailure: a name in `tied` that is in no stage, or two of one stage.
    """
    whole = [stages.get(index, source) for index, source in enumerate(sources)]
    # Each process calls the functions of its own stages, so it sees what these share.
    parts = peers.gather([_same_objects(whole, kind) for kind in ("named_parameters", "named_buffers")])
    found, buffers = ([names for part in those for names in part] for those in zip(*parts, strict=True))
    if tied:
        known = [each for part in peers.gather(names_of_one(stages, at_least=1)) for each in part]
        first = {name: (stage, names[0]) for stage, names in known for name in names}
        for group in tied:
            if missing := [name for name in group if name not in first]:
                raise RuntimeFailure(f"tied parameter {missing[0]!r} is in no stage")
            names: dict[int, str] = {}
            for stage, name in sorted(first[name] for name in group):
                _require_one_name(names.setdefault(stage, name), name, stage)
            if len(names) > 1:
                found.append(names)
    ties = Ties(map(Tie, _merged(found)))
    # Stages of a traced model that were moved to another device have copies of one buffer, and say so themselves.
    own = {name: first for one in whole if isinstance(one, Stage) for name, first in one.earlier_buffers.items()}
    ties.buffers = own | {name: min(names.items())[1] for names in _merged(buffers) for name in names.values()}
    return ties


def _same_objects(stages: Sequence[Any], kind: str) -> list[dict[int, str]]:
    """By stage the names of each tensor that is the same object in several stages.

    Args:
        stages: modules, and functions of stages that other processes build.
        kind: the method that names the tensors of a module, such as "named_parameters".
    """
    seen: dict[int, dict[int, str]] = {}
    for index, stage in enumerate(stages):
        prefix = "" if isinstance(stage, Stage) else f"{index}."
        for name, tensor in getattr(stage, kind)() if isinstance(stage, nn.Module) else ():
            seen.setdefault(id(tensor), {}).setdefault(index, prefix + name)
    return [names for names in seen.values() if len(names) > 1]


def _merged(found: Sequence[Mapping[int, str]]) -> list[dict[int, str]]:
    """Merges names by stage that have a name in common, and sorts them.

    Raises:
        RuntimeFailure: two parameters of one stage would be tied.
    """
    groups: list[dict[int, str]] = []
    for each in found:
        names = dict(each)
        for group in [g for g in groups if set(g.items()) & set(names.items())]:
            groups.remove(group)
            for stage, name in group.items():
                _require_one_name(names.setdefault(stage, name), name, stage)
        groups.append(dict(sorted(names.items())))
    return sorted(groups, key=lambda names: list(names.items()))


def _require_one_name(name: str, other: str, stage: int) -> None:
    """Raises RuntimeFailure if two parameters of one stage would be tied."""
    if name != other:
        raise RuntimeFailure(
            f"tied= makes {name} and {other} one parameter, and both lie in stage {stage}; let the modules of that "
            "stage share the parameter itself, and name one of them"
        )


Names = tuple[int, list[str]]
"""A stage, and the names there of one parameter."""


def names_of_one(stages: Mapping[int, Stage], at_least: int = 2) -> list[Names]:
    """Finds parameters that have at least so many names within a stage, and these names in order."""
    found: dict[tuple[int, int], list[str]] = {}
    for index, stage in stages.items():
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            found.setdefault((index, id(parameter)), []).append(name)
    return [(index, names) for (index, _), names in found.items() if len(names) >= at_least]


def keep_as_one(ties: Ties, known: Sequence[Names], stages: Mapping[int, Stage]) -> None:
    """Makes each tied parameter one object in all stages here, and each parameter that had several names within a
    stage one object again, after stages were cut.

    Args:
        known: the names within stages, as `names_of_one` found them before.

    Raises:
        RuntimeFailure: the uses of one have been cut in different ways.
    """
    tied = [[(index, name) for index, name in tie.names.items() if index in stages] for tie in ties]
    within = [[(index, name) for name in names] for index, names in known]
    for (index, first), *others in filter(None, [*tied, *within]):
        one = stages[index].get_parameter(first)
        for stage, name in others:
            if (parameter := stages[stage].get_parameter(name)) is one:
                continue
            kinds = {each: (placements_of(p), tuple(p.shape)) for each, p in ((first, one), (name, parameter))}
            _require_alike({each: (str(cut), shape) for each, (cut, shape) in kinds.items()})
            path, _, last = name.rpartition(".")
            setattr(stages[stage].get_submodule(path), last, one)


def require_cut_alike(ties: Ties, stages: Mapping[int, Stage], peers: Peers) -> None:
    """Raises the same RuntimeFailure on every rank if stages that share a parameter have different parts of it."""
    mine = {
        name: (str(placements_of(p := stages[index].get_parameter(name))), tuple(p.shape))
        for tie in ties
        for index, name in tie.names.items()
        if index in stages
    }
    found = {name: kind for part in peers.gather(mine) for name, kind in part.items()}
    for tie in ties:
        _require_alike({name: found[name] for name in tie.names.values()})


def _require_alike(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    if len(set(kinds.values())) > 1:
        said = "; ".join(
            f"{name} of shape {list(shape)} as {cut or 'a whole'}" for name, (cut, shape) in kinds.items()
        )
        raise RuntimeFailure(
            f"one parameter is held in different ways ({said}); let parallelize= cut it alike wherever it is used, "
            "or untie it"
        )


def require_tied_alike(ties: Ties, placement: Placement, peers: Peers) -> None:
    """Raises RuntimeFailure if a parameter lies in a shared stage and in a stage that other ranks host.

    The ranks of the shared stage would have parts of it, and the others the whole.
    """
    if not isinstance(peers, GroupPeers):
        return
    for tie in ties:
        hosts = {stage: placement.hosts(0, stage) for stage in tie.stages}
        if any(len(ranks) > 1 for ranks in hosts.values()) and len(set(hosts.values())) > 1:
            where = "; ".join(
                f"{tie.names[s]} of stage {s} on ranks {' '.join(map(str, ranks))}" for s, ranks in hosts.items()
            )
            raise RuntimeFailure(
                f"a parameter that stages share lies on different ranks ({where}); let the same ranks share these "
                "stages, or untie them"
            )
