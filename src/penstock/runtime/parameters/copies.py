"""The copies of stages in this process. If the schedule has several pipelines, each stage has one copy per pipeline.

    pipeline 0   stage 0 on rank 0, stage 1 on rank 1      the owners: what is saved, named and clipped
    pipeline 1   stage 1 on rank 0, stage 0 on rank 1      copies: their gradients go to the owner, values come back

Copies of one stage in one process are one module, the user's own. So whatever the user does to it between steps
(loading values, freezing, hooks, `eval()`) reaches every pipeline. What each copy has for itself takes turns in it:

    pipeline 0   F0 B0 ..       B2       gradients 0, buffers 0     the module's own between steps
    pipeline 1         F1 B1 ..    B3    gradients 1, buffers 1     laid in their place for an op, and aside again

If updates are ops, copies also have weights of their own. The gradients of all copies are added up in `shared.py`.

Copies are built where they run, and what processes were given is compared before anything of it is shared:

    list of stages --build_alike--> own stages --forms, or the error--> all processes: alike, or refused by all

A function makes a stage where it runs alone, so only those who run a stage can compare it. The parameters of a
module are compared wherever it is given. One without parameters may stand in for a stage that other processes run.

Functions that draw from torch's generator draw what they draw in one process, which calls them one after the other:

    rank 0    stage 0 from state s0 -> s1
    rank 1    stage 1 from state s0, as all build at once; once s1 is known, again from s1 -> s2
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.gradients import GradientSums
from penstock.runtime.parameters.ties import Ties
from penstock.runtime.partitioning.cutting import build_stage
from penstock.runtime.stage.recompute import Place
from penstock.runtime.stage.stage import Copy, Stage, StageSource
from penstock.runtime.tensors.dtensor import is_sharded, local, memory
from penstock.runtime.tensors.rng import generator_states, set_generator_states
from penstock.runtime.tensors.storage import copy_of
from penstock.schedule import Placement
from penstock.schedule.updates import OWNER

States = dict[str, bytes]
"""Of the generators, by kind of device."""


def require_one_copy_a_rank(placement: Placement) -> None:
    """Raises RuntimeFailure where a rank hosts a stage in two pipelines."""
    for stage in range(placement.num_stages):
        hosts = [ranks[stage] for ranks in placement.pipelines]
        twice = next((rank for rank in hosts if hosts.count(rank) > 1), None)
        if twice is not None:
            pipelines = ", ".join(str(k) for k, rank in enumerate(hosts) if rank == twice)
            raise RuntimeFailure(
                f"rank {twice} hosts stage {stage} in pipelines {pipelines}; the runtime runs a stage on different "
                "ranks in different pipelines, so that copies are there for a reason: give one of them another rank"
            )


class Copies:
    """All copies of all stages, as this process sees them.

    Args:
        here: (pipeline, stage) -> the copy, for those in this process.
    """

    def __init__(self, here: Mapping[Copy, Stage], placement: Placement, peers: Peers) -> None:
        self.here = dict(here)
        self._placement, self._peers = placement, peers
        self._turns: dict[int, CopyTurns] = {}
        self._ties = Ties()

    def know(self, ties: Ties) -> None:
        """Once stages are as they run: a parameter that several share counts in its owner alone."""
        self._ties = ties
        stages = self.stages
        count = Counter(id(module) for stage in stages.values() for module in stage.modules())
        kept = {module for module, num in count.items() if num > 1}
        for index, stage in stages.items():
            pipelines = sorted(k for k, s in self.here if s == index)
            if len(pipelines) > 1:
                self._turns[index] = CopyTurns(stage, pipelines, list(self.own(index).values()), kept)

    @property
    def stages(self) -> dict[int, Stage]:
        """Stage -> its module, for those that any pipeline has in this process; ascending."""
        return {index: self.here[k, index] for k, index in sorted(self.here, key=lambda key: key[::-1])}

    @property
    def owners(self) -> dict[int, Stage]:
        """Stage -> its owner's copy, for those in this process; ascending stages."""
        return {stage: self.here[k, stage] for k, stage in sorted(self.here) if k == OWNER}

    def of_rank(self, rank: int) -> list[Copy]:
        """The copies that a rank runs. A copy that ranks of this process share counts for the first of them."""
        found: list[Copy] = []
        for k, stage in sorted(self.here):
            hosts = self._placement.hosts(k, stage)
            if hosts[0] == rank or (rank in hosts and hosts[0] not in self._peers.here):
                found.append((k, stage))
        return found

    def parameters(self) -> list[Parameter]:
        """Those in this process, each once."""
        return list({id(p): p for stage in self.here.values() for p in stage.parameters()}.values())

    # Whose turn it is.

    @property
    def take_turns(self) -> bool:
        """Whether some stage has several copies in this process, which are one module."""
        return bool(self._turns)

    def select(self, pipeline: int, stage: int) -> None:
        """Puts a copy's gradients, buffers and weights into its stage, before an op of the copy."""
        turns = self._turns.get(stage)
        if turns is not None:
            turns.select(pipeline)

    def each(self) -> Iterator[Copy]:
        """Yields every copy, selected; afterwards the owners' are selected."""
        for key in self.here:
            self.select(*key)
            yield key
        for turns in self._turns.values():
            turns.rest()

    def separate_weights(self) -> None:
        """Every copy gets weights of its own, as updates are ops."""
        for turns in self._turns.values():
            turns.separate_weights()

    def share_weights(self) -> None:
        """Gives every copy in this process that has weights of its own the owner's, where that is here."""
        for turns in self._turns.values():
            turns.share_weights()

    def begin(self) -> None:
        """Starts a training step."""
        for turns in self._turns.values():
            turns.begin()

    def end(self) -> None:
        """Ends it, however it went."""
        for turns in self._turns.values():
            turns.end()

    # Gradients.

    def follow_cleared(self) -> None:
        """Before a step that goes on with an open window, clears in all copies what the caller cleared in one.

        Raises RuntimeFailure as `CopyTurns.follow_cleared`.
        """
        for index, turns in self._turns.items():
            turns.follow_cleared(index, list(self.own(index)))

    def own(self, index: int) -> dict[str, Parameter]:
        """By name the parameters of a stage that no other stage owns, in the same order on every rank."""
        return {n: p for n, p in self.stages[index].named_parameters() if not self._ties.is_elsewhere(index, n)}

    def take_gradients(self, index: int) -> dict[int, dict[str, Tensor | None]]:
        """Takes by pipeline the gradients of a stage's own parameters; the owner's stay where they are."""
        own = self.own(index)
        if index in self._turns:
            return {k: dict(zip(own, found, strict=True)) for k, found in self._turns[index].take_gradients().items()}
        return {k: {name: p.grad for name, p in own.items()} for k, stage in self.here if stage == index}

    def leave_sums_to_owners(self) -> None:
        """Drops the sums in copies that are no owners, before a step adds to them, so that a sum counts once."""
        for index in self.stages:
            if (OWNER, index) not in self.here:
                for parameter in self.own(index).values():
                    parameter.grad = None

    def drop_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Leaves no gradient in any copy, nor in these parameters of the modules that they are."""
        for turns in self._turns.values():
            turns.drop_gradients()
        for parameter in parameters:
            parameter.grad = None


@dataclass
class _CopyState:
    """The weights and buffers of a copy that is not selected."""

    weights: list[Tensor] = field(default_factory=list)
    buffers: dict[Place, Tensor | None] = field(default_factory=dict)


class CopyTurns:
    """The copies of one stage in this process, which are one module.

    Args:
        pipelines: that have one; the first is the owner.
        parameters: whose gradients they sum.
        kept: modules, by id, that other stages hold too; no copy has buffers of its own there.
    """

    def __init__(
        self, stage: nn.Module, pipelines: Sequence[int], parameters: Sequence[Parameter], kept: Collection[int]
    ) -> None:
        self._stage, self._kept = stage, kept
        self._owner, *self._others = pipelines
        self._selected = self._owner
        self._parameters = list(parameters)
        self._gradients = GradientSums(self._parameters, self._owner)
        self._separate: list[Parameter] = []
        self._aside = {k: _CopyState() for k in self._others}
        self._known: list[tuple[Tensor, int] | None] = []
        """The owner's gradients as a step ended that left other copies sums of their own, each with torch's count of
        its changes."""

    def rest(self) -> None:
        """The module has what is the owner's, and the caller may change it."""
        self.select(self._owner)
        gradients = self._gradients.now() if self._gradients.aside else []
        self._known = [None if one is None else (one, one._version) for one in gradients]

    def follow_cleared(self, stage: int, names: Sequence[str]) -> None:
        """Clears the gradients of an open window in all copies that the caller has cleared in the module.

        Raises:
            RuntimeFailure: one was changed otherwise, which the module has of the owner's copy alone.
        """
        for place, (known, parameter) in enumerate(zip(self._known, self._parameters, strict=False)):
            if known is not None and parameter.grad is None:
                for gradients in self._gradients.aside.values():
                    gradients[place] = None
            elif known is not None and (parameter.grad is not known[0] or parameter.grad._version != known[1]):
                raise RuntimeFailure(
                    f"the gradient of {names[place]} of stage {stage} was changed while a window was open, and each "
                    f"of {len(self._others) + 1} pipelines here has a sum of its own for it, of which the parameter "
                    "holds the first; let the window end, or clear all of them (pipe.zero_grad())"
                )

    def separate_weights(self) -> None:
        """From now on every copy has weights of its own, of those parameters that are trained."""
        self._separate = [p for p in self._parameters if p.requires_grad]
        for aside in self._aside.values():
            aside.weights = [p.detach().clone() for p in self._separate]

    def share_weights(self) -> None:
        """Gives every copy the owner's weights."""
        self.select(self._owner)
        with torch.no_grad():
            for aside in self._aside.values():
                for weight, parameter in zip(aside.weights, self._separate, strict=True):
                    weight.copy_(parameter.data)

    def begin(self) -> None:
        """A training step begins: every copy starts from the owner's buffers."""
        found = {
            (module, name): buffer
            for module in self._stage.modules()
            if id(module) not in self._kept
            for name, buffer in module._buffers.items()
        }
        for aside in self._aside.values():
            copies = {id(b): None if b is None else copy_of(b) for b in found.values()}
            aside.buffers = {place: copies[id(buffer)] for place, buffer in found.items()}

    def end(self) -> None:
        """It is over, however it went."""
        self.rest()
        for aside in self._aside.values():
            aside.buffers = {}

    def select(self, pipeline: int) -> None:
        """Has the module hold what a copy has."""
        if pipeline == self._selected:
            return
        then = self._aside.pop(pipeline)
        buffers = {place: place[0]._buffers.get(place[1]) for place in then.buffers}
        weights = [p.data.clone() if is_sharded(p) else p.data for p in self._separate]
        self._aside[self._selected] = _CopyState(weights, buffers)
        for parameter, weight in zip(self._separate, then.weights, strict=True):
            if is_sharded(parameter):  # cannot be pointed elsewhere
                memory(parameter).copy_(local(weight))
            else:
                parameter.data = weight
        self._gradients.select(pipeline)
        for (module, name), buffer in then.buffers.items():
            module._buffers[name] = buffer
        self._selected = pipeline

    def take_gradients(self) -> dict[int, list[Tensor | None]]:
        """By pipeline the copies' gradients; the owner's stay where they are."""
        self.select(self._owner)
        return {self._owner: self._gradients.now(), **{k: self._gradients.take(k) for k in self._others}}

    def drop_gradients(self) -> None:
        """Leaves none but the owner's."""
        self.select(self._owner)
        self._gradients.aside.clear()
        self._known = []


def form_of(module: nn.Module, prefix: str = "") -> list[str]:
    """A line for each parameter: what must be alike of it in every process."""
    return [_line(f"parameter {name}", each) for name, each in module.named_parameters(prefix)]


def _line(what: str, tensor: Tensor) -> str:
    return f"{what} of shape {'that is not known yet' if is_lazy(tensor) else list(tensor.shape)}, {tensor.dtype}"


def digest_of(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def build_alike(sources: Sequence[Stage | StageSource], placement: Placement, mesh: ProcessMesh) -> dict[Copy, Stage]:
    """Builds the copies of stages that this process hosts. Every process calls it.

    Raises:
        RuntimeFailure: in every process, if some were given other stages than others, or one of them could not build
            its own; there its own error is raised.
    """
    here = set(mesh.pipeline.here)
    copies = [
        (pipeline, stage)
        for pipeline, hosts in enumerate(placement.pipelines)
        for stage in range(len(hosts))
        if here & set(placement.hosts(pipeline, stage))
    ]
    stages: dict[int, Stage] = {}
    error = _build_in_order(sources, list(dict.fromkeys(stage for _, stage in copies)), stages, mesh.pipeline)

    def forms_here() -> dict[str, list[str]]:
        if error is not None:
            raise error
        return _forms_of(sources, stages)

    first: dict[str, tuple[int, list[str]]] = {}
    for rank, forms in enumerate(mesh.everyone.together(forms_here, "build its stages")):
        for subject, form in forms.items():
            one, known = first.setdefault(subject, (rank, form))
            if form != known:
                pairs = zip_longest(known, form, fillvalue="no more")
                wanted, found = next(pair for pair in pairs if pair[0] != pair[1])
                raise RuntimeFailure(
                    f"rank {rank} was given another {subject} than rank {one}; rank {one} has {wanted}, and rank "
                    f"{rank} has {found}; give every rank the same stages"
                )
    return {(pipeline, stage): stages[stage] for pipeline, stage in copies}


def _build_in_order(
    sources: Sequence[Stage | StageSource], mine: Sequence[int], built: dict[int, Stage], peers: Peers
) -> Exception | None:
    """Builds stages, and those once more that drew from another state of the generators than in one process.

    Every process of a pipeline must call it. Afterwards the generators are as they would be in one process.

    Args:
        mine: the stages to build, which come into `built`.

    Returns:
        The error of a function. It is raised later, as the other processes wait for this one until the end.
    """
    error: Exception | None = None
    drawn: dict[int, tuple[States, States]] = {}
    """The states before and after a function that drew."""
    begun = generator_states()

    def build(stage: int) -> None:
        nonlocal error
        before = generator_states()
        try:
            built[stage] = build_stage(sources[stage], stage, len(sources))
        except Exception as failure:
            error = failure
        if (after := generator_states()) != before:
            drawn[stage] = before, after

    for stage in mine:
        if error is None:
            build(stage)
    told = peers.gather((begun, list(drawn)))
    state: States = told[0][0]
    drawing = sorted({stage for _, stages in told for stage in stages})
    for stage in drawing:
        if stage in drawn and drawn[stage][0] != state and error is None:
            set_generator_states(state)
            build(stage)
        after = drawn[stage][1] if stage in drawn else None
        state = next(each for each in peers.gather(after) if each is not None)
    if drawing:
        set_generator_states(state)
    return error


def _forms_of(sources: Sequence[Stage | StageSource], stages: Mapping[int, Stage]) -> dict[str, list[str]]:
    """Returns by subject the forms that this process knows.

    Where a stage runs, buffers may grow, and parameters may be frozen between two pipelines. So only processes that
    run the stage compare these.
    """
    forms: dict[str, list[str]] = {}
    for index, source in enumerate(sources):
        if (stage := stages.get(index)) is not None:
            forms[f"stage {index}"] = form_of(stage)
            buffers = [_line(f"buffer {name}", buffer) for name, buffer in stage.named_buffers()]
            trained = [f"{name} {'trained' if p.requires_grad else 'frozen'}" for name, p in stage.named_parameters()]
            forms[f"state of stage {index}"] = buffers + trained
        elif isinstance(source, nn.Module):
            form = form_of(source, "" if isinstance(source, Stage) else str(index))
            forms |= {f"stage {index}": form} if form else {}
    return forms
