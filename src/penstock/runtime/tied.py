"""Tied parameters: one parameter in several stages, like a GPT's embedding and head.

A plain loop adds, microbatch by microbatch, the sum of what every use contributes, the deepest use first.
Here that sum travels with the backward: each stage's is caught before it reaches `.grad` and sent to the next
stage up that shares the parameter, whose backward starts from it; the topmost (the owner) adds the whole to
the gradient. So it is the same to the bit.

    rank 3, I5 of stage 3 -> sum so far of microbatch 5 -> rank 0, I5 of stage 0 -> owner's gradient

A tied parameter's gradient is never deferred to W: its hook makes the split backward leave it in I.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.message import Edge, Payload
from penstock.runtime.shards import as_shard, local
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
        self._from_below: dict[int, list[int]] = {}
        for slot, tie in enumerate(ties, start=1):
            for stage in tie.stages[:-1]:
                self._from_below.setdefault(stage, []).append(slot)
        self._owned = {slot: tie.owner for slot, tie in enumerate(ties, start=1)}
        self._caught: dict[int, Tensor | None] = {}
        self._sums: dict[int, Tensor | None] = {}
        self._catching = False
        self._handles = [
            p.register_post_accumulate_grad_hook(self._catch)
            for p in {id(p): p for p in local.values()}.values()
            if p.requires_grad
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _catch(self, parameter: Tensor) -> None:
        if self._catching:
            before, now = self._caught.get(id(parameter)), parameter.grad
            # A reentrant checkpoint adds in a backward of its own.
            self._caught[id(parameter)] = now if before is None or now is None else before + now
            parameter.grad = None

    def begin(self) -> None:
        """Starts a step: gradients from earlier steps are kept aside, to be added to."""
        self._catching = True
        self._caught.clear()
        self._sums = {
            slot: parameter.grad for (slot, stage), parameter in self._local.items() if stage == self._owned[slot]
        }
        for parameter in self._local.values():
            parameter.grad = None

    def sort(self, op: Op, received: Sequence[Payload]) -> tuple[Sequence[Payload], list[tuple[Tensor, Tensor]]]:
        """Tells the gradients of outputs from the tied sums, which come after them, by slot: (parameter, its sum)."""
        slots = self._from_below.get(op.stage, ())
        main = len(received) - len(slots)
        sums: list[tuple[Tensor, Tensor]] = []
        for slot, payload in zip(slots, received[main:], strict=True):
            parameter, gradient = self._local[slot, op.stage], payload.leaves[0]
            if gradient is not None and parameter.requires_grad:
                sums.append((parameter, as_shard(gradient.to(parameter.device), parameter)))
        return received[:main], sums

    def collect(self, op: Op) -> None:
        """After a backward: adds this microbatch's whole sums where this stage is the owner."""
        for slot, owner in self._owned.items():
            if owner != op.stage:
                continue
            total = self._caught.pop(id(self._local[slot, op.stage]), None)
            if total is not None:
                so_far = self._sums.get(slot)
                self._sums[slot] = total if so_far is None else so_far.add_(total)

    def give(self, edge: Edge) -> Payload:
        """The sum so far, for the next stage up."""
        parameter = self._local[edge.slot, edge.producer.stage]
        caught = self._caught.pop(id(parameter), None)
        return Payload.gradients([None if caught is None else local(caught)])

    def end(self) -> None:
        """Ends the step's catching, however it went."""
        self._catching = False

    def sums(self) -> dict[int, Tensor | None]:
        """Slot -> gradient, for the ties this rank owns."""
        return self._sums

    def parameter(self, slot: int) -> Parameter | None:
        """This rank's parameter of a tie, if it has one."""
        return next((p for (own, _), p in self._local.items() if own == slot), None)

    def followers(self, slot: int) -> list[Parameter]:
        """This rank's other parameters of a tie, which have the first one's value and gradient."""
        first = self.parameter(slot)
        return [p for (own, _), p in self._local.items() if own == slot and p is not first]

    def put(self, slot: int, gradient: Tensor | None) -> None:
        """Sets the summed gradient on this rank's parameters."""
        for (own_slot, _), parameter in self._local.items():
            if own_slot == slot:
                parameter.grad = gradient

    def fill(self, slot: int, value: Tensor) -> None:
        """Sets the value of this rank's parameters of a tie."""
        for (own_slot, _), parameter in self._local.items():
            if own_slot == slot and local(parameter).data_ptr() != local(value).data_ptr():
                local(parameter).copy_(local(value))
