"""Tied parameters: one parameter in several stages, like a GPT's embedding and head.

A plain loop adds, microbatch by microbatch, the sum of what every use contributes. Here each stage's
contribution is caught before it reaches `.grad`, sent to the lowest stage's rank (the owner), summed there
per microbatch, deepest stage first as autograd does, and only then added. So the sum is the same to the bit.

    rank 3, I5 of stage 3 -> contribution to microbatch 5 --+
    rank 0, I5 of stage 0 -> contribution to microbatch 5 --+--> owner's gradient += sum

A tied parameter's gradient is never deferred to W: its hook makes the split backward leave it in I.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.message import Edge, Payload
from penstock.schedule import Op


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


def find_ties(stage_parameters: Sequence[Mapping[str, Parameter]]) -> list[Tie]:
    """The parameters that are the same object in several stages."""
    seen: dict[int, dict[int, str]] = {}
    for stage, parameters in enumerate(stage_parameters):
        for name, parameter in parameters.items():
            seen.setdefault(id(parameter), {}).setdefault(stage, name)
    return [Tie(names) for names in seen.values() if len(names) > 1]


class TiedGradients:
    """Catches, passes on and sums the gradients of tied parameters on one rank.

    Args:
        ties: in slot order (slot k is `ties[k - 1]`).
        local: (slot, stage) -> the parameter, for the stages this rank hosts.
    """

    def __init__(self, ties: Sequence[Tie], local: Mapping[tuple[int, int], Parameter]) -> None:
        self._ties = ties
        self._local = dict(local)
        self._caught: dict[int, Tensor | None] = {}
        self._sums: dict[int, Tensor | None] = {}
        self._handles = [
            p.register_post_accumulate_grad_hook(self._catch) for p in {id(p): p for p in local.values()}.values()
        ]
        self._catching = False

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _catch(self, parameter: Tensor) -> None:
        if self._catching:
            self._caught[id(parameter)] = parameter.grad
            parameter.grad = None

    def begin(self) -> None:
        """Starts a step: gradients from earlier steps are kept aside, to be added to."""
        self._catching = True
        self._caught.clear()
        self._sums = {}
        for (slot, stage), parameter in self._local.items():
            if stage == self._ties[slot - 1].owner:
                self._sums[slot] = parameter.grad
        for parameter in self._local.values():
            parameter.grad = None

    def sort(self, op: Op, received: Sequence[Payload]) -> tuple[Payload | None, list[Payload]]:
        """Tells the chain's message from the tied contributions: the latter come after, by slot."""
        expected = sum(len(t.names) - 1 for t in self._ties if t.owner == op.stage)
        main = len(received) - expected
        return (received[0] if main else None), list(received[main:])

    def collect(self, op: Op, ties: Sequence[Payload]) -> None:
        """After a backward: sums this microbatch's contributions where this stage is the owner."""
        if not self._ties:
            return
        contributions = iter(ties)
        for slot, tie in enumerate(self._ties, start=1):
            if tie.owner != op.stage:
                continue
            parts = [next(contributions).leaves[0] for _ in range(len(tie.names) - 1)]
            parts.append(self._caught.pop(id(self._local[slot, op.stage]), None))
            total: Tensor | None = None
            for part in parts:
                if part is not None:
                    part = part.to(self._local[slot, op.stage].device)
                    total = part if total is None else total + part
            if total is not None:
                so_far = self._sums.get(slot)
                self._sums[slot] = total if so_far is None else so_far.add_(total)

    def give(self, edge: Edge) -> Payload:
        """This stage's contribution, for the owner."""
        parameter = self._local[edge.slot, edge.producer.stage]
        return Payload.gradients([self._caught.pop(id(parameter), None)])

    def sums(self) -> dict[int, Tensor | None]:
        """Slot -> gradient, for the ties this rank owns. Ends the step's catching."""
        self._catching = False
        return self._sums

    def parameter(self, slot: int) -> Parameter | None:
        """This rank's parameter of a tie, if it has one."""
        return next((p for (own, _), p in self._local.items() if own == slot), None)

    def put(self, slot: int, gradient: Tensor | None) -> None:
        """Sets the summed gradient on this rank's parameters."""
        for (own_slot, _), parameter in self._local.items():
            if own_slot == slot:
                parameter.grad = gradient
