"""The null device: real ordering, no tensors. It proves that what reaches an op is what the op needs."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Edge, Payload
from penstock.schedule import Op


class NullDevice:
    """Runs nothing; keeps the order in which ops ran."""

    def __init__(self) -> None:
        self.ran: list[Op] = []

    def run(self, op: Op, received: Sequence[Payload]) -> None:
        for payload in received:
            edge = payload.skeleton
            if edge.consumer != op:
                raise RuntimeFailure(f"{op} received what was meant for {edge.consumer}")
        self.ran.append(op)

    def give(self, edge: Edge) -> Payload:
        if not self.ran or self.ran[-1] != edge.producer:
            raise RuntimeFailure(f"{edge.producer} has not just run, and can send nothing to {edge.consumer}")
        return Payload([], edge)
