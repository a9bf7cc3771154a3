"""The model as this process holds it: copies of stages, parameters that stages share, how gradients come together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.buckets import send_values
from penstock.runtime.parameters.fsdp import ShardedParameters
from penstock.runtime.parameters.owners import all_dtypes, owned_parameters, sees_gradients, ties_of
from penstock.runtime.parameters.pipeline_copies import Copies, build_copies
from penstock.runtime.parameters.shared_modules import SharedModules
from penstock.runtime.parameters.shared_stage import (
    Parallelize,
    cut_stages,
    keep_as_one,
    names_of_one,
    require_cut_alike,
    require_tied_alike,
    share_values_of_stages,
)
from penstock.runtime.parameters.tied import Tie, TiedGradients
from penstock.runtime.stage.stage import Stage, StageSource
from penstock.runtime.tensors.dtensor import as_shard, local
from penstock.schedule import Placement
from penstock.schedule.updates import OWNER


def _others(
    sources: Sequence[Stage | StageSource], stages: Mapping[int, Stage]
) -> list[tuple[weakref.ref[Parameter], int, str]]:
    """The parameters of the model given that no stage of this process has, with their stages and names."""
    own = {id(p) for stage in stages.values() for p in stage.parameters()}
    return [
        (weakref.ref(parameter), index, name if isinstance(source, Stage) else f"{index}.{name}")
        for index, source in enumerate(sources)
        if isinstance(source, nn.Module) and index not in stages
        for name, parameter in source.named_parameters()
        if id(parameter) not in own
    ]


class LocalModel:
    """Attributes:
    copies: of stages, in this process. stages: the owners among them, by stage.
    device: where they lie.
    ties: parameters that several stages share. tied: what takes and passes on their gradients.
    sharded: the parameters of which replicas keep parts; None where they do not.
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
        mesh: ProcessMesh,
        device: torch.device | str | None,
        tied: Sequence[Sequence[str]],
        parallelize: Parallelize | None = None,
    ) -> None:
        self.placement, self._peers = placement, mesh.pipeline
        peers = mesh.pipeline
        self.copies = copies = Copies(build_copies(sources, placement, peers.here), placement, peers)
        self.stages: dict[int, Stage] = copies.owners
        stages = copies.stages
        # On the whole model, before anything takes the place of a parameter.
        self.ties: list[Tie] = ties_of(sources, stages, tied, peers)
        require_tied_alike(self.ties, placement, peers)
        self._given = [(weakref.ref(p), i, n) for i, stage in stages.items() for n, p in stage.named_parameters()]
        self._shared = SharedModules(sources, stages)
        self._elsewhere = _others(sources, stages)
        self._without_gradient: list[tuple[weakref.ref[Parameter], int, str]] = []
        as_one = names_of_one(stages)
        hooked = self._hooked() if parallelize is not None else []
        share_values_of_stages(self.stages, placement, peers)
        cut_stages(stages, placement, mesh, parallelize)
        keep_as_one(as_one, stages)
        self._require_kept(hooked)
        self.device = device_of(stages.values(), device)
        for stage in stages.values():
            stage.to(self.device)
        copies.know(self.ties)
        self.tied = TiedGradients(self.ties, stages, copies.here)
        require_cut_alike(self.ties, stages, peers)
        self.share_values()
        self.share_tied_values()
        if isinstance(mesh.replicas, GroupPeers):
            send_values([*copies.parameters(), *self.buffers()], lambda _: 0, mesh.replicas)
        self.sharded = ShardedParameters(stages, mesh) if mesh.has_parts else None
        self.parameters: list[Parameter] = copies.parameters()
        self.named = owned_parameters(self.stages, self.ties, lambda _: True)
        self.own = owned_parameters(self.stages, self.ties, lambda stage: placement.hosts(0, stage)[0] in peers.here)
        self.dtypes = all_dtypes(self.stages, self.own, peers)

    def owned(self) -> list[Parameter]:
        """The parameters of the owners' copies here, each once."""
        return list({id(p): p for stage in self.stages.values() for p in stage.parameters()}.values())

    def buffers(self) -> list[Tensor]:
        """Of all copies, each once."""
        return list({id(b): b for stage in self.copies.stages.values() for b in stage.buffers()}.values())

    def share_values(self) -> None:
        """Gives every copy its owner's parameters and buffers."""
        self.copies.share_parameters()
        self.copies.share_buffers()

    def stand_ins(self) -> dict[int, list[Parameter]]:
        """By the id of a parameter of the model given, what took its place when stages were cut."""
        now = {index: dict(stage.named_parameters()) for index, stage in self.copies.stages.items()}
        found: dict[int, list[Parameter]] = {}
        for given, index, name in self._given:
            known, one = given(), now[index].get(name)
            if known is not None and one is not None and one is not known:
                those = found.setdefault(id(known), [])
                those += [] if any(one is each for each in those) else [one]
        return found

    def _hooked(self) -> list[tuple[weakref.ref[Parameter], int, str]]:
        """Of the parameters given those that a hook watches."""
        return [known for known in self._given if (one := known[0]()) is not None and sees_gradients(one)]

    def _require_kept(self, hooked: Sequence[tuple[weakref.ref[Parameter], int, str]]) -> None:
        """Raises RuntimeFailure where something took the place of a parameter that a hook watches."""
        for given, index, name in hooked:
            if given() is not dict(self.copies.stages[index].named_parameters()).get(name):
                raise RuntimeFailure(
                    f"{name} has a hook that is to see its gradients, and parallelize puts this rank's part in its "
                    "place, where the hook would see none; register it on pipe.named_parameters(), once the pipeline "
                    "is made"
                )

    def require_trainable(self) -> None:
        """Raises RuntimeFailure where stages share what a step would change out of order, or a hook sees nothing."""
        self._shared.require_unchanging()
        if self.sharded is not None:
            self.sharded.require_unhooked()

    def begin(self) -> None:
        """Starts a training step."""
        self._without_gradient = [
            known for known in self._elsewhere if (one := known[0]()) is not None and one.grad is None
        ]
        self.copies.begin()
        self.tied.begin()

    @property
    def is_shared(self) -> bool:
        """Whether something of a stage here is another one's, or another copy's, too, so that ops need `inside`."""
        return bool(self.ties) or self.copies.take_turns or self._shared.has_any

    @contextmanager
    def inside(self, pipeline: int, stage: int) -> Iterator[None]:
        """Around an op of a copy of a stage in a training step."""
        self.copies.select(pipeline, stage)
        with self.tied.inside(pipeline, stage), self._shared.unchanged(stage):
            yield

    def end(self) -> None:
        """Ends it, however it went."""
        self.copies.end()

    def gather_gradients(self) -> None:
        """Brings together the gradients of what several stages or pipelines share."""
        self.copies.sum_gradients()
        for slot, tie in enumerate(self.ties, start=1):
            parameter = self.tied.parameter(slot)
            self.tied.put(slot, self.spread(tie, None if parameter is None else parameter.grad, parameter))

    def require_own_gradients(self) -> None:
        """Raises RuntimeFailure where a stage here used a parameter of one that another process has: what it adds to
        the gradient here would be lost.
        """
        for given, stage, name in self._without_gradient:
            parameter = given()
            if parameter is not None and parameter.grad is not None:
                parameter.grad = None
                here = ", ".join(map(str, self.copies.stages))
                raise RuntimeFailure(
                    f"a stage of this process ({here}) uses {name}, a parameter of stage {stage}, which another "
                    "process has, and none of its modules holds it, so its part of the gradient would be lost; "
                    "register the parameter in both stages, as a tied one"
                )

    def zero_grad(self) -> None:
        # Where replicas keep parts, a step has other parameters in the modules than there are between steps.
        parameters = self.parameters
        if self.sharded is not None:
            parameters = [*self.copies.parameters(), *(one.whole for one in self.sharded.of_whole.values())]
        self.copies.drop_gradients(parameters)

    @contextmanager
    def as_whole(self) -> Iterator[None]:
        """Between steps: what replicas keep in parts is whole in here. Every process must call it."""
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

    def close(self) -> None:
        self.tied.close()

    def share_tied_values(self) -> None:
        """Gives all stages that share a parameter its owner's value."""
        for slot, tie in enumerate(self.ties, start=1):
            parameter = self.tied.parameter(slot)
            value = self.spread(tie, None if parameter is None else parameter.detach(), parameter)
            if value is not None:
                self.tied.fill(slot, value)

    def spread(self, tie: Tie, tensor: Tensor | None, like: Tensor | None) -> Tensor | None:
        """What every copy of a tie's owner has, for all ranks that hold another stage of it."""
        if len(self.placement.hosts(OWNER, tie.owner)) > 1:
            return tensor  # the same ranks share all the stages, and each has what is its own
        have = {ranks[tie.owner] for ranks in self.placement.pipelines}
        need = {ranks[stage] for ranks in self.placement.pipelines for stage in tie.stages} - have
        source = self.placement.pipelines[OWNER][tie.owner]
        if not need or set(self._peers.here) & (have - {source}):
            return tensor
        part = None if tensor is None else local(tensor)
        came = self._peers.share(part, None if like is None else local(like), source, sorted(need))
        return None if came is None else as_shard(came, like)


def device_of(stages: Iterable[Stage], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    for stage in stages:
        for parameter in stage.parameters():
            return parameter.device
    return torch.device("cpu")
