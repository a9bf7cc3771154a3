"""The model as this process holds it: copies of stages, parameters that stages share, how gradients come together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.runtime.copies import Copies, build_copies
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.fsdp import shard_fully
from penstock.runtime.mesh import Mesh
from penstock.runtime.parameters import all_dtypes, owned_parameters, ties_of
from penstock.runtime.parameters import tied_gradients as catching
from penstock.runtime.setup import device_of
from penstock.runtime.shards import as_shard, local
from penstock.runtime.sharing import Parallelize, cut_stages, require_tied_alike, share_stages
from penstock.runtime.stage import Stage, StageSource
from penstock.runtime.tied import Tie
from penstock.schedule import Placement
from penstock.schedule.updates import OWNER


class HeldModel:
    """Attributes:
    copies: of stages, in this process. stages: the owners among them, by stage.
    device: where they lie.
    ties: parameters that several stages share. tied: of each pipeline, what catches their gradients.
    parameters: of all copies, each once.
    named: name -> parameter, for those here; a tied one is its lowest stage's.
    own: those of them that this process answers for, among the ranks of its pipeline.
    dtypes: name -> type of every parameter of the model, in its order.

    Args:
        mesh: where this process lies.
        parallelize: makes a stage this process's shard of it, where the mesh has shards or stages are shared.

    Raises:
        RuntimeFailure: a name in `tied` that is in no stage.
    """

    def __init__(
        self,
        sources: Sequence[Stage | StageSource],
        placement: Placement,
        mesh: Mesh,
        device: torch.device | str | None,
        tied: Sequence[Sequence[str]],
        parallelize: Parallelize | None = None,
    ) -> None:
        self.placement, self._peers = placement, mesh.pipeline
        peers = mesh.pipeline
        self.copies = copies = Copies(build_copies(sources, placement, peers.here), placement, peers)
        self.stages: dict[int, Stage] = copies.owners
        share_stages(self.stages, placement, peers, parallelize)
        cut_stages(copies.here.values(), mesh, parallelize)
        self.device = device_of(copies.here.values(), device)
        for stage in copies.here.values():
            stage.to(self.device)
        if mesh.has_parts:
            shard_fully(copies.here.values(), mesh, placement)
        self.ties: list[Tie] = ties_of(sources, self.stages, tied, peers)
        require_tied_alike(self.ties, placement, peers)
        if self.ties and mesh.has_parts:
            names = ", ".join(self.ties[0].names.values())
            raise RuntimeFailure(f'{names} are one parameter, of which sharding="fsdp" makes several; use "zero1"')
        self.tied = [catching(self.ties, copies.of(k)) for k in range(placement.num_pipelines)]
        self.parameters: list[Parameter] = copies.parameters()
        self.named = owned_parameters(self.stages, self.ties, lambda _: True)
        self.own = owned_parameters(self.stages, self.ties, lambda stage: placement.hosts(0, stage)[0] in peers.here)
        self.dtypes = all_dtypes(self.stages, self.own, peers)
        self._share_tied_values()
        self.share_values()

    def owned(self) -> list[Parameter]:
        """The parameters of the owners' copies here, each once."""
        return list({id(p): p for stage in self.stages.values() for p in stage.parameters()}.values())

    def share_values(self) -> None:
        """Gives every copy its owner's parameters and buffers."""
        self.copies.share_parameters()
        self.copies.share_buffers()

    def begin(self) -> None:
        """Starts a training step."""
        for tied in self.tied:
            tied.begin()

    def end(self) -> None:
        """Ends it, however it went."""
        for tied in self.tied:
            tied.end()

    def gather_gradients(self) -> None:
        """Brings together the gradients of what several stages or pipelines share."""
        for pipeline, tied in enumerate(self.tied):
            sums = tied.sums()
            for slot, tie in enumerate(self.ties, start=1):
                tied.put(slot, self._share(tie, pipeline, sums.get(slot), tied.parameter(slot)))
        self.copies.sum_gradients()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def every_stage(self) -> list[nn.Module]:
        """All copies of all stages here."""
        return list(self.copies.here.values())

    def close(self) -> None:
        for tied in self.tied:
            tied.close()

    def _share_tied_values(self) -> None:
        """Starts all copies of a tied parameter from its owner's value."""
        tied = self.tied[OWNER]
        for slot, tie in enumerate(self.ties, start=1):
            parameter = tied.parameter(slot)
            value = self._share(tie, OWNER, None if parameter is None else parameter.detach(), parameter)
            if parameter is not None and value is not None:
                with torch.no_grad():
                    tied.fill(slot, value)

    def _share(self, tie: Tie, pipeline: int, tensor: Tensor | None, like: Tensor | None) -> Tensor | None:
        """What the owner of a tied parameter has, for all ranks that hold it in a pipeline."""
        ranks = [self.placement.pipelines[pipeline][stage] for stage in tie.stages]
        if len(self.placement.hosts(pipeline, tie.owner)) > 1:
            return tensor  # the same ranks share all the stages, and each has what is its own
        part = None if tensor is None else local(tensor)
        came = self._peers.share(part, None if like is None else local(like), ranks[0], sorted({*ranks}))
        return None if came is None else as_shard(came, like)
