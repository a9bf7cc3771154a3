"""`Pipeline.verify`: one step is computed in several ways that must agree. Nothing of it lasts.

    the schedule's own order       ==  one microbatch after another    losses, gradients and buffers, to the bit
    one microbatch after another   ~   the batch in one piece          loss and gradients, but for rounding
    the stages, one after another  ==  the model's own forward         losses and gradients, to the bit

Each way breaks on other mistakes. What differs first, and the sentence of the contract (docs/contract.md) that was
most likely broken, come back as a table. Gradients are compared by digests, so no second copy of them is held. One
copy of the parameters is held during each run, because a forward or a hook may change them. How the first step of
training checks the loss is in `stage/loss.py`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.dispatch import Dispatch
from penstock.passes.reorder import in_plain_order
from penstock.runtime.arguments import PipelineArguments
from penstock.runtime.errors import BrokenContract, DeadlineExceeded, LinkLost, PeerLost, RuntimeFailure, VerifyError
from penstock.runtime.execute.plan import ActivePlan, start_of
from penstock.runtime.local_pipeline import LocalPipeline
from penstock.runtime.parameters.replicas import without_reductions
from penstock.runtime.partitioning import Split
from penstock.runtime.partitioning.cutting import build_stage
from penstock.runtime.partitioning.tracer import Untraceable
from penstock.runtime.plain_loop import chained, own_forward, run_plain
from penstock.runtime.stage.loss import module_of
from penstock.runtime.stage.microbatches import Microbatches
from penstock.runtime.stage.module_state import having, untouched
from penstock.runtime.tensors.digest import Sketch, hash_of
from penstock.runtime.tensors.dtensor import memory, overwrite
from penstock.runtime.tensors.pytree import flatten, unflatten
from penstock.runtime.tensors.rng import mix, restored
from penstock.runtime.tensors.storage import copy_of
from penstock.schedule import Schedule, ScheduleError

CONTRACT = {
    1: "a forward depends on its inputs, parameters, buffers and torch's generator alone",
    2: "forwards of other microbatches run between a forward and its backward: do not change in place what a "
    "backward needs, and leave weights to the optimizer",
    3: "a traced model is traced once: after a change of what its forward reads, make a new pipeline; between layers "
    "it asks isinstance(x, Tensor), not type(x), and whether a layer returned None only with an example",
    4: "modules and parameters stay the same objects, alike on every process that holds them",
    5: "a stage uses its own parameters; a shared one is one object in the model, or is named in tied=",
    6: "tensors, numbers, text, None, and tuples, lists and dicts of them travel between stages",
    7: "the loss is a mean over samples, or says what it is (weight, adds_up, reduction, ignore_index); samples do "
    "not see one another, and each input is cut along its samples (ps.BatchRules)",
}
"""The sentences of the contract that a step can break, shortened, by number."""
SAME, DIFFERS, LEFT_OUT = "same", "differs", "not compared"


@dataclass(frozen=True)
class ComparedWays:
    """Two ways to compute the same step, and whether they agree.

    Attributes:
        ways: the two ways, in words.
        outcome: "same", "differs" or "not compared".
        found: the first thing that differs, or why nothing was compared, or what was left out.
        sentence: the number of the sentence of the contract that was most likely broken. None if none was.

    Examples:
        >>> from penstock.runtime import ComparedWays
        >>> ComparedWays("the stages, and the model's own forward", "same").outcome
        'same'
    """

    ways: str
    outcome: str
    found: str = ""
    sentence: int | None = None


@dataclass(frozen=True)
class Verification:
    """What `Pipeline.verify` found. Printed, it is a table.

    Attributes:
        comparisons: the comparisons, in the order in which they were made.

    Examples:
        >>> from penstock.runtime import ComparedWays, Verification
        >>> print(Verification((ComparedWays("the stages, and the model's own forward", "same"),)))
        the stages, and the model's own forward  same
    """

    comparisons: tuple[ComparedWays, ...]

    @property
    def holds(self) -> bool:
        """Whether no comparison differs."""
        return all(each.outcome != DIFFERS for each in self.comparisons)

    def __str__(self) -> str:
        width = max(len(each.ways) for each in self.comparisons)
        lines = []
        for each in self.comparisons:
            lines.append(f"{each.ways:<{width}}  {each.outcome}" + f": {each.found}" * bool(each.found))
            if each.sentence is not None:
                lines.append(f"  likely cause, sentence {each.sentence} of the contract: {CONTRACT[each.sentence]}")
        return "\n".join(lines)


@dataclass
class Computed:
    """What one way to compute a step came to in this process.

    Attributes:
        losses: by microbatch, each one's share of the loss. Empty where another process has them.
        digests: of each gradient and buffer, by its name in words.
        sketches: of each gradient, to compare gradients but for rounding.
        has_failed: whether some process could not compute it. error: what kept this one from that.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)
    sketches: dict[str, Sketch] = field(default_factory=dict)
    has_failed: bool = False
    error: Exception | None = None

    def note_gradients(self, parameters: Mapping[str, nn.Parameter], where: str = "") -> None:
        """Takes digests and sketches of the gradients of parameters."""
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self.digests[f"the gradient of {name}{where}"] = hash_of(parameter.grad)
                self.sketches[f"the gradient of {name}{where}"] = Sketch.of(parameter.grad)

    @property
    def said(self) -> str | None:
        """The first line of the error."""
        if self.error is None:
            return None
        first = str(self.error).strip().splitlines()
        return f"{type(self.error).__name__}: {first[0] if first else ''}"

    def difference(self, other: Computed) -> str | None:
        """The first thing that differs by a bit."""
        mine, theirs = (
            {f"the loss of microbatch {m}": repr(loss.item()) for m, loss in sorted(each.losses.items())}
            for each in (self, other)
        )
        for name in dict.fromkeys((*mine, *theirs)):
            if mine.get(name) != theirs.get(name):
                return f"{name} is {mine.get(name)} and {theirs.get(name)}"
        return self.changed(other.digests) or other.changed(self.digests)

    def changed(self, digests: Mapping[str, int]) -> str | None:
        """The first name with another digest here than the given one."""
        return next((name for name, digest in digests.items() if self.digests.get(name) != digest), None)


TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""By the type computed in, the relative difference between microbatches and whole batch that rounding explains."""


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
        model = given.model.model if isinstance(given.model, Split) else given.model
        self._model = model if isinstance(model, nn.Module) else None
        own = [each for each in (self._model, module_of(given.loss_fn)) if each is not None]
        self._modules = nn.ModuleList([*own, *local.model.every_stage()])
        """All modules here, the loss and those of the user's model that no stage here holds too."""

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
        return self._conclude()

    def _conclude(self) -> Verification:
        found = Verification(tuple(self._comparisons))
        if not found.holds:
            raise VerifyError(f"the model does not keep the contract on this step:\n{found}", found)
        return found

    # The comparisons.

    def _compare_holders(self) -> None:
        """Modules and parameters are those that the pipeline was made with, and alike wherever they are held."""
        local = self._local
        local.follow_model()
        said = self._first(self._replaced())
        if said is None:
            try:
                local.optimizer_state.agreement.require()
            except (DeadlineExceeded, PeerLost):
                raise
            except RuntimeFailure as error:
                said = str(error)
            said = self._first(said)
        self._note("the model, and the model as ps.Pipeline got it", said, 4)
        self._conclude()

    def _replaced(self) -> str | None:
        """Says which layer or parameter is not the one with which the pipeline was made."""
        before = self._local.found
        return next(
            (
                f"{name} is another one than when ps.Pipeline was made, or there was none, and ps.Pipeline runs and "
                "trains what there was; make a new pipeline, or change values in place (copy_() in torch.no_grad())"
                for name, one in self._local.held().items()
                if before.get(name) is not one
            ),
            None,
        )

    def _compare_orders(self, own: ActivePlan, plain: ActivePlan, batch: Microbatches) -> Computed | None:
        """Compares the schedule's order with the plain one. Returns what the plain order came to, if it ran."""
        ways, local = "the schedule's order, and one microbatch after another", self._local
        exactly = not own.schedule.microbatch_orders
        theirs = self._run(own, batch)
        parts = self._run(plain, batch)
        if (said := self._failure(parts)) is not None:
            sentence = self._first(_sentence_of(parts.error))
            if sentence is None:  # the user's own error
                local.failure.conclude(self._everyone)
                raise RuntimeFailure(said)
            self._note(ways, said, int(sentence))
            return None
        if (said := self._failure(theirs)) is not None:
            self._note(ways, f"the schedule's order fails: {said}", 2)
            return parts
        found = self._first(theirs.difference(parts)) if exactly else self._beyond_rounding(theirs, parts)
        is_repeatable = found is None or self._first(self._run(plain, batch).difference(parts)) is None
        broken = 2 if is_repeatable and not own.recomputed else 1
        self._note(ways, found, broken, "" if exactly else "but for rounding, as it sums in another order")
        return parts

    def _compare_parameters(self, whole: ActivePlan, batch: Microbatches) -> None:
        """Compares the parameters that stages use in a microbatch with those that they hold."""
        first = replace(
            batch,
            inputs={stage: values[:1] for stage, values in batch.inputs.items()},
            targets=batch.targets[:1],
            adds_up=True,
            windows=(range(1),),
        )
        ways, foreign = "the parameters that stages use, and their own", list[str]()
        with ExitStack() as stack:  # a run of its own: looking at a graph may change in which order gradients add up
            for (_, index), stage in self._local.model.copies.here.items():
                stack.callback(stage.register_forward_hook(_looking_for(foreign, index)).remove)
            said = self._failure(self._run(whole, first))
        found = self._first(self._shared_by_functions() or (foreign[0] if foreign else None))
        if found is None and said is not None:
            self._note_left_out(ways, f"the first microbatch does not run by itself: {said}")
        else:
            self._note(ways, found, 5)

    def _shared_by_functions(self) -> str | None:
        """Says which parameter the functions of two stages take from outside of the functions, and no tie names.

        A process calls the functions of its own stages alone, so it can't see that others return the same module.
        Here every function is called. A parameter that lives on when its stage is gone was taken from outside.
        """
        sources, owned_name = self._local.sources, self._local.model.ties.owned_name
        taken: dict[int, tuple[int, str, nn.Parameter]] = {}
        for index, function in enumerate(sources if self._local.is_told else ()):
            if isinstance(function, nn.Module):
                continue
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
        norms = [m for m in self._modules.modules() if isinstance(m, _BATCH_NORMS) and m.running_mean is None]
        their = f"batch norms ({len(norms)}) without running statistics normalise each microbatch by itself"
        why = self._first(their if norms else None)
        if isinstance(inputs, list) or isinstance(targets, list):
            why = "the batch was given as microbatches; give it whole, to be cut"
        elif getattr(self._given.loss_fn, "by_microbatch", False):
            why = "the loss is meant for each microbatch by itself (by_microbatch)"
        if why is not None:
            self._note_left_out(ways, why)
            return
        one = self._local.cut(inputs, targets, self._given.loss_fn, (), num=1)
        before, casts = self._buffers(), self._given.precision.autocast is not None
        runners = self._local.devices.runners.values()
        for modules, mode in ((), ""), ([*self._modules.modules()], "compared in evaluation mode"):
            # Recurrent layers stay in training mode, without their dropout: cuDNN has no backward in evaluation mode.
            modes = [(m, "dropout", 0.0) if isinstance(m, nn.RNNBase) else (m, "training", False) for m in modules]
            # Without autocast, ops compute in the types of their parameters, whose rounding is less.
            with having(modes), having((runner, "autocast", None) for runner in runners):
                if modules or casts:
                    parts = self._run(plain, batch)
                together = self._run(whole, one)
                if (said := self._failure(parts) or self._failure(together)) is not None:
                    self._note_left_out(ways, f"the batch does not run in one piece: {said}")
                    return
                found = self._beyond_rounding(parts, together)
                if found is not None:
                    changed = self._first(parts.changed(before))
                    if changed is None:
                        other = self._run(whole, one, seed=mix(self._seed, 1))
                        changed = self._beyond_rounding(together, other)
                    if changed is not None:
                        continue  # each microbatch sees statistics of those before it, or draws other numbers
            self._note(ways, found, 7, mode)
            return
        self._note_left_out(ways, "a forward changes buffers or draws random numbers in evaluation mode too")

    def _compare_with_model(self, plain: ActivePlan, batch: Microbatches) -> None:
        """Compares the stages, each with what the one before would send it, with the model's own forward, which for a
        list calls one stage after another: in one process, with the parameters that it has, as old as they may be.
        """
        ways = "the stages, and the model's own forward"
        local, stages, graph, found = self._local, self._local.sources, self._local.running.schedule.graph, None
        if len(stages) == 1:
            self._note_left_out(ways, "the only stage calls the model's own forward")
        elif local.mesh.shards is not None or local.mesh.has_parts or self._given.parallel.parallelize is not None:
            self._note_left_out(ways, "processes hold parts of parameters")
        elif self._model is None and not (len(local.model.stages) == len(stages) and graph.is_chain):
            self._note_left_out(ways, "the model was given as a list of stages, not all of them here and in a chain")
        else:
            if local.mesh.replica == 0 and local.devices.last:
                local.switch(plain)
                found = self._differs_from_model(batch)
            said, sentence = self._first(found) or (None, 0)
            self._note(ways, said, sentence)

    def _differs_from_model(self, batch: Microbatches) -> tuple[str, int] | None:
        """What differs, and the sentence of the contract that was most likely broken."""
        local, device = self._local, self._local.model.device
        stages: list[Any] = [local.model.copies.stages.get(n, source) for n, source in enumerate(local.sources)]
        model = nn.ModuleList(stages) if self._model is None else self._model
        tensors = [tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())]
        with having((tensor, "data", tensor.data.to(device)) for tensor in tensors if tensor.device != device):
            own = self._run_loop(
                chained(stages) if self._model is None else own_forward(self._given.model), model, batch
            )
            if own.error is not None:
                return f"the model's own forward fails: {own.said}", 3
            staged = self._run_loop(chained(stages, separates=True), model, batch)
            said = f"the stages fail: {staged.said}" if staged.error else staged.difference(own)
            if said is None:
                return None
            together = self._run_loop(chained(stages), model, batch)
        is_alike = together.error is None and together.difference(own) is None
        return said, 6 if is_alike else 3

    # Runs.

    def _plan(self, schedule: Schedule) -> ActivePlan:
        return self._local.activated(start_of(schedule, Dispatch.FROZEN, self._local.costs, None))

    def _run(self, plan: ActivePlan, batch: Microbatches, seed: int | None = None) -> Computed:
        """Runs a step by a plan, and puts back what it changes."""
        local, state, result = self._local, self._local.optimizer_state, Computed()
        settings = local.settings(_copied(batch), plan, self._seed if seed is None else seed)

        failure = local.begin()
        local.switch(plan)

        def attempt() -> None:
            with local.attempted():
                try:
                    local.begin_training(batch, None, False)
                    local.renew_transport()
                    with local.sharing("verify"):
                        local.run(settings, plan.plan)
                        state.gather()
                except (DeadlineExceeded, PeerLost):
                    raise
                except Exception as error:
                    failure.note(error)
                finally:
                    state.end()
            if any(self._everyone.gather(failure.has_lost_link)):
                raise LinkLost("some process lost a link in a step of verify")

        with untouched(self._modules), _values_kept(local.model.parameters):
            local.repeated(attempt, state.zero_grad)
            result.has_failed, result.error = failure.has_failed, failure.error
            if not failure.has_failed:
                for runner in local.devices.last:
                    result.losses.update(runner.losses)
                for (pipeline, _), stage in local.model.copies.here.items():
                    result.note_gradients(dict(stage.named_parameters()), _in_pipeline(pipeline))
                result.digests |= self._buffers()
            state.zero_grad()
        return result

    def _run_loop(self, forward: Callable[..., Any], model: nn.Module, batch: Microbatches) -> Computed:
        """Runs a plain loop over the microbatches in this process, and puts back what it changes."""
        result, loss_fn, parameters = Computed(), self._given.loss_fn, dict(model.named_parameters())
        assert loss_fn is not None, "verify needs a loss"
        autocast, device = self._given.precision.autocast, self._local.model.device
        with having((parameter, "grad", None) for parameter in parameters.values()):
            try:
                with untouched(self._modules), _values_kept(parameters.values()):
                    losses = run_plain(forward, _copied(batch), loss_fn, self._seed, autocast, device)
                    result.losses = dict(enumerate(losses))
            except Exception as error:
                result.error = error
            result.note_gradients(parameters)
        return result

    def _buffers(self) -> dict[str, int]:
        """Digests of the buffers here."""
        return {
            f"the buffer {name}{_in_pipeline(pipeline)}": hash_of(buffer)
            for (pipeline, _), stage in self._local.model.copies.here.items()
            for name, buffer in stage.named_buffers()
        }

    @contextmanager
    def _left_as_found(self) -> Iterator[None]:
        """Around all runs: gradients, generators and what the pipeline runs are put back."""
        local = self._local
        before, last = local.running, local.last
        try:
            gradients = ((parameter, "grad", None) for parameter in local.model.parameters)
            with having(gradients), restored(local.model.device):
                yield
        finally:
            local.switch(before)
            local.last = last

    # What all processes hear.

    def _first(self, found: Any) -> Any:
        """Returns the first finding of all processes, or None. Every process must call this, and gets the same."""
        return next((each for each in self._everyone.gather(found) if each is not None), None)

    def _failure(self, result: Computed) -> str | None:
        """The error of a process that could not compute a step, in words, the same in every process."""
        told = self._everyone.gather((result.has_failed, result.said))
        if not any(has_failed for has_failed, _ in told):
            return None
        return next((said for _, said in told if said is not None), "a process could not do its part")

    def _note(self, ways: str, found: str | None, sentence: int, also: str = "") -> None:
        """Adds a comparison. `found` is the same in every process."""
        outcome, said = (SAME, also) if found is None else (DIFFERS, f"{found}" + f" ({also})" * bool(also))
        self._comparisons.append(ComparedWays(ways, outcome, said, None if found is None else sentence))

    def _note_left_out(self, ways: str, why: str) -> None:
        self._comparisons.append(ComparedWays(ways, LEFT_OUT, why))

    def _beyond_rounding(self, one: Computed, other: Computed) -> str | None:
        """The first thing that differs by more than rounding, the same in every process."""
        types = {p.dtype for p in self._local.model.parameters if p.is_floating_point()}
        tolerance = max((TOLERANCE.get(each, 0.1) for each in types), default=TOLERANCE[torch.float32])
        losses = [float(sum(each.losses.values())) / self._local.mesh.num_shards for each in (one, other)]
        first, second = self._everyone.sum(torch.tensor(losses, dtype=torch.float64, device="cpu")).tolist()
        loss = f"the loss is {first:.6g} over the microbatches and {second:.6g} in one piece"
        if (shown := self._first(None if _close(first, second, tolerance) else loss)) is not None:
            return shown
        mine = [
            (name, sketch.distance(other.sketches.get(name)), sketch.norm, sketch.size)
            for name, sketch in one.sketches.items()
        ]
        everyone = [each for part in self._everyone.gather(mine) for each in part]
        squares = sum(norm**2 for _, _, norm, _ in everyone)
        numbers = sum(size for *_, size in everyone) or 1
        typical = (squares / numbers) ** 0.5
        for name, distance, norm, size in everyone:
            scale = max(norm, _SMALL * typical * size**0.5)
            if not distance <= tolerance * scale:
                return f"the loss is the same, and {name} differs by {distance / max(scale, 1e-30):.2g} of its norm"
        return None


_SMALL = 0.02
"""A gradient is judged by its own norm, or by this share of what is typical for its size, if that is more. The
gradient of a key's bias, for one, is rounding alone."""
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _copied(batch: Microbatches) -> Microbatches:
    """A batch with tensors of its own, as a forward or a loss may change them in place."""

    def copied(values: Sequence[Any]) -> Any:
        leaves, skeleton = flatten(list(values))
        return unflatten([copy_of(leaf).requires_grad_(leaf.requires_grad) for leaf in leaves], skeleton)

    inputs = {stage: copied(values) for stage, values in batch.inputs.items()}
    return replace(batch, inputs=inputs, targets=copied(batch.targets))


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


def _in_pipeline(pipeline: int) -> str:
    return f" of pipeline {pipeline}" if pipeline else ""


def _close(one: float, other: float, tolerance: float) -> bool:
    if one != one or other != other:
        return (one != one) == (other != other)
    return one == other or abs(one - other) <= tolerance / 4 * max(abs(one), abs(other))


def _looking_for(foreign: list[str], index: int) -> Callable[[nn.Module, Any, Any], None]:
    """A hook of a stage's forward that notes the parameters that it uses and that are not the stage's own."""

    def look(stage: nn.Module, args: Any, output: Any) -> None:
        own = {id(p) for p in stage.parameters()}
        for parameter in _parameters_behind(flatten(output)[0]):
            if id(parameter) not in own:
                foreign.append(
                    f"stage {index} uses a parameter of shape {tuple(parameter.shape)} that none of its modules "
                    "holds, so no optimizer of this stage trains it"
                )

    return look


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


def _sentence_of(error: Exception | None) -> str | None:
    """The number of the sentence that an error says was broken, as text; None if it names none."""
    if isinstance(error, BrokenContract):
        return str(error.sentence)
    if isinstance(error, Untraceable):
        return "3"
    return "2" if error is not None and "inplace operation" in str(error) else None
