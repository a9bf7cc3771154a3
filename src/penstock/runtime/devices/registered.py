"""The device of a rank whose schedule has ops of registered kinds: calls their functions, hands on all other ops.

Only such schedules have it, so others pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.runtime.message import Edge, Payload
from penstock.runtime.registered import OpCall, OpFunction, name_of
from penstock.runtime.worker import Device
from penstock.schedule import Op


class RegisteredDevice:
    """Around the device that runs the other ops.

    Args:
        calls: of each registered op its function and what that is told.
        tokens: how many of the messages that come in for an op are tokens; they come last.
        device: where the stages lie; on a GPU an op ends when its work is done, as with all other ops.
    """

    def __init__(
        self,
        inner: Device,
        calls: Mapping[Op, tuple[OpFunction, OpCall]],
        tokens: Mapping[Op, int],
        device: torch.device,
    ) -> None:
        self._inner = inner
        self._calls = calls
        self._tokens = tokens
        self._gpu = device if device.type == "cuda" else None

    def run(self, op: Op, received: Sequence[Payload]) -> int | None:
        if num_tokens := self._tokens.get(op, 0):
            received = received[:-num_tokens]
        if op not in self._calls:
            return self._inner.run(op, received)
        function, call = self._calls[op]
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # left as it was, whatever the function does
                function(call)
                if self._gpu is not None:
                    torch.cuda.synchronize(self._gpu)
        except Exception as error:
            error.add_note(f"in function {name_of(function)}, which ops= has for kind {op.kind}")
            raise
        return None

    def give(self, edge: Edge) -> Payload:
        return Payload([]) if edge.is_token else self._inner.give(edge)
