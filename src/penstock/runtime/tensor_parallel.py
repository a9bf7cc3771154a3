"""Tensor parallelism: modules that hold a shard of their weights and run as one on all ranks of a mesh.

    x [B, T, D] --entered--> columns --> rows --summed--> y [B, T, D]
    the same on            a part of the features,      the same on
    every rank             no word between ranks        every rank

What lies between `entered` and `summed` is a region: an attention with some of the heads, an MLP with some of its
width. Weights there are DTensors, of which each rank computes with its own part; what goes in and out are plain
tensors, equal on all ranks. (This cut is that of Shoeybi et al. 2019, arXiv 1909.08053, section 3: its f and g.)

A module becomes one of these in place (`Sharding`), so what holds it goes on holding it, and its parameters keep
their names. `on_shard` is the arithmetic without any word between ranks: the split backward defers its weights.

    entered    forward: nothing                      backward: the sum of all ranks' gradients
    summed     forward: the sum of all ranks'        backward: nothing

All ranks of a mesh run the same ops in the same order, backwards included, so nothing needs a name: the next sum here
is the next one there. Each has the mesh's own deadline.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.mesh.collective import is_late
from penstock.runtime.tensors.dtensor import as_shard, local, rows_of_part
from penstock.runtime.tensors.rng import mix, seed_generators


def entered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """`x`, which is the same on all ranks of a mesh, where each goes on with a part of the work.

    Its gradient is the sum of what all ranks' parts say. Raises PeerLost, DeadlineExceeded (in the backward).
    """
    entering: Tensor = _Entered.apply(x, mesh)
    return entering


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all ranks' `x`, the same on each. Raises PeerLost, DeadlineExceeded."""
    total: Tensor = _Summed.apply(x, mesh)
    return total


def largest(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The largest of all ranks' `x`, element by element; has no gradient. Raises PeerLost, DeadlineExceeded."""
    return _over_ranks(x.detach(), mesh, dist.ReduceOp.MAX)


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _over_ranks(g, ctx.mesh, dist.ReduceOp.SUM), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _over_ranks(x, mesh, dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def _over_ranks(x: Tensor, mesh: DeviceMesh, how: Any) -> Tensor:
    # A copy, as the gradient that came may be another node's too.
    out = x.clone(memory_format=torch.contiguous_format)
    try:
        dist.all_reduce(out, how, group=mesh.get_group())
    except RuntimeError as error:
        raise _explained(error, mesh) from None
    return out


def _explained(error: RuntimeError, mesh: DeviceMesh) -> RuntimeFailure:
    shard = f"shard {mesh.get_local_rank()} of {mesh.size()}"
    if is_late(error):
        return DeadlineExceeded(
            f"{shard} waited for the others' parts of a sum for longer than the timeout; if they are just slow, "
            "give a longer one; if not, one stands still or was given other batches or calls"
        )
    return PeerLost(f"{shard} lost its connection to another while it waited for the others' parts of a sum")


def shard_of(parameter: Parameter, mesh: DeviceMesh, dim: int) -> Parameter:
    """A parameter that every rank holds in full, cut along `dim` as `torch.chunk` cuts; the whole may be freed."""
    # Imported where a shard is first made, as it takes a second.
    from torch.distributed.tensor import Shard, distribute_tensor

    cut = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return Parameter(as_shard(cut.to_local().clone(), cut), parameter.requires_grad)


def span(size: int, mesh: DeviceMesh) -> range:
    """Which of `size` rows lie on this rank; of the last ranks it may be none."""
    return rows_of_part(size, mesh.size(), mesh.get_local_rank())


class ShardedModule(nn.Module):
    """A module whose `forward` has some words between ranks around `on_shard`."""

    mesh: DeviceMesh

    @abstractmethod
    def on_shard(self, x: Tensor) -> Tensor:
        """What this rank's shard makes of `x`, a plain tensor."""


class ColumnLinear(ShardedModule, nn.Linear):
    """In a region: some of the output features, of input that is the same on all ranks."""

    def on_shard(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.on_shard(x)


class RowLinear(ShardedModule, nn.Linear):
    """The end of a region: all output features, of some of the input features. All hold the bias, added once."""

    def on_shard(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        y = summed(self.on_shard(x), self.mesh)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabularyLinear(ColumnLinear):
    """A head: logits of some of the vocabulary, as a DTensor of them all, which `CrossEntropy` takes as it is."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard  # there since a shard was made

        logits = self.on_shard(entered(x, self.mesh))
        shape = torch.Size((*x.shape[:-1], self.out_features))
        stride = torch.empty(shape, device="meta").stride()
        placed = [Shard(logits.dim() - 1)]
        return DTensor.from_local(logits, self.mesh, placed, run_check=False, shape=shape, stride=stride)


class VocabularyEmbedding(ShardedModule, nn.Embedding):
    """Rows of some of the tokens; the others' are zeros here, and the sum over ranks has all."""

    @property
    def padding_here(self) -> int | None:
        """Which of this rank's rows, if any, is that of the token that stands for nothing."""
        own, padding = span(self.num_embeddings, self.mesh), self.padding_idx
        return None if padding is None or padding not in own else padding - own.start

    def on_shard(self, x: Tensor) -> Tensor:
        return F.embedding(x, local(self.weight), self.padding_here)

    def forward(self, tokens: Tensor) -> Tensor:
        own = span(self.num_embeddings, self.mesh)
        if not own:  # a small vocabulary may leave the last ranks without rows
            # A row of zeros, and not `local(self.weight).sum()`, whose gradient has strides of 0: torch 2.11 would
            # gather that shard before it adds to it, on this rank alone.
            row = F.pad(local(self.weight), (0, 0, 0, 1))
            return summed(F.embedding(torch.zeros_like(tokens), row), self.mesh)
        # A token that is on no rank stays out of range on all, for torch to refuse.
        elsewhere = (tokens < own[0]) & (tokens >= 0) | (tokens > own[-1]) & (tokens < self.num_embeddings)
        rows = self.on_shard((tokens - own[0]).masked_fill(elsewhere, 0))
        return summed(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.mesh)


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
        drawn = int(torch.randint(1 << 62, (), device="cpu"))
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
        self.columns(linear)
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
        """In a region: every rank keeps all the weights, and uses them on its own part of the work.

        A norm over each head's features is such a module: each rank uses it on its own heads. The gradient of the
        weights is the sum of all ranks', so the module's code sees them as they enter the region. They keep their
        names.
        """
        kind = type(module)
        seen = {name: _entering(name, self.mesh) for name, p in module._parameters.items() if p is not None}
        module.__class__ = type(f"Entering{kind.__name__}", (kind,), seen)

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


def _entering(name: str, mesh: DeviceMesh) -> property:
    def parameter(self: nn.Module) -> Tensor:
        own = self._parameters[name]
        assert own is not None
        return entered(own, mesh)

    return property(parameter)
