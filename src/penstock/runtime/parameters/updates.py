"""Updates that are ops of the schedule, in this process's pipeline: weights, optimizer, checkpoint.

    begin --> the step runs: F, B and U of each copy, through `UpdatingOps` --> end

A step that fails may have made some of its updates. Then only `load` is allowed, and everything else raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.replicas import Replicas
from penstock.runtime.parameters.rules import TiedPrediction, rule_of
from penstock.runtime.parameters.ties import Tie
from penstock.runtime.parameters.versions import CopyWeights, VersionedParameters
from penstock.runtime.stage.stage import Copy
from penstock.runtime.tensors.dtensor import as_shard, local, memory
from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport.wiring import first_of_tied_values, twins_of
from penstock.schedule import Schedule
from penstock.schedule.tentative import known_to
from penstock.schedule.updates import OWNER
from penstock.schedule.weight_versions import Needs, moment, predictions_of, tied_reads_of

GRADIENTS = "gradients/"
PREFIX = "asynchronous/"
"""What a checkpoint holds besides parameters and optimizer: `asynchronous/PIPELINE/gradients/NAME` and the like."""


class ScheduledUpdates:
    """The updates of a schedule.

    Attributes:
        copies: of the stages here. weights: of each copy. rule: says which weights ops read.
        one_copy_steps: only the owner's copy of a stage has the optimizer's state.
        replicas: add up gradients with this process. is_first_shard: this process has the first shards.
        leaves_open: the last window of the running step goes on in the next step.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: LocalModel,
        one_copy_steps: bool,
        replicas: Replicas,
        is_first_shard: bool = True,
    ) -> None:
        assert schedule.updates is not None
        assert schedule.windows is not None
        copies = model.copies
        self.schedule, self.copies, self.one_copy_steps, self._model = schedule, copies, one_copy_steps, model
        self.replicas, self.is_first_shard = replicas, is_first_shard
        self._windows = schedule.windows
        self.rule = rule_of(schedule.updates.rule)
        self._needs: dict[Copy, Needs] = predictions_of(schedule, model.ties.stages, one_copy_steps)
        self._tied_reads = {
            (tie.name, stage): tied_reads_of(schedule, tie.owner, stage)
            for tie in model.ties
            for stage in tie.stages[1:]
        }
        replicas.unshard()
        copies.separate_weights()
        model.tied.separate()
        self.weights: dict[Copy, CopyWeights] = {key: self._weights_of(*key) for key in copies.each()}
        for key in copies.each():
            for name, master in self.weights[key].masters.items():
                replicas.sharding.stands_for(master, copies.here[key].get_parameter(name))
        replicas.reshard()
        self.leaves_open = False
        self._known = known_to(schedule) if self.rule.steps_tentatively else {}
        self._scales: Callable[[], Sequence[float]] = list

    def _weights_of(self, pipeline: int, stage: int) -> CopyWeights:
        ties = self._model.ties
        tied: dict[str, VersionedParameters] = {}
        for slot, leaf in self._model.tied.read_by((pipeline, stage)).items():
            if leaf.requires_grad:
                name = ties[slot - 1].name
                reads = self._tied_reads[name, stage].get(pipeline)
                rule = self.rule if reads is None else TiedPrediction()
                tied[name] = VersionedParameters({name: leaf}, [], rule, self.schedule, stage, reads=reads)
        one = self.copies.here[pipeline, stage]
        return CopyWeights(
            one,
            self.schedule,
            stage,
            self.rule,
            pipeline == OWNER or not self.one_copy_steps,
            [name for name, _ in one.named_parameters() if ties.is_elsewhere(stage, name)],
            tied,
            self._needs.get((pipeline, stage)),
            self.replicas.sharding.has_all_state,
        )

    def needed(self, pipeline: int, stage: int, when: int) -> Sequence[int]:
        """How many updates ahead a copy must know its weights at a moment of a pass (`weight_versions.moment`)."""
        return self._needs.get((pipeline, stage), {}).get(when, ())

    def tied_needed(self, name: str, pipeline: int, stage: int, when: int) -> Sequence[int]:
        """The same for a tied parameter in a copy of a stage that does not own it."""
        reads = self._tied_reads[name, stage].get(pipeline)
        return () if reads is None else reads.needed(when)

    def known_weight(self, stage: int, update: int) -> float:
        """The weight of the losses, of all replicas, whose gradients a PREDICT knows. A window weighs 1."""
        scales = self._scales()
        return self.replicas.sum_of(sum(scales[m] for m in self._known.get((stage, update), ())))

    def tied_name(self, edge: Edge) -> str:
        """The name of the tied parameter whose value an edge carries."""
        ties = self._model.ties
        twins, first = twins_of(ties.stages), first_of_tied_values(len(ties), self._windows.num_pipelines)
        tie, _, _ = twins[(edge.slot - first) % len(twins)]
        return ties[tie].name

    def stand_ins(self) -> dict[int, list[Parameter]]:
        """Returns by the id of a parameter of the given model its masters here."""
        found: dict[int, list[Parameter]] = {}
        for key in sorted(self.weights):
            for name, parameter in self.copies.here[key].named_parameters():
                master = self.weights[key].masters.get(name)
                found.setdefault(id(parameter), []).extend(
                    self.replicas.sharding.owned([] if master is None else [master])
                )
        for given, those in self._model.stand_ins().items():  # what was cut into shards
            found.setdefault(given, []).extend(master for one in those for master in found.get(id(one), ()))
        return found

    def masters(self) -> list[Parameter]:
        """What the optimizer steps here, before replicas deal it out."""
        return [master for weights in self.weights.values() for master in weights.masters.values()]

    def begin(
        self,
        optimizer: Optimizer | None,
        rates: Sequence[float] | None,
        clip_norm: float | None,
        leave_open: bool,
        scales: Callable[[], Sequence[float]],
    ) -> None:
        """Starts a step. `scales` gives the weight of each microbatch's loss.

        Raises:
            RuntimeFailure: there is no optimizer, or another number of rates than updates.
        """
        if optimizer is None:
            raise RuntimeFailure(
                f"{self.schedule.name} has its updates in the order, and no optimizer to run there; give "
                "ps.Pipeline(optimizer=...)"
            )
        if rates is not None and len(rates) != self._windows.num_updates:
            raise RuntimeFailure(
                f"{len(rates)} rates given for {self._windows.num_updates} updates of {self.schedule.name}; give "
                "one each"
            )
        self.copies.follow_cleared()
        self.leaves_open, self._scales = leave_open, scales
        self.replicas.unshard()
        self.copies.share_weights()  # whatever was done to the model's since
        self._fill_twins()
        for key in self.copies.each():
            self.weights[key].begin(optimizer, rates, clip_norm, leave_open)
        if self._needs:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Gives all copies, as a step begins, the predictions that they can't make. Every process must call it."""
        for key in self.copies.each():
            self.weights[key].look_ahead(self.replicas.sharding.predicted)
        shared, num_pipelines = self._model.shared, self._windows.num_pipelines
        for index in self.copies.stages if self.one_copy_steps else ():
            others = [(k, index) for k in range(num_pipelines) if k != OWNER]
            found: dict[int, list[Tensor]] = {}
            for steps in sorted({steps for key in others for steps in self.needed(*key, moment(0))}):
                found[steps] = self._ahead_at_owner(index, steps)
                shared.share_of_stage(index, found[steps])
            for key in others:
                if key in self.weights:
                    self.weights[key].versions.give_ahead(
                        {steps: found[steps] for steps in self.needed(*key, moment(0))}
                    )
        for slot, tie in self._model.ties.slots():
            self._look_ahead_of_tie(slot, tie)

    def _ahead_at_owner(self, index: int, steps: int) -> list[Tensor]:
        """Predicts the parameters of a stage; in a process without the owner, returns memory for the predictions."""
        if (OWNER, index) in self.weights:
            self.copies.select(OWNER, index)
            return self.weights[OWNER, index].versions.ahead(steps)
        pipeline = next(k for k, stage in self.weights if stage == index)
        return [torch.empty_like(memory(p)) for p in self.weights[pipeline, index].versions.named.values()]

    def _look_ahead_of_tie(self, slot: int, tie: Tie) -> None:
        """Does the same for a tied parameter, for the stages that read it and do not own it."""
        parameter = self._model.shared.tied(slot)
        trained = any(tie.name in {*copy.tied, *copy.versions.named} for copy in self.weights.values())
        if parameter is None or not trained:
            return
        reads = [one for stage in tie.stages[1:] for one in self._tied_reads[tie.name, stage].values()]
        found: dict[int, Tensor] = {}
        for steps in sorted({steps for one in reads for steps in one.needed(moment(0))}):
            found[steps] = torch.empty_like(memory(parameter))
            if (OWNER, tie.owner) in self.weights:
                self.copies.select(OWNER, tie.owner)
                (found[steps],) = self.weights[OWNER, tie.owner].versions.ahead(steps, [tie.name])
            self._model.shared.share_of_tie(slot, found[steps])
        for weights in self.weights.values():
            if (tied := weights.tied.get(tie.name)) is not None and (needed := tied.needed()):
                tied.give_ahead({steps: [found[steps]] for steps in needed})

    def end(self) -> None:
        """Ends a step: all copies have the newest parameters. Every process must call it."""
        for key in self.copies.each():
            weights = self.weights[key]
            weights.end()
            if self.leaves_open:
                # One replica keeps the sum so far, to which its part of the next step adds.
                parameters = list(weights.versions.named.values())
                sums = self.replicas.summed(parameters, [p.grad for p in parameters])
                for parameter, gradient in zip(parameters, sums, strict=True):
                    kept = self.replicas.is_first and gradient is not None
                    parameter.grad = as_shard(local(gradient), parameter) if kept else None
        shared = self._model.shared
        shared.share_tied()
        for slot, tie in self._model.ties.slots():
            mine = [weights for (_, stage), weights in self.weights.items() if stage == tie.owner]
            older = mine[0].versions.older().get(tie.name) if mine else None
            if older is not None:
                older = as_shard(older, shared.tied(slot))
            older = shared.spread(slot, older) if self.rule.keeps else None
            self._bring_to(tie.name, self.num_updates, older)

    def _bring_to(self, name: str, num_updates: int, older: Tensor | None) -> None:
        """Between steps, brings the copies that read a tied parameter to the number of updates of its owner."""
        for weights in self.weights.values():
            if (tied := weights.tied.get(name)) is not None:
                tied.renumber(num_updates)
                tied.set_older({} if older is None else {name: older})

    def _fill_twins(self) -> None:
        """Copies the model's tied parameters, which the user may have changed, to the copies that read them."""
        for slot, tie in self._model.ties.slots():
            parameter = self._model.shared.tied(slot)
            for weights in self.weights.values():
                if tie.name in weights.tied and parameter is not None:
                    weights.tied[tie.name].fill([parameter.detach()])

    @property
    def num_updates(self) -> int:
        """The number of updates of every copy here over all steps; 0 if no copy is here."""
        return max((weights.num_updates for weights in self.weights.values()), default=0)

    def require_known(self) -> None:
        """Raises RuntimeFailure if a parameter is to be trained that was frozen when the pipeline was made."""
        for (_, index), weights in self.weights.items():
            for name, parameter in weights.own():
                if parameter.requires_grad and name not in weights.versions.named:
                    raise RuntimeFailure(
                        f"{name} of stage {index} was frozen when the pipeline was made and is not any more, and the "
                        f"updates that {self.schedule.name} has in its order are those of what was trained then; "
                        "make a new pipeline"
                    )

    def mismatch(self) -> dict[tuple[int, int, int], int]:
        """By (stage, pipeline, microbatch), the updates between its forward and backward in the last step."""
        return {
            (index, k, m): count
            for (k, index), weights in self.weights.items()
            for m, count in weights.mismatch.items()
        }

    def names(self) -> dict[Tensor, str]:
        """By master, the parameter's name."""
        return {master: name for weights in self.weights.values() for name, master in weights.masters.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Returns what a checkpoint needs besides parameters and optimizer: older versions, and gradients of an open
        window.
        """
        if not self.replicas.is_first:
            return {}
        return {
            f"{PREFIX}{key[0]}/{name}": tensor
            for key in self.copies.each()
            for name, tensor in self.weights[key].state().items()
        }

    def load(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """Takes over the parameters' values and the checkpoint's tensors. Copies must have the owners' values.

        Gradients of pipelines that are not there now are added to the owner's. Copies that the checkpoint does not
        have get the owner's older versions.
        """
        by_copy: dict[int, dict[str, Tensor]] = {}
        for name, tensor in sorted(tensors.items()):
            pipeline, rest = name.removeprefix(PREFIX).split("/", 1)
            known = int(pipeline) < self._windows.num_pipelines
            held = by_copy.setdefault(int(pipeline) if known else OWNER, {})
            if rest not in held:
                held[rest] = tensor
            elif rest.startswith(GRADIENTS):
                held[rest] = held[rest] + tensor
        of_owner = {n: t for n, t in by_copy.get(OWNER, {}).items() if not n.startswith(GRADIENTS)}
        for k, index in self.copies.each():
            weights, stage = self.weights[k, index], self.copies.here[k, index]
            weights.fill({name: p.detach() for name, p in stage.named_parameters()})
            weights.num_updates = num_updates
            mine = {**of_owner, **by_copy.get(k, {})}
            if not self.replicas.is_first:
                mine = {name: tensor for name, tensor in mine.items() if not name.startswith(GRADIENTS)}
            weights.load_state(mine)
        for tie in self._model.ties:
            self._bring_to(tie.name, num_updates, of_owner.get(f"versions/{tie.name}"))
