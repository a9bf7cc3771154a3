"""Checkpoints for tests: processes that are threads of one, and damage.

on_ranks(2, lambda peers: write(..., peers=peers))    flip_tensor(folder / "step-00000003")
"""

from __future__ import annotations

import json
import math
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.runtime.checkpoint import CheckpointError
from penstock.runtime.mesh.peers import Peers


class ThreadPeers(Peers):
    """Peers that meet at a barrier. `before` is called in each before it meets the others, with how often it has."""

    def __init__(
        self, rank: int, meeting: threading.Barrier, values: list[Any], before: Callable[[int], None] | None = None
    ) -> None:
        self.here, self.num_ranks = (rank,), meeting.parties
        self._meeting, self._values, self._before, self._times = meeting, values, before, 0

    def gather(self, value: Any) -> list[Any]:
        self._times += 1
        if self._before is not None:
            self._before(self._times)
        self._values[self.here[0]] = pickle.dumps(value)
        self._meeting.wait(60)
        found = [pickle.loads(each) for each in self._values]
        self._meeting.wait(60)
        return found


def on_ranks(num_ranks: int, act: Callable[[Any], Any]) -> list[Any]:
    """Runs one thread a rank; a CheckpointError of a rank is its result."""
    meeting, values = threading.Barrier(num_ranks), [None] * num_ranks

    def one(rank: int) -> Any:
        try:
            return act(ThreadPeers(rank, meeting, values))
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))


def flip_tensor(folder: Path, file: str = "__0_0.distcp") -> Path:
    """Flips a bit of the largest tensor in a file of a checkpoint, and returns the file."""
    tensors = json.loads((folder / "manifest.json").read_text())["manifest"]["tensors"]
    chunks = [chunk for each in tensors.values() for chunk in each["chunks"] if chunk["file"] == file]
    chunk = max(chunks, key=lambda found: math.prod(found["shape"]))
    content = bytearray((folder / file).read_bytes())
    content[chunk["offset"]] ^= 1
    (folder / file).write_bytes(content)
    return folder / file
