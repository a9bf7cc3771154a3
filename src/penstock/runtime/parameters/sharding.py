"""Which part of a parameter each replica keeps, and which replica steps it: `ParallelOptions(sharding=)`.

                 each replica keeps     steps            a sum goes to      after an update
none, copies     all                    everything       every replica      nothing is sent
zero1            all                    what it owns     the owner          owners send their parameters
fsdp             a part of everything   its parts        each its part      parts are gathered

If a rule predicts weights, the replica that steps a parameter predicts it, and sends the prediction with the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.runtime.mesh.collective import all_gather
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.process_mesh import REPLICAS, ProcessMesh
from penstock.runtime.parameters.buckets import (
    GradientBucket,
    PartBucket,
    as_real,
    cut_into_buckets,
    padded_rows,
    send_values,
)
from penstock.runtime.parameters.gradients import Gradients
from penstock.runtime.parameters.versions import Write
from penstock.runtime.stage.stage import Stage
from penstock.runtime.tensors.dtensor import is_sharded, local, memory, rows_of_part, rows_per_part, standing_for


class ReplicaParameters:
    """What each replica keeps of a parameter, and which replica steps it: here every replica keeps and steps all.

    Args:
        peers: the replicas; None for one alone.

    Attributes:
        keeps_whole: between steps each replica keeps all of every parameter.
        has_all_state: each replica has all of the optimizer's state.
    """

    keeps_whole = True
    has_all_state = True

    def __init__(self, peers: GroupPeers | None) -> None:
        self._replica = 0 if peers is None else peers.here[0]

    def unshard(self) -> None:
        """Makes all parameters whole here, before forwards."""

    def reshard(self, stepped: bool) -> None:
        """Gives up what other replicas keep. `stepped`: updates among the ops have changed values."""

    def at_rest(self, parameter: Parameter) -> Parameter:
        """What stands for a parameter between steps."""
        return parameter

    def in_step(self, parameter: Parameter) -> Parameter:
        """What a step computes with in the place of one that is there between steps."""
        return parameter

    def goes_to(self, parameter: Parameter) -> Any:
        """Where the sum of a parameter's gradients goes; parameters of one bucket go alike."""
        return None

    def bucket(self, parameters: Sequence[Parameter], peers: GroupPeers) -> GradientBucket | PartBucket:
        """The sum over replicas of the gradients of parameters that go alike."""
        return GradientBucket(parameters, peers, self.goes_to(parameters[0]))

    def stands_for(self, master: Parameter, parameter: Parameter) -> None:
        """Notes that an update steps `master` in place of a parameter, so it is kept as the parameter is."""

    def owned(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Of some parameters those that this replica steps, or the parts that it keeps of them."""
        return list(parameters)

    def dealt(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Of some parameters what an optimizer is made of on every replica, before each keeps what it steps."""
        return self.owned(parameters)

    def tells(self, parameter: Tensor) -> bool:
        """Whether this replica is the one that tells a tensor, and what the optimizer keeps of it."""
        return self._replica == 0

    def to_step(self, masters: Sequence[Parameter], gradients: Gradients) -> tuple[Sequence[Parameter], Gradients]:
        """At an update that is an op: what the optimizer steps in the masters' place, and the gradients of that."""
        return masters, gradients

    def spread(self, stepped: Iterable[Parameter]) -> None:
        """Gives every replica what the others have stepped, after an update."""
        whole = list(stepped)
        self.bring(whole, [memory((self.owned([one]) or [one])[0]) for one in whole], whole)

    def predicted(self, masters: Sequence[Parameter], write: Write) -> list[Tensor]:
        """Of each master where it will be, on every replica. Unless `has_all_state`, all replicas must call it.

        Args:
            write: writes into a tensor where something will be that this replica steps.
        """
        found = [torch.empty_like(memory(master)) for master in masters]
        parts = list(found)
        for place, master in enumerate(masters):
            for stepped in self.owned([master]):
                if stepped is not master:
                    parts[place] = torch.empty_like(memory(stepped))
                write(parts[place], stepped)
        self.bring(masters, parts, found)
        return found

    def bring(self, masters: Sequence[Parameter], parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Gives every replica in `into` what those who step the masters have in `parts`, each what it steps."""


class OwnedParameters(ReplicaParameters):
    """Gives every parameter an owner among the replicas (ZeRO-1): the largest first, to whoever has least so far.

    A tied parameter has the same owner on all ranks, so one replica has its gradient and state wherever it is held.

    Args:
        tied: by number, the parameters here that other ranks may hold as well.
    """

    has_all_state = False

    def __init__(self, peers: GroupPeers, parameters: Sequence[Parameter], tied: Mapping[int, Parameter]) -> None:
        super().__init__(peers)
        self._peers = peers
        held = [0] * peers.num_ranks
        self._owner: dict[int, int] = {}
        for number, parameter in tied.items():
            held[number % peers.num_ranks] += parameter.numel()
            self._owner[id(parameter)] = number % peers.num_ranks
        others = (parameter for parameter in parameters if id(parameter) not in self._owner)
        for parameter in sorted(others, key=lambda p: -p.numel()):
            owner = held.index(min(held))
            held[owner] += parameter.numel()
            self._owner[id(parameter)] = owner

    def goes_to(self, parameter: Parameter) -> int | None:
        return self._owner.get(id(parameter))

    def stands_for(self, master: Parameter, parameter: Parameter) -> None:
        self._owner[id(master)] = self._owner[id(parameter)]

    def owned(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        return [p for p in parameters if self._owner.get(id(p)) in (None, self._replica)]

    def dealt(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        return list(parameters)

    def tells(self, parameter: Tensor) -> bool:
        return self._owner.get(id(parameter), 0) == self._replica

    def bring(self, masters: Sequence[Parameter], parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        owner = {id(out): self._owner[id(master)] for out, master in zip(into, masters, strict=True)}
        send_values(into, lambda out: owner[id(out)], self._peers)


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter that replicas divide by rows.

    Attributes:
        whole: the parameter that was given. It has memory only in a step.
        part: this replica's rows along dimension `dim`, from row `begin` on. It takes the parameter's place at rest.
        places: the modules that have the parameter, each with its name there.
    """

    whole: Parameter
    part: Parameter
    dim: int
    begin: int
    places: tuple[tuple[nn.Module, str], ...]

    def put(self, parameter: Parameter) -> None:
        """Puts the whole or the part into its modules."""
        for module, name in self.places:
            setattr(module, name, parameter)

    def rows_of(self, tensor: Tensor) -> Tensor:
        """The part's rows of a local tensor that has the whole's shape."""
        return tensor.narrow(self.dim, self.begin, local(self.part).shape[self.dim])


class ShardedParameters(ReplicaParameters):
    """The parameters of the stages of this process, of which each replica keeps a part.

    The whole is there only while a step runs (ZeRO-3, fully sharded).

        at rest            module.weight is this replica's part, a DTensor; the optimizer steps it
        a step begins      the parts of all replicas are gathered, and module.weight is whole
        its backwards      add to whole gradients here
        REDUCE             adds a stage's gradients up over the replicas and leaves each its part of the sum
        the step ends      module.weight is the part again, and the whole's memory is given up

    Where updates are ops of the schedule, each sums its gradients and steps its part, and what all parts come to is
    gathered at once, as the next op reads it. Older versions that a rule keeps, and gradients of an open window, stay
    whole between steps.

    Everything is gathered at once, in one order on all replicas, and gradients go stage by stage. So replicas may use
    different layers (a mixture whose expert gets no sample here) and run their ops in different orders. torch's FSDP2
    gathers a layer when it is called and adds its gradients up when a backward reaches it, where such replicas would
    wait for each other; it also takes the place of a layer's hooks, and takes one type per layer.

    What several stages of this process share has one part. What stages in other processes share, or copies of a stage
    in other pipelines, or ranks that have one stage together, has a part in each of them: replicas cut all of them
    alike.

    What is one number stays whole on every replica.

    Args:
        stages: with the same values on all replicas.
    """

    keeps_whole = False
    has_all_state = False

    def __init__(self, stages: Mapping[int, Stage], mesh: ProcessMesh) -> None:
        assert isinstance(mesh.replicas, GroupPeers)
        super().__init__(mesh.replicas)
        self._mesh, self._peers, self._group = mesh, mesh.replicas, mesh.replicas.group
        self._shared: dict[Any, Any] = {}
        self.of_whole: dict[int, ShardedParameter] = {}
        self._of_master: dict[int, ShardedParameter] = {}
        places: dict[Parameter, dict[tuple[nn.Module, str], None]] = {}
        for stage in stages.values():
            for module in stage.modules():
                for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                    places.setdefault(parameter, {})[module, name] = None
        for parameter in dict.fromkeys(one for stage in stages.values() for one in stage.parameters()):
            dim = _cut_along(parameter)
            if dim is not None and _has_own_memory(parameter):
                part, begin = self._part(parameter, dim)
                one = ShardedParameter(parameter, part, dim, begin, tuple(places[parameter]))
                self.of_whole[id(parameter)] = one
        self._whole_of = {id(one.part): one.whole for one in self.of_whole.values()}
        # By the wholes, which are as large on every replica.
        buckets = cut_into_buckets((one.whole for one in self.of_whole.values()), lambda _: None)
        self._buckets = [[self.of_whole[id(whole)] for whole in bucket] for bucket in buckets]
        self._is_whole = True
        self._counts_before = self._counts()
        self.reshard(stepped=False)

    def _part(self, parameter: Parameter, dim: int) -> tuple[Parameter, int]:
        """What is kept here of a parameter, and its first row."""
        from torch.distributed.tensor import DTensor, Shard

        value = local(parameter.data)
        rows = rows_of_part(value.shape[dim], self._mesh.num_replicas, self._mesh.replica)
        holders, cuts = self._mesh.holders, (Shard(dim),)
        if is_sharded(parameter):
            cuts = (*cuts, *parameter.placements)  # type: ignore[attr-defined]
            if (across := parameter.device_mesh) != self._mesh.shards:  # type: ignore[attr-defined]
                holders = self._holders_with(across)
        elif self._mesh.shards is not None:
            holders = holders[REPLICAS]
        part = DTensor.from_local(
            value.narrow(dim, rows.start, len(rows)).clone(memory_format=torch.contiguous_format),
            holders,
            cuts,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return standing_for(parameter, part), rows.start

    def _holders_with(self, across: Any) -> Any:
        """The device mesh of the replicas of all ranks that have a stage together."""
        if across not in self._shared:
            group = across.get_group()
            rows = self._mesh.replicas.gather(dist.get_process_group_ranks(group))
            self._shared[across] = dist.device_mesh.DeviceMesh.from_group(
                [self._group, group], across.device_type, mesh=rows, mesh_dim_names=(REPLICAS, "shared")
            )
        return self._shared[across]

    def unshard(self) -> None:
        """Gathers the parameters from all replicas."""
        if self._is_whole:
            return
        for bucket in self._buckets:
            for one in bucket:
                whole = local(one.whole.data)
                whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            self.gather(bucket, [local(one.part) for one in bucket], [local(one.whole.data) for one in bucket])
        for one in self.of_whole.values():
            one.whole.requires_grad_(one.part.requires_grad)
            one.put(one.whole)
        self._counts_before = self._counts()
        self._is_whole = True

    def _counts(self) -> list[int]:
        """Torch's counts of the wholes' changes in place. Made under `torch.inference_mode`, a tensor has none."""
        return [0 if one.whole.is_inference() else one.whole._version for one in self.of_whole.values()]

    @torch.no_grad()
    def gather(self, bucket: Sequence[ShardedParameter], parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Writes what the parts of some parameters come to into local tensors. Every replica must call it.

        Args:
            parts: what each replica has: the parts themselves, or others like them.
        """
        num, mine = self._mesh.num_replicas, []
        for one, part in zip(bucket, parts, strict=True):
            mine.append(padded_rows(part, one.dim, rows_per_part(local(one.whole).shape[one.dim], num)))
        flat = torch.cat([rows.reshape(-1) for rows in mine])
        rows = flat.new_empty(num, flat.numel())
        self._peers.wait_for(self._peers.start(all_gather, as_real(flat), as_real(rows)), "parts of a stage")
        found = rows.split([own.numel() for own in mine], dim=1)
        for one, own, value, whole in zip(bucket, mine, found, into, strict=True):
            value = value.reshape(num * len(own), *own.shape[1:])
            whole.copy_(value[: whole.shape[one.dim]].movedim(0, one.dim))

    @torch.no_grad()
    def reshard(self, stepped: bool) -> None:
        """Gives up what other replicas keep.

        Args:
            stepped: updates among the ops of a step have changed the wholes, and parts get their values, as they do
                if a forward or a hook has changed one. If not, the wholes lose their gradients, which went into sums
                or belong to a step that broke off.
        """
        has_changed = self._is_whole and (stepped or self._counts() != self._counts_before)
        for one in self.of_whole.values():
            if not stepped:
                one.whole.grad = None
            if has_changed:
                local(one.part).copy_(one.rows_of(local(one.whole.data)))
        if not self._is_whole:
            return
        for one in self.of_whole.values():
            one.put(one.part)
            local(one.whole.data).untyped_storage().resize_(0)
        self._is_whole = False

    # What the sums and updates of replicas do with parts.

    def at_rest(self, parameter: Parameter) -> Parameter:
        one = self.of_whole.get(id(parameter))
        return parameter if one is None else one.part

    def in_step(self, parameter: Parameter) -> Parameter:
        return self._whole_of.get(id(parameter), parameter)

    def goes_to(self, parameter: Parameter) -> bool:
        return id(parameter) in self.of_whole

    def bucket(self, parameters: Sequence[Parameter], peers: GroupPeers) -> GradientBucket | PartBucket:
        if not self.goes_to(parameters[0]):
            return GradientBucket(parameters, peers, None)
        ones = [self.of_whole[id(p)] for p in parameters]
        return PartBucket(parameters, [one.part for one in ones], [one.dim for one in ones], peers)

    def stands_for(self, master: Parameter, parameter: Parameter) -> None:
        if (one := self.of_whole.get(id(parameter))) is not None:
            self._of_master[id(master)] = one

    def owned(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        found = ((p, self._of_master.get(id(p))) for p in parameters)
        return [p if one is None else one.part for p, one in found]

    def to_step(self, masters: Sequence[Parameter], gradients: Gradients) -> tuple[Sequence[Parameter], Gradients]:
        known = [self._of_master.get(id(master)) for master in masters]
        rows = [g if one is None or g is None else one.rows_of(g) for one, g in zip(known, gradients, strict=True)]
        return [m if one is None else one.part for one, m in zip(known, masters, strict=True)], rows

    def bring(self, masters: Sequence[Parameter], parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        known = zip(masters, parts, into, strict=True)
        cut = {id(m): (part, memory(out)) for m, part, out in known if id(m) in self._of_master}  # not single numbers
        for bucket in cut_into_buckets((master for master in masters if id(master) in cut), lambda _: None):
            ones = [self._of_master[id(master)] for master in bucket]
            self.gather(ones, *zip(*(cut[id(master)] for master in bucket), strict=True))


def _has_own_memory(parameter: Parameter) -> bool:
    """Whether a parameter's memory is its own, so that it may be given up; gives a plain one its own."""
    value = local(parameter.data)
    memory = value.untyped_storage()  # that numpy has seen, or has given, keeps its size
    if memory.resizable() and memory.nbytes() == value.numel() * value.element_size():
        return True
    if not is_sharded(parameter):
        parameter.data = value.clone()
    return not is_sharded(parameter)


def _cut_along(parameter: Tensor) -> int | None:
    """The first dimension along which a parameter is not cut into shards yet; None where there is none, or no row."""
    taken = {p.dim for p in parameter.placements if p.is_shard()} if is_sharded(parameter) else set()  # type: ignore[attr-defined]
    return next((dim for dim in range(parameter.dim()) if dim not in taken and parameter.shape[dim]), None)
