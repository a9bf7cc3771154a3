"""What each replica keeps of a parameter, and who steps it: the settings behind `ParallelOptions(sharding=)`.

                 each replica keeps     steps            a sum goes to      after an update
none, copies     all                    everything       every replica      nothing is sent
zero1            all                    what it owns     the owner          owners send their parameters
fsdp             a part of everything   its parts        each its part      parts are gathered (`fsdp.py`)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.parameters.buckets import GradientBucket, SumBucket, send_values
from penstock.runtime.parameters.gradients import Gradients


class Unsharded:
    """Every replica keeps all of every parameter, and steps it. The other settings say what differs."""

    def unshard(self) -> None:
        """Before forwards: all parameters are whole here."""

    def reshard(self, stepped: bool) -> None:
        """After them: what other replicas keep is given up. `stepped`: updates among the ops have changed values."""

    def at_rest(self, parameter: Parameter) -> Parameter:
        """What stands for a parameter between steps."""
        return parameter

    def goes_to(self, parameter: Parameter) -> Any:
        """Where the sum of a parameter's gradients goes; parameters of one bucket go alike."""
        return None

    def bucket(self, parameters: Sequence[Parameter], peers: GroupPeers) -> SumBucket:
        """The sum of the gradients of parameters that go alike."""
        return GradientBucket(parameters, peers, None)

    def stands_for(self, master: Parameter, parameter: Parameter) -> None:
        """An update steps `master` in place of a parameter: it is kept as that is."""

    def owned(self, parameters: Iterable[Parameter], replica: int) -> list[Parameter]:
        """Of some parameters what a replica steps: those, or the parts that it keeps of them."""
        return list(parameters)

    def teller(self, parameter: Tensor) -> int:
        """The replica that tells a tensor, and what the optimizer keeps of it."""
        return 0

    def to_step(self, masters: Sequence[Parameter], gradients: Gradients) -> tuple[Sequence[Parameter], Gradients]:
        """At an update that is an op: what the optimizer steps in the masters' place, and the gradients of that."""
        return masters, gradients

    def spread(self, stepped: Iterable[Parameter], peers: GroupPeers) -> None:
        """After an update: every replica gets what the others have stepped."""


class OwnedParameters(Unsharded):
    """Every parameter has an owner among the replicas (ZeRO-1): the largest first, each to who has least so far.

    Args:
        follow: parameters of this process that are one with another, and that one: they have its owner.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        num_replicas: int,
        follow: Sequence[tuple[Parameter, Parameter]],
    ) -> None:
        held = [0] * num_replicas
        self._owner: dict[int, int] = {}
        for parameter in sorted(parameters, key=lambda p: -p.numel()):
            owner = held.index(min(held))
            held[owner] += parameter.numel()
            self._owner[id(parameter)] = owner
        for parameter, first in follow:
            self.stands_for(parameter, first)

    def goes_to(self, parameter: Parameter) -> int | None:
        return self._owner.get(id(parameter))

    def bucket(self, parameters: Sequence[Parameter], peers: GroupPeers) -> SumBucket:
        return GradientBucket(parameters, peers, self.goes_to(parameters[0]))

    def stands_for(self, master: Parameter, parameter: Parameter) -> None:
        self._owner[id(master)] = self._owner[id(parameter)]

    def owned(self, parameters: Iterable[Parameter], replica: int) -> list[Parameter]:
        return [p for p in parameters if self._owner.get(id(p)) in (None, replica)]

    def teller(self, parameter: Tensor) -> int:
        return self._owner.get(id(parameter), 0)

    def spread(self, stepped: Iterable[Parameter], peers: GroupPeers) -> None:
        send_values(stepped, lambda p: self._owner[id(p)], peers)
