"""A backend that computes nothing. It proves that what reaches an op is what the op needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.async_ops import AsyncOpHandle
from penstock.runtime.execute.backend import Handler
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.wiring import WiredOp
from penstock.schedule import Op


class NullBackend:
    """Runs nothing; keeps the order in which ops ran. Every kind has the same handler."""

    began: int | None = None
    launched = None

    def __init__(self) -> None:
        self.ran: list[Op] = []
        self.handlers: dict[str, Handler] = defaultdict(lambda: self.run)

    def run(self, wired: WiredOp, inputs: Sequence[Payload]) -> list[Payload]:
        for payload in inputs:
            edge = payload.skeleton
            if edge.consumer != wired.op:
                raise RuntimeFailure(f"{wired.op} received what was meant for {edge.consumer}")
        self.ran.append(wired.op)
        return [Payload([], edge) for edge in wired.output_edges]

    def begin(self) -> None:
        """There is nothing to wait for."""

    def waited(self, start: int, end: int) -> None:
        """Nothing here takes time."""

    def start(self, op: Op, received: Sequence[Payload]) -> AsyncOpHandle:
        raise RuntimeFailure(f"{op} is asynchronous, and nothing here starts such ops")
