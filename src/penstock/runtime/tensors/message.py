"""What travels between ops: an edge of the schedule's graph, and a payload."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from penstock.schedule import Op
from penstock.schedule.op import OF_UPDATES, PREDICT, UPDATE


class Edge(NamedTuple):
    """A message from `producer` to `consumer`.

    `slot` 0 carries activations or gradients; slot k carries the gradient of the k-th tied parameter; slot -k is a
    token, which carries nothing: the k-th of the stage graph's needs asks that the producer has run. The slots after
    those of tied parameters are of updates, one for each copy of a stage but the owner's: gradients of a window go to
    the owner, parameters come back. As many more are those of PREDICT. Last come those of the values of tied
    parameters, one for each stage but the owner that has one: an update of the owner's stage sends what it made. As
    many more are those of what a PREDICT of that stage made.
    """

    producer: Op
    consumer: Op
    slot: int = 0

    @property
    def is_token(self) -> bool:
        return self.slot < 0

    @property
    def is_update(self) -> bool:
        """Whether it carries a window's gradients to a stage's owner, or parameters from it."""
        return self.consumer.kind in OF_UPDATES

    @property
    def is_tied_value(self) -> bool:
        """Whether it carries the new value of a tied parameter from an update to a stage that reads it."""
        return self.producer.kind in OF_UPDATES and not self.is_update

    def __str__(self) -> str:
        what = ""
        if self.is_tied_value:
            what = "the tied parameter after "
        elif self.is_update:
            what = (
                "the parameters of " if self.producer.kind in (UPDATE, PREDICT) else "the window's gradients after "
            )
        elif self.slot:
            what = "the token of " if self.is_token else "the tied gradient of "
        return f"{what}{self.producer.short()} of stage {self.producer.stage}"


@dataclass(slots=True)
class Payload:
    """Tensors and how they were arranged.

    Attributes:
        leaves: the tensors; None where a gradient is absent.
        skeleton: see `pytree.flatten`.
        needs_grad: for each leaf, whether its producer wants its gradient back. For gradients: False.
    """

    leaves: list[Tensor | None]
    skeleton: Any = None
    needs_grad: list[bool] = field(default_factory=list)

    @classmethod
    def gradients(cls, leaves: list[Tensor | None]) -> Payload:
        return cls(leaves, 0, [False] * len(leaves))
