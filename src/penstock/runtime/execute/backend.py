"""A backend: what runs the ops of one rank in one step. It has a handler for each kind of op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.async_ops import AsyncOpHandle, Start
from penstock.runtime.execute.launched_ops import LaunchedOps
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.wiring import WiredOp
from penstock.schedule import Op

Handler = Callable[[WiredOp, Sequence[Payload]], Sequence[Payload]]
"""Runs one op on what its incoming edges brought, in their order and without tokens. Returns the payload of each of
`wired.output_edges`, in that order."""


class Backend(Protocol):
    """What runs the ops of one rank in one step."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """By kind of op."""

    @property
    def launched(self) -> LaunchedOps | None:
        """The ops that a device was given; None where each has run when its handler returns."""

    @property
    def began(self) -> int | None:
        """When the op run last began, in nanoseconds of the monotonic clock, where that was later than its call: it
        waited for other ranks that run it too. Else None."""

    def begin(self) -> None:
        """Before the rank's first op, in the thread that runs them."""

    def start(self, op: Op, received: Sequence[Payload]) -> AsyncOpHandle:
        """Starts an asynchronous op, given what its incoming edges brought, tokens too."""

    def waited(self, start: int, end: int) -> None:
        """Takes note that the rank waited for messages, from `start` to `end` in nanoseconds of that clock."""


class OpTable:
    """A backend put together of handlers."""

    began: int | None = None

    def __init__(
        self, handlers: Mapping[str, Handler], start: Start | None = None, launched: LaunchedOps | None = None
    ) -> None:
        self.handlers, self.launched = handlers, launched
        self._start = start

    def begin(self) -> None:
        """Real ops begin when they are asked to."""

    def start(self, op: Op, received: Sequence[Payload]) -> AsyncOpHandle:
        """Raises RuntimeFailure where nothing starts such ops."""
        if self._start is None:
            raise RuntimeFailure(f"{op} is asynchronous, and nothing here starts such ops")
        return self._start(op, received)

    def waited(self, start: int, end: int) -> None:
        """Real ops take their time whenever they start."""
