"""Shards modules in place over one mesh: which of their weights go where, and where a region begins."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensor_parallel.modules import (
    ColumnLinear,
    RowLinear,
    ShardedModule,
    VocabularyEmbedding,
    VocabularyLinear,
    entered,
    shard_of,
)
from penstock.runtime.tensors.rng import mix, seed_generators

__all__ = ["LocalRng", "Shardable", "Sharding"]


class LocalRng:
    """The generators of one region, between its beginning and its end.

    all alike ... begin | each its own ... end | all alike, from where they were at begin
    """

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
        """Puts the generators back, if ranks have drawn for themselves in it."""
        if self._found:
            torch.set_rng_state(self._found[0])
        if len(self._found) > 1:
            torch.cuda.set_rng_state(self._found[1], self._device)
        self._found = []


@runtime_checkable
class Shardable(Protocol):
    """A module that knows how it is sharded."""

    def shard_over(self, sharding: Sharding) -> None: ...


class Sharding:
    """Shards the modules of one stage. A parameter that several of them share stays one.

    Args:
        mesh: of one dimension; its ranks hold the same stage in full.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._made: dict[int, tuple[Parameter, Parameter]] = {}
        self._taken: set[nn.Module] = set()

    def takes(self, module: nn.Module) -> bool:
        """Whether a module has not been sharded yet: one that is called from several places comes more than once."""
        new = module not in self._taken
        self._taken.add(module)
        return new

    def columns(self, linear: nn.Linear) -> None:
        """In a region: this rank keeps some of the output features."""
        self.parameter(linear, "weight", 0)
        self.parameter(linear, "bias", 0)
        self.become(linear, ColumnLinear)

    def rows(self, linear: nn.Linear) -> None:
        """At the end of a region: this rank keeps the weights of some of the input features."""
        self.parameter(linear, "weight", 1)
        self.become(linear, RowLinear)

    def head(self, linear: nn.Linear) -> None:
        """This rank keeps some of the vocabulary; the logits become a DTensor."""
        self.parameter(linear, "weight", 0)
        self.parameter(linear, "bias", 0)
        self.become(linear, VocabularyLinear)

    def embedding(self, embedding: nn.Embedding) -> None:
        """This rank keeps the rows of some of the vocabulary. What a subclass does to them it goes on doing."""
        self.parameter(embedding, "weight", 0)
        kind = type(embedding)
        if kind is not nn.Embedding:
            # Its `super().forward` is then ours.
            self.become(embedding, type(f"Vocabulary{kind.__name__}", (kind, VocabularyEmbedding), {}))
        else:
            self.become(embedding, VocabularyEmbedding)

    def whole(self, module: nn.Module) -> None:
        """In a region: every rank keeps all the weights, and uses them on its own part of the work."""
        enter_parameters(module, self.mesh)

    def region(self, module: nn.Module, last: nn.Module | None = None) -> None:
        """What goes into `module`, by its first argument or as `hidden_states`, enters a region.

        Where `last` is given, the module that ends the region, random numbers between are drawn by each rank for
        itself: its heads drop out other numbers than those of other ranks. Before and after all draw alike.
        """
        mesh, local_rng = self.mesh, LocalRng(self.mesh)  # and not this sharding, which has the whole parameters

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
            x: Tensor = args[0] if args else kwargs["hidden_states"]
            if last is not None and module.training:
                local_rng.begin(x.device)
            x = entered(x, mesh)
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

        module.register_forward_pre_hook(enter, with_kwargs=True)
        if last is not None:
            last.register_forward_pre_hook(lambda *_: local_rng.end())

    def parameter(self, module: nn.Module, name: str, dim: int) -> None:
        """Replaces a parameter, if the module has it, by this rank's shard of it."""
        whole = module._parameters.get(name)
        if whole is None:
            return
        if id(whole) not in self._made:
            # The whole one is kept until the stage is done, so that its id stays its own.
            self._made[id(whole)] = whole, shard_of(whole, self.mesh, dim)
        module._parameters[name] = self._made[id(whole)][1]

    def require_complete(self, stage: nn.Module) -> None:
        """Raises RuntimeFailure where a parameter was sharded for one of its modules, and is whole in another."""
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            if id(parameter) in self._made:
                raise RuntimeFailure(
                    f"{name} is also a parameter of another module, where it was sharded; shard both or none"
                )

    def become(self, module: nn.Module, kind: type[ShardedModule]) -> None:
        """Turns a module, in place, into another with the same parameters."""
        module.__class__ = kind
        module.__dict__["mesh"] = self.mesh


def enter_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Makes a module's code see its parameters as they enter the region; they keep their names and values.

    For modules inside a region whose weights every rank holds in full, such as a norm over each head's features: each
    rank uses them on its own heads, so their gradient is the sum of all ranks'.
    """
    kind = type(module)
    seen = {name: _entering(name, mesh) for name, p in module._parameters.items() if p is not None}
    module.__class__ = type(f"Entering{kind.__name__}", (kind,), seen)


def _entering(name: str, mesh: DeviceMesh) -> property:
    def parameter(self: nn.Module) -> Tensor:
        own = self._parameters[name]
        assert own is not None
        return entered(own, mesh)

    return property(parameter)
