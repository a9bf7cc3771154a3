"""What replicas must have alike when a step begins: which parameters are trained, and the optimizer's options.

    begin   each tells a digest --> the schedule's first ops run --> before a gradient is summed: are all the same?
                                                                     if not, each tells the rest, and all raise

Replicas would become other models without a word where they differ, and sums of other lengths end a process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers

_PLAIN = (int, float, str, type(None))
_OWN = "params", "param_names", "foreach", "fused", "capturable"
"""Of an optimizer's group, what may differ: replicas have parts of what they divide, and step what they hold by other
kernels."""

State = tuple[tuple[tuple[object, ...], ...], tuple[tuple[tuple[str, object], ...], ...]]


class ReplicaAgreement:
    """Args:
    peers: the replicas.
    parameters: those of this process, in an order that all replicas have. names: of them, by id.
    whole: whether each replica keeps all of a parameter and its gradient, and steps it.
    """

    def __init__(
        self, peers: GroupPeers, parameters: Sequence[Parameter], names: dict[int, str], whole: bool
    ) -> None:
        self._peers, self._parameters, self._names, self._whole = peers, tuple(parameters), names, whole
        self._places: list[int] | None = None
        self._state: State = ((), ())
        self._digest = 0.0
        self._told: Callable[[], Tensor] | None = None

    def begin(self, optimizer: Optimizer | None) -> None:
        """Tells the others how this replica begins a step."""
        places = [p.data_ptr() for p in self._parameters] if self._whole else []
        moved = [False] * len(self._parameters)
        if self._places is not None and self._whole:
            moved = [now != before for now, before in zip(places, self._places, strict=True)]
        state: State = (
            tuple(
                (p.requires_grad, p.dtype, self._whole and p.grad is not None, has_moved)
                for p, has_moved in zip(self._parameters, moved, strict=True)
            ),
            () if optimizer is None else tuple(self._options(group) for group in optimizer.param_groups),
        )
        if state != self._state or not self._digest:
            self._state = state
            self._digest = float(int.from_bytes(hashlib.sha256(repr(state).encode()).digest()[:6]) + 1)
        row = torch.zeros(self._peers.num_ranks, dtype=torch.float64)
        row[self._peers.here[0]] = self._digest
        self._told = self._peers.begin_sum(row)

    def end(self) -> None:
        """The step is over: what lies elsewhere when the next one begins was moved by the caller."""
        self._places = [p.data_ptr() for p in self._parameters] if self._whole else []

    def require(self) -> None:
        """Raises RuntimeFailure, in every replica, if they began the step with other parameters or options."""
        if self._told is None:
            return
        told, self._told = self._told, None
        digests = told().tolist()
        if digests.count(digests[0]) == len(digests):
            return
        first, *others = self._peers.gather(self._facts())
        replica, subject = next(
            (number, subject)
            for number, other in enumerate(others, 1)
            for subject in {**first, **other}
            if other.get(subject) != first.get(subject)
        )
        there, here = others[replica - 1].get(subject, "not there"), first.get(subject, "not there")
        raise RuntimeFailure(
            f"{subject} is {there} in replica {replica}, and {here} in replica 0, so they would train other models; "
            "change it on every rank, between the same two steps"
        )

    def _options(self, group: dict[str, object]) -> tuple[tuple[str, object], ...]:
        """Of a group, what is plain numbers and words, and how many parameters it has."""
        found: list[tuple[str, object]] = []
        for name, value in sorted(group.items()):
            one = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_cuda else value
            parts = one if isinstance(one, tuple | list) else (one,)
            if name not in _OWN and all(isinstance(part, _PLAIN) for part in parts):
                found.append((name, one))
        parameters = group["params"]
        if self._whole and isinstance(parameters, list):
            found.append(("number of parameters", len(parameters)))
        return tuple(found)

    def _facts(self) -> dict[str, str]:
        """By subject, the state in words."""
        parameters, groups = self._state
        facts = {}
        for parameter, (is_trained, dtype, has_gradient, has_moved) in zip(self._parameters, parameters, strict=True):
            words = ["trained" if is_trained else "frozen", f"of {dtype}"]
            words += ["with a gradient before the step"] if has_gradient else []
            words += ["given other data since the last step"] if has_moved else []
            facts[f"parameter {self._names.get(id(parameter), '')}"] = ", ".join(words)
        for number, options in enumerate(groups):
            facts |= {f"{name} of the optimizer's group {number}": repr(value) for name, value in options}
        return facts
