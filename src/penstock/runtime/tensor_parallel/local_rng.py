"""Random numbers that each rank draws for itself, in a region: its heads drop out other numbers than other ranks'.

all alike ... begin | each its own ... end | all alike, from where they were at begin
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.runtime.tensors.rng import mix, seed_generators

__all__ = ["Apart"]


class Apart:
    """The generators of one region, between its beginning and its end."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._device = torch.device("cpu")
        self._found: list[Tensor] = []

    def begin(self, device: torch.device) -> None:
        """Seeds the generators for this rank alone, from a number that all draw alike.

        What a region left that did not come to its end is forgotten: an error, or a checkpoint that had recomputed
        all it needed, has put the generators back by itself.
        """
        drawn = int(torch.randint(1 << 62, ()))
        self._device = device
        self._found = [torch.get_rng_state()]
        if device.type == "cuda":
            self._found.append(torch.cuda.get_rng_state(device))
        seed_generators(mix(drawn, self._mesh.get_local_rank()), device)

    def end(self) -> None:
        """Puts the generators back, if the region began with drawing apart."""
        if self._found:
            torch.set_rng_state(self._found[0])
        if len(self._found) > 1:
            torch.cuda.set_rng_state(self._found[1], self._device)
        self._found = []
