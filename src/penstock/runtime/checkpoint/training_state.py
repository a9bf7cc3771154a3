"""A pipeline's state as plain named tensors, under any schedule and number of ranks.

    model/layers.3.mlp.up.weight             parameters and persistent buffers, by their names in the whole model
    constants/layers.3.mlp.up.weight         in place of a parameter that never changes, a number of its values
    buffers/layers.3.mask                    other buffers
    buffers/loss_fn/mean                     all buffers of the module that computes the loss
    extra/layers.3#data                      what a module's `get_extra_state` gave, see `object_state`
    optimizer/layers.3.mlp.up.weight/exp_avg
    attribute/num_steps#data                 of the optimizer
    gradients/layers.3.mlp.up.weight         where gradients wait for an update

A tied parameter, and a buffer that stages share, is stored once, under the name it has in its lowest stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.runtime.checkpoint.folder import Kind
from penstock.runtime.checkpoint.object_state import (
    ATTRIBUTE,
    LoadedStates,
    StatefulObject,
    bases_in,
    module_with_extra_state,
    states_of,
    suffixes_in,
)
from penstock.runtime.checkpoint.optimizer import PREFIX as OPTIMIZER
from penstock.runtime.checkpoint.optimizer import (
    attribute_objects,
    attributes_by_parameter,
    members_of,
    optimizer_tensors,
    plain_attributes,
    stage_optimizer,
)
from penstock.runtime.checkpoint.together import together
from penstock.runtime.errors import CheckpointError
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.optimizer_state import OptimizerState
from penstock.runtime.parameters.updates import GRADIENTS
from penstock.runtime.parameters.updates import PREFIX as ASYNCHRONOUS
from penstock.runtime.tensors.digest import hash_of
from penstock.runtime.tensors.dtensor import is_sharded, local, overwrite, own_shard, unexpanded, whole
from penstock.schedule.updates import OWNER

MODEL = "model/"
BUFFERS = "buffers/"
CONSTANTS = "constants/"
LOSS = "loss_fn/"
"""Before the names of the buffers of the module that computes the loss."""
COUNTERS, SCALER = "pipeline", "scaler"
"""In the meta of a checkpoint, the key of the counters; and in these, that of the numbers of loss scaling."""


class StagedState(NamedTuple):
    """What a load will put in place: read, and found right.

    Attributes:
        put: puts all in place, and cannot fail. Every process must call it.
        objects: the states of objects, which may not take them.
    """

    put: Callable[[], None]
    objects: LoadedStates

    def put_together(self, peers: Peers, what: str) -> None:
        """Puts all in place in every process, or nothing in any. Raises CheckpointError, with `what` failed."""
        try:
            together(peers, self.objects.give, what)
        except BaseException:
            self.objects.take_back()
            raise
        self.put()


class TrainingState:
    """What a pipeline saves: the stages and the optimizer of this process, under their stored names.

    Of several copies of a stage the owner's is saved, and all get what is loaded. So too gradients that wait for an
    update, and what a schedule with updates keeps besides.

    Attributes:
        modules: those here that have extra state.

    Args:
        trained: what training changes in this process.
    """

    def __init__(self, trained: OptimizerState, mesh: ProcessMesh) -> None:
        self._trained, self._model, self._updating = trained, trained.model, trained.updating
        self._optimizer, self._suffixes = trained.optimizer, suffixes_in(mesh)
        self._stored_as = trained.model.ties.owned_name
        self._tensors: list[tuple[str, Tensor]] = []
        """Stored name, with its prefix -> each parameter and buffer here that has it."""
        self._answers: set[str] = set()
        self._names: dict[Tensor, str] = {}
        self._constants: dict[str, Tensor] = {}
        """Of parameters that never change, by stored name, the number that stands for each."""
        for index, stage in self._model.stages.items():
            self._add_parameters(index, stage)
            kept = {id(value) for value in stage.state_dict(keep_vars=True).values()}  # whatever the name there
            for name, buffer in stage.named_buffers():
                stored = self._stored_as(name)
                self._tensors.append(((MODEL if id(buffer) in kept else BUFFERS) + stored, buffer))
                if stored == name and trained.answers(index, buffer):
                    self._answers.add(name)
        end, loss = self._model.loss
        for name, buffer in loss.named_buffers() if loss is not None and end in self._model.copies.stages else ():
            self._tensors.append((BUFFERS + LOSS + name, buffer))
            self._answers |= {LOSS + name} if trained.answers(end, buffer) else set()
        self.modules = [
            module_with_extra_state(name, f"{k}.{trained.holder(index)}", module)
            for (k, index), stage in sorted(self._model.copies.here.items())
            for name, module in (*stage.named_modules(), *stage.around.items())
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]
        for name, parameter in self._parameters():
            self._names.setdefault(parameter, name)
        if self._updating is not None:
            self._names |= self._updating.names()

    def _parameters(self) -> list[tuple[str, Parameter]]:
        """Stored name and parameter of each copy of a stage here."""
        stages = self._model.copies.here.values()
        return [(self._stored_as(name), each) for stage in stages for name, each in stage.named_parameters()]

    def _add_parameters(self, index: int, stage: Any) -> None:
        for name, parameter in stage.named_parameters():
            stored, answers = self._stored_as(name), self._trained.answers(index, parameter)
            if (number := stage.constants.get(name)) is not None:
                self._constants[CONSTANTS + name] = torch.from_numpy(np.array(number, np.uint64).view(np.int64))
                self._answers |= {name} if answers else set()
                continue
            self._tensors.append((MODEL + stored, parameter))
            if answers and not self._model.ties.is_elsewhere(index, name):
                self._answers.add(stored)

    # Saving.

    def objects(self, there: Iterable[str] | None = None) -> list[StatefulObject]:
        """The modules with extra state, and the attributes of the optimizer: those here, or those that are there."""
        if self._optimizer is None:
            return self.modules
        if there is None:
            found = plain_attributes(self._optimizer, self._names)
        else:
            found = sorted(bases_in(there, ATTRIBUTE) - attributes_by_parameter(self._optimizer, self._names).keys())
        return [*self.modules, *attribute_objects(self._optimizer, found, self._suffixes)]

    def share(self) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        """What this process writes but for objects, its shards of what others write, and the optimizer's meta.

        Raises CheckpointError for what can't be stored.
        """
        tensors, meta = self._all()
        writes, helps = {}, {}
        for name, tensor in tensors.items():
            owner = _owner(name) if name.startswith(OPTIMIZER) else name.partition("/")[2]
            if owner in self._answers:
                writes[name] = tensor
            elif is_sharded(tensor):
                helps[name] = tensor
        if self._updating is not None:
            kept = self._updating.tensors()
            if self._updating.is_first_shard:
                writes |= kept
            else:
                helps |= {name: tensor for name, tensor in kept.items() if is_sharded(tensor)}
        return writes, helps, meta

    def held(self) -> tuple[dict[str, Tensor], Any]:
        """All that this process holds, whoever writes it, and the optimizer's meta.

        Whole tensors by their stored names: who holds a shard helps to put them together.
        """
        tensors, meta = self._all()
        if self._updating is not None:
            tensors |= self._updating.tensors()
        return {name: whole(tensor) for name, tensor in tensors.items()} | states_of(self.objects())[0], meta

    def scaler(self) -> dict[str, Any]:
        """The numbers of loss scaling under their name in a checkpoint; nothing where losses are not scaled.

        Raises:
            CheckpointError: gradients have been divided by the scale, and wait for an update.
        """
        scaling = self._trained.scaling
        if scaling is None or scaling.scale is None:
            return {}
        if scaling.has_divided:
            raise CheckpointError(
                "gradients were clipped, and so divided by the loss scale, which a checkpoint does not say; call "
                "update() after clip(), or zero_grad()"
            )
        return {SCALER: scaling.state()}

    def _all(self) -> tuple[dict[str, Tensor], Any]:
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._tensors:
            tensors.setdefault(name, tensor.detach())
        tensors |= self._constants
        if self._updating is None:
            for stage in self._model.stages.values():
                for name, parameter in stage.named_parameters():
                    if parameter.grad is not None:
                        tensors.setdefault(GRADIENTS + self._stored_as(name), parameter.grad)
        if self._optimizer is None:
            return tensors, None
        state, meta = optimizer_tensors(self._optimizer, self._names)
        return tensors | state, meta

    # What there is to load.

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Of the names of all that is held anywhere those that `stage` reads here."""
        there = set(names)
        stepped = {name for members in self.members() for name in members}
        found = {*self.expected(MODEL), *(name for name in self.expected(BUFFERS) if name in there)}
        found |= self._constants.keys() & there
        found |= set(self._kept_by_updates(there).values())
        found |= {name for name in there if name.startswith(OPTIMIZER) and _owner(name) in stepped}
        found |= {name for each in self.objects(there) if (name := each.name_in(there)) is not None}
        return sorted(found)

    def expected(self, prefix: str = "") -> dict[str, Kind]:
        """By stored name shape and type of the model's parameters and buffers in this process."""
        return {name: _kind(tensor) for name, tensor in self._tensors if name.startswith(prefix)}

    def members(self) -> list[list[str]]:
        """The names of the parameters of each group of the optimizer here."""
        return [] if self._optimizer is None else members_of(self._optimizer, self._names)

    def aliases(self) -> dict[str, str]:
        """By each other name of a parameter or buffer here, the name that it is stored under."""
        found: dict[str, str] = {}
        for stage in self._model.stages.values():
            first: dict[Tensor, str] = {}
            buffers = stage.named_buffers(remove_duplicate=False)
            for name, tensor in (*stage.named_parameters(remove_duplicate=False), *buffers):
                stored = self._stored_as(first.setdefault(tensor, name))
                found |= {name: stored} if name != stored else {}
        return found

    def _kept_by_updates(self, there: Iterable[str]) -> dict[str, str]:
        """Of these names what a schedule with updates keeps of the parameters here.

        By the name under which such a schedule takes it over: gradients from other schedules are the owner's.
        """
        here = {name for stage in self._model.copies.here.values() for name, _ in stage.named_parameters()}
        here |= set(map(self._stored_as, here))
        found: dict[str, str] = {}
        for name in sorted(there):
            place = f"{ASYNCHRONOUS}{OWNER}/{name}" if name.startswith(GRADIENTS) else name
            if place.startswith(ASYNCHRONOUS) and place.split("/", 3)[-1] in here:
                found[place] = name
        return found

    # Loading.

    def stage(
        self,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        what: str,
        members: Sequence[list[list[str]]],
        objects: Sequence[StatefulObject] = (),
    ) -> StagedState:
        """Reads all that is loaded here and finds it right, and changes nothing.

        Args:
            tensors: each with memory of its own whenever it is asked for. meta: as a checkpoint has it.
            what: what has both, in errors. members: of every process. objects: of the caller.

        Raises:
            CheckpointError: something is damaged or does not fit.
        """
        counters = meta[COUNTERS]
        values = self._stage_values(tensors, what)
        self._require_constants(tensors, what)
        put_optimizer = None
        if (one := self._optimizer) is not None:
            put_optimizer = stage_optimizer(one, self._names, tensors, meta.get(OPTIMIZER[:-1]), what, members)
        states = LoadedStates([*self.objects(tensors), *objects], tensors, what, self._model.device)
        scaler = self._scaler_of(tensors, what, counters.get(SCALER))
        model, updating, scaling = self._model, self._updating, self._trained.scaling
        gradients = self._stage_gradients(tensors) if updating is None else []
        kept = {}
        if updating is not None:
            kept = {place: tensors[name] for place, name in self._kept_by_updates(tensors).items()}

        def put() -> None:
            with torch.no_grad():
                for target, value in values:
                    overwrite(target, value)
            if put_optimizer is not None:
                put_optimizer()
            with nullcontext() if updating is None else model.as_whole():  # versions are of whole parameters
                model.share_values()
                model.zero_grad()
                if updating is not None:
                    updating.load(kept, counters["num_updates"])
            for parameter, gradient in gradients:
                parameter.grad = gradient
            if scaling is not None:
                scaling.begin_again(scaler)
            states.give_again()

        return StagedState(put, states)

    def _stage_values(self, tensors: Mapping[str, Tensor], what: str) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a parameter or buffer here and its new value.

        A buffer that is not persistent stays as its module made it where there is none of its kind.
        """
        targets: dict[str, list[Tensor]] = {}
        for name, tensor in self._tensors:
            if name in tensors or name.startswith(MODEL):
                targets.setdefault(name, []).append(tensor)
        values: list[tuple[Tensor, Tensor]] = []
        for name, those in sorted(targets.items()):
            value = tensors[name]
            if name.startswith(BUFFERS) and _kind(value) != _kind(those[0]):
                continue
            for target in those:
                mine, here = local(own_shard(value, target)), local(target.detach())
                first = unexpanded(mine, here)
                if first.numel() < mine.numel() and hash_of(first.expand_as(mine)) != hash_of(mine):
                    raise CheckpointError(
                        f"{what} does not fit: {name.partition('/')[2]} is expanded here, and has "
                        "other values for one place there: make it contiguous()"
                    )
                values.append((here, mine))
        return values

    def _require_constants(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Raises CheckpointError where parameters that never change have other values than when it was written."""
        for name in sorted(self._constants.keys() & tensors.keys()):
            if not torch.equal(tensors[name], self._constants[name]):
                raise CheckpointError(
                    f"{what} holds adapters alone, and {name.removeprefix(CONSTANTS)} under them "
                    "is not what it was when they were trained: give the model that they were trained on"
                )

    def _scaler_of(self, there: Iterable[str], what: str, stored: Any) -> dict[str, Any] | None:
        """The numbers with which loss scaling goes on; None where it begins, or there is none."""
        scales = self._trained.scaling is not None and self._trained.scaling.scale is not None
        if scales != (stored is not None) and any(name.startswith(GRADIENTS) for name in there):
            was, now = ("multiplied", "does not scale") if stored is not None else ("not multiplied", "scales")
            raise CheckpointError(
                f"{what} has gradients that wait for an update and are {was} by a loss scale, and "
                f"this pipeline {now} losses; give both PrecisionOptions(scaler=...), or save after an update"
            )
        return stored if scales else None

    def _stage_gradients(self, tensors: Mapping[str, Tensor]) -> list[tuple[Parameter, Tensor]]:
        """Gradients that wait for an update, whatever kind of schedule they come from."""
        parts: dict[str, list[str]] = {}
        for name in sorted(tensors):
            if name.startswith((GRADIENTS, ASYNCHRONOUS)) and (stored := name.partition(GRADIENTS)[2]):
                parts.setdefault(stored, []).append(name)
        waiting: list[tuple[Parameter, Tensor]] = []
        for name, parameter in self._parameters():
            if (those := parts.get(name)) and self._trained.steps(parameter):
                total = reduce(add, (tensors[each] for each in those)).to(parameter.device)
                waiting.append((parameter, own_shard(total, parameter)))
        return waiting


def _kind(tensor: Tensor) -> Kind:
    return tuple(tensor.shape), tensor.dtype


def _owner(name: str) -> str:
    """The parameter that a part of an optimizer's state belongs to."""
    return name.removeprefix(OPTIMIZER).rpartition("/")[0]
