"""`Pipeline`: trains a model over a schedule, step by step, with the same calls on every rank.

A step cuts the batch, runs the schedule, shares losses and votes, and updates. After a lost link all of it runs anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from penstock.control import Configuration
from penstock.cost import Links
from penstock.dispatch import Dispatch
from penstock.runtime.adapt import AdaptOptions, Agent, MeasuredStep, start_agent
from penstock.runtime.arguments import (
    ParallelOptions,
    PipelineArguments,
    PrecisionOptions,
    require_norm,
    require_plain_modes,
)
from penstock.runtime.checkpoint import save_load
from penstock.runtime.checkpoint.object_state import Stateful
from penstock.runtime.checkpoint.state_transfer import hand_over
from penstock.runtime.checkpoint.training_state import TrainingState
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure, require_value
from penstock.runtime.execute.plan import ActivePlan, require_free
from penstock.runtime.execute.step_end import StepEnd, StepResult, SummedValues
from penstock.runtime.execute.timeline import gathered_timeline, measured_of
from penstock.runtime.lifetime import Lifetime, while_open
from penstock.runtime.local_pipeline import LocalPipeline
from penstock.runtime.mesh.peers import require_same
from penstock.runtime.node_moves import move_nodes, probes_of, run_setting, tell_place
from penstock.runtime.parameters.optimizer import GivenOptimizer
from penstock.runtime.partitioning.cutting import evaluating
from penstock.runtime.split_backward import DeferredShare
from penstock.runtime.stage.batch_rules import BatchRules
from penstock.runtime.stage.branches import has_many_ends, is_plain
from penstock.runtime.stage.microbatches import NO_LOSS, Microbatches
from penstock.runtime.stage.ops import Purpose, StepSettings
from penstock.runtime.stage.registered_ops import OpFunction
from penstock.runtime.stage.stage import StageSource
from penstock.runtime.tensors.pytree import flatten, unflatten
from penstock.runtime.tensors.rng import mix, restored
from penstock.runtime.transport.choose import TransportOptions
from penstock.runtime.transport.repeat import MOST_ATTEMPTS
from penstock.runtime.verify import Verification, Verifier
from penstock.schedule import Schedule
from penstock.simulation import Timeline
from penstock.unknown_names import refuse_unknown


class Pipeline:
    """Trains a model through a schedule.

        pipe = ps.Pipeline(model, ps.build("1f1b", 4, 8), loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW)
        result = pipe.step(inputs, targets)

    All ranks take turns in this process, unless torch.distributed is set up with one process per rank. In both cases
    every rank makes the same calls with the same whole batch.

    Args:
        model: a module, which is cut into stages of equal cost; the result of `ps.split`; or a list with one entry
            per stage, a module or a function that makes one (called only where the stage runs). If a module's forward
            is not just that of an `nn.Sequential`, it is traced, see `ps.split`.
        schedule: the schedule to run. It is checked here. Messages in it are ignored, because the transport places
            its own. With one rank per process, all processes must give the same schedule.
        loss_fn: `(output, targets) -> loss`, a mean over the samples, or over what `loss_fn.weight(targets)` counts.
            Of torch's own losses `reduction`, `ignore_index` and class weights are read.
            If the model returns its loss, this says where, and a step needs no targets unless `weight` counts them.
            With the attribute `adds_up = True` or `reduction="sum"`, it returns each microbatch's share of the loss
            instead, and the shares are added up as they are. `by_microbatch = True` says that it is meant for each
            microbatch by itself. Otherwise the first step compares the loss of two microbatches together with what
            their own losses come to.
        optimizer: a function from parameters to a torch optimizer, such as `torch.optim.AdamW` or a partial of it.
            Or an optimizer over the model's parameters; each process then keeps those that it holds. None: a step
            leaves its gradients for an optimizer of your own.
        mesh: a process group or one-dimensional device mesh to run over. Default: all of torch.distributed. Or a
            device mesh with dimensions named pp (the pipeline), dp (replicas, each with a part of the batch) and tp
            (shards of its stages).
        dispatch: how a rank picks its next op: "frozen", "hinted", "dynamic" or "auto" (the fastest of them, by
            simulation without delays).
        ops: for each registered kind of op in the schedule the function that runs it, such as `program.callables`.
            The function is called with an `OpCall` at the op's place in the order. Evaluation leaves these ops out.
        seed: seed for dropout. Draws are the same for any schedule and any number of ranks, and others in each step,
            evaluation and prediction.
        timeout: the longest time that any wait may last (seconds).
        precision: autocast and clipping; see `PrecisionOptions`.
        parallel: cutting, devices, tied parameters, sharding; see `ParallelOptions`.
        transport: what carries messages between processes: `TransportOptions`, or only its name.
        adapt: how to measure links while training, and switch to what is faster; see `AdaptOptions`. None: not at
            all. Over a mesh, all replicas and shards switch together, and nodes change places if a link between them
            is late. After that this process holds other parameters, and `optimizer` updates those.
        batch: how each tensor of a batch is cut, where its samples are not in dimension 0; see `BatchRules`.

    Close a pipeline with `close()`, or use it in a `with` block. If making one fails, nothing is left behind.

    If updates are ops of the schedule (U), one step runs many of them. Each updates one stage, by the rule that the
    schedule names. `PrecisionOptions.clip_norm` then limits the norm of each stage's gradient.

    Raises:
        ScheduleError: the schedule is not valid.
        PartitionError: more stages than layers, a list whose length is not the schedule's number of stages, or
            something in the model's forward that can't be cut; the message names the line.
        RuntimeFailure: torch.distributed or `ops` do not fit the schedule, or a store cannot be reached.
        ControlError: invalid numbers for adapting.

    Examples:
        >>> import torch, penstock as ps
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> schedule = ps.build("zb-h1", num_ranks=2, num_microbatches=4)
        >>> x = torch.randn(16, 8)
        >>> with ps.Pipeline(model, schedule, loss_fn=torch.nn.MSELoss(), optimizer=torch.optim.SGD) as pipe:
        ...     result = pipe.step(x, x.roll(1, 1))
        >>> result.loss.shape, pipe.timeline().source
        (torch.Size([]), 'measured')
    """

    @refuse_unknown(RuntimeFailure)
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
        batch: BatchRules | None = None,
    ) -> None:
        self._given = given = PipelineArguments(
            model,
            schedule,
            loss_fn,
            optimizer,
            ops or {},
            seed,
            timeout,
            precision or PrecisionOptions(),
            parallel or ParallelOptions(),
            TransportOptions.of(transport),
            adapt,
            batch,
        )
        self._num_steps, self._seed, self._loss_fn = 0, seed, loss_fn
        self._num_forwards = 0
        """Evaluations and predictions since the last step, which draw other numbers each."""
        self._summed: SummedValues | None = None
        self.step_sums: tuple[float, ...] = ()
        self._agent: Agent | None = None
        self._moving_to: Configuration | None = None
        self._life = Lifetime()
        self._local = LocalPipeline(given, mesh, dispatch, self._life)
        try:
            if self._local.adapt is not None:
                self._start_agent(self._local.adapt)
        except BaseException:
            with suppress(Exception):
                self.close()
            raise

    def _start_agent(self, adapt: AdaptOptions) -> None:
        """Starts an agent, one over all processes of the mesh."""
        local, setting = self._local, run_setting(self._local, self._given, adapt.may_move)
        # `ready` of where it lies by then.
        self._agent = start_agent(adapt, local.mesh.everyone, setting, lambda then: self._local.ready(then))
        tell_place(self._agent, local)
        if setting.mesh is not None:
            self._agent.probes = probes_of(lambda: self._local, self._given)

    def _switch(self, then: ActivePlan | Configuration) -> None:
        """Switches to something else for the next step. Nodes move when that step begins, not before."""
        if isinstance(then, Configuration):
            self._moving_to = then
        else:
            self._local.switch(then)

    def _move(self, then: Configuration) -> None:
        """Moves to where a configuration places the nodes. Every process calls it, between two steps."""
        self._moving_to = None
        self._local = move_nodes(self._local, then, self._given, self._life, self._agent)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the next step."""
        return self._local.running.schedule

    @property
    def dispatch(self) -> Dispatch:
        """How ranks pick their ops in the next step."""
        return self._local.running.dispatch

    @property
    def configuration(self) -> Configuration:
        """What the next step runs: schedule, dispatch, caps and delegated links."""
        return self._local.running.configuration

    @property
    def number(self) -> int:
        """The number of the decision that the next step runs; 0 for what was given at the start."""
        return 0 if self._agent is None else self._agent.number

    @property
    def nodes(self) -> tuple[int, ...]:
        """Over a mesh with replicas, the node of rank p in replica d at index p * dp + d; otherwise empty.

        Nodes are numbered in the order of their lowest processes.
        """
        return () if self._local.nodes is None else self._local.nodes.mesh.nodes

    @property
    def links(self) -> Links | None:
        """The conditions injected into links between this pipeline's ranks; None if there are none."""
        return None if self._local.conditions is None else self._local.conditions.links

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer over the parameters that this process updates."""
        return self._local.optimizer_state.optimizer

    @property
    def num_updates(self) -> int:
        """Number of updates so far, including those before a `load`."""
        return self._local.optimizer_state.num_updates

    @property
    def notices(self) -> list[str]:
        """Messages for the user, from all ranks: stages that cannot split or defer little, and how adapting goes.

        What one rank finds in a step, all processes have at the end of that step.
        """
        self._local.notices.note(self._agent.notices if self._agent is not None else ())
        return self._local.notices.known()

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The decisions of adapting so far, as in its log. Only rank 0's process has them."""
        return self._agent.decisions if self._agent is not None else []

    @while_open
    def reconfigure(self, configuration: Configuration) -> None:
        """Switches to another schedule, dispatch or set of delegated links from the next step on.

        Every rank must make the same call. Losses and gradients stay the same, to the bit.

        Raises:
            ScheduleError: the schedule is not valid.
            RuntimeFailure: the schedule has another placement, stage graph or number of microbatches, the transport
                cannot run it, or the run adapts.
        """
        require_free(self._agent is not None)
        # Replicas and shards sum in the order of the schedule: they must switch to the same, too.
        digests = [{"configuration": digest} for digest in self._local.mesh.everyone.gather(configuration.digest)]
        require_same(digests, "every rank must switch to the same", shown=False)
        self._switch(self._local.ready(configuration))

    @property
    def rank(self) -> int:
        """The lowest rank in this process."""
        return self._local.peers.here[0]

    def parameters(self) -> list[Parameter]:
        """The parameters in this process, each of them once."""
        return list(self._local.model.parameters)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The parameters in this process, by their names in the whole model.

        A tied parameter comes once, by the name in the first stage that uses it. Copies of a stage in other pipelines
        and tied parameters that another process owns are here too, so a change by name reaches all that hold one.
        """
        yield from self._local.model.names().items()

    # Stepping.

    @while_open
    def step(
        self, inputs: Any, targets: Any = None, *, update: bool = True, rates: Sequence[float] | None = None
    ) -> StepResult:
        """Runs the schedule once over a batch, and then the optimizer.

        Without an optimizer the gradients are added to those in `.grad`, clipped (`PrecisionOptions.clip_norm`), and
        stay there: step an optimizer of your own, on every rank, and call `zero_grad`. `num_updates` stays.
        If updates are ops of the schedule, they run at their places instead, and all have run when the step ends.
        If the batch has fewer samples than the schedule has microbatches, fewer microbatches run, unless updates or
        other ops were placed for all of them. Adapting does not measure such a step.

        Args:
            inputs: the whole batch, unless `ParallelOptions.batches` says that each replica gives its part. A tensor,
                or a tuple (positional arguments) or dict (keyword arguments) of tensors, with the samples in
                dimension 0 or where `BatchRules` say; it is cut into microbatches. Or a list with one such entry per
                microbatch.
            targets: the targets, in the same form. Each goes to `loss_fn` with its microbatch's output.
            update: False only adds to the gradients, as several `backward` calls would; call `update()` later. If
                updates are ops, False leaves the last window open, and the next step's first window adds to it.
            rates: if updates are ops, the learning rate of each. Default: the optimizer's own.

        A step that fails leaves no gradients, because the gradients of only some microbatches would be wrong. If it
        may have made some of its updates, the pipeline can't be used until it has loaded a checkpoint.

        Raises:
            RuntimeFailure: a batch that can't be cut, a stage or loss that returned something invalid, a loss that is
                not that of the batch, a step in which no microbatch's loss has a gradient, ranks that disagree on
                `update`, or options for updates (a scaler, zero1) without an optimizer.
            PeerFailed: another process could not do its part; the message has its error.
            DeadlineExceeded, PeerLost: another rank is late or gone. After that the pipeline is broken, and every
                later call says so.
        """
        self._life.require_whole()
        if self._loss_fn is None and not has_many_ends(self.schedule.graph):
            raise RuntimeFailure(NO_LOSS.format("train"))
        if self._moving_to is not None:
            self._local.follow_model()
            with self._local.sharing("a move of nodes"):
                self._move(self._moving_to)
        windows = self.schedule.windows.ranges if self.schedule.windows is not None else ()
        if rates is not None and not windows:
            raise RuntimeFailure(f"{self.schedule.name} has no updates as ops; set the optimizer's own learning rate")
        local, state = self._local, self._local.optimizer_state
        with local.begin().noted():
            rates = None if rates is None else [float(rate) for rate in rates]
            require_plain_modes(local.model.device, "step", trains=True)
            local.follow_model()
            local.model.require_trainable()
        batch = local.cut(inputs, targets, self._loss_fn, windows, trains=True)
        number, has_begun = self._num_steps + 1, False

        def attempt() -> tuple[StepResult, Callable[[], Tensor] | None]:
            nonlocal has_begun
            measured: list[MeasuredStep] = []
            has_begun = False
            try:
                with local.attempted():
                    local.begin_training(batch, rates, update)
                    has_begun, self._num_steps, self._num_forwards = True, number, 0
                    local.renew_transport()
                    measured = self._run_schedule(batch)
                return self._end_schedule(batch, update, measured)
            finally:
                if has_begun:
                    state.end()

        try:
            # Nothing puts back weights that updates among the ops have changed.
            most = MOST_ATTEMPTS if state.updating is None else 1
            result, norm = local.repeated(attempt, state.zero_grad, most)
            result = self._update_after(result, norm, update)
        except BaseException as error:
            if has_begun:
                state.zero_grad()
                if state.updating is not None:
                    self._life.lose_updates(error)
            raise
        if self._agent is not None:
            with local.sharing("a look at clocks, and at links between nodes"):
                self._agent.look_at_nodes(local.mesh.everyone, self._num_steps)
        return result

    def _run_schedule(self, batch: Microbatches) -> list[MeasuredStep]:
        """Runs all ops of a training step. The gradients lie in `.grad` afterwards. Returns what an agent is told."""
        local, doing = self._local, f"step {self._num_steps}"
        with restored(local.model.device):
            if self._agent is not None and local.transport is not None:
                local.transport.crossings()  # those of an evaluation
            now = local.running_for(batch)
            settings = local.settings(batch, now, mix(self._seed, self._num_steps))
            begin = perf_counter_ns()
            with local.sharing(doing):
                workers = local.run(settings, now.plan)
        with local.sharing(doing):
            local.optimizer_state.gather()
        end = perf_counter_ns()
        local.notices.note(local.devices.little_deferred())
        if self._agent is None or now is not local.running:
            return []
        seen = local.choice.seen(local.transport)
        return [measured_of(worker, begin, end, *seen) for worker in workers]

    def _end_schedule(
        self, batch: Microbatches, update: bool, measured: Sequence[MeasuredStep]
    ) -> tuple[StepResult, Callable[[], Tensor] | None]:
        """Shares the losses. Returns them, and what waits for the gradient norm if it is clipped after the ops.

        The norm is on its way while the losses are: over a late link, each sum takes as long as the link is late.
        """
        state, mesh = self._local.optimizer_state, self._local.mesh
        norm = None
        is_certain = self._local.attempts is None  # else a process may have given the attempt up, with its gradients
        if is_certain and state.updating is None and state.clip_norm is not None and state.scaling is None:
            with mesh.waiting():
                norm = state.begin_norm() if update else state.begin_no_norm()
        try:
            usual = self._local.running_for(batch) is self._local.running
            return self._result(batch, self._agent if usual else None, update, measured), norm
        except Exception as error:
            if norm is not None and not isinstance(error, DeadlineExceeded | PeerLost):
                norm()  # all ranks began it
            raise

    def _update_after(self, result: StepResult, norm: Callable[[], Tensor] | None, update: bool) -> StepResult:
        """Runs the optimizer, unless updates were ops or the step only adds to the gradients."""
        state = self._local.optimizer_state
        if state.updating is not None:
            state.count_updates(update)
        elif update:
            with self._local.sharing(f"the update of step {self._num_steps}"):
                return replace(result, grad_norm=state.update(norm), skipped=state.skipped)
        elif norm is not None:
            with self._local.mesh.waiting():
                norm()
        return result

    @while_open
    def update(self) -> Tensor | None:
        """Clips, runs the optimizer and clears the gradients. Returns the norm if clipping is on.

        Raises:
            RuntimeFailure: updates are ops of the schedule, and have run already; or there is no optimizer.
        """
        state = self._local.optimizer_state
        state.require_updates_apart()
        with self._local.sharing("an update"):
            return state.update()

    @while_open
    def clip(self, max_norm: float) -> Tensor:
        """Scales the gradients so that the norm of the whole model's is at most `max_norm`. Returns the norm before.

        Use it to do something between clipping and `update()`; `PrecisionOptions.clip_norm` clips within `update()`.
        Every rank must call it. Raises RuntimeFailure if updates are ops of the schedule.
        """
        require_norm(max_norm, "max_norm")
        state = self._local.optimizer_state
        with self._local.mesh.waiting():
            return state.clip(max_norm)

    def mismatch(self) -> dict[tuple[int, int, int], int]:
        """By (stage, pipeline, microbatch), how many updates came between its forward and backward in the last step.

        This is what ran; `ps.schedule.count_mismatch(schedule)` computes the same from the schedule. Every rank must
        call it. It is empty without updates.
        """
        updating = self._local.optimizer_state.updating
        return self._of_all_ranks({} if updating is None else updating.mismatch())

    def state_bytes(self) -> list[dict[str, int]]:
        """Bytes that each rank held: parameters, older versions, gradients and the optimizer's state.

        Of older versions and gradients it is the most in the last step. Every rank must call it.
        """
        state, here = self._local.optimizer_state, self._local.peers.here
        found = self._of_all_ranks({rank: state.bytes_of(rank) for rank in here})
        return [found[rank] for rank in sorted(found)]

    def host_memory(self) -> list[int]:
        """The most bytes of activations that OFFLOAD and RELOAD kept in host memory in the last step, per process.
        Every rank must call it.
        """
        return list(self._local.peers.gather(self._local.devices.host.peak))

    def deferred_share(self) -> dict[int, DeferredShare]:
        """How much of each stage's work on weight gradients the last step deferred to W, and why the rest ran in I.

        The result is by stage. Stages whose backward is not split are left out. Every rank must call it.
        """
        return dict(sorted(self._of_all_ranks(self._local.devices.deferred_shares()).items()))

    def _of_all_ranks(self, mine: dict[Any, Any]) -> dict[Any, Any]:
        return {key: value for part in self._local.peers.gather(mine) for key, value in part.items()}

    @while_open
    def zero_grad(self) -> None:
        self._local.optimizer_state.zero_grad()

    @while_open
    def verify(self, inputs: Any, targets: Any = None) -> Verification:
        """Checks on one step that the model and the loss keep the contract (docs/contract.md). Nothing of it lasts.

        It computes the step in the schedule's own order and one microbatch after another, which must give equal bits;
        with the batch in one piece, which must give the same but for rounding; and by the model's own forward, which
        must give the bits of the stages. That takes about six times as long as a step. Every rank must call it.

        Args:
            inputs: a batch, as for `step`.
            targets: its targets, as for `step`.

        Returns:
            What was compared, and how. Printed, it is a table.

        Raises:
            VerifyError: something differs. The message names the first tensor that does, and the sentence of the
                contract that was most likely broken.
            RuntimeFailure: a batch that can't be cut, a step that fails in every order, or a schedule that no plain
                loop can be compared with, as it has updates or ops of the user's in its order.

        Examples:
            >>> import torch, penstock as ps
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
            >>> x, y = torch.randn(8, 4), torch.randn(8, 1)
            >>> with ps.Pipeline(model, ps.build("zb-h1", 2, 4), loss_fn=torch.nn.MSELoss()) as pipe:
            ...     print(pipe.verify(x, y))
            the model, and the model as ps.Pipeline got it          same
            the schedule's order, and one microbatch after another  same
            the parameters that stages use, and their own           same
            the microbatches, and the batch in one piece            same
            the stages, and the model's own forward                 same
        """
        if self._loss_fn is None:
            raise RuntimeFailure(NO_LOSS.format("verify"))
        require_plain_modes(self._local.model.device, "verify", trains=True)
        return Verifier(self._local, self._given, mix(self._seed, self._num_steps + 1)).verify(inputs, targets)

    @while_open
    def evaluate(self, inputs: Any, targets: Any = None) -> StepResult:
        """Computes the loss of a batch, or the mean loss over a loader, without gradients, in evaluation mode.

        The model does not change. If a batch has fewer samples than the schedule has microbatches, fewer microbatches
        run. Over a loader, a batch weighs as much as its loss is a mean over, such as targets that are not ignored.
        So the mean is that of all samples together. Losses that add up (`adds_up`, `reduction="sum"`) weigh equally.

        Args:
            inputs: a batch, as for `step`. Or a loader without `targets`: an iterable that is no tensor, list, tuple,
                mapping or dataclass, such as a DataLoader or a generator. It gives batches (inputs, targets), or
                mappings and tensors that are inputs alone. Every rank must give equally many.
            targets: the batch's targets, as for `step`.

        Returns:
            The loss. Over a loader it is in float64, and `losses` has one share for each batch; they add up to it.

        Raises:
            RuntimeFailure: no loss_fn, a batch that can't be cut, a loader without a batch, or with more than two
                values for one, or a Dataset alone.
        """
        if self._loss_fn is None and not has_many_ends(self.schedule.graph):
            raise RuntimeFailure(NO_LOSS.format("evaluate"))
        has_samples = isinstance(inputs, Dataset) and not isinstance(inputs, IterableDataset)
        require_value(not has_samples, "inputs", inputs, "batches: wrap it in a DataLoader(dataset, batch_size=...)")
        is_batch = isinstance(inputs, Tensor | list | tuple | Mapping) or is_dataclass(inputs)
        if targets is None and isinstance(inputs, Iterable) and not is_batch:
            return self._mean_loss(inputs)
        _, result = self._run_forward(inputs, targets, Purpose.EVALUATE)
        return result

    def _mean_loss(self, loader: Iterable[Any]) -> StepResult:
        """The mean loss of the batches of a loader."""
        losses, weights = [], []
        for given in loader:
            if isinstance(given, list | tuple) and len(given) > 2:
                two = "(inputs, targets), where inputs may be a tuple, as in ((ids, mask), targets)"
                raise RuntimeFailure(f"the loader gives {len(given)} values for a batch; give two, {two}")
            if isinstance(given, list):  # as torch's default_collate makes of tuples, also of those within
                given = tuple(tuple(each) if isinstance(each, list) else each for each in given)
            inputs, targets = given if isinstance(given, list | tuple) and len(given) == 2 else (given, None)
            batch, result = self._run_forward(inputs, targets, Purpose.EVALUATE)
            losses.append(float(result.loss))
            weights.append(batch.weight)
        if not losses:
            raise RuntimeFailure("evaluate was given a loader without a batch; give one, or a fresh generator")
        shares = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
        total = sum(weights) or 1.0  # no target counts in any batch: the loss is 0
        loss = torch.tensor(sum(shares) / total, dtype=torch.float64)
        return StepResult(loss, torch.tensor(shares, dtype=torch.float64) / total, window_losses=loss.reshape(1))

    @while_open
    def predict(self, inputs: Any) -> list[Any]:
        """The model's output for each microbatch, in evaluation mode. Every rank gets all outputs."""
        batch, _ = self._run_forward(inputs, None, Purpose.PREDICT)
        outputs: dict[int, Any] = {}

        def taken_apart() -> dict[int, Any]:  # as the classes of named tuples may be none that can be pickled
            return {m: flatten(output) for m, output in self._local.devices.outputs(batch).items()}

        for part in self._local.mesh.everyone.together(taken_apart, "give its outputs"):
            outputs |= {m: unflatten(leaves, skeleton) for m, (leaves, skeleton) in part.items()}
        return [outputs[m] for m in sorted(outputs)]

    def _run_forward(self, inputs: Any, targets: Any, purpose: Purpose) -> tuple[Microbatches, StepResult]:
        """Runs the forwards of a batch, again where a link was lost, and shares what became of them."""
        if has_many_ends(self.schedule.graph):
            raise RuntimeFailure(
                f"several stages of {self.schedule.name} feed no other, and what compares them are ops, which run in "
                "training alone; evaluate the stages yourself"
            )
        self._life.require_whole()
        with self._local.begin().noted():
            require_plain_modes(self._local.model.device, purpose.value)
            self._local.follow_model()
        loss_fn = self._loss_fn if purpose is Purpose.EVALUATE else None
        batch = self._local.cut(inputs, targets, loss_fn, ())
        num = len(batch) if is_plain(self.schedule) else self.schedule.num_microbatches
        self._num_forwards += 1
        seed = mix(self._seed, self._num_steps, self._num_forwards)
        settings = StepSettings(batch, purpose, seed, counts=self._local.running.counts)
        local, replicas = self._local, self._local.optimizer_state.replicas

        def attempt() -> StepResult:
            try:
                with (
                    local.attempted(),
                    evaluating(self._given.model, local.model.every_stage()),
                    restored(local.model.device),
                    local.sharing("an evaluation"),
                ):
                    local.optimizer_state.agreement.begin()
                    with local.failure.noted():
                        replicas.unshard()
                    local.failure.has_failed |= not replicas.can_unshard
                    local.renew_transport()
                    local.run(settings, local.running.forward(num))
            finally:
                replicas.reshard()
            return self._result(batch)

        return batch, local.repeated(attempt)

    def _result(
        self,
        batch: Microbatches,
        agent: Agent | None = None,
        updates: bool | None = None,
        measured: Sequence[MeasuredStep] = (),
    ) -> StepResult:
        """Collects the losses from the processes that ran them, and switches if an agent says so."""
        memory = self._local.choice.memory_of(self._local.transport)
        devices = self._local.devices
        agreement, failure = self._local.optimizer_state.agreement, self._local.failure
        tells = [] if self._summed is None else self._summed.now(self._local.mesh.everyone, failure)
        outcome = StepEnd(self._local.mesh, devices.last, updates, memory, tells, agreement, failure, measured)
        self._local.notices.note(self._agent.notices if self._agent is not None else ())
        self._local.notices.note(self._local.attempts.failover.notices if self._local.attempts is not None else ())
        self._local.notices.note(self._local.choice.notices(self._local.transport))
        result, self.step_sums, following = outcome.share(batch, agent, self._local.notices)
        if following is not None:
            self._switch(following)
        return result

    @while_open
    def save(
        self,
        directory: str | Path,
        *,
        meta: Mapping[str, Any] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        keep: int = 2,
        number: int | None = None,
    ) -> Path:
        """Writes a checkpoint `directory/step-...`, sharded by parameter name. Every rank must call it.

        The checkpoint appears as a whole or not at all. Of the older ones, the newest `keep - 1` stay. `meta` is
        small JSON data of the caller's. `stateful` names objects with `state_dict` and `load_state_dict`, such as a
        learning-rate scheduler or a data loader; their state is saved too, once per replica or process if it differs.
        `number` is the number in the name. It defaults to `num_steps`; give it if you count other steps. If the
        folder has a checkpoint with a larger number, `notices` say that a load of the folder will choose that one.

        Raises CheckpointError, on every rank, if it can't be written, or if ranks give different `meta`, `keep` or
        `number`.
        """
        self._life.require_whole()
        self._local.follow_model()
        counters = {"num_steps": self._num_steps, "num_updates": self.num_updates, "seed": self._seed}
        state, place = TrainingState(self._local.optimizer_state, self._local.mesh), self._local.mesh
        self._local.optimizer_state.agreement.require()
        with place.waiting():
            path = save_load.save(directory, state, place, counters, meta, stateful, keep, number)
        self._local.notices.note(save_load.later_than(path))
        return path

    @while_open
    def load(
        self, directory: str | Path, *, stateful: Mapping[str, Stateful] | None = None, fallback: bool = False
    ) -> dict[str, Any]:
        """Loads a checkpoint, or the newest one in a folder, written under any schedule and number of ranks.

        Training continues as if it had never stopped. Returns the `meta` of the checkpoint. The objects named in
        `stateful` get their saved state. Either every rank loads the checkpoint, or none does.

        If the newest checkpoint is damaged, the error names the one before. With `fallback` that one is loaded
        instead, the damaged one is renamed to `step-....damaged`, and `notices` report it. Raises CheckpointError if
        the checkpoint is damaged or belongs to another model; nothing has changed then.
        """
        self._local.follow_model()
        state, place = TrainingState(self._local.optimizer_state, self._local.mesh), self._local.mesh
        loaded = save_load.load(directory, state, place, stateful, fallback)
        self._num_steps, self._seed = loaded.counters["num_steps"], loaded.counters["seed"]
        self._num_forwards = 0
        self._local.optimizer_state.num_updates = loaded.counters["num_updates"]
        self._life.load()
        self._local.notices.note(loaded.notices)
        return loaded.meta

    @while_open
    def hand_over(self, then: Pipeline) -> int:
        """Hands all state of training to another pipeline of the same model, which continues from here.

        The other pipeline may run another schedule, over the same processes in other places. Every process must call
        this. Each process fetches only what it does not hold itself. Returns the bytes that this process fetched.
        Raises RuntimeFailure if the pipelines' models differ.
        """
        self._life.require_whole()
        then._life.require_open()
        self._local.follow_model()
        then._local.follow_model()
        giver, taker = (TrainingState(each.optimizer_state, each.mesh) for each in (self._local, then._local))
        fetched = hand_over(giver, taker, self.num_updates, self._local.mesh.everyone)
        then._num_steps, then._seed, then._num_forwards = self._num_steps, self._seed, self._num_forwards
        then._local.optimizer_state.num_updates = self.num_updates
        then._life.load()
        return fetched

    @property
    def num_steps(self) -> int:
        """Number of steps so far, including those before a `load`."""
        return self._num_steps

    def sum_each_step(self, values: Callable[[], Sequence[float]]) -> None:
        """Sums values over all processes, at the end of each step, evaluation and prediction from now on.

        The sums travel with the losses. They are then in `step_sums`, the same on every process. Use them for
        decisions that all ranks must make alike. A separate sum would take as long again over a late link.
        Every process must call it.

        Args:
            values: a function that returns this process's values; every process returns equally many, in every step.
                A step in which it raises fails in all processes, as one in which a layer raises.
        """
        self._summed = SummedValues(lambda: [float(value) for value in values()])

    def op_times(self) -> tuple[float, float, int]:
        """Of this process's ranks in the last step, in ms: how long they ran ops, all together; from the first op's
        start to the last op's end; and how many ranks ran any.
        """
        workers = self._local.last[1] if self._local.last is not None else []
        times = [worker.times for worker in workers if worker.times]
        busy = sum(end - start for row in times for _, start, end in row)
        span = max((row[-1][2] for row in times), default=0) - min((row[0][1] for row in times), default=0)
        return busy / 1e6, span / 1e6, len(times)

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in the order of processes. Values must be plain data."""
        return self._local.mesh.everyone.gather(value)

    def timeline(self) -> Timeline:
        """The measured timeline of the last step or evaluation. Every rank must call it."""
        if self._local.last is None:
            raise RuntimeFailure("there is no timeline yet; run a step first")
        return gathered_timeline(self._local.peers, *self._local.last)

    def close(self) -> None:
        """Stops adapting and the transport, and removes all hooks and patches from the model.

        A `with` block calls it at its end. Closing a closed pipeline does nothing.
        """
        if self._life.is_closed:
            return
        self._life.close()
        try:
            if self._agent is not None:
                self._agent.close()
        finally:
            self._local.close()

    def __repr__(self) -> str:
        schedule = self.schedule
        return (
            f"<Pipeline {schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} microbatches; {self.dispatch.value} dispatch, updates: {self.num_updates}>"
        )

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
