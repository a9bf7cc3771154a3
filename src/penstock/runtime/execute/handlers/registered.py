"""Handlers of registered kinds: each calls the function that was given for its kind. REDUCE is one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.runtime.execute.async_ops import Awaited, Started
from penstock.runtime.execute.gang import Gang
from penstock.runtime.execute.handlers.backend import Handler
from penstock.runtime.execute.launched_ops import DeviceQueue, OnDevice
from penstock.runtime.stage.host_memory import HostCopy
from penstock.runtime.stage.registered_ops import Calls, Outputs, name_of
from penstock.runtime.tensors.message import Payload
from penstock.runtime.transport.wiring import WiredOp
from penstock.schedule import Op
from penstock.schedule.updates import OWNER


class RegisteredOps:
    """The registered ops of one rank.

    Args:
        rank: whose they are.
        calls: of each registered op its function and what that is told.
        outputs: what forwards made here.
        queue: in which the stages' device has its work, so that an op may go on there when its function has returned;
            None for a device that has none.
        gang: where ranks of this process meet; the first of an op's ranks calls its function for all of them.
        select: has a stage hold what its copy of a pipeline has; a function sees what the owner's has.
    """

    def __init__(
        self,
        rank: int,
        calls: Calls,
        outputs: Outputs,
        queue: DeviceQueue | None = None,
        gang: Gang | None = None,
        select: Callable[[int, int], None] | None = None,
    ) -> None:
        self._rank, self._calls, self._select = rank, calls, select
        self._outputs, self._gang = outputs, gang
        self._queue = queue
        kinds = {op.kind for host, op in calls if host == rank}
        self.handlers: dict[str, Handler] = dict.fromkeys(kinds, self._run)

    def _run(self, wired: WiredOp, inputs: Sequence[Payload]) -> tuple[()]:
        self._once(wired.op, self._call)
        return ()

    def start(self, op: Op, received: Sequence[Payload]) -> Started:
        """Starts an asynchronous op."""
        started: Started = self._once(op, self._started)
        return started

    def _started(self, op: Op) -> Started:
        handle = self._call(op)
        known = handle is None or hasattr(handle, "wait") or hasattr(handle, "result")
        if self._queue is not None and known and not isinstance(handle, HostCopy):
            handle = OnDevice(self._queue, handle)
        return Awaited(op, handle, self._calls[self._rank, op][1].timeout)

    def _once(self, op: Op, call: Callable[[Op], Any]) -> Any:
        """Calls a function on the first rank of those in this process that run it together; the others get what that
        returned."""
        gang, ranks = self._gang, self._calls[self._rank, op][1].ranks
        if gang is None or len(ranks) == 1:
            return call(op)
        if self._rank != ranks[0]:
            return gang.find(op)
        outcome = call(op)
        gang.leave(op, outcome)
        return outcome

    def _call(self, op: Op) -> Any:
        function, call = self._calls[self._rank, op]
        if self._select is not None:
            self._select(OWNER, op.stage)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # left as it was, whatever the function does
                return function(replace(call, _outputs=self._outputs))
        except Exception as error:
            error.add_note(f"in function {name_of(function)}, which ops= has for kind {op.kind}")
            raise
