"""Modules inside a region whose weights every rank holds in full: a norm over each head's features.

Each rank uses them on its own heads, so their gradient is the sum of all ranks'.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.runtime.sharded.between import entered

__all__ = ["enter_parameters"]


def enter_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Makes a module's code see its parameters as they enter the region; they keep their names and values."""
    kind = type(module)
    seen = {name: _entering(name, mesh) for name, p in module._parameters.items() if p is not None}
    module.__class__ = type(f"Entering{kind.__name__}", (kind,), seen)


def _entering(name: str, mesh: DeviceMesh) -> property:
    def parameter(self: nn.Module) -> Tensor:
        own = self._parameters[name]
        assert own is not None
        return entered(own, mesh)

    return property(parameter)
