"""The pipeline: a model, a schedule and an optimizer, trained step by step, the same call on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.control import Configuration
from penstock.cost import Links, Ring
from penstock.dispatch import Dispatch
from penstock.renamed import refuse_old
from penstock.runtime.adapt import AdaptOptions, Agent, NodeProbes, steer
from penstock.runtime.arguments import KEYWORDS, ParallelOptions, PrecisionOptions, require_arguments
from penstock.runtime.checkpoint import saving
from penstock.runtime.checkpoint.state_transfer import hand_over
from penstock.runtime.checkpoint.training_state import state_of
from penstock.runtime.checkpoint.user_state import Stateful
from penstock.runtime.compatibility import (
    Combination,
    check_once,
    require_compatible,
    require_dense,
    require_runnable,
    steered,
    why_nodes_stay,
)
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.active_plan import (
    ActivePlan,
    dispatch_of,
    require_free,
    require_switchable,
    running,
    start_of,
)
from penstock.runtime.execute.enable_split import deferred_shares, little_deferred, split_stages, stay_on_device
from penstock.runtime.execute.lockstep import lockstep_of
from penstock.runtime.execute.notices import Notices
from penstock.runtime.execute.plan import StepPlan
from penstock.runtime.execute.step_executor import StepExecutor
from penstock.runtime.execute.step_result import StepEnd, StepResult
from penstock.runtime.execute.timeline import gathered_timeline, idle_share, measured_of
from penstock.runtime.execute.torch_devices import TorchDevices
from penstock.runtime.execute.worker import Worker
from penstock.runtime.lifetime import Lifetime
from penstock.runtime.mesh.consistency import require_same, schedule_digest
from penstock.runtime.mesh.nodes import Nodes
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.process_mesh import read_mesh
from penstock.runtime.mesh.torch_mesh import device_mesh_of, end_groups
from penstock.runtime.parameters.data_parallel import reductions_of, with_reductions, without_reductions
from penstock.runtime.parameters.given_optimizer import goes_on_as, kept_groups, require_alike
from penstock.runtime.parameters.late_rings import LateRing, probed_besides
from penstock.runtime.parameters.local_model import LocalModel
from penstock.runtime.parameters.optimizer_state import GivenOptimizer, OptimizerState
from penstock.runtime.parameters.state_bytes import gradient_bytes
from penstock.runtime.stage.branches import has_many_ends, is_plain
from penstock.runtime.stage.cut import evaluating, stages_of
from penstock.runtime.stage.host_memory import SavedTensors
from penstock.runtime.stage.microbatches import Microbatches, cut_for, num_entries
from penstock.runtime.stage.offload import functions_for, offloads
from penstock.runtime.stage.ops import Purpose, StepSettings
from penstock.runtime.stage.registered_ops import OpFunction, calls_of, functions_of
from penstock.runtime.stage.replica_batches import ReplicaBatches
from penstock.runtime.stage.split_backward import DeferredShare, unprepare
from penstock.runtime.stage.stage import StageSource
from penstock.runtime.tensors.rng import mix, restored
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.channel import Tags
from penstock.runtime.transport.choose import TransportChoice, TransportOptions
from penstock.runtime.transport.conditioned import Conditions
from penstock.runtime.transport.failover import Failover, guard
from penstock.runtime.transport.shared_memory import SharedMemoryTransport
from penstock.runtime.transport.wiring import Wiring
from penstock.schedule import Schedule
from penstock.schedule.send_recv import remove_communication
from penstock.simulation import Timeline


class Pipeline:
    """Runs a schedule on a model.

        pipe = ps.Pipeline(model, ps.build("1f1b", 4, 8), loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW)
        result = pipe.step(inputs, targets)

    All ranks run in this process, in turn, unless torch.distributed is set up with one process per rank.
    Either way every rank makes the same calls with the same whole batch.

    Args:
        model: a module, cut into stages of equal cost; what `ps.split` makes of it; or a list with one module, or
            function that makes one (called only where its stage runs), for each stage. A forward that is more than
            an `nn.Sequential`'s is traced, see `ps.split`.
        schedule: checked here; messages in it are left out, for the transport places them. With one rank a
            process, all must give the same.
        loss_fn: `(output, targets) -> loss`, a mean over the samples, or over what `loss_fn.weight(targets)`
            counts.
        optimizer: a function from parameters to a torch optimizer, like `torch.optim.AdamW` or a partial of
            it; or an optimizer over the model's parameters, of which each process keeps its own.
        mesh: a process group or one-dimensional device mesh to run over, by default all of torch.distributed; or a
            device mesh with dimensions named pp (the pipeline), dp (its replicas, each with a part of the batch) and
            tp (shards of its stages).
        dispatch: "frozen", "hinted", "dynamic" or "auto" (the fastest of them by simulation without delays).
        ops: of each registered kind of op in the schedule the function that runs it, like `program.callables`;
            called with an `OpCall` at the op's place in the order. Evaluation leaves these ops out.
        seed: for dropout, the same whatever the schedule and the number of ranks.
        timeout: seconds that any wait may last.
        precision: the type of `torch.autocast`, and clipping; see `PrecisionOptions`.
        parallel: cutting, devices, tied parameters, shards; see `ParallelOptions`.
        transport: what carries messages between processes; see `TransportOptions`, or its name alone.
        adapt: measure links while training, and switch to what is faster; see `AdaptOptions`. None: not at all. Over
            a mesh all replicas and shards switch together, and nodes change places where a link between them is late;
            after that the parameters here are other ones, and `optimizer` has these.

    A pipeline that cannot be made leaves nothing behind. One that was is closed at the end of a `with` block, or by
    `close()`.

    Where updates are ops of the schedule (U), one step runs many of them, each on its stage alone, by the rule that
    the schedule names; `PrecisionOptions.clip_norm` then bounds the norm of each stage's gradient.

    Raises:
        ScheduleError: the schedule is not valid. Only the first rank tells why.
        PartitionError: more stages than layers, a list of another length than the schedule's stages, or something in
            the model's forward that stands in the way of cutting it; the message has the line.
        RuntimeFailure: what torch.distributed has, or `ops`, does not fit the schedule; a store that cannot be
            reached.
        ControlError: adapting with numbers that make no sense.
    """

    @refuse_old(KEYWORDS, RuntimeFailure)
    def __init__(
        self,
        model: nn.Module | Sequence[StageSource],
        schedule: Schedule,
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        optimizer: GivenOptimizer = None,
        mesh: Any = None,
        dispatch: Dispatch | str = Dispatch.FROZEN,
        ops: Mapping[str, OpFunction] | None = None,
        seed: int = 0,
        timeout: float = 60.0,
        precision: PrecisionOptions | None = None,
        parallel: ParallelOptions | None = None,
        transport: TransportOptions | str | None = None,
        adapt: AdaptOptions | None = None,
    ) -> None:
        options = {
            "precision": (precision, PrecisionOptions),
            "parallel": (parallel, ParallelOptions),
            "adapt": (adapt, AdaptOptions),
        }
        require_arguments(model, schedule, loss_fn, optimizer, seed, timeout, ops, options)
        precision, parallel = precision or PrecisionOptions(), parallel or ParallelOptions()
        carried = TransportOptions.of(transport)
        clip_norm, links = precision.clip_norm, carried.links
        self._given: dict[str, Any] = {
            "model": model,
            "schedule": schedule,
            "loss_fn": loss_fn,
            "optimizer": optimizer,
            "ops": ops,
            "seed": seed,
            "timeout": timeout,
            "precision": precision,
            "parallel": parallel,
            "transport": transport,
            "adapt": adapt,
        }
        schedule = remove_communication(schedule)  # the transport places messages
        self._learner: OptimizerState
        self._num_steps = 0
        self._seed = seed
        self._loss_fn = loss_fn
        self._mesh = place = read_mesh(mesh, schedule.num_ranks, timeout, parallel.of_replicas)
        self._peers = place.pipeline
        self._told = isinstance(place.everyone, GroupPeers)  # whether others must be given the same
        require_runnable(schedule)
        self._own_batches: ReplicaBatches | None = None
        if parallel.batches == "replica":
            self._own_batches = ReplicaBatches(schedule, place, self._said_by_all)
        adapt = steered(schedule, adapt)
        apart = isinstance(self._peers, GroupPeers)
        whole = apart or schedule.num_ranks == 1  # a node has one rank
        self._nodes = nodes = Nodes.of(mesh) if whole and place.num_replicas > 1 else None
        if links is not None:
            links.check_ranks(schedule.num_ranks if nodes is None else nodes.mesh.num_nodes)
        choice = carried.choice(adapt is not None and adapt.may_delegate)
        self._choice = choice if apart else TransportChoice()
        ops = ops or {}
        facts = {
            "schedule": schedule_digest(schedule),
            "dispatch": str(dispatch),
            "seed": seed,
            "clip_norm": clip_norm,
            "tied": [list(group) for group in parallel.tied],
            "ops": sorted(ops),
            "transport": choice.shared,
            "links": str(links),
            "adapt": adapt is not None,
            "sharding": parallel.sharding,
            "batches": parallel.batches,
        }
        require_same(place.everyone.gather(facts), "every rank must make the same ps.Pipeline(...)")
        check_once(schedule, place.everyone)
        self._costs = known = adapt.costs if adapt is not None else None
        chosen = dispatch_of(dispatch, schedule, known, self._choice)
        combination = Combination(
            schedule,
            place.num_replicas,
            place.num_shards,
            parallel.sharding,
            chosen.value,
            self._choice.name,
            is_late=links is not None,
            one_process=not apart,
        )
        require_compatible(combination)
        self._first = schedule  # which REDUCE ops are not among yet
        first = start_of(schedule, chosen, known, adapt)
        schedule = with_reductions(schedule, place)
        start = start_of(schedule, chosen, known, adapt)
        reducing = reductions_of(schedule, place, ops, lambda stage: self._learner.replicas.start(stage))
        self._offloads = offloads(schedule, ops)
        moving = functions_for(self._saved) if self._offloads else {}
        functions = functions_of(schedule, {**ops, **reducing, **moving})
        sources = stages_of(model, schedule.num_stages, parallel.costs)
        self._notices = Notices(self._peers)
        self._life = Lifetime("this pipeline")
        self._transport: Transport | None = None
        self._failover: Failover | None = None
        self._helm: Agent | None = None
        self._last: tuple[Wiring, list[Worker]] | None = None
        self._told_of_stays = False
        self._moving_to: Configuration | None = None
        self._groups: Any = None
        self._place = ExitStack()
        with kept_groups(optimizer), self._life.making() as on_close:
            on_close(lambda: self._place.close())  # of where it lies by then
            self._failover = guard(place, choice.delegates.interfaces, timeout)
            self._place.callback(self._end_failover, self._failover)
            self._model = held = LocalModel(
                sources, schedule.placement, place, parallel.device, parallel.tied, parallel.parallelize
            )
            self._place.callback(_leave, held)
            tied = {", ".join(tie.names.values()): tie.stages for tie in held.ties}
            require_compatible(replace(combination, schedule=schedule, tied=tied))
            require_dense(schedule, held.copies.stages, held.ties, place, clip_norm)
            self._conditions = conditions = None
            late = None
            if links is not None:
                here = links if nodes is None else nodes.mesh.links_of(links, place.replica)
                self._conditions = conditions = Conditions(here)
                if nodes is not None:
                    around = nodes.mesh.ring_links(links, self._peers.here[0])
                    late = LateRing(Ring() if adapt is None else adapt.ring, around, conditions)
            self._learner = OptimizerState(held, place, schedule, optimizer, clip_norm, parallel.one_copy_steps, late)
            self._tags = Tags.of(schedule, held.ties.stages)
            self._running = self._worked_out(start)
            updating, ranks = self._learner.updating, self._peers.here
            calls = calls_of(schedule, functions, held.stages, self._peers, timeout)
            together = lockstep_of(place, schedule.updates is not None, timeout)
            self._devices = TorchDevices(schedule, held, ranks, loss_fn, precision.autocast, calls, updating)
            self._executor = StepExecutor(self._devices, ranks, self._choice, conditions, together)
            self._split_stages()
            self._notices.share()
            if isinstance(self._peers, GroupPeers):
                wiring = self._running.plan.wiring
                self._transport = self._choice.make(
                    self._peers, self._tags, timeout, wiring, start.dispatch, held.device, conditions, self._failover
                )
                self._place.callback(self._transport.close)
            if adapt is not None:
                self._steer(adapt, first, links, timeout)
                on_close(lambda: None if self._helm is None else self._helm.close())

    def _steer(self, adapt: AdaptOptions, first: Configuration, links: Links | None, timeout: float) -> None:
        """Puts an agent in place, one of all processes of the mesh."""
        place, nodes = self._mesh, self._nodes
        weighs: tuple[float, ...] = ()
        if nodes is not None and adapt.may_move:
            why = why_nodes_stay(first.schedule, self._given["model"], self._given["optimizer"], nodes)
            if self._own_batches is not None:
                why = "each replica is given its own part of a batch, which its loader would go on giving it there"
            if why is not None:
                self._notices.note([f"nodes stay where they lie, also where a link between them is late: {why}"])
                nodes = None
        else:
            nodes = None
        if nodes is not None:
            first = replace(first, nodes=nodes.mesh.nodes)
            self._running = replace(self._running, configuration=replace(self.configuration, nodes=first.nodes))
            weighs = gradient_bytes(self._model.copies.stages, self._peers, first.schedule.num_stages)
        self._helm = steer(
            adapt,
            place.everyone,
            first,
            self._costs,
            self._choice,
            self._ready,
            num_copies=place.num_replicas * place.num_shards,
            mesh=None if nodes is None else nodes.mesh,
            gradient_bytes=weighs,
        )
        self._tell_place()
        if nodes is not None:
            injected = None
            if links is not None and self._conditions is not None:
                injected = partial(probed_besides, links, self._conditions)
            self._helm.probes = NodeProbes(nodes.processes, place.everyone, timeout, injected)

    def _tell_place(self) -> None:
        """Lets the agent know where this process lies. Every process must call it."""
        place, helm = self._mesh, self._helm
        if helm is None or place.is_flat:
            return
        helm.copy = place.replica * place.num_shards + place.shard
        helm.pipeline = self._peers.gather(place.everyone.here[0])
        if len(helm.pipeline) < self.schedule.num_ranks:  # one process runs the whole pipeline
            helm.pipeline = helm.pipeline * self.schedule.num_ranks
        if helm.probes is not None:
            helm.probes.everyone = place.everyone

    def _ready(self, configuration: Configuration) -> ActivePlan | Configuration:
        """Works out what a configuration needs to run, unless that is where nodes lie; any thread may do that."""
        plain = without_reductions(configuration.schedule, self._mesh)
        require_switchable(plain, self._first)
        configuration = replace(configuration, schedule=with_reductions(plain, self._mesh))
        if not {*configuration.schedule.graph.registered} <= {*self.schedule.graph.registered}:
            raise RuntimeFailure(
                f"{plain.name} has the gradients of more stages complete at one place than {self._first.name}, with "
                "which this pipeline was made: start a new one"
            )
        self._choice.require_dispatch(configuration.dispatch)
        self._choice.require_schedule(configuration.schedule, configuration.delegated)
        if configuration.nodes != self.configuration.nodes:
            return configuration
        self._choice.prepare(self._transport, configuration.delegated)
        return self._worked_out(configuration)

    def _worked_out(self, configuration: Configuration) -> ActivePlan:
        return running(configuration, self._model.ties.stages, self.rank, self._tags, self._costs)

    def _switch(self, then: ActivePlan | Configuration) -> None:
        """Runs something else from the next step on. Nodes move when that begins; until then nothing has changed."""
        if isinstance(then, Configuration):
            self._moving_to = then
            return
        self._running = then
        self._split_stages()

    def _move(self, then: Configuration) -> None:
        """Goes on where a configuration has the nodes. Every process is here, between two steps.

        A pipeline is made there, is handed all state, and what it is made of becomes this one's.
        """
        assert self._nodes is not None, "nodes that move are known"
        self._moving_to, moved = None, None
        groups = device_mesh_of(self._nodes.at(then.nodes).layout, self._model.device.type)
        try:
            moved = _MovedPipeline(**self._given, mesh=groups, dispatch=then.dispatch)
            moved._groups = groups
            self._require_movable(moved)
            plan = moved._ready(then)
            assert isinstance(plan, ActivePlan), "the nodes lie there by now"
            self.hand_over(moved)
        except BaseException as error:
            if moved is not None:
                moved.close()
            end_groups(groups)
            if type(error) is not RuntimeFailure or self._helm is None:
                raise
            self._helm.end(f"nodes could not move: {error}")  # as on every process, and training goes on
            return
        if self._conditions is not None and moved._conditions is not None:
            moved._conditions.origin = self._conditions.origin
        moved._life = self._life  # whether it is broken is said once
        moved._learner.optimizer = goes_on_as(self._learner.optimizer, moved._learner.optimizer)
        moved._switch(plan)
        self._place.close()
        if self._groups is not None:
            end_groups(self._groups)
        for name in _OF_PLACE:
            setattr(self, name, getattr(moved, name))
        self._notices.move_to(self._peers, moved._notices.known())
        self._tell_place()

    def _require_movable(self, then: Pipeline) -> None:
        """Raises RuntimeFailure, in every process, where one cannot go on as another pipeline."""
        known = {id(parameter) for parameter in self.parameters()}
        shared = sum(id(parameter) in known for parameter in then.parameters())
        why = f"it shares {shared} parameters: functions are to make fresh stages" if shared else ""
        why = why or require_alike(self._learner.optimizer, then._learner.optimizer)
        if said := [each for each in self.gather(why) if each]:
            raise RuntimeFailure(f"the pipeline there cannot take over: {said[0]}")

    def _split_stages(self) -> None:
        self._notices.note(split_stages(self._devices.runners, self._running))

    @property
    def schedule(self) -> Schedule:
        """What the next step runs."""
        return self._running.schedule

    @property
    def dispatch(self) -> Dispatch:
        """How ranks pick ops in the next step."""
        return self._running.dispatch

    @property
    def configuration(self) -> Configuration:
        """What the next step runs, with its caps and delegated links."""
        return self._running.configuration

    @property
    def number(self) -> int:
        """Of the decision that the next step runs; 0 for what was given."""
        return 0 if self._helm is None else self._helm.number

    @property
    def nodes(self) -> tuple[int, ...]:
        """Over a mesh with replicas, where nodes lie: of rank p in replica d that at p * dp + d; else none. Nodes
        count by their lowest process.
        """
        return () if self._nodes is None else self._nodes.mesh.nodes

    @property
    def links(self) -> Links | None:
        """The conditions injected into links between this pipeline's ranks; None where there are none."""
        return None if self._conditions is None else self._conditions.links

    @property
    def optimizer(self) -> Optimizer | None:
        """Over the parameters that are stepped in this process."""
        return self._learner.optimizer

    @property
    def clip_norm(self) -> float | None:
        """Most the norm of a gradient may be at an update."""
        return self._learner.clip_norm

    @property
    def num_updates(self) -> int:
        """Updates so far, those before a `load` included."""
        return self._learner.num_updates

    @property
    def notices(self) -> list[str]:
        """What a person should know, of all ranks: stages that cannot split or put little off, how steering fares.

        What a rank finds out in a step, all have at its end.
        """
        self._notices.note(self._helm.notices if self._helm is not None else ())
        return self._notices.known()

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """What steering has decided so far, as its log has it; on rank 0's process."""
        return self._helm.decisions if self._helm is not None else []

    def reconfigure(self, configuration: Configuration) -> None:
        """Runs another schedule, dispatch or set of delegated links from the next step on.

        Every rank must make the same call. Losses and gradients stay the same, to the bit.

        Raises:
            ScheduleError: the schedule is not valid.
            RuntimeFailure: it has another placement, stage graph or number of microbatches; the transport cannot
                run it, or the run is steered.
        """
        self._life.require_open()
        require_free(self._helm is not None)
        then = self._ready(configuration)
        told = [{"configuration": digest} for digest in self._peers.gather(configuration.digest)]
        require_same(told, "every rank must switch to the same")
        self._switch(then)

    @property
    def rank(self) -> int:
        """The first rank in this process."""
        return self._peers.here[0]

    def parameters(self) -> list[Parameter]:
        """The parameters in this process, each once."""
        return list(self._model.parameters)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The parameters in this process under their plain names in the whole model, a tied one once."""
        yield from self._model.named.items()

    # Stepping.

    def step(
        self, inputs: Any, targets: Any = None, *, update: bool = True, rates: Sequence[float] | None = None
    ) -> StepResult:
        """Runs the schedule once over a batch, then the optimizer. Where updates are ops of the schedule, they run in
        their places instead, and all have run when the step ends.

        Args:
            inputs: a tensor, or tuple (positional arguments) or dict (keyword arguments) of tensors with the
                samples in dimension 0, cut into microbatches; or a list with one such entry per microbatch. The whole
                batch, unless `ParallelOptions.batches` says that each replica gives its part.
            targets: alike; each goes to `loss_fn` with its microbatch's output.
            update: False to only add to the gradients, as several `backward` calls would; `update()` follows. Where
                updates are ops: False leaves the last window open, and the next step's first one adds to it.
            rates: where updates are ops, the learning rate of each; by default the optimizer's own.

        A step that fails leaves no gradients, as those of only some microbatches would be wrong silently. Where it
        may have made some of its updates, the pipeline is of no more use until it has loaded a checkpoint.

        Raises:
            RuntimeFailure: a batch that can't be cut, a stage or loss that returned what it should not.
            DeadlineExceeded, PeerLost: another rank is late or gone. After an error in the middle of a step between
                processes the pipeline is broken, and says so from then on.
        """
        self._life.require_open()
        if self._loss_fn is None and not has_many_ends(self.schedule.graph):
            raise RuntimeFailure("this pipeline has no loss_fn; give one to ps.Pipeline to train")
        if self._moving_to is not None:
            with self._sharing("a move of nodes"):
                self._move(self._moving_to)
        windows = self.schedule.windows.ranges if self.schedule.windows is not None else ()
        if rates is not None and not windows:
            raise RuntimeFailure(f"{self.schedule.name} has no updates as ops; set the optimizer's own learning rate")
        batch = self._cut(inputs, targets, self._loss_fn, windows)
        with self._mesh.waiting():
            self._learner.begin(rates, update)
        self._num_steps += 1
        try:
            with restored(self._model.device), self._mesh.waiting():
                if self._transport is not None:
                    self._transport.crossings()  # those of an evaluation
                seed, now = mix(self._seed, self._num_steps), self._running
                begin = perf_counter_ns()
                away = now.away if self._offloads else frozenset()
                settings = StepSettings(
                    batch, Purpose.TRAIN, seed, now.split, now.recomputed, now.counts, now.shuffled, away
                )
                with self._sharing(f"step {self._num_steps}"):
                    workers = self._run(settings, now.plan)
            with self._sharing(f"step {self._num_steps}"), self._mesh.waiting():
                self._learner.gather()
            end = perf_counter_ns()
            if self._helm is not None:
                seen = self._choice.link_events(self._transport), self._choice.counters(self._transport)
                self._helm.ended([measured_of(worker, begin, end, *seen) for worker in workers])
            self._notices.note(little_deferred(self._devices.runners))
            if away and not self._told_of_stays:
                self._notices.note(stay_on_device(self._devices.runners))
                self._told_of_stays = True
            result = self._result(batch, self._helm)
        except BaseException as error:
            self._learner.fail(error)
            raise
        finally:
            self._learner.end()
        if self._learner.updating is not None:
            self._learner.count_updates(update)
        elif update:
            result = replace(result, grad_norm=self.update())
        if self._helm is not None:
            with self._sharing("a probe of the links between nodes"):
                self._helm.look_at_nodes()
        return result

    def update(self) -> Tensor | None:
        """Clips, runs the optimizer and clears the gradients; returns the norm where clipping is on.

        Raises:
            RuntimeFailure: updates are ops of the schedule, and have run.
        """
        self._life.require_open()
        with self._mesh.waiting():
            return self._learner.update()

    def mismatch(self) -> dict[tuple[int, int, int], int]:
        """By (stage, pipeline, microbatch), the updates that the last step counted between its forward and backward.

        What `ps.schedule.count_mismatch(schedule)` proves, as it was run. Every rank must call it. Empty without
        updates.
        """
        mine = {} if self._learner.updating is None else self._learner.updating.mismatch()
        return {key: count for part in self._peers.gather(mine) for key, count in part.items()}

    def state_bytes(self) -> list[dict[str, int]]:
        """Of each rank the bytes of parameters, of older versions and gradients at most in the last step, and of the
        optimizer's state. Every rank must call it.
        """
        mine = {rank: self._learner.bytes_of(rank) for rank in self._peers.here}
        found = {rank: held for part in self._peers.gather(mine) for rank, held in part.items()}
        return [found[rank] for rank in sorted(found)]

    def host_memory(self) -> list[int]:
        """Of each process, the most bytes of activations that it had in host memory in the last step, by OFFLOAD and
        RELOAD. Every rank must call it.
        """
        return list(self._peers.gather(self._devices.host.peak))

    def _saved(self, stage: int, microbatch: int) -> SavedTensors:
        """What a forward here saved that goes to host memory."""
        return self._devices.runners[self.schedule.microbatch_pipeline[microbatch], stage].saved(microbatch)

    def deferred_share(self) -> dict[int, DeferredShare]:
        """By stage, how much of its work on weight gradients the last step's split backward put off to W, and why it
        did the rest in I. Every rank must call it. Stages whose backward is not split are not in it.
        """
        found: dict[int, DeferredShare] = {}
        for part in self._peers.gather(deferred_shares(self._devices.runners)):
            found |= part
        return dict(sorted(found.items()))

    def zero_grad(self) -> None:
        self._learner.zero_grad()

    def evaluate(self, inputs: Any, targets: Any = None) -> StepResult:
        """The loss of a batch without gradients, in evaluation mode; nothing in the model changes.

        A batch with fewer samples than the schedule has microbatches runs in fewer.
        """
        if self._loss_fn is None and not has_many_ends(self.schedule.graph):
            raise RuntimeFailure("this pipeline has no loss_fn; give one to ps.Pipeline to evaluate")
        return self._result(self._run_forward(inputs, targets, Purpose.EVALUATE))

    def predict(self, inputs: Any) -> list[Any]:
        """The model's output for each microbatch, in evaluation mode, on every rank."""
        batch = self._run_forward(inputs, None, Purpose.PREDICT)
        outputs: dict[int, Any] = {}
        for part in self._mesh.everyone.gather(self._devices.outputs(batch)):
            outputs.update(part)
        return [outputs[m] for m in sorted(outputs)]

    def _run_forward(self, inputs: Any, targets: Any, purpose: Purpose) -> Microbatches:
        self._life.require_open()
        if has_many_ends(self.schedule.graph):
            raise RuntimeFailure(
                f"several stages of {self.schedule.name} feed no other, and what compares them are ops, which run in "
                "training alone; evaluate the stages yourself"
            )
        self._learner.require_whole()
        loss_fn = self._loss_fn if purpose is Purpose.EVALUATE else None
        batch = self._cut(inputs, targets, loss_fn, (), fewer=is_plain(self.schedule))
        num = len(batch) if is_plain(self.schedule) else self.schedule.num_microbatches
        with (
            evaluating(self._model.every_stage()),
            restored(self._model.device),
            self._sharing("an evaluation"),
            self._mesh.waiting(),
        ):
            self._learner.replicas.unshard()
            self._run(StepSettings(batch, purpose), self._running.forward(num))
        self._learner.replicas.reshard()
        return batch

    def _cut(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[..., Tensor] | None,
        windows: Sequence[range],
        fewer: bool = False,
    ) -> Microbatches:
        """This replica's part of a batch, cut; `fewer`: a small one into fewer microbatches than the schedule has."""
        num = self.schedule.num_microbatches
        if self._own_batches is not None:
            return self._own_batches.cut(inputs, targets, loss_fn, windows, num, fewer)
        if inputs is None:
            raise RuntimeFailure(
                "no inputs were given; every process gives the whole batch, or, with "
                'ps.ParallelOptions(batches="replica"), those with the first stage their replica\'s inputs and those '
                "with the last one its targets"
            )
        if fewer:
            num = max(1, min(num, num_entries(inputs) // self._mesh.num_replicas))
        return cut_for(self.schedule, inputs, targets, loss_fn, windows, num, *self._mesh.part, self._told)

    def _said_by_all(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """What every process says of the batch that it was given."""
        with self._sharing("what each process was given"):
            return self._mesh.everyone.gather(facts)

    def _run(self, settings: StepSettings, plan: StepPlan) -> list[Worker]:
        with self._devices.step(settings):
            workers = self._executor.run(self._running, plan, self._transport, settings.training)
        self._last = plan.wiring, workers
        return workers

    def _result(self, batch: Microbatches, helm: Agent | None = None) -> StepResult:
        """The losses, from whichever process ran them; then switches to what an agent says."""
        memory = self._transport if isinstance(self._transport, SharedMemoryTransport) else None
        outcome = StepEnd(self._mesh, self._devices.last, memory)
        self._notices.note(self._helm.notices if self._helm is not None else ())
        self._notices.note(self._failover.notices if self._failover is not None else ())
        result, following = outcome.share(batch, helm, self._notices)
        if following is not None:
            self._switch(following)
        return result

    def save(
        self,
        directory: str | Path,
        *,
        meta: Mapping[str, Any] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        keep: int = 2,
        number: int | None = None,
    ) -> Path:
        """Writes a checkpoint `directory/step-...`, sharded by parameter name; every rank must call it.

        It appears whole or not at all; of older ones the newest `keep - 1` stay. `meta` is small JSON of the
        caller's, the same on all ranks. `stateful` names objects with `state_dict` and `load_state_dict` whose state
        is kept too, like a learning-rate scheduler or a data loader; where it differs, that of each replica or
        process. `number` is that in the name, `num_steps` by default: whoever counts other steps gives theirs.
        Raises CheckpointError.
        """
        self._life.require_open()
        self._learner.require_whole()
        counters = {"num_steps": self._num_steps, "num_updates": self.num_updates, "seed": self._seed}
        state, place = state_of(self._learner), self._mesh
        with place.waiting():
            return saving.save(directory, state, place, counters, meta or {}, stateful or {}, keep, number)

    def load(
        self,
        directory: str | Path,
        *,
        stateful: Mapping[str, Stateful] | None = None,
        fallback: bool = False,
    ) -> dict[str, Any]:
        """Loads a checkpoint, or the newest in a folder, written under any schedule and number of ranks.

        Training goes on as if it had never stopped. Returns the `meta` it was saved with; `stateful` gets the state
        of the objects it names. Every rank loads the same, or none loads anything. Where the newest is damaged, the
        error names the one before; with `fallback` it is loaded instead, the damaged one is renamed to
        `step-....damaged`, and `notices` say so. Raises CheckpointError where it is damaged or of another model;
        nothing is changed then.
        """
        self._life.require_open()
        loaded = saving.load(directory, state_of(self._learner), self._mesh, stateful or {}, fallback)
        self._num_steps, self._learner.num_updates = loaded.counters["num_steps"], loaded.counters["num_updates"]
        self._seed = loaded.counters["seed"]
        self._notices.note(loaded.notices)
        return loaded.meta

    def hand_over(self, then: Pipeline) -> int:
        """Lets another pipeline of the same model go on where this one is: it gets all that training has made.

        It may run another schedule, over the same processes in other places; every process must call this. Each
        fetches only what it does not hold itself; returns the bytes that this one fetched. Raises RuntimeFailure
        where they are not of one model.
        """
        self._life.require_open()
        fetched = hand_over(self._learner, then._learner, self._mesh.everyone)
        then._num_steps, then._learner.num_updates, then._seed = self._num_steps, self.num_updates, self._seed
        return fetched

    @property
    def num_steps(self) -> int:
        """Steps run so far, those before a `load` included."""
        return self._num_steps

    def agree(self, values: Sequence[float]) -> list[float]:
        """The sum of every process's values, the same everywhere: for decisions all ranks must take alike."""
        return [float(v) for v in self._mesh.everyone.sum(torch.tensor(values, dtype=torch.float64))]

    def idle_share(self) -> float:
        """The share of the last step, from its first op to its last, in which this process's ranks were idle."""
        workers = self._last[1] if self._last is not None else []
        return idle_share([worker.recorder.times for worker in workers])

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in their order; plain data."""
        return self._mesh.everyone.gather(value)

    def timeline(self) -> Timeline:
        """The measured timeline of the last step or evaluation. Every rank must call it."""
        if self._last is None:
            raise RuntimeFailure("there is no timeline yet; run a step first")
        return gathered_timeline(self._peers, *self._last)

    def close(self) -> None:
        """Ends steering and the transport, and leaves the model as it was found: no hooks, no patched layers. Done
        when a `with` block ends; closing it again does nothing.
        """
        self._life.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end_failover(self, failover: Failover | None) -> None:
        if failover is not None:
            failover.close(parts=not self._life.is_broken)

    def _sharing(self, doing: str) -> AbstractContextManager[None]:
        """Around what an error in the middle of would leave other processes waiting for."""
        return self._life.sharing(doing, self.rank) if self._told else nullcontext()


_OF_PLACE = (
    "_mesh", "_failover", "_peers", "_nodes", "_model", "_learner", "_tags", "_running", "_devices", "_executor",
    "_transport", "_conditions", "_place", "_groups", "_last",
)  # fmt: skip
"""What a pipeline has that depends on where its process lies in the mesh."""


class _MovedPipeline(Pipeline):
    """A pipeline that is to become another's, which steers it."""

    def _steer(self, adapt: AdaptOptions, first: Configuration, links: Links | None, timeout: float) -> None:
        if self._nodes is not None:
            self._running = replace(
                self._running, configuration=replace(self.configuration, nodes=self._nodes.mesh.nodes)
            )


def _leave(model: LocalModel) -> None:
    """Leaves a model as it was found."""
    model.close()
    for stage in model.every_stage():
        unprepare(stage)
