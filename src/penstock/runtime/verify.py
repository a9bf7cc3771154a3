"""`Pipeline.verify`: one step is computed in several ways that must agree. Nothing of it lasts.

    the schedule's own order       ==  one microbatch after another    losses, gradients and buffers, to the bit
    one microbatch after another   ~   the batch in one piece          outputs, loss, gradients, but for rounding
    the stages, one after another  ==  the model's own forward         losses and gradients, to the bit

Each way breaks on other mistakes. What differs first, and the sentence of the contract (docs/contract.md) that was
most likely broken, come back as a table. Gradients are compared by digests, so no second copy of them is held. One
copy of the parameters is held during each run, because a forward or a hook may change them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.dispatch import Dispatch
from penstock.passes.plain import in_plain_order
from penstock.runtime.arguments import PipelineArguments
from penstock.runtime.errors import BrokenContract, DeadlineExceeded, PeerLost, RuntimeFailure, VerifyError
from penstock.runtime.execute.plan import ActivePlan, start_of
from penstock.runtime.local_pipeline import LocalPipeline
from penstock.runtime.parameters.data_parallel import without_reductions
from penstock.runtime.partitioning import Split
from penstock.runtime.partitioning.cutting import build_stage
from penstock.runtime.partitioning.source_line import Untraceable
from penstock.runtime.plain_loop import chained, own_forward, run_plain
from penstock.runtime.stage.microbatches import Microbatches
from penstock.runtime.stage.module_state import untouched
from penstock.runtime.stage.ops import Purpose, StepSettings
from penstock.runtime.tensors.digest import hash_of
from penstock.runtime.tensors.dtensor import is_sharded, memory, overwrite
from penstock.runtime.tensors.pytree import flatten
from penstock.runtime.tensors.rng import mix, restored
from penstock.runtime.tensors.sketch import Sketch
from penstock.runtime.verification import DIFFERS, LEFT_OUT, SAME, ComparedWays, Verification
from penstock.schedule import ScheduleError

TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""By the type computed in, the relative difference between microbatches and whole batch that rounding explains."""


@dataclass
class Computed:
    """What a step came to in this process.

    Attributes:
        losses: by microbatch, each one's share of the loss. Empty where another process has them.
        gradients, buffers: a digest by name.
        sketches: of each gradient by name, if they are to be compared but for rounding.
        outputs: of each sample, numbers made of the model's output for it.
        has_failed: whether some process could not compute it. error: what kept this one from that.
    """

    losses: dict[int, Tensor]
    gradients: dict[str, int]
    buffers: dict[str, int]
    sketches: dict[str, Sketch]
    outputs: list[Tensor]
    has_failed: bool = False
    error: Exception | None = None


class Verifier:
    """Runs the steps that `Pipeline.verify` compares.

    Args:
        local: the pipeline in this process.
        given: the pipeline's arguments.
        seed: of the step.
    """

    def __init__(self, local: LocalPipeline, given: PipelineArguments, seed: int) -> None:
        self._local, self._given, self._seed = local, given, seed
        self._everyone = local.mesh.everyone
        self._comparisons: list[ComparedWays] = []

    def verify(self, inputs: Any, targets: Any) -> Verification:
        """Makes all comparisons. Every process must call it. Raises VerifyError where something differs."""
        local = self._local
        schedule = without_reductions(local.running.schedule, local.mesh)
        try:
            whole = self._plan(in_plain_order(schedule, 1))
        except ScheduleError as error:
            raise RuntimeFailure(f"verify compares with a plain loop: {error}") from None
        self._compare_holders()
        with self._left_as_found():
            batch = local.cut(inputs, targets, self._given.loss_fn, (), trains=True)
            own = local.running_for(batch)
            plain = self._plan(in_plain_order(without_reductions(own.schedule, local.mesh)))
            parts = self._compare_orders(own, plain, batch)
            if parts is not None:
                self._compare_parameters(whole, batch)
                self._compare_with_whole(parts, plain, whole, batch, inputs, targets)
                self._compare_with_model(plain, batch)
        found = Verification(tuple(self._comparisons))
        if not found.holds:
            raise VerifyError(f"the model does not keep the contract on this step:\n{found}", found)
        return found

    # The comparisons.

    def _compare_holders(self) -> None:
        """Modules and parameters are those that the pipeline was made with, and alike wherever they are held."""
        local = self._local
        said = self._first(
            _said_by(local.require_own_layers) or _said_by(local.require_own_parameters) or self._newer_parameter()
        )
        if said is None:
            said = self._first(_said_by(local.optimizer_state.agreement.require))
        self._note("the model, and the model as ps.Pipeline got it", said, 4)
        if self._comparisons[-1].outcome != SAME:
            found = Verification(tuple(self._comparisons))
            raise VerifyError(f"the model does not keep the contract:\n{found}", found)

    def _newer_parameter(self) -> str | None:
        """Says which parameter of a stage was added after the pipeline was made."""
        stages, known = self._local.model.every_stage(), set(map(id, self._local.model.parameters))
        newer = [name for stage in stages for name, one in stage.named_parameters() if id(one) not in known]
        return f"parameter {newer[0]} is newer than ps.Pipeline, and no optimizer would train it" if newer else None

    def _compare_orders(self, own: ActivePlan, plain: ActivePlan, batch: Microbatches) -> Computed | None:
        """Compares the schedule's order with the plain one. Returns what the plain order came to, if it ran."""
        ways = "the schedule's order, and one microbatch after another"
        exactly = not own.schedule.microbatch_orders
        theirs = self._run(own, batch, sketched=not exactly)
        parts = self._run(plain, batch, sketched=True)
        if (said := self._failure(parts)) is not None:
            self._require_contract_error(ways, parts, said)
            return None
        if (said := self._failure(theirs)) is not None:
            self._note(ways, f"the schedule's order fails: {said}", 2)
            return parts
        found = self._first(_difference(theirs, parts)) if exactly else self._beyond_rounding(theirs, parts)
        sentence = 1 if own.recomputed else 2
        if found is not None:  # does a second run in the same order give something else?
            again = self._run(plain, batch)
            if self._first(_difference(again, parts)) is not None:
                sentence = 1
        self._note(ways, found, sentence, "" if exactly else "but for rounding, as it sums in another order")
        return parts

    def _compare_parameters(self, whole: ActivePlan, batch: Microbatches) -> None:
        """Compares the parameters that stages use in a microbatch with those that they hold."""
        first = replace(
            batch,
            inputs={stage: values[:1] for stage, values in batch.inputs.items()},
            targets=batch.targets[:1],
            weighed=lambda: [1.0],
            windows=(range(1),),
        )
        foreign: list[str] = []
        with self._watching_parameters(foreign):  # looking at a graph may change in which order it adds gradients up
            self._run(whole, first)
        found = self._first(self._shared_by_functions() or (foreign[0] if foreign else None))
        self._note("the parameters that stages use, and their own", found, 5)

    def _shared_by_functions(self) -> str | None:
        """Says which parameter the functions of two stages take from outside of the functions, and no tie names.

        A process calls the functions of its own stages alone, so it can't see that others return the same module.
        Here every function is called. A parameter that lives on when its stage is gone was taken from outside.
        """
        sources, owned_name = self._local.sources, self._local.model.ties.owned_name
        functions = {
            n: one for n, one in enumerate(sources) if not isinstance(one, nn.Module) and self._local.is_told
        }
        taken: dict[int, tuple[int, str, nn.Parameter]] = {}
        for index, function in functions.items():
            made = [(n, weakref.ref(p)) for n, p in build_stage(function, index, len(sources)).named_parameters()]
            gc.collect()
            for name, one in [(name, one) for name, held in made if (one := held()) is not None]:
                first, known, _ = taken.setdefault(id(one), (index, name, one))
                if owned_name(name) != owned_name(known):
                    return f"functions of stages {first} and {index} share {known}; name it in tied="
        return None

    def _compare_with_whole(
        self, parts: Computed, plain: ActivePlan, whole: ActivePlan, batch: Microbatches, inputs: Any, targets: Any
    ) -> None:
        """Compares the microbatches with the batch in one piece. A model that draws is compared without its draws."""
        ways = "the microbatches, and the batch in one piece"
        if isinstance(inputs, list) or isinstance(targets, list):
            self._note_left_out(ways, "the batch was given as microbatches; give it whole, to be cut")
            return
        if getattr(self._given.loss_fn, "by_microbatch", False):
            self._note_left_out(ways, "the loss is meant for each microbatch by itself (by_microbatch)")
            return
        if len(batch) == 1:
            self._note_left_out(ways, "the batch is one microbatch")
            return
        one = self._local.cut(inputs, targets, self._given.loss_fn, (), num=1)
        before = self._buffers()
        for without, modules in self._modes():
            with _in_evaluation(modules), self._without_autocast():
                if modules or self._given.precision.autocast is not None:
                    parts = self._run(plain, batch, sketched=True)
                together = self._run(whole, one, sketched=True)
                if (said := self._failure(parts) or self._failure(together)) is not None:
                    self._note_left_out(ways, f"the batch does not run in one piece: {said}")
                    return
                found = self._beyond_rounding(parts, together)
                if found is not None:
                    if self._first(_changed(before, parts.buffers)) is not None:
                        continue  # each microbatch sees statistics of those before it
                    other = self._run(whole, one, sketched=True, seed=mix(self._seed, 1))
                    if self._beyond_rounding(together, other) is not None:
                        continue  # random draws differ
                    with _nudged(self._local.model.parameters):
                        other = self._run(whole, one, sketched=True)
                    if self._beyond_rounding(together, other) is not None:
                        self._note_left_out(ways, "weights that differ by rounding alone give other results")
                        return
            self._note(ways, found, 7, without)
            return
        why = self._first(_changed(before, parts.buffers))
        why = "draws random numbers" if why is None else f"changes its buffer {why}"
        self._note_left_out(ways, f"a forward {why} in evaluation mode, so microbatches differ from the whole batch")

    def _compare_with_model(self, plain: ActivePlan, batch: Microbatches) -> None:
        """Compares the stages, called one after another, with the model's own forward: in one process, which uses
        the parameters that it has, as old as they may be.
        """
        ways = "the stages, and the model's own forward"
        local, model = self._local, self._given.model
        whole = model.model if isinstance(model, Split) else model
        if not isinstance(whole, nn.Module):
            self._note_left_out(ways, "the model was given as a list of stages")
            return
        if len(local.sources) == 1:
            self._note_left_out(ways, "the only stage calls the model's own forward")
            return
        if local.mesh.shards is not None or local.mesh.has_parts or self._given.parallel.parallelize is not None:
            self._note_left_out(ways, "processes hold parts of parameters")
            return
        found = None
        if local.mesh.replica == 0 and local.devices.last:
            local.switch(plain)
            found = self._differs_from_model(whole, own_forward(model), batch)
        self._note(ways, self._first(found), 3)

    def _differs_from_model(self, model: nn.Module, forward: Callable[..., Any], batch: Microbatches) -> str | None:
        local, given = self._local, self._given
        parameters = dict(model.named_parameters())
        assert given.loss_fn is not None, "verify needs a loss"
        results = []
        stages = [local.model.copies.stages.get(index, source) for index, source in enumerate(local.sources)]
        with _on_device(stages, local.model.device), _gradients_aside(parameters.values()):
            for each in (chained(stages), forward):
                for parameter in parameters.values():
                    parameter.grad = None
                error, losses = None, []
                try:
                    with untouched(model), _values_kept(parameters.values()):
                        losses = run_plain(
                            each, batch, given.loss_fn, self._seed, given.precision.autocast, local.model.device
                        )
                except Exception as caught:
                    error = caught
                digests = {name: hash_of(p.grad) for name, p in parameters.items() if p.grad is not None}
                results.append(Computed(dict(enumerate(losses)), digests, {}, {}, [], error is not None, error))
        staged, own = results
        if own.error is not None:
            return f"the model's own forward fails: {_error_of(own)}"
        return _difference(staged, own) if staged.error is None else f"the stages fail: {_error_of(staged)}"

    # Runs.

    def _plan(self, schedule: Any) -> ActivePlan:
        local = self._local
        return local.activated(start_of(schedule, Dispatch.FROZEN, local.costs, None))

    def _run(
        self, plan: ActivePlan, batch: Microbatches, *, sketched: bool = False, seed: int | None = None
    ) -> Computed:
        """Runs a step by a plan, and puts back what it changes."""
        local, state = self._local, self._local.optimizer_state
        result = Computed({}, {}, {}, {}, [])
        scale = None if state.scaling is None else state.scaling.scale
        settings = StepSettings(
            batch, Purpose.TRAIN, self._seed if seed is None else seed, plan.split, plan.recomputed, plan.counts,
            plan.taped_out_of_order, plan.away if local.offloads else frozenset(), scale,
        )  # fmt: skip
        failure = local.begin()
        local.switch(plan)
        with ExitStack() as stack:
            for stage in local.model.every_stage():
                stack.enter_context(untouched(stage))
            stack.enter_context(_values_kept(local.model.parameters))
            stack.enter_context(self._outputs_kept(result.outputs if sketched else None))
            try:
                with failure.noted(), local.mesh.waiting():
                    state.begin(None, False)
                failure.has_failed |= not state.replicas.can_unshard
                try:
                    with local.sharing("verify"), local.mesh.waiting():
                        local.run(settings, plan.plan)
                        state.gather()
                finally:
                    state.end()
            except (DeadlineExceeded, PeerLost):
                raise
            except Exception as error:
                failure.note(error)
            result.has_failed, result.error = failure.has_failed, failure.error
            if not failure.has_failed:
                self._record(result, sketched)
            state.zero_grad()
        return result

    def _record(self, result: Computed, sketched: bool) -> None:
        local = self._local
        for runner in local.devices.last:
            result.losses.update(runner.losses)
        for (pipeline, _), stage in local.model.copies.here.items():
            place = f" of pipeline {pipeline}" if pipeline else ""
            for name, parameter in stage.named_parameters():
                if parameter.grad is not None:
                    result.gradients[name + place] = hash_of(parameter.grad)
                    if sketched:
                        result.sketches[name + place] = Sketch.of(parameter.grad)
        result.buffers = self._buffers()

    def _buffers(self) -> dict[str, int]:
        """Digests of the buffers here."""
        return {
            f"{name} of pipeline {pipeline}" if pipeline else name: hash_of(buffer)
            for (pipeline, _), stage in self._local.model.copies.here.items()
            for name, buffer in stage.named_buffers()
        }

    @contextmanager
    def _without_autocast(self) -> Iterator[None]:
        """Inside, ops compute in the types of their parameters, whose rounding is less."""
        runners = self._local.devices.runners.values()
        try:
            for runner in runners:
                runner.autocast = None
            yield
        finally:
            for runner in runners:
                runner.autocast = self._given.precision.autocast

    @contextmanager
    def _left_as_found(self) -> Iterator[None]:
        """Around all runs: gradients, generators and what the pipeline runs are put back."""
        local = self._local
        before, last = local.running, local.last
        try:
            with _gradients_aside(local.model.parameters), restored(local.model.device):
                yield
        finally:
            local.switch(before)
            local.last = last

    @contextmanager
    def _outputs_kept(self, kept: list[Tensor] | None) -> Iterator[None]:
        """Around a run: of each sample of the model's outputs, numbers that tell it from others go into `kept`."""
        runners = self._local.devices.last if kept is not None else []
        for runner in runners:
            loss_fn = runner.loss_fn

            def noting(output: Any, target: Any, loss_fn: Any = loss_fn) -> Any:
                assert kept is not None
                kept.append(_by_sample(output))
                return loss_fn(output, target)

            runner.loss_fn = noting
        try:
            yield
        finally:
            for runner in runners:
                runner.loss_fn = self._given.loss_fn

    @contextmanager
    def _watching_parameters(self, foreign: list[str]) -> Iterator[None]:
        """Around a run: names the parameters that a stage's first forward uses and that are not the stage's own."""
        handles = []
        for (_, index), stage in self._local.model.copies.here.items():

            def look(stage: nn.Module, args: Any, output: Any, index: int = index) -> None:
                if index in seen:
                    return
                seen.add(index)
                own = {id(p) for p in stage.parameters()}
                for parameter in _parameters_behind(flatten(output)[0]):
                    if id(parameter) not in own:
                        foreign.append(
                            f"stage {index} uses a parameter of shape {tuple(parameter.shape)} that none of its "
                            "modules holds, so no optimizer of this stage trains it"
                        )

            handles.append(stage.register_forward_hook(look))
        seen: set[int] = set()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _modes(self) -> Iterator[tuple[str, list[nn.Module]]]:
        """Yields words and modules to put into evaluation mode, so that batch norms and random draws do not differ
        between microbatches and the whole batch: first batch norms, then torch's layers that draw too, then all.
        """
        model = self._given.model
        whole = model.model if isinstance(model, Split) else model
        roots = [*([whole] if isinstance(whole, nn.Module) else []), *self._local.model.every_stage()]
        modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        norms: list[nn.Module] = [m for m in modules if isinstance(m, _BATCH_NORMS) and m.training]
        words = f"with batch norms ({len(norms)}) in evaluation mode, as each normalises a microbatch by itself"
        yield (f"compared {words}" if norms else ""), norms
        drawing = [module for module in modules if _draws(module)]
        if drawing:
            yield "compared without dropout" + f", and {words}" * bool(norms), [*norms, *drawing]
        yield "compared in evaluation mode", modules

    # What all processes hear.

    def _first(self, found: str | None) -> str | None:
        """The text of the first process that has one. Every process must call it, and gets the same text."""
        return next((each for each in self._everyone.gather(found) if each is not None), None)

    def _failure(self, result: Computed) -> str | None:
        """The error of a process that could not compute a step, in words, the same in every process."""
        told = self._everyone.gather((result.has_failed, _error_of(result)))
        if not any(has_failed for has_failed, _ in told):
            return None
        return next((said for _, said in told if said is not None), "a process could not do its part")

    def _note(self, ways: str, found: str | None, sentence: int, also: str = "") -> None:
        """Adds a comparison. `found` is the same in every process."""
        outcome, said = (SAME, also) if found is None else (DIFFERS, f"{found}" + f" ({also})" * bool(also))
        self._comparisons.append(ComparedWays(ways, outcome, said, None if found is None else sentence))

    def _note_left_out(self, ways: str, why: str) -> None:
        self._comparisons.append(ComparedWays(ways, LEFT_OUT, why))

    def _require_contract_error(self, ways: str, result: Computed, said: str) -> None:
        """A step that fails in plain order too: notes the contract's sentence, or raises the user's own error."""
        sentence = self._first(_sentence_of(result.error))
        if sentence is None:
            self._local.failure.conclude(self._everyone)
            raise RuntimeFailure(said)
        self._note(ways, said, int(sentence))

    def _beyond_rounding(self, one: Computed, other: Computed) -> str | None:
        """The first thing that differs by more than rounding, the same in every process."""
        tolerance = self._tolerance()
        mine = {
            name: (sketch.distance(other.sketches.get(name)), sketch.norm, sketch.size)
            for name, sketch in one.sketches.items()
        }
        shown = self._first(_outputs_differ(one.outputs, other.outputs, tolerance))
        losses = [float(sum(each.losses.values())) / self._local.mesh.num_shards for each in (one, other)]
        first, second = self._everyone.sum(torch.tensor(losses, dtype=torch.float64, device="cpu")).tolist()
        if shown is None and not _close(first, second, tolerance):
            shown = f"the loss is {first:.6g} over the microbatches and {second:.6g} in one piece"
        shown = self._first(shown)
        if shown is not None:
            return shown
        everyone = [each for part in self._everyone.gather(mine) for each in part.items()]
        squares = sum(norm**2 for _, (_, norm, _) in everyone)
        numbers = sum(size for _, (_, _, size) in everyone) or 1
        typical = (squares / numbers) ** 0.5
        for name, (distance, norm, size) in everyone:
            least = _SMALL * typical * size**0.5
            if not distance <= tolerance * max(norm, least):
                share = distance / max(norm, least, 1e-30)
                return f"the loss is the same, and the gradient of {name} differs by {share:.2g} of its norm"
        return None

    def _tolerance(self) -> float:
        types = {p.dtype for p in self._local.model.parameters if p.is_floating_point()}
        return max((TOLERANCE.get(each, 0.1) for each in types), default=TOLERANCE[torch.float32])


_SMALL = 0.02
"""A gradient is judged by its own norm, or by this share of what is typical for its size, if that is more. The
gradient of a key's bias, for one, is rounding alone."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU,
    nn.MultiheadAttention,
)  # fmt: skip


def _draws(module: nn.Module) -> bool:
    return module.training and isinstance(module, (*_DROPOUTS, nn.RNNBase))


@contextmanager
def _in_evaluation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """These modules in evaluation mode. Recurrent layers stay in training mode, without their dropout, as cuDNN has
    no backward in evaluation mode.
    """
    before = [
        (module, module.training, module.dropout if isinstance(module, nn.RNNBase) else 0.0) for module in modules
    ]
    try:
        for module in modules:
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0
            else:
                module.training = False
        yield
    finally:
        for module, training, dropout in before:
            module.training = training
            if isinstance(module, nn.RNNBase):
                module.dropout = dropout


@contextmanager
def _nudged(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, each number of each parameter is another one by a few roundings; afterwards as before."""
    before = [(parameter, parameter.data) for parameter in parameters]
    try:
        for parameter, data in before:
            if data.is_floating_point() and not is_sharded(data):
                draw = torch.Generator(data.device).manual_seed(0)  # alike in every process that holds the parameter
                signs = torch.randint(0, 2, data.shape, generator=draw, device=data.device) * 2 - 1
                parameter.data = data * (1 + 8 * torch.finfo(data.dtype).eps * signs.to(data.dtype))
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


@contextmanager
def _values_kept(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Around a run: parameters that forwards or hooks change get back their values."""
    before = [(memory(parameter), memory(parameter).clone(), hash_of(parameter)) for parameter in parameters]
    try:
        yield
    finally:
        for values, copy, known in before:
            if hash_of(values) != known:
                overwrite(values, copy)


@contextmanager
def _gradients_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, parameters have no gradients; afterwards those that they had."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def _on_device(stages: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Inside, all stages lie on one device; afterwards where they lay."""
    tensors = [tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())]
    before = [(tensor, tensor.data) for tensor in tensors if tensor.device != device]
    try:
        for tensor, data in before:
            tensor.data = data.to(device)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _by_sample(output: Any) -> Tensor:
    """The sum of each sample's numbers, and of their sizes: [B, 2 * number of tensors with samples]."""
    leaves = [leaf.detach() for leaf in flatten(output)[0] if leaf.dim() and leaf.is_floating_point()]
    rows = [leaf.double().flatten(1) if leaf.dim() > 1 else leaf.double()[:, None] for leaf in leaves]
    rows = [row for row in rows if len(row) == len(rows[0])]
    if not rows:
        return torch.zeros(0, 0)
    return torch.cat([part for row in rows for part in (row.sum(1, True), row.abs().sum(1, True))], 1).cpu()


def _outputs_differ(parts: Sequence[Tensor], whole: Sequence[Tensor], tolerance: float) -> str | None:
    """The first sample with another output in the whole batch. None if outputs can't be put side by side."""
    if not parts or len(whole) != 1 or len({part.shape[1] for part in (*parts, *whole)}) > 1:
        return None
    one, other = torch.cat(list(parts)), whole[0]
    if one.shape != other.shape or not one.numel():
        return None
    sizes = one.abs().amax(0, keepdim=True).clamp_min(1e-30)
    apart = ((one - other).abs() / sizes).amax(1) > tolerance
    apart |= one.isfinite().all(1) != other.isfinite().all(1)
    if not apart.any():
        return None
    sample = int(apart.nonzero()[0])
    return f"the model's output for sample {sample} is another one in its microbatch than in the whole batch"


def _close(one: float, other: float, tolerance: float) -> bool:
    if one != one or other != other:
        return (one != one) == (other != other)
    return one == other or abs(one - other) <= tolerance / 4 * max(abs(one), abs(other))


def _parameters_behind(outputs: Sequence[Tensor]) -> Iterator[nn.Parameter]:
    """The parameters at the ends of the graphs of some outputs."""
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            yield leaf
        waiting.extend(following for following, _ in node.next_functions if following is not None)


def _difference(one: Computed, other: Computed) -> str | None:
    """The first thing that differs by a bit."""
    for m in sorted(one.losses.keys() | other.losses.keys()):
        a, b = one.losses.get(m), other.losses.get(m)
        if a is None or b is None or not torch.equal(a, b):
            if a is not None and b is not None and a.isnan().all() and b.isnan().all():
                continue
            values = " and ".join("none" if each is None else f"{each.item():.9g}" for each in (a, b))
            return f"the loss of microbatch {m} is {values}"
    for what, mine, theirs in (
        ("gradient of", one.gradients, other.gradients),
        ("buffer", one.buffers, other.buffers),
    ):
        for name in dict.fromkeys((*mine, *theirs)):
            if mine.get(name) != theirs.get(name):
                return f"the {what} {name}"
    return None


def _changed(before: dict[str, int], now: dict[str, int]) -> str | None:
    """The name of the first digest that is another one now."""
    return next((name for name, digest in now.items() if before.get(name) != digest), None)


def _said_by(check: Callable[[], None]) -> str | None:
    """What a check says that fails."""
    try:
        check()
    except (DeadlineExceeded, PeerLost):
        raise
    except RuntimeFailure as error:
        return str(error)
    return None


def _error_of(result: Computed) -> str | None:
    if result.error is None:
        return None
    first = str(result.error).strip().splitlines()
    return f"{type(result.error).__name__}: {first[0] if first else ''}"


def _sentence_of(error: Exception | None) -> str | None:
    """The number of the sentence that an error says was broken, as text; None if it names none."""
    if isinstance(error, BrokenContract):
        return str(error.sentence)
    if isinstance(error, Untraceable):
        return "3"
    return "2" if error is not None and "inplace operation" in str(error) else None
