"""A pipeline in one process, at the process's place in the mesh: what it builds there, and removes at the end.

    arguments --refused or alike in every process--> LocalPipeline --build--> model, optimizer, executor, transport
                                                          |                                              |
    nodes change places: another one is built there <-----'        run: one step of some kind <----------'

`Pipeline` has one, and gets another one when nodes have moved. What `Pipeline` keeps itself depends on no place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.control import Configuration
from penstock.cost import Ring
from penstock.dispatch import Dispatch
from penstock.passes.reduce import REDUCE
from penstock.runtime.arguments import PipelineArguments
from penstock.runtime.compatibility import (
    FeatureCombination,
    allowed_adaptation,
    names_of_layers,
    require_compatible,
    require_runnable,
    why_never_fewer,
    why_order_stays,
)
from penstock.runtime.errors import LinkLost, RuntimeFailure
from penstock.runtime.execute.executors import StepExecutor
from penstock.runtime.execute.gang import lockstep_of
from penstock.runtime.execute.launched_ops import MOST_LAUNCHED_OPS
from penstock.runtime.execute.plan import (
    ActivePlan,
    StepPlan,
    activate,
    dispatch_of,
    require_switchable,
    start_of,
    with_fewer,
)
from penstock.runtime.execute.step_end import Notices, StepFailure
from penstock.runtime.execute.torch_backend import TorchDevices
from penstock.runtime.execute.worker import Worker
from penstock.runtime.lifetime import Lifetime
from penstock.runtime.mesh.peers import GroupPeers, require_same, schedule_digest
from penstock.runtime.mesh.process_mesh import Nodes, read_mesh, require_order
from penstock.runtime.parameters.copies import digest_of, form_of
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.optimizer import facts_of
from penstock.runtime.parameters.optimizer_state import OptimizerState
from penstock.runtime.parameters.replicas import reductions_of, with_reductions, without_reductions
from penstock.runtime.partitioning import Split
from penstock.runtime.partitioning.cutting import stages_of
from penstock.runtime.partitioning.traced_stage import TracedStage
from penstock.runtime.split_backward import unprepare
from penstock.runtime.stage.batch_rules import BatchRules, in_words, require_keys, rules_of, uncut
from penstock.runtime.stage.branches import is_plain, loss_stage
from penstock.runtime.stage.host_memory import SavedTensors
from penstock.runtime.stage.loss import module_of
from penstock.runtime.stage.microbatches import Microbatches, ReplicaBatches, cut_for, num_for
from penstock.runtime.stage.module_state import StepStart
from penstock.runtime.stage.ops import Purpose, StepSettings
from penstock.runtime.stage.registered_ops import calls_of, functions_of, moves_of, require_round_trips
from penstock.runtime.stage.stage import StageSource
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.channel import Tags
from penstock.runtime.transport.choose import TransportChoice, TransportOptions
from penstock.runtime.transport.link_conditions import Conditions, LateRing
from penstock.runtime.transport.repeat import MOST_ATTEMPTS, Attempts, GuardedGroup, guard
from penstock.runtime.transport.wiring import Wiring
from penstock.schedule import Schedule, check
from penstock.schedule.async_ops import MOVES, without_offload
from penstock.schedule.messages import remove_communication
from penstock.schedule.weight_versions import why_none_is_predicted

R = TypeVar("R")
_SAME = "every rank must make the same ps.Pipeline(...)"
_UNSCALED = (
    "autocast=torch.float16 without loss scaling: gradients smaller than 3e-8 become 0, and nothing else says so; "
    'give PrecisionOptions(scaler=torch.amp.GradScaler("cuda")), or torch.bfloat16, which needs none'
)


class LocalPipeline:
    """A pipeline in one process: its stages, transport, optimizer and plans, made anew when nodes move.

    If making one fails, nothing is left behind.

    Args:
        given: the arguments of the pipeline. None of them depends on the place.
        mesh: where this process lies, as for `Pipeline`. dispatch: how ranks pick ops at first.
        life: the lifetime of the pipeline.

    Attributes:
        mesh, peers, nodes: where this process lies, the ranks of its pipeline, and the nodes that may change places.
        adapt: what adapting may do to the schedule. start: what runs first, without REDUCE ops.
        running: what the next step runs. last: what the last step or evaluation ran, and its workers. failure: what
            kept this process from doing its part of that.
        notices: messages for the user.
        found: what `held` gave when this was made.
        groups: the process groups that were made for its place, after nodes have moved.
        sources: the stages as they were given or cut, those of other processes too.
        own_batches: cuts the parts of a batch that replicas are given. None: each process is given the whole batch.

    Raises:
        The errors of `Pipeline`.
    """

    def __init__(self, given: PipelineArguments, mesh: Any, dispatch: Dispatch | str, life: Lifetime) -> None:
        self._given, self._life, self._made = given, life, ExitStack()
        self._has_cut = False  # whether a training step's batch has been cut
        self._is_stale = False
        """Whether messages of an attempt that was given up may be on their way by the transport."""
        self.transport: Transport | None = None
        self.attempts: Attempts | None = None
        self.conditions: Conditions | None = None
        self.last: tuple[Wiring, list[Worker]] | None = None
        self.failure = StepFailure(is_shared=False)
        self.groups: DeviceMesh | None = None
        try:
            self._build(self._checked(mesh, dispatch))
        except BaseException:
            with suppress(Exception):
                self.close()
            raise

    def _checked(self, mesh: Any, dispatch: Dispatch | str) -> Schedule:
        """Checks the arguments, which all processes must give alike. Returns the schedule with its reductions."""
        given, links = self._given, self._given.transport.links
        schedule = remove_communication(given.schedule)  # the transport places messages
        require_runnable(schedule)
        self.mesh = place = read_mesh(mesh, schedule.num_ranks, given.timeout, given.parallel.sharding)
        self.peers = place.pipeline
        self.is_told = isinstance(place.everyone, GroupPeers)  # whether others must be given the same
        self.notices = Notices(place.everyone)
        self.own_batches: ReplicaBatches | None = None
        if given.parallel.batches == "replica":
            self.own_batches = ReplicaBatches(schedule, place, self._said_by_all)
        self.adapt = adapt = allowed_adaptation(schedule, given.adapt)
        self.costs = None if adapt is None else adapt.costs
        apart = isinstance(self.peers, GroupPeers)
        whole = apart or schedule.num_ranks == 1  # a node has one rank
        self.nodes = Nodes.of(mesh) if whole and place.num_replicas > 1 else None
        if links is not None:
            links.check_ranks(schedule.num_ranks if self.nodes is None else self.nodes.mesh.num_nodes)
        choice = TransportChoice(given.transport, adapt is not None and adapt.may_delegate)
        self.choice = choice if apart else TransportChoice(TransportOptions())
        require_same(place.everyone.gather(_facts(given, schedule, choice, dispatch)), _SAME)
        check(schedule)
        chosen = dispatch_of(dispatch, schedule, self.costs, self.choice, peers=place.everyone)
        self.start = start_of(schedule, chosen, self.costs, adapt)
        self.sources = stages_of(given.model, schedule.num_stages, given.parallel.costs)
        self.attempts = guard(place, choice.delegates.interfaces, given.timeout)
        if self.attempts is not None:
            self._made.callback(self.attempts.failover.close)
        return with_reductions(schedule, place)

    def _build(self, schedule: Schedule) -> None:
        """Makes all that a step needs."""
        given, place, parallel, precision = self._given, self.mesh, self._given.parallel, self._given.precision
        own = () if isinstance(given.model, nn.Module) else getattr(given.model, "tied", ())  # of a list of stages
        ties, parallelize = (*own, *parallel.tied), parallel.parallelize
        self.model = held = LocalModel(self.sources, schedule.placement, place, parallel.device, ties, parallelize)
        self._made.callback(_leave, held)
        held.loss = loss_stage(schedule.graph), module_of(given.loss_fn)
        sparse, summing = names_of_layers(held.copies.stages, place.everyone)
        self._combination = FeatureCombination(
            schedule,
            place.num_replicas,
            held.device.type,
            one_process=not isinstance(self.peers, GroupPeers),
            tied={", ".join(tie.names.values()): tie.stages for tie in held.ties},
            dispatch=self.start.dispatch,
            scales_loss=precision.enabled_scaler is not None,
            skips_updates=precision.skip_not_finite,
            clips=precision.clip_norm is not None,
            sparse=sparse,
            summing=summing,
        )
        require_compatible(self._combination)
        if precision.autocast is torch.float16 and precision.enabled_scaler is None:
            self.notices.note([_UNSCALED])
        stays = why_order_stays(schedule) if given.adapt is not None and given.adapt.may_replan else None
        self.notices.note(filter(None, [why_none_is_predicted(schedule), stays]))
        self.found = self.held()
        self.optimizer_state = OptimizerState(
            held,
            place,
            schedule,
            given.optimizer,
            precision.clip_norm,
            parallel.one_copy_steps,
            self._made.enter_context(ExitStack()),
            self._late_links(),
            precision.enabled_scaler,
            precision.skip_not_finite,
        )
        if self.is_told:
            place.everyone.together(self._require_own_loss, "use its loss_fn")
        require_same(place.everyone.gather(facts_of(self.optimizer_state.optimizer)), _SAME)
        reducing = reductions_of(schedule, self.optimizer_state.replicas.start)
        ops = {**reducing, **given.ops} if place.num_replicas == 1 else {**given.ops, **reducing}
        calls = calls_of(schedule, functions_of(schedule, ops), held.stages, self.peers, given.timeout)
        self._is_moving = not MOVES & set(given.ops)
        if self._is_moving:
            require_round_trips(schedule)
            calls = {**moves_of(schedule, self.peers.here, self._saved, given.timeout), **calls}
        together = lockstep_of(place, schedule.updates is not None, given.timeout)
        most_ahead = 1 if place.waits_in_ops(bool(schedule.placement.shared)) else MOST_LAUNCHED_OPS
        ranks, updating = self.peers.here, self.optimizer_state.updating
        self.devices = TorchDevices(
            schedule, held, ranks, given.loss_fn, precision.autocast, calls, updating, most_ahead
        )
        self._made.callback(self.devices.close)
        self.executor = StepExecutor(self.devices, ranks, self.choice, self.conditions, together)
        self.tags = Tags(schedule, held.ties.stages)
        self.switch(self.activated(start_of(schedule, self.start.dispatch, self.costs, self.adapt)))
        self.notices.share()
        if isinstance(self.peers, GroupPeers):
            self.transport = self._make_transport(self.peers)
            self._made.callback(self._end_transport)

    def _require_own_loss(self) -> None:
        """Raises RuntimeFailure if the loss trains parameters that its stage does not own: where another process has
        those, it would not get what the loss adds to their gradients.
        """
        end, in_step = loss_stage(self.start.schedule.graph), self.optimizer_state.replicas.sharding.in_step
        if end in self.model.copies.stages:
            owned = {id(in_step(parameter)) for parameter in self.model.copies.own(end).values()}
            self._given.require_loss_within(owned, f"stage {end}, where the loss is, or that others own")

    def _late_links(self) -> LateRing | None:
        """Injects conditions into the links between ranks; returns those of the ring of its replicas."""
        links, nodes = self._given.transport.links, self.nodes
        if links is None:
            return None
        here = links if nodes is None else nodes.mesh.links_of(links, self.mesh.replica)
        self.conditions = Conditions(here)
        if nodes is None:
            return None
        around = nodes.mesh.ring_links(links, self.peers.here[0])
        return LateRing(Ring() if self.adapt is None else self.adapt.ring, around, self.conditions)

    # What runs.

    def ready(self, configuration: Configuration) -> ActivePlan | Configuration:
        """Works out what a configuration needs to run, unless that is where nodes lie; any thread may do that.

        Raises:
            ScheduleError: the schedule is not valid.
            RuntimeFailure: it cannot take the place of what runs.
        """
        first = self.start.schedule
        plain = without_reductions(configuration.schedule, self.mesh)
        require_switchable(plain, first)
        if self._is_moving:
            require_round_trips(plain)
        configuration = replace(configuration, schedule=with_reductions(plain, self.mesh))
        require_compatible(
            replace(self._combination, schedule=configuration.schedule, dispatch=configuration.dispatch)
        )
        known = {*without_offload(self.running.schedule).graph.registered}
        if not {*without_offload(configuration.schedule).graph.registered} <= known:
            raise RuntimeFailure(
                f"{plain.name} has the gradients of more stages complete at one place than {first.name}, with "
                "which this pipeline was made: start a new one"
            )
        self.choice.require_delegates(configuration.delegated)
        if configuration.nodes != self.running.configuration.nodes:
            if self.nodes is None:
                raise RuntimeFailure("only nodes of a mesh with replicas change places; leave nodes= as it is")
            require_order(self.nodes.at(configuration.nodes).layout)
            return configuration
        self.choice.prepare(self.transport, configuration.delegated)
        now = self.running
        if configuration == replace(now.configuration, dispatch=configuration.dispatch):
            return replace(now, configuration=configuration)  # how ranks pick ops is no part of the plan
        plan = self.activated(configuration)
        self.choice.require_lines(plan.plan.wiring)
        return plan

    def activated(self, configuration: Configuration) -> ActivePlan:
        """What this process needs to run a configuration. Its schedule is not checked here."""
        return activate(configuration, self.model.ties.stages, self.peers.here[0], self.tags, self.costs)

    def switch(self, then: ActivePlan) -> None:
        """Runs something else from the next step on."""
        self.running = then
        self.notices.note(self.devices.split_stages(then))

    def begin(self) -> StepFailure:
        """A step, evaluation or prediction begins. Returns the keeper of this process's errors in it."""
        self.failure = StepFailure(self._shares_failures())
        return self.failure

    def begin_training(self, batch: Microbatches, rates: Sequence[float] | None, update: bool) -> None:
        """Readies parameters and gradients for a training step. `rates` and `update` as in `Pipeline.step`."""
        with self.failure.noted(), self.mesh.waiting():
            self.optimizer_state.begin(rates, update, lambda: batch.scales)
        self.failure.has_failed |= not self.optimizer_state.replicas.can_unshard

    def settings(self, batch: Microbatches, now: ActivePlan, seed: int) -> StepSettings:
        """The settings of a training step."""
        scaling = self.optimizer_state.scaling
        return StepSettings(
            batch,
            Purpose.TRAIN,
            seed,
            now.split,
            now.recomputed,
            now.counts,
            now.taped_out_of_order,
            now.away if self._is_moving else frozenset(),
            None if scaling is None else scaling.scale,
        )

    def repeated(self, once: Callable[[], R], undo: Callable[[], None] | None = None, most: int = MOST_ATTEMPTS) -> R:
        """Calls a function together with all processes, and again from the start if a link was lost meanwhile.

        Args:
            once: raises LinkLost in all processes, or in none. Most of what it does lies within `attempted`.
            undo: drops the results of `once`. Buffers, attributes of modules and gradients are put back besides.
            most: how often `once` may be called.

        Raises:
            PeerLost: links were lost that often.
        """
        attempts, everyone = self.attempts, self.mesh.everyone
        if attempts is None or not isinstance(everyone, GroupPeers) or not isinstance(everyone.guard, GuardedGroup):
            return once()
        start = StepStart([*self.model.every_stage(), self.model.loss[1]], self.model.parameters)
        failure, failed = self.failure, (self.failure.error, self.failure.has_failed)

        def attempt() -> R:
            try:
                return once()
            except LinkLost:
                failure.error, failure.has_failed = failed
                failure.has_lost_link, self._is_stale = False, True
                if undo is not None:
                    undo()
                start.put_back()
                raise

        return attempts.repeated(everyone.guard, attempt, most)

    @contextmanager
    def attempted(self) -> Iterator[None]:
        """Around the work of an attempt, which a lost link ends. Afterwards all processes vote on the attempt."""
        try:
            yield
        except LinkLost:
            self.failure.has_lost_link = True
        if self.attempts is not None:
            self.attempts.vote()

    def renew_transport(self) -> None:
        """Makes another transport if messages of an attempt that was given up may be on their way by this one, or if
        it goes by groups that were left. Every process calls it in an attempt.
        """
        if self.attempts is None or not isinstance(self.peers, GroupPeers):
            return
        if not self._is_stale and not self.choice.is_stale(self.transport):
            return
        if self.transport is not None:
            self.attempts.failover.left.append(self.transport)
            self.transport.close()
        self._is_stale, self.transport = True, None  # until there is another one
        self.transport, self._is_stale = self._make_transport(self.peers), False

    def _make_transport(self, peers: GroupPeers) -> Transport:
        wiring, device, timeout = self.running.plan.wiring, self.model.device, self._given.timeout
        return self.choice.make(peers, self.tags, timeout, wiring, device, self.conditions, self.attempts)

    def run(self, settings: StepSettings, plan: StepPlan) -> list[Worker]:
        """Runs a step of some kind to its end."""
        with self.devices.step(replace(settings, keeps_batch=self.attempts is not None)):
            with self.failure.noted():
                self.devices.begin()
            workers = self.executor.run(self.running, plan, self.transport, settings.training, self.failure)
            if not self.failure.has_failed:
                self.devices.complete()
        self.last = plan.wiring, workers
        return workers

    def _shares_failures(self) -> bool:
        """Whether a step goes on for the sake of other processes where this one fails: messages and sums of whole
        gradients are all that these wait for.
        """
        schedule, place = self.running.schedule, self.mesh
        if not self.is_told or place.shards is not None or schedule.placement.shared:
            return False
        if schedule.updates is not None and place.num_replicas > 1:
            return False
        kinds = {registered.kind for registered in schedule.graph.registered}
        return self.adapt is None and not schedule.asynchronous and kinds <= {REDUCE} and self.choice.name != "nccl"

    @contextmanager
    def sharing(self, doing: str) -> Iterator[None]:
        """Around what processes do together. An error in the middle of it would leave others waiting."""
        life = self._life.sharing(doing, self.peers.here[0]) if self.is_told else nullcontext()
        with life, self.mesh.waiting():
            yield

    def _saved(self, stage: int, microbatch: int) -> SavedTensors:
        """What a forward here saved that goes to host memory."""
        pipeline = self.running.schedule.microbatch_pipeline[microbatch]
        return self.devices.runners[pipeline, stage].saved(microbatch)

    def follow_model(self) -> None:
        """Stages of a model whose forward is traced take the buffers that the user has given it since."""
        for stage in self.model.every_stage():
            if isinstance(stage, TracedStage):
                stage.follow_model()

    def held(self) -> dict[str, object]:
        """The parameters and layers of the user's model and of the stages here, by their places in words."""
        roots: dict[str, nn.Module] = {f"stage {index}": stage for index, stage in self.model.copies.stages.items()}
        if isinstance(self._given.model, nn.Module):
            roots["the model"] = self._given.model
        return {
            f"{kind} {path}{'.' * bool(path)}{name} of {where}": one
            for where, root in roots.items()
            for path, module in root.named_modules()
            for kind, parts in (("parameter", module._parameters), ("layer", module._modules))
            for name, one in parts.items()
            if one is not None
        }

    # Batches.

    def cut(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[..., Tensor] | None,
        windows: Sequence[range],
        trains: bool = False,
        num: int | None = None,
    ) -> Microbatches:
        """This replica's part of a batch, cut. A small one is cut into fewer microbatches than the schedule has.

        Args:
            trains: whether a training step is to run it.
            num: the number of microbatches, whatever the schedule has.

        Raises:
            RuntimeFailure: a small batch of a schedule of which a step runs all microbatches; see `why_never_fewer`.
        """
        schedule, mesh = self.running.schedule, self.mesh
        why = why_never_fewer(schedule, mesh.num_replicas) if trains else None

        def rules() -> BatchRules:
            if trains and not self._has_cut:
                require_keys(self._given.batch, inputs, targets)
            return rules_of(self._given.model, self._given.batch, inputs)

        if self.own_batches is not None:
            fewer = is_plain(schedule) and why is None
            most = schedule.num_microbatches if num is None else num
            batch = self.own_batches.cut(inputs, targets, loss_fn, windows, most, fewer, rules)
        elif inputs is None:
            raise RuntimeFailure(
                "no inputs were given; every process gives the whole batch, or, with "
                'ps.ParallelOptions(batches="replica"), those with the first stage their replica\'s inputs and those '
                "with the last one its targets"
            )
        else:
            found = rules()
            if is_plain(schedule) and num is None:
                inputs = uncut(inputs, "inputs", found.inputs)
                num = num_for(inputs, targets, schedule, mesh.num_replicas, trains, why)
            batch = cut_for(schedule, inputs, targets, loss_fn, windows, num, *mesh.part, self.is_told, found)
        if trains:
            self._has_cut = True
            self.running_for(batch)
        return batch

    def running_for(self, batch: Microbatches) -> ActivePlan:
        """What a training step of a batch runs: of a small batch, the ops of its microbatches alone."""
        now, num = self.running, len(batch)
        if num >= now.schedule.num_microbatches or why_never_fewer(now.schedule, self.mesh.num_replicas) is not None:
            return now
        if num not in now.fewer:
            usual = f"{now.schedule.num_microbatches} microbatches of {now.schedule.name}"
            self.notices.note([f"a small batch ran {num} of the {usual}; if most are so small, build it with fewer"])
            now.fewer[num] = self.activated(with_fewer(now.configuration, num, self.mesh))
        return now.fewer[num]

    def _said_by_all(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """What every process says of the batch that it was given."""
        with self.sharing("what each process was given"):
            return self.mesh.everyone.gather(facts)

    # The end.

    def close(self) -> None:
        """Takes back what was made, the last first; doing it again does nothing."""
        self._made.close()

    def _end_transport(self) -> None:
        if self.transport is not None:
            self.transport.close()


def _facts(
    given: PipelineArguments, schedule: Schedule, choice: TransportChoice, dispatch: Dispatch | str
) -> dict[str, object]:
    """What all processes must give alike, by its name."""
    scaler, parallel = given.precision.enabled_scaler, given.parallel
    loss_fn: Any = getattr(given.loss_fn, "func", given.loss_fn)
    return {
        "schedule": schedule_digest(schedule),
        "model": _form_of(given.model),
        "number of stages in its list": None if isinstance(given.model, nn.Module) else len(given.model),
        "loss_fn": in_words(loss_fn),
        "dispatch": str(dispatch),
        "seed": given.seed,
        "precision": repr(replace(given.precision, scaler=None)),
        "scaler": None if scaler is None else scaler.state_dict(),
        "tied": [list(group) for group in parallel.tied],
        "ops": sorted(given.ops),
        "transport": choice.shared,
        "links": str(given.transport.links),
        "adapt": given.adapt is not None,
        "sharding": parallel.sharding,
        "batches": parallel.batches,
        "batch": None if given.batch is None else [in_words(given.batch.inputs), in_words(given.batch.targets)],
    }


def _form_of(model: nn.Module | Sequence[StageSource]) -> str | None:
    """Tells models of other parameters apart; None for a list, whose stages are compared once they are built."""
    if not isinstance(model, nn.Module | Split):
        return None
    stages = [model] if isinstance(model, nn.Module) else list(model)
    return digest_of(line for stage in stages for line in form_of(stage))


def _leave(model: LocalModel) -> None:
    """Leaves a model as it was found."""
    model.tied.close()
    for stage in model.every_stage():
        unprepare(stage)
