"""Checks that all processes that hold a parameter have the same of it: sentence 4 of the contract.

    a step begins     replicas compare which parameters they train, of which types, by which options and rates. If
                      they differ, they add up no gradients: sums of different lengths would crash a process
    a step ends       the first step, and every `EVERY`th after it, compares the same between all processes, and
                      checksums of the values of each parameter, by its name

If something differs, all processes raise the same error. It names the parameter and two processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.errors import BrokenContract, listed
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.optimizer import is_plain
from penstock.runtime.parameters.sharding import ReplicaParameters
from penstock.runtime.tensors.digest import Sketch, hash_of
from penstock.runtime.tensors.dtensor import is_sharded

EVERY = 10
"""Holders compare values at the end of the first step, and again after every so many steps."""

_OWN_OPTIONS = "params", "param_names", "foreach", "fused", "capturable"
"""Options of an optimizer's group that may differ: zero1 deals out parameters, and holders may use other kernels."""

Key = tuple[str, object]
"""A subject in words, and which of several: a part, a rank, a replica."""
Facts = dict[Key, Any]
"""What a process has. Processes with the same key must have the same."""


class HolderChecksums:
    """Compares what processes have of the parameters that several of them hold. Every process must make one.

    Args:
        optimizer: returns the optimizer.
    """

    def __init__(
        self,
        model: LocalModel,
        mesh: ProcessMesh,
        sharding: ReplicaParameters,
        optimizer: Callable[[], Optimizer | None],
    ) -> None:
        self._model, self._mesh, self._sharding, self._optimizer = model, mesh, sharding, optimizer
        self._rates: tuple[float, ...] = ()
        self._num_steps = 0
        copies = mesh.num_replicas * mesh.num_shards * model.placement.num_pipelines
        has_holders = copies > 1 or model.ties or model.placement.shared
        self._is_needed = bool(has_holders) and isinstance(mesh.everyone, GroupPeers)
        self._held = _held_parameters(model, mesh, sharding)
        self._wait: Callable[[], Tensor] | None = None
        self._alike = True

    def begin(self, rates: Sequence[float] | None = None) -> None:
        """Starts to compare what replicas train, as a step or evaluation begins.

        Args:
            rates: of updates that are ops, in place of the optimizer's.
        """
        self._rates = () if rates is None else tuple(map(float, rates))
        if isinstance(self._mesh.replicas, GroupPeers):
            digest = hashlib.sha256(repr(self._facts_of_training()).encode()).digest()
            row = torch.zeros(self._mesh.num_replicas, dtype=torch.float64, device="cpu")
            row[self._mesh.replica] = int.from_bytes(digest[:6])  # a double holds 48 bits exactly
            self._wait = self._mesh.replicas.begin_sum(row)

    def is_alike(self) -> bool:
        """Whether all replicas of this process began the step alike. All of them get the same answer.

        If they did not, they must leave out their sums.
        """
        if self._wait is not None:
            row, self._wait = self._wait(), None
            self._alike = bool((row == row[0]).all())
        return self._alike

    def conclude(self, alike: bool, is_training: bool = False) -> None:
        """Ends a step. Raises the same BrokenContract in every process if holders differ beyond rounding.

        Args:
            alike: whether all replicas of all processes began the step alike.
        """
        self._num_steps += is_training
        if not alike:
            self._compare(self._facts_of_training())
        elif is_training and self._num_steps % EVERY == 1:
            self._compare_all()

    def require(self) -> None:
        """Compares everything, between two steps. Every process must call it. Raises BrokenContract as `conclude`."""
        self._compare(self._facts_of_training())  # parts of other types could not be gathered
        with self._model.as_whole():
            self._compare_all()

    def _compare_all(self) -> None:
        if self._is_needed:
            self._compare(self._facts_of_training())
            if differing := self._differing(self._values(hash_of)):
                self._compare({key: value for key, value in self._values(_Rounded).items() if key in differing})

    def _compare(self, mine: Facts) -> None:
        """Raises the same BrokenContract in every process if some of them have other facts than others."""
        if differing := self._differing(mine):
            self._num_steps = 0  # so that the end of the next step compares again
            one, other = next(iter(differing.values()))
            raise BrokenContract(
                f"{listed([subject for subject, _ in differing])} {'differs' if len(differing) == 1 else 'differ'} "
                f"between process {one} and process {other}, so they would train other models (sentence 4 of the "
                "contract); change it alike on every process, between the same two steps, and leave changes within a "
                "step to the optimizer",
                4,
            )

    def _differing(self, mine: Facts) -> dict[Key, tuple[int, int]]:
        """Gathers the facts of all processes. Returns by key the first two processes whose facts differ."""
        first: dict[Key, tuple[int, Any]] = {}
        differing: dict[Key, tuple[int, int]] = {}
        for process, facts in enumerate(self._mesh.everyone.gather(mine)):
            for key, fact in facts.items():
                known, said = first.setdefault(key, (process, fact))
                if fact != said:
                    differing.setdefault(key, (known, process))
        return differing

    # What is compared.

    def _facts_of_training(self) -> Facts:
        """Which parameters are trained, of which types, and by which options."""
        optimizer, rank = self._optimizer(), self._mesh.pipeline.here[0]
        options = [] if optimizer is None else [_options_of(group) for group in optimizer.param_groups]
        facts: Facts = {(name, None): (p.requires_grad, str(p.dtype)) for (name, _), p in self._held.items()}
        return {**facts, ("the optimizer", rank): options, ("rates= of the step", rank): self._rates}

    def _values(self, fact: Callable[[Tensor], object]) -> Facts:
        """Makes a fact of the values of each parameter, or of the part that lies here."""
        return {key: fact(self._sharding.in_step(parameter)) for key, parameter in self._held.items()}


class _Rounded:
    """A parameter's values. They equal other values if rounding explains the difference.

    Processors of different kinds step a parameter by different kernels, so last bits may differ.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._sketch = Sketch.of(parameter)
        is_rounded = parameter.is_floating_point() or parameter.is_complex()
        self._tolerance = max(torch.finfo(parameter.dtype).eps, 1e-5) if is_rounded else 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Rounded):
            return False
        return self._sketch.distance(other._sketch) <= self._tolerance * self._sketch.norm

    __hash__ = None  # type: ignore[assignment]


def _held_parameters(model: LocalModel, mesh: ProcessMesh, sharding: ReplicaParameters) -> dict[Key, Parameter]:
    """Returns the parameters in this process, each once: by its owner's name for it, and the part that lies here.

    Processes that hold the same part have the same key.
    """
    rank, shared = mesh.pipeline.here[0], {stage for stage, _ in model.placement.shared}
    held: dict[str, tuple[Key, Parameter]] = {}
    for index, stage in model.copies.stages.items():
        for name, parameter in stage.named_parameters():
            value = sharding.in_step(parameter)
            part = _part_of(value)
            if not is_sharded(value) and (mesh.shards is not None or index in shared):
                part = mesh.shard, rank if index in shared else None  # it may be cut, and nothing says how
            subject = f"parameter {model.ties.owned_name(name)}"
            held.setdefault(subject, ((subject, part), parameter))
    return dict(held.values())


def _part_of(parameter: Tensor) -> tuple[object, ...]:
    """Says which part of a parameter lies here; returns () for a whole one."""
    if not is_sharded(parameter):
        return ()
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    dims = zip(parameter.placements, mesh.get_coordinate(), mesh.shape, strict=True)  # type: ignore[attr-defined]
    return tuple((str(placement), place, size) for placement, place, size in dims if not placement.is_replicate())


def _options_of(group: Mapping[str, object]) -> list[str]:
    """The options of an optimizer's group that are plain numbers and words, such as "lr=0.1"."""
    found = []
    for name, value in sorted(group.items()):
        one = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_cuda else value
        if name not in _OWN_OPTIONS and is_plain(one):
            found.append(f"{name}={one!r}")
    return found
