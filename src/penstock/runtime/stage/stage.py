"""A stage: consecutive layers of the model, run one after another, each from its own random seed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from penstock.runtime.errors import RuntimeFailure, require_value
from penstock.runtime.tensors.pytree import device_of
from penstock.runtime.tensors.rng import mix, seed_generators

GATHERS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Modules whose training forward changes buffers."""


WHOLE = ""
"""The name of a layer that is the whole model."""

Copy = tuple[int, int]
"""(pipeline, stage): a copy of a stage."""


class Stage(nn.Module):
    """Consecutive layers of a model, under their names in the whole model.

    So `named_parameters()` gives the same names as the model does.

    Args:
        layers: for each name in the whole model ("layers.3", or "3" for the fourth of a sequential) its layer. The
            name "" stands for the whole model, whose parameters then keep their own names.
        indices: each layer's number in the whole model. Its random seed is made from that number.
        calling: how a layer is called with the output of the layer before it.

    Attributes:
        constants: by name, parameters that never change and come from elsewhere, each as a number made from its
            values. A checkpoint stores that number in place of the values, and loading compares it.
        earlier_buffers: by name, buffers that an earlier stage has too, each with its name there.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> stage = ps.runtime.Stage({"0": torch.nn.Linear(4, 4), "1": torch.nn.ReLU()}, indices=[0, 1])
        >>> [name for name, _ in stage.named_parameters()], stage(torch.randn(2, 4)).shape
        (['0.weight', '0.bias'], torch.Size([2, 4]))
    """

    constants: Mapping[str, int] = {}
    earlier_buffers: Mapping[str, str] = {}

    def __init__(
        self, layers: Mapping[str, nn.Module], indices: Sequence[int], calling: Calling | None = None
    ) -> None:
        super().__init__()
        self._calling = calling or with_one_argument
        for name, layer in layers.items():
            place_at(self, name, layer)
        self._layers = tuple(layers.values())
        self._indices = tuple(indices)

    @property
    def around(self) -> dict[str, nn.Module]:
        """By name, modules of the model whose layers lie in several stages."""
        return {}

    @property
    def in_order(self) -> tuple[nn.Module, ...]:
        """The layers, in the order in which they run."""
        return self._layers

    def get_submodule(self, target: str) -> nn.Module:
        """The module at a path in the whole model."""
        whole = self._modules.get(WHOLE)
        return super().get_submodule(target) if whole is None else whole.get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the layers, by names in the whole model."""
        whole = self._modules.get(WHOLE)
        return super().state_dict(*args, **kwargs) if whole is None else whole.state_dict(*args, **kwargs)

    def replace(self, old: nn.Module, new: nn.Module) -> None:
        """Replaces a module with another one, wherever in the stage it is."""
        self._layers = tuple(new if layer is old else layer for layer in self._layers)
        for parent in self.modules():
            for name, child in parent._modules.items():
                if child is old:
                    parent._modules[name] = new

    def forward(self, value: Any, seed: int | None = None) -> Any:
        """Runs the layers. With `seed` (of this step and microbatch) their random draws are repeatable."""
        device = None if seed is None else device_of(value)
        for index, layer in zip(self._indices, self._layers, strict=True):
            if seed is not None and device is not None:
                seed_generators(mix(seed, index), device)
            value = self._calling(layer, value)
        return value


def require_stage(module: nn.Module, what: str) -> None:
    """Raises RuntimeFailure for a module that can't be trained as it is: one that replicates or shards itself, or
    whose parameters have no values yet.
    """
    require_value(isinstance(module, nn.Module), what, module, "an instance of a module")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for path, part in module.named_modules():
        where = f"layer {path} of {what}" if path else what
        kind = type(part).__name__
        if isinstance(part, DataParallel | DistributedDataParallel):
            raise RuntimeFailure(
                f"{where} is a {kind}, which replicates it and brings gradients together by itself; give the module "
                "inside (its .module), and replicas by mesh= with a dimension dp"
            )
        if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel | fsdp.FSDPModule):
            raise RuntimeFailure(
                f"{where} is sharded by FSDP ({kind}) already; give the plain module, and "
                'ps.ParallelOptions(sharding="fsdp")'
            )
        for name, t in (*part._parameters.items(), *part._buffers.items()):
            if t is not None and (is_lazy(t) or t.is_meta):
                how = "has no shape yet; run the model once on a sample" if is_lazy(t) else "is on the meta device"
                raise RuntimeFailure(
                    f"{name} of {where} ({kind}) {how}; ps.Pipeline(...) takes models whose parameters have values"
                )


def place_at(root: nn.Module, path: str, module: nn.Module) -> None:
    """Registers a module under a dotted path, within folder modules that may hold nothing else."""
    holder, last = holder_of(root, path)
    holder._modules[last] = module  # add_module takes no empty name


def holder_of(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds what a dotted path names, and its name there. Makes folder modules that are missing."""
    *folders, last = path.split(".")
    for folder in folders:
        if folder not in root._modules:
            root.add_module(folder, nn.Module())
        root = root.get_submodule(folder)
    return root, last


def with_one_argument(layer: nn.Module, value: Any) -> Any:
    """Calls a layer as `nn.Sequential` does."""
    return layer(value)


def with_arguments(layer: nn.Module, value: Any) -> Any:
    """Calls a module with a tuple as positional arguments, a dict as keyword arguments."""
    if isinstance(value, tuple):
        return layer(*value)
    if isinstance(value, dict):
        return layer(**value)
    return layer(value)


Calling = Callable[[nn.Module, Any], Any]
StageSource = nn.Module | Callable[[], nn.Module]
"""A stage, or a function that builds it on the process that needs it."""
