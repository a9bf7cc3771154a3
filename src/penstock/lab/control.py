"""Requests to a running lab: one JSON object in, and one back, over a socket in the lab's folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.cost import CostError
from penstock.lab.errors import LabError, LabMisuse
from penstock.lab.forwarder import Forwarder

MOST_BYTES = 2**20
PATIENCE = 30.0
"""Seconds to wait for an answer, as the programs on the hosts may keep the machine busy."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class ControlServer:
    """Answers requests between two rounds of the forwarder. A slow client delays nothing.

    Args:
        answer: makes the answer to a request; its LabError and CostError are sent back as such.
    """

    def __init__(self, path: Path, forwarder: Forwarder, answer: Answer) -> None:
        self._forwarder, self._answer = forwarder, answer
        self._clients: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        forwarder.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
            self._clients[client.fileno()] = client
            self._forwarder.watch(client.fileno(), lambda: self._serve(client))

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            request = client.recv(MOST_BYTES)
            if request:
                client.send(json.dumps(self._reply(request)).encode())
                return
        self._forwarder.forget(client.fileno())
        del self._clients[client.fileno()]
        client.close()

    def _reply(self, request: bytes) -> dict[str, Any]:
        try:
            return self._answer(json.loads(request))
        except (LabError, CostError) as error:
            return {"error": str(error), "exit_code": getattr(error, "exit_code", LabMisuse.exit_code)}
        except (ValueError, KeyError, TypeError) as error:
            return {"error": f"a request that is none: {type(error).__name__}: {error}", "exit_code": 2}


def ask(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request and returns the answer. Raises LabError, LabMisuse."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(PATIENCE)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        try:
            client.connect(str(path))
            client.send(json.dumps(request).encode())
            reply = client.recv(MOST_BYTES)
        except TimeoutError:
            raise LabError(f"the lab at {path.parent} did not answer within {PATIENCE:g} s") from None
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise LabError(f"the lab at {path.parent} does not answer: {reason}; `penstock lab list`") from None
    if not reply:
        raise LabError(f"the lab at {path.parent} ended instead of answering")
    answer: dict[str, Any] = json.loads(reply)
    if "error" in answer:
        raise (LabMisuse if answer["exit_code"] == LabMisuse.exit_code else LabError)(answer["error"])
    return answer
