"""A backend that computes nothing. It proves that what reaches an op is what the op needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.worker import Backend
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.wiring import WiredOp
from penstock.schedule import Op


class NullBackend(Backend):
    """Runs nothing; keeps the order in which ops ran. Every kind has the same handler."""

    def __init__(self) -> None:
        super().__init__(defaultdict(lambda: self.run))
        self.ran: list[Op] = []

    def run(self, wired: WiredOp, inputs: Sequence[Payload]) -> list[Payload]:
        for payload in inputs:
            edge = payload.skeleton
            if edge.consumer != wired.op:
                raise RuntimeFailure(f"{wired.op} received what was meant for {edge.consumer}")
        self.ran.append(wired.op)
        return [Payload([], edge) for edge in wired.output_edges]
