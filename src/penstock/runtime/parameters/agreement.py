"""Checks that all processes that hold a parameter have the same of it: sentence 4 of the contract.

    replicas              all parameters of a rank's stages            every replica
    copies of a stage     its parameters                               a rank of each pipeline
    a tied parameter      that one                                     the ranks of all stages that share it
    a shared stage        its parameters, or parts of them             the ranks that share it
    shards                parts of parameters, and what is not cut     every shard

Processes compare digests. A digest is one number in a sum that is small, or that is made anyway:

    a step begins     which parameters are trained, their types and their options. If holders differ, they add up no
                      gradients: sums of different lengths would crash a process
    a step ends       the values too, at the first step and at every `EVERY`th: in the row that carries the losses

If digests differ, all processes tell what they have, and all raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.errors import BrokenContract, listed
from penstock.runtime.mesh.peers import GroupPeers, MeshPeers, Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.given_optimizer import is_plain
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.sharding import ReplicaParameters
from penstock.runtime.tensors.digest import hash_of
from penstock.runtime.tensors.dtensor import is_sharded
from penstock.runtime.tensors.sketch import Sketch

EVERY = 10
"""Holders compare values at the first step, and again after every so many steps."""

_OWN = "params", "param_names", "foreach", "fused", "capturable"
"""Options of an optimizer's group that may differ: zero1 deals out parameters, and holders may use other kernels."""

_KINDS = _TRAINED, _GROUPS, _STEPPED, _VALUES = "trained", "groups", "stepped", "values"

_Scope = tuple[object, ...]
"""A kind of facts, and what they are about. Processes with the same scope compare their facts."""
_Holders = tuple[int, ...]
"""Processes, ascending."""
_Facts = dict[str, object]
"""By subject, in words, the fact of one process about it: words, options, or a value made of a parameter's values."""
_Options = tuple[str, ...]


class _DigestRow:
    """One number for each holder in each set of holders. Each process fills in its own, and a sum collects all.

    Args:
        sets: the same on all processes that sum.
        processes: those that sum.
    """

    def __init__(self, sets: Iterable[_Holders], processes: Collection[int]) -> None:
        summing = [(holders, [one for one in holders if one in processes]) for holders in sets]
        self._slots = [(holders, one) for holders, some in summing if len(some) > 1 for one in some]

    def __len__(self) -> int:
        return len(self._slots)

    def filled(self, process: int, digests: Mapping[_Holders, int]) -> list[float]:
        return [float(digests.get(holders, 0)) if one == process else 0.0 for holders, one in self._slots]

    def is_alike(self, row: Sequence[float]) -> bool:
        """Whether all holders in each set filled in the same. A holder with nothing to compare filled in 0."""
        first: dict[_Holders, float] = {}
        pairs = zip(self._slots, row, strict=True)
        return all(not digest or first.setdefault(holders, digest) == digest for (holders, _), digest in pairs)


class HolderAgreement:
    """Compares the facts of all processes about parameters that several of them hold. Every process must make one.

    Args:
        masters: by id of a parameter, the parameters that updates step in its place; None if updates are no ops.
        one_copy_steps: only the owner's copy of a stage is stepped.
        optimizer: returns the optimizer.
    """

    def __init__(
        self,
        model: LocalModel,
        mesh: ProcessMesh,
        sharding: ReplicaParameters,
        masters: Mapping[int, Sequence[Tensor]] | None,
        one_copy_steps: bool,
        optimizer: Callable[[], Optimizer | None],
    ) -> None:
        self._model, self._everyone, self._optimizer = model, mesh.everyone, optimizer
        self._sharding, self._masters, self._process = sharding, masters, mesh.everyone.here[0]
        self._scopes = _scopes_of(model, mesh, sharding, masters is not None, one_copy_steps)
        self._parameters = list({id(p): p for held in self._scopes.values() for p in held.values()}.values())
        by_scope: dict[_Scope, list[int]] = {}
        for process, scopes in enumerate(mesh.everyone.gather(list(self._scopes))):
            for scope in scopes:
                by_scope.setdefault(scope, []).append(process)
        self._holders = {scope: tuple(those) for scope, those in by_scope.items() if len(those) > 1}
        sets = sorted(set(self._holders.values()))
        self._whole = _DigestRow(sets, {process for holders in sets for process in holders})
        dimensions = mesh.everyone.along if isinstance(mesh.everyone, MeshPeers) else (mesh.everyone,)
        self._rows: dict[Peers, _DigestRow] = {
            peers: _DigestRow(sets, peers.gather(self._process))
            for peers in dimensions
            if isinstance(peers, GroupPeers)
        }
        self._waits: dict[Peers, Callable[[], Tensor]] = {}
        self._alike: dict[Peers, bool] = {}
        self._state: object = None
        self._facts: dict[_Scope, _Facts] = {}
        self._digests: dict[_Holders, int] = {}
        self._num_steps = 0

    def begin(self, rates: Sequence[float] | None = None) -> None:
        """Tells the others which parameters this process trains and by which options, as a step or evaluation begins.

        Args:
            rates: of updates that are ops, in place of the optimizer's.
        """
        if not self._whole:
            return
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        options = [_options_of(group) for group in groups]
        members = [list(map(id, group["params"])) for group in groups]
        given = None if rates is None else tuple(map(float, rates))
        state = ([(p.requires_grad, p.dtype) for p in self._parameters], options, members, given)
        if state != self._state:
            self._state = state
            self._facts = {scope: self._facts_of(scope, options, members) for scope in self._scopes}
            for scope, facts in self._facts.items():
                if scope[0] in (_GROUPS, _STEPPED):
                    facts["rates= of the step"] = str(given)
            self._digests = self._digests_of(self._facts)
        for peers, row in self._rows.items():
            if row:
                filled = torch.tensor(row.filled(self._process, self._digests), dtype=torch.float64, device="cpu")
                self._waits[peers] = peers.begin_sum(filled)

    def is_alike(self, peers: Peers) -> bool:
        """Whether these processes began the step alike. All of them get the same answer, and wait for it.

        If they did not, they must leave out their sums.
        """
        if peers in self._waits:
            self._alike[peers] = self._rows[peers].is_alike(self._waits.pop(peers)().tolist())
        return self._alike.get(peers, True)

    def agrees(self) -> bool:
        """Whether all processes that this one knows of began the step alike."""
        found = [self.is_alike(peers) for peers in self._rows]  # waits for all of them
        return all(found)

    def values_row(self) -> list[float]:
        """The numbers that processes sum at the end of a training step to compare values; none in most steps."""
        self._num_steps += 1
        if not self._whole or (self._num_steps - 1) % EVERY:
            return []
        digests = self._digests_of(self._values(hash_of)) if self.agrees() else {}
        return self._whole.filled(self._process, digests)

    def conclude(self, alike: bool, values: Sequence[float] = ()) -> None:
        """Ends a step. Raises the same BrokenContract in every process if holders differ beyond rounding.

        Args:
            alike: whether all processes began the step alike.
            values: the sum of all processes' `values_row`.
        """
        if alike and (not values or self._whole.is_alike(values)):
            return
        self._num_steps = 0  # so that values are compared once more when the next step ends
        mine = self._values(_Value) if alike else self._facts
        gathered = self._everyone.gather({scope: mine[scope] for scope in mine if scope in self._holders})
        differing: dict[object, dict[str, dict[int, object]]] = {}
        for scope, holders in sorted(self._holders.items(), key=lambda one: _KINDS.index(one[0][0])):
            told = [gathered[process].get(scope, {}) for process in holders]
            for subject in {subject: None for facts in told for subject in facts}:
                said = [facts.get(subject) for facts in told]
                if any(each != said[0] for each in said):
                    of_kind = differing.setdefault(scope[0], {})
                    of_kind.setdefault(subject, dict(zip(holders, said, strict=True)))
        if differing:  # other kinds follow from the first
            raise BrokenContract(_words(next(iter(differing.values()))), 4)

    def require(self) -> None:
        """Compares everything, between two steps. Every process must call it. Raises BrokenContract as `conclude`."""
        if not self._whole:
            return
        self.begin()
        if not all(self._everyone.gather(self.agrees())):
            self.conclude(alike=False)
        with self._model.as_whole():
            self._num_steps = 0
            row = torch.tensor(self.values_row(), dtype=torch.float64, device="cpu")
            self.conclude(True, self._everyone.sum(row).tolist())

    def _values(self, fact: Callable[[Tensor], object]) -> dict[_Scope, _Facts]:
        """Makes the facts about the values of parameters, each by `fact`."""
        return {
            scope: {f"parameter {name}": fact(self._sharding.in_step(p)) for name, p in held.items()}
            for scope, held in self._scopes.items()
            if scope[0] == _VALUES and scope in self._holders
        }

    def _digests_of(self, facts: Mapping[_Scope, _Facts]) -> dict[_Holders, int]:
        """A digest of 48 bits, which a double holds exactly, for each set of holders with this process."""
        by_holders: dict[_Holders, list[object]] = {}
        for scope in sorted(facts.keys() & self._holders.keys(), key=repr):
            by_holders.setdefault(self._holders[scope], []).append((scope, facts[scope]))
        return {
            holders: int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:6])
            for holders, told in by_holders.items()
        }

    def _facts_of(self, scope: _Scope, options: Sequence[_Options], members: Sequence[Sequence[int]]) -> _Facts:
        """The facts of one scope, but none about values."""
        if scope[0] == _GROUPS:
            return {f"group {number} of the optimizer": those for number, those in enumerate(options)}
        facts: _Facts = {}
        of_parameter = {one: options[number] for number, ones in enumerate(members) for one in ones}
        for name, parameter in self._scopes[scope].items() if scope[0] != _VALUES else ():
            if scope[0] == _TRAINED:
                facts[f"parameter {name}"] = (
                    f"{'trained' if parameter.requires_grad else 'frozen'}, {parameter.dtype}"
                )
            elif parameter.requires_grad and options:
                for one in (parameter,) if self._masters is None else self._masters.get(id(parameter), ()):
                    facts[f"parameter {name} in the optimizer"] = of_parameter.get(id(one), ("left out",))
        return facts


class _Value:
    """A parameter's values. They equal other values if rounding explains the difference.

    Processors of different kinds step a parameter by different kernels, so last bits may differ.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._hash, self._sketch = hash_of(parameter), Sketch.of(parameter)
        is_rounded = parameter.is_floating_point() or parameter.is_complex()
        self._tolerance = max(torch.finfo(parameter.dtype).eps, 1e-5) if is_rounded else 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value) or self._hash == other._hash:
            return isinstance(other, _Value)
        return self._sketch.distance(other._sketch) <= self._tolerance * self._sketch.norm

    __hash__ = None  # type: ignore[assignment]


def _scopes_of(
    model: LocalModel, mesh: ProcessMesh, sharding: ReplicaParameters, updates: bool, one_copy_steps: bool
) -> dict[_Scope, dict[str, Parameter]]:
    """Returns by scope the parameters that this process may share with others, by their owners' names.

    Args:
        updates: whether updates are ops.
    """
    is_dealt = sharding.keeps_whole and not sharding.has_all_state
    rank, owners = mesh.pipeline.here[0], model.stages
    shared, tied = {stage for stage, _ in model.placement.shared}, {tie.name for tie in model.ties}
    scopes: dict[_Scope, dict[str, Parameter]] = {(_GROUPS, rank): {}}
    # If a process has a tied parameter in several stages, the stage where it is stepped comes first.
    for index, stage in sorted(model.copies.stages.items(), key=lambda one: one[0] not in owners):
        for name, parameter in stage.named_parameters():
            owned = model.ties.owned_name(name)
            is_tied = owned in tied
            group = owned if is_tied else index
            if is_tied and (_TRAINED, group) in scopes:
                continue
            value = sharding.in_step(parameter)
            part = _part_of(value)
            if not is_sharded(value) and (mesh.shards is not None or index in shared):
                part = mesh.shard, rank if index in shared else None  # it may be cut, and nothing says how
            those: list[_Scope] = [(_TRAINED, group), (_VALUES, group, part)]
            if (index in owners or not one_copy_steps) and not (updates if is_tied else is_dealt):
                # The same replica steps a tied parameter on all ranks.
                those.append((_STEPPED, group, mesh.replica if is_dealt else None))
            for scope in those:
                scopes.setdefault(scope, {})[owned] = parameter
    return scopes


def _part_of(parameter: Tensor) -> _Scope:
    """Says which part of a parameter lies here; returns () for a whole one."""
    if not is_sharded(parameter):
        return ()
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    dims = zip(parameter.placements, mesh.get_coordinate(), mesh.shape, strict=True)  # type: ignore[attr-defined]
    return tuple((str(placement), place, size) for placement, place, size in dims if not placement.is_replicate())


def _options_of(group: Mapping[str, object]) -> _Options:
    """The options of an optimizer's group that are plain numbers and words, such as "lr=0.1"."""
    found: list[str] = []
    for name, value in sorted(group.items()):
        one = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_cuda else value
        if name not in _OWN and is_plain(one):
            found.append(f"{name}={one!r}")
    return tuple(found)


def _words(differing: Mapping[str, Mapping[int, object]]) -> str:
    """Says which facts differ, between which processes, and what to do.

    Args:
        differing: by subject, the fact of each process.
    """
    said = next(iter(differing.values()))
    first = next(iter(said.values()))
    other = next(fact for fact in said.values() if fact != first)
    mine, theirs = (_processes([one for one, fact in said.items() if fact == each]) for each in (first, other))
    shown = "" if isinstance(first, _Value) else f" ({_shown(first, other)}, and {_shown(other, first)})"
    return (
        f"{listed(list(differing))} {'differs' if len(differing) == 1 else 'differ'} between {mine} and {theirs}"
        f"{shown}, so they would train other models (sentence 4 of the contract); change it alike on every process, "
        "between the same two steps, and leave changes within a step to the optimizer"
    )


def _shown(fact: object, other: object) -> str:
    """A fact in words. Of options, only those that the other process doesn't have."""
    if isinstance(fact, tuple):
        return listed([option for option in fact if not isinstance(other, tuple) or option not in other]) or "nothing"
    return "nothing" if fact is None else str(fact)


def _processes(numbers: Sequence[int]) -> str:
    return f"process {numbers[0]}" if len(numbers) == 1 else f"processes {listed(list(map(str, numbers)))}"
