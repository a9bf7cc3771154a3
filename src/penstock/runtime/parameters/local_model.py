"""The model in this process: copies of stages, parameters that stages share, and how gradients come together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.buckets import send_values
from penstock.runtime.parameters.copies import Copies, build_alike
from penstock.runtime.parameters.sharding import ShardedParameters
from penstock.runtime.parameters.shared import Parallelize, SharedTensors, cut_stages, share_values_of_stages
from penstock.runtime.parameters.tied_gradients import TiedGradients
from penstock.runtime.parameters.ties import keep_as_one, names_of_one, require_cut_alike, require_tied_alike, ties_of
from penstock.runtime.stage.stage import Stage, StageSource
from penstock.schedule import Placement


class LocalModel:
    """The stages of a model that lie in this process, their parameters, and what others hold of these too.

    Attributes:
        copies: of stages, in this process. stages: the owners' copies, by stage.
        device: of the stages.
        ties: parameters that several stages share. tied: passes on their gradients.
        shared: shares gradients and values among stages, pipelines and ranks.
        sharded: the parameters that replicas divide; None if they do not.
        parameters: of all copies, each once.
        named: by name the parameters here; a tied parameter has the name of its lowest stage.
        own: those of `named` that this process answers for, among the ranks of its pipeline.
        dtypes: by name the type of every parameter of the model, in the model's order.
        loss: the stage with the loss, and the module that computes it; None if no module does.

    Args:
        mesh: says where this process lies.
        parallelize: turns a stage into this process's shard of it, if the mesh has shards or stages are shared.

    Raises:
        RuntimeFailure: a name in `tied` is in no stage, or processes were given different stages.
    """

    def __init__(
        self,
        sources: Sequence[Stage | StageSource],
        placement: Placement,
        mesh: ProcessMesh,
        device: torch.device | str | None,
        tied: Sequence[Sequence[str]],
        parallelize: Parallelize | None = None,
    ) -> None:
        self.placement, self._peers = placement, mesh.pipeline
        self.loss: tuple[int, nn.Module | None] = -1, None
        peers = mesh.pipeline
        self.copies = copies = Copies(build_alike(sources, placement, mesh), placement, peers)
        self.stages: dict[int, Stage] = copies.owners
        stages = copies.stages
        # On the whole model, before anything takes the place of a parameter.
        self.ties = ties_of(sources, stages, tied, peers)
        require_tied_alike(self.ties, placement, peers)
        self._given = [(weakref.ref(p), i, n) for i, stage in stages.items() for n, p in stage.named_parameters()]
        self._untrainable = [
            name
            for stage in stages.values()
            for name, tensor in (*stage.named_parameters(), *stage.named_buffers())
            if tensor.is_inference()
        ]
        as_one = names_of_one(stages)
        self.device = device_of(stages.values(), device)
        mesh.require_collectives(self.device, bool(placement.shared) and parallelize is not None)
        share_values_of_stages(self.stages, placement, peers)
        cut_stages(stages, placement, mesh, parallelize, self.device)
        require_cut_alike(self.ties, stages, peers)
        keep_as_one(self.ties, as_one, stages)
        for stage in stages.values():
            stage.to(self.device)
        copies.know(self.ties)
        self.tied = TiedGradients(self.ties, stages, copies.here)
        self.shared = SharedTensors(copies, placement, self.ties, peers)
        self.share_values()
        self.shared.share_tied()
        if isinstance(mesh.replicas, GroupPeers):
            send_values([*copies.parameters(), *self.buffers()], lambda _: 0, mesh.replicas)
        self.sharded = ShardedParameters(stages, mesh) if mesh.has_parts else None
        self.parameters: list[Parameter] = copies.parameters()
        answered = [index for index in self.stages if placement.hosts(0, index)[0] in peers.here]
        self.named = {name: p for index in self.stages for name, p in copies.own(index).items()}
        self.own = {name: p for index in answered for name, p in copies.own(index).items()}
        self.dtypes = _all_dtypes(self.stages, self.own, peers)

    def names(self) -> dict[str, Parameter]:
        """By the name in its owner's stage, every parameter in this process."""
        found: dict[str, Parameter] = {}
        for stage in self.copies.stages.values():
            for name, parameter in stage.named_parameters():
                found.setdefault(self.ties.owned_name(name), parameter)
        return found

    def owned(self) -> list[Parameter]:
        """The parameters of the owners' copies here, each once."""
        return list({id(p): p for stage in self.stages.values() for p in stage.parameters()}.values())

    def buffers(self) -> list[Tensor]:
        """Of all copies, each once."""
        return list({id(b): b for stage in self.copies.stages.values() for b in stage.buffers()}.values())

    def share_values(self) -> None:
        """Gives every copy its owner's parameters and buffers."""
        self.shared.share_parameters()
        self.shared.share_buffers()

    def stand_ins(self) -> dict[int, list[Parameter]]:
        """By the id of a parameter of the given model, the parameter that took its place when stages were cut.

        If several were given that are tied, it takes the place of the first, and none that of the others.
        """
        now = {index: dict(stage.named_parameters()) for index, stage in self.copies.stages.items()}
        found: dict[int, list[Parameter]] = {}
        first: dict[int, Parameter] = {}
        for given, index, name in self._given:
            known, one = given(), now[index].get(name)
            if known is not None and one is not None:
                is_first = first.setdefault(id(one), known) is known
                found |= {id(known): [one] if is_first else []} if one is not known else {}
        return found

    def require_trainable(self) -> None:
        """Raises RuntimeFailure if a parameter or buffer can't be trained."""
        if self._untrainable:
            raise RuntimeFailure(
                f"{self._untrainable[0]} was made under torch.inference_mode(), of which autograd keeps nothing for "
                "a backward; make the model outside of it, and freeze parts by requires_grad_(False)"
            )

    def begin(self) -> None:
        """Starts a training step."""
        self.copies.begin()
        self.tied.begin()

    @property
    def is_shared(self) -> bool:
        """Whether a stage here shares parameters with another stage, or has several copies, so ops need `inside`."""
        return bool(self.ties) or self.copies.take_turns

    @contextmanager
    def inside(self, pipeline: int, stage: int) -> Iterator[None]:
        """Surrounds an op of a copy of a stage in a training step."""
        self.copies.select(pipeline, stage)
        with self.tied.inside(pipeline, stage):
            yield

    def zero_grad(self) -> None:
        # If replicas keep parts, modules have other parameters in a step than between steps. A step that failed at
        # its end has given gradients to both.
        parameters = self.parameters
        if self.sharded is not None:
            parameters = [*parameters, *(one.whole for one in self.sharded.of_whole.values())]
        self.copies.drop_gradients(parameters)

    @contextmanager
    def as_whole(self) -> Iterator[None]:
        """Makes divided parameters whole within the `with` statement, between steps. Every process must call it."""
        if self.sharded is None:
            yield
            return
        self.sharded.unshard()
        try:
            yield
        finally:
            self.sharded.reshard(stepped=True)

    def every_stage(self) -> list[nn.Module]:
        """All stages here, whichever pipelines run them."""
        return list(self.copies.stages.values())


def device_of(stages: Iterable[Stage], device: torch.device | str | None) -> torch.device:
    if device is not None:
        found = torch.device(device)
        if found.type == "cuda" and (found.index or 0) >= (there := torch.cuda.device_count()):
            raise RuntimeFailure(
                f'device is {str(device)!r} and torch finds {there} GPUs; give one that is there, or "cpu"'
            )
        return found
    for stage in stages:
        for parameter in stage.parameters():
            return parameter.device
    return torch.device("cpu")


def _all_dtypes(stages: Mapping[int, Stage], own: Mapping[str, Parameter], peers: Peers) -> dict[str, torch.dtype]:
    """By name the type of every parameter of the model, in the model's order."""
    by_stage: dict[int, dict[str, torch.dtype]] = {}
    mine = {i: {n: p.dtype for n, p in s.named_parameters() if n in own} for i, s in stages.items()}
    for part in peers.gather(mine):
        for stage, found in part.items():
            if len(found) >= len(by_stage.get(stage, ())):  # of processes that share a stage one has all its names
                by_stage[stage] = found
    return {name: dtype for stage in sorted(by_stage) for name, dtype in by_stage[stage].items()}
