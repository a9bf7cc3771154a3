"""What training changes in this process from step to step: parameters, their gradients, and the optimizer.

    begin() -> the schedule's ops add to gradients -> gather() -> update()

If updates are ops of the schedule, they have run before `gather`, and there is no `update`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.checksum import HolderChecksums
from penstock.runtime.parameters.gradients import begin_norm, num_bytes, scale_gradients
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.muon import mark_ends, require_whole_matrices
from penstock.runtime.parameters.optimizer import GivenOptimizer, goes_on_as, held_by, make_step, optimizer_of
from penstock.runtime.parameters.replicas import replicas_of
from penstock.runtime.parameters.scaling import LossScaling, require_scalable
from penstock.runtime.parameters.updates import ScheduledUpdates
from penstock.runtime.stage.module_state import having
from penstock.runtime.stage.stage import Stage
from penstock.runtime.transport.link_conditions import LateRing
from penstock.schedule import Schedule
from penstock.schedule.updates import OWNER


class OptimizerState:
    """The optimizer of this process, with all that an update needs: gradients, their norm and their scale.

    Attributes:
        model: the part in this process. num_updates: so far.
        clip_norm: see `ps.Pipeline`.
        optimizer: over what is stepped here.
        replicas: exchange with other replicas. updating: the updates that are ops; None if there are none.
        scaling: scales losses, and checks that gradients are finite; None if nobody asks for it.
        skipped: the last update was left out, because some gradient was not finite.
        agreement: compares the parameters that several processes hold.

    Args:
        schedule: has REDUCE ops if there are replicas.
        one_copy_steps: see `ParallelOptions`.
        ends: closes at the end; a given optimizer then has all of its parameters again, and may be stepped by others.
        late: the lateness that is injected into links between replicas.
        scaler, skip_not_finite: see `PrecisionOptions`.
    """

    def __init__(
        self,
        model: LocalModel,
        mesh: ProcessMesh,
        schedule: Schedule,
        optimizer: GivenOptimizer,
        clip_norm: float | None,
        one_copy_steps: bool,
        ends: ExitStack,
        late: LateRing | None = None,
        scaler: torch.amp.GradScaler | None = None,
        skip_not_finite: bool = False,
    ) -> None:
        self.clip_norm, self.num_updates = clip_norm, 0
        self.scaling, self.skipped = None, False
        if scaler is not None:
            require_scalable(scaler, model.dtypes)
        if scaler is not None or skip_not_finite:
            self.scaling = LossScaling(scaler, mesh.everyone)
        self._name, self._windows = schedule.name, schedule.windows
        self.model, self._mesh, self._one_copy_steps = model, mesh, one_copy_steps
        if optimizer is not None:
            model.require_trainable()
        self.replicas = replicas_of(model, mesh, schedule, late)
        for (_, stage), module in model.copies.here.items():
            tied = [tie.names[stage] for tie in model.ties if stage in tie.names]
            mark_ends(module, stage == schedule.num_stages - 1, tied)
        self.updating = None
        if schedule.updates is not None:
            self.updating = ScheduledUpdates(schedule, model, one_copy_steps, self.replicas, mesh.shard == 0)
        self.optimizer: Optimizer | None = None
        self._ends = ends
        self._make_optimizer(optimizer)
        self._is_updating = False
        self._refuse_foreign_steps()
        self.agreement = HolderChecksums(model, mesh, self.replicas.sharding, lambda: self.optimizer)
        self.replicas.agreement = self.agreement

    def go_on_from(self, before: OptimizerState) -> None:
        """Takes over the optimizer and the count of updates of the same model in other places."""
        self.num_updates = before.num_updates
        before._ends.close()
        self._ends.close()
        self.optimizer = goes_on_as(before.optimizer, self.optimizer)
        self._refuse_foreign_steps()

    def _refuse_foreign_steps(self) -> None:
        """Has `optimizer.step()` raise outside of `update`, if other processes would have to step as well.

        If updates are ops, an optimizer finds gradients only within these, so a step outside does nothing.
        """
        if self.optimizer is None or self.updating is not None or not isinstance(self._mesh.everyone, GroupPeers):
            return
        if hasattr(self.optimizer, "_optimizer_step_pre_hooks"):
            self._ends.callback(self.optimizer.register_step_pre_hook(self._require_updating).remove)

    def _require_updating(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_updating:
            raise RuntimeFailure(
                f"{type(optimizer).__name__}.step() was called, and this pipeline has "
                f"{self._mesh.everyone.num_ranks} processes, which step together and then fetch what others have "
                "stepped; call pipe.update() on every rank instead. A GradScaler would leave out a step in some "
                "processes alone; give ps.PrecisionOptions(scaler=...), which then scales the loss itself, and call "
                "no method of it"
            )

    def _make_optimizer(self, given: GivenOptimizer) -> None:
        """Makes the optimizer over the parameters that are stepped here: of the owner's copies, or of all copies.

        Raises:
            RuntimeFailure, PeerFailed: in every process, if one can't make its optimizer, or if no optimizer has a
                parameter that is stepped.
        """
        model, sharding, updating = self.model, self.replicas.sharding, self.updating
        if updating is not None:
            stepped, stand_ins = updating.masters(), updating.stand_ins()
        else:
            stepped, stand_ins = model.owned() if self._one_copy_steps else model.parameters, model.stand_ins()
        owned = sharding.owned(stepped)

        def made() -> list[bool]:
            self.optimizer = optimizer = optimizer_of(given, owned, stand_ins, sharding.dealt(stepped), self._ends)
            if updating is not None:
                updating.rule.require(optimizer)
            if optimizer is None:
                return []
            require_whole_matrices(optimizer, model.sharded is not None)
            known = held_by(optimizer)
            return [id(p) in known for p in owned if p.requires_grad]

        found = [each for part in self._mesh.everyone.together(made, "make its optimizer") for each in part]
        if found and not any(found):
            raise RuntimeFailure(
                f"the optimizer has none of the {len(found)} parameters that are stepped: functions make a stage "
                "anew in each call, and asynchronous schedules and fsdp step other parameters than the model's; give "
                "a function that makes an optimizer of the parameters that it is called with: torch.optim.AdamW"
            )

    def begin(self, rates: Sequence[float] | None, update: bool, scales: Callable[[], Sequence[float]]) -> None:
        """Starts a step. `rates` and `update` as in `Pipeline.step`; `scales` gives the weights of losses.

        Raises:
            RuntimeFailure: without an optimizer, options by which none of the user's own could step what is left.
        """
        self.agreement.begin(rates)
        is_scaled = self.scaling is not None and self.scaling.scale is not None
        is_dealt = self.replicas.sharding.keeps_whole and not self.replicas.sharding.has_all_state
        if update and self.optimizer is None and (is_scaled or is_dealt):
            raise RuntimeFailure(
                f"{'scaler=' if is_scaled else 'sharding=zero1'} is a part of updates, and this pipeline has no "
                "optimizer; give ps.Pipeline(optimizer=...), or leave the option out to step one of your own"
            )
        if self.scaling is not None:
            self.scaling.begin()
        if self.updating is not None:
            self.updating.require_known()
            self.updating.begin(self.optimizer, rates, self.clip_norm, not update, scales)
        elif not self.replicas.keeps_aside:
            self.model.copies.leave_sums_to_owners()
        self.replicas.begin()
        self.model.begin()

    def gather(self) -> None:
        """Adds up the gradients of stages, copies and replicas, and shares buffers."""
        if self.updating is not None:
            self.updating.end()
        else:
            self.model.shared.sum_gradients()
        self.replicas.finish()
        self.replicas.share_buffers()
        self.model.shared.share_buffers()

    def end(self) -> None:
        """The step is over, however it went."""
        self.model.copies.end()
        self.replicas.reshard()

    def count_updates(self, update: bool) -> None:
        """Counts the updates that ran as ops."""
        if self.updating is not None and self._windows is not None:
            self.num_updates += len(self._windows.ranges) - (not update)

    def update(self, begun: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Clips, runs the optimizer and clears the gradients; returns the norm where clipping is on.

        Without an optimizer the clipped gradients stay, for one of the user's own.
        With `scaling`, a gradient that is not finite in some process leaves the update out in all of them.

        Args:
            begun: waits for the norm, if `begin_norm` was called.
        """
        self.skipped = self.scaling is not None and not self.scaling.divide(self.model.parameters)
        norm = None if self.skipped or self.clip_norm is None else self.clip(self.clip_norm, begun)
        if not self.skipped:
            if self.optimizer is None:
                return norm
            with having([(self, "_is_updating", True)]):
                make_step(self.optimizer)
            if self._one_copy_steps or not self.replicas.sharding.has_all_state:
                self._mesh.everyone.repeated(self._share_stepped)
            self.replicas.forget_stepped()
            self.num_updates += 1
        if self.scaling is not None:
            self.scaling.updated()
        self.zero_grad()
        return norm

    def _share_stepped(self) -> None:
        self.replicas.share_stepped()
        if self._one_copy_steps:
            self.model.shared.share_parameters()

    def require_updates_apart(self) -> None:
        """Raises RuntimeFailure where updates are ops of the schedule, or there is no optimizer."""
        if self.updating is not None:
            raise RuntimeFailure(f"{self._name} has updates as ops of its order; step() runs them all")
        if self.optimizer is None:
            raise RuntimeFailure(
                "update() has no optimizer to run; give ps.Pipeline(optimizer=...), or call pipe.clip() if gradients "
                "are clipped, step an optimizer of your own, and call pipe.zero_grad()"
            )

    def clip(self, max_norm: float, begun: Callable[[], Tensor] | None = None) -> Tensor:
        """Scales gradients so that the norm of all is at most `max_norm`; returns what it was.

        Args:
            begun: see `update`.
        """
        if self.updating is not None:
            raise RuntimeFailure(f"{self._name} has updates as ops of its order; set PrecisionOptions(clip_norm=...)")
        if self.scaling is not None:
            self.scaling.divide(self.model.parameters)
        norm = (begun or self.begin_norm())()
        scale_gradients(self.model.parameters, max_norm, norm)
        return norm.cpu()

    def begin_norm(self) -> Callable[[], Tensor]:
        """Begins to compute the norm of all gradients; returns a function that waits for it. Every process must call
        both.
        """
        model, replicas, everyone = self.model, self._mesh.replicas, self._mesh.everyone
        names = [name for name, p in model.own.items() if self._answers_for(p)]
        is_guarded = self._mesh.shards is None and isinstance(replicas, GroupPeers) and replicas.guard is not None
        holders = replicas if is_guarded else None
        return begin_norm(model.dtypes, model.named, names, everyone, model.device, holders)

    def begin_no_norm(self) -> Callable[[], Tensor]:
        """Takes part in the sum of `begin_norm`, if this process does not update and others do.

        All processes find out about the difference by their next sum.
        """
        return self._mesh.everyone.begin_sum(torch.zeros(len(self.model.dtypes), dtype=torch.float64, device="cpu"))

    def zero_grad(self) -> None:
        if self.scaling is not None:
            self.scaling.begin_again()
        self.model.zero_grad()

    def bytes_of(self, rank: int) -> dict[str, int]:
        """Bytes of the parameters, older versions, gradients and optimizer state of a rank here.

        Versions and gradients are the most that the last step held. If updates are no ops, there is one version, and
        each trained parameter has a gradient of its size.
        """
        here, updating = self.model.copies.here, self.updating
        mine = self.model.copies.of_rank(rank)
        parameters = [p for key in mine for p in here[key].parameters()]
        if updating is None:
            owned = [key for key in mine if key[0] == OWNER or not self._one_copy_steps]
            stepped = [p for key in owned for p in here[key].parameters()]
            held = {"versions": 0, "gradients": num_bytes(p for p in parameters if p.requires_grad)}
        else:
            weights = [updating.weights[key] for key in mine]
            stepped = self.replicas.sharding.owned(master for each in weights for master in each.masters.values())
            held = {what: sum(each.bytes()[what] for each in weights) for what in ("versions", "gradients")}
        state = {} if self.optimizer is None else self.optimizer.state
        values = (value for one in dict.fromkeys(stepped) for value in state.get(one, {}).values())
        kept = num_bytes(value for value in values if isinstance(value, Tensor))
        return {"parameters": num_bytes(parameters), **held, "optimizer": kept}

    def answers(self, stage: int, tensor: Tensor) -> bool:
        """Whether this process writes a tensor of a stage."""
        hosts = self.model.placement.hosts(0, stage)
        return hosts[0] in self._mesh.pipeline.here and self._answers_for(tensor)

    def holder(self, stage: int) -> str:
        """The replica and shard of a stage that this process holds, as in the names of a checkpoint."""
        hosts, here = self.model.placement.hosts(0, stage), self._mesh.pipeline.here
        part = self._mesh.shard
        if len(hosts) > 1 and here[0] in hosts:
            part += hosts.index(here[0]) * self._mesh.num_shards
        return f"{self._mesh.replica}.{part}"

    def steps(self, parameter: Parameter) -> bool:
        """Whether this process steps a parameter."""
        return bool(self.replicas.sharding.owned([parameter]))

    def _answers_for(self, tensor: Tensor) -> bool:
        """Whether this process, among the replicas and shards that hold a tensor, is the one that tells it."""
        return self._mesh.shard == 0 and self.replicas.sharding.tells(tensor)


def gradient_bytes(stages: Mapping[int, Stage], peers: Peers, num_stages: int) -> tuple[float, ...]:
    """The bytes of each stage's gradients. Every rank of the pipeline must call it.

    Args:
        stages: the stages in this process.
    """
    mine = {index: num_bytes(p for p in stage.parameters() if p.requires_grad) for index, stage in stages.items()}
    found = {index: size for part in peers.gather(mine) for index, size in part.items()}
    return tuple(float(found.get(stage, 0)) for stage in range(num_stages))
