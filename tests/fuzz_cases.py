"""Random training runs: a model of random blocks, a schedule, a mesh, options, and what a user does on the way.

    case = draw(17)               all that follows is drawn from the seed alone, alike in every process
    outcome = run(case, None)     by the pipeline and by the plain loop: where they differ, in words

What is compared: the loss, the gradients, the buffers and what hooks recorded, after each step; the parameters after
three updates; an evaluation; the state of the user's own model.
"""

from __future__ import annotations

import copy
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
import penstock.runtime.split_backward.prepared as slot_module
from fuzz_blocks import BLOCKS, FORKS, SHARING, Fork, InPlace, Join, OnFirst, Tied, real
from offload_programs import offloaded
from own_loop import seeded
from penstock.library.registry import SCHEDULES
from penstock.runtime.tensors.dtensor import whole
from penstock.runtime.tensors.rng import mix
from plain_loop import call, cut, named_as, seed_devices, weights

D = 4
"""The width of every model."""
NUM_STEPS = 3

Shape = tuple[int, int, int]
"""Processes along pp, dp and tp."""

TOWERS = "distmm"
"""The schedule whose branches meet in no stage: ops of its own compare what they end in."""

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}
"""By the type that a case computes in, relative, where replicas or shards add up in another order than one process.

Some models make much of a rounding. Such a case is run again in float64: what is rounding is then 1e-9 times smaller,
and what is a mistake is as large as before.
"""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.005),
}

EVENTS = (
    "load after", "load before", "freeze before, thaw after", "freeze after", "hook after", "hook before",
    "eval after", "accumulate",
)  # fmt: skip
"""What a user does to the model before and after the pipeline is made."""


MEMORY = ("", "", "recompute", "offload", "offload half")
"""What is done so that less is held: forwards that run again; activations of all microbatches, or of half, that wait
in host memory."""

TURNS = ("evaluate", "switch", "resume", "hand over")
"""What a user does after the first update: evaluates and predicts; goes on with backwards split or joined; saves, and
loads into a pipeline of another schedule; hands over to one."""


@dataclass(frozen=True)
class Case:
    """One run. Everything in the model, the batches and the order of things follows from these.

    Attributes:
        blocks: the layers: the name of a block; "fork NAME", "on first NAME", "in place", "join"; "tied", "tied t".
        form: how the model is given: "sequential", "list" (a module per stage), "functions" (that make one each), or
            "subclass" (a sequential with a forward of its own).
        schedule, options: in the library, for the pp ranks. separate: whether backwards are split after it is built.
        shape: processes along pp, dp, tp; None: all ranks in one process.
        samples: of each step's batch. listed: the batch is a list, an entry per microbatch, of several lengths.
        device: on which all stages lie; several processes share it.
        turns: of `TURNS`. memory: of `MEMORY`, where the schedule takes it. late: milliseconds of the first link.
    """

    seed: int
    blocks: tuple[str, ...]
    form: str = "sequential"
    schedule: str = "1f1b"
    num_ranks: int = 2
    num_microbatches: int = 4
    options: tuple[tuple[str, Any], ...] = ()
    separate: bool = False
    shape: Shape | None = None
    samples: int = 8
    listed: bool = False
    dispatch: str = "frozen"
    autocast: bool = False
    defer: bool = True
    optimizer: str = "sgd"
    clip_norm: float | None = None
    zero: bool = True
    sharding: str = "none"
    transport: str = "host"
    events: tuple[str, ...] = ()
    loss: str = "mean"
    device: str = "cpu"
    turns: tuple[str, ...] = ()
    memory: str = ""
    late: float = 0.0

    def build(self) -> ps.Schedule:
        made = ps.build(self.schedule, self.num_ranks, self.num_microbatches, **dict(self.options))
        if self.memory == "recompute":
            made = _recomputed(made)
        made = ps.passes.separate_gradients(made) if self.separate else made
        if self.memory.startswith("offload") and made.graph.updates is None:
            made = offloaded(made, 2 if self.memory == "offload half" else 1)
            ps.check(made)
        return made

    def second(self) -> ps.Schedule:
        """What runs after the first update, where a turn brings another schedule."""
        first = self.build()
        if not {"resume", "hand over"} & {*self.turns}:
            return first
        rng = random.Random(self.seed * 31 + 5)
        for _ in range(60):
            name, ranks = rng.choice(list(SCHEDULES)), rng.choice([1, 2, 3, 4])
            if self.shape is not None:
                ranks = self.num_ranks
            try:
                made = ps.build(name, ranks, self.num_microbatches)
            except ps.ScheduleError:
                continue
            fits = made.num_stages == first.num_stages or self.form == "sequential"
            if name != TOWERS and fits and made.num_stages <= len(self.blocks):
                return made
        return first

    @property
    def num_replicas(self) -> int:
        return self.shape[1] if self.shape else 1

    @property
    def exact(self) -> bool:
        """Whether every sum is made in the order of one process, so that bits must be the same."""
        return self.shape is None or self.shape[1] * self.shape[2] == 1

    def __str__(self) -> str:
        plain = Case(0, ())
        changed = {k: v for k, v in vars(self).items() if v != getattr(plain, k, None)}
        return "Case(" + ", ".join(f"{k}={v!r}" for k, v in {"seed": self.seed, **changed}.items()) + ")"


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        kind: "same"; "different"; "refused" (an error of ours before the first step); "late" (one in the first step,
            before there is any number); "raw" (any other error); "invalid" (the plain loop itself fails).
        detail: in words.
    """

    kind: str
    detail: str = ""


# Drawing.


def draw(seed: int, shape: Shape | None = None) -> Case:
    """A case.

    Args:
        shape: of the mesh; all ranks in one process where not given.
    """
    rng = random.Random(seed)
    while True:
        made = _draw(seed, rng, shape)
        try:
            stages = made.build().num_stages
        except ps.ScheduleError:
            continue
        if stages <= len(made.blocks) and (shape is None or shape[0] == made.num_ranks):
            return made


def with_turns(case: Case) -> Case:
    """The case with something done after its first update, and perhaps for its memory."""
    rng = random.Random(case.seed * 17 + 3)
    turns = tuple(rng.sample(TURNS, rng.choice([1, 1, 2])))
    if case.schedule == TOWERS:
        return case
    turned = replace(case, turns=turns, memory=rng.choice(MEMORY))
    if case.num_ranks > 1 and rng.random() < 0.3:
        turned = replace(turned, late=3.0)
    if case.shape is not None and rng.random() < 0.4:
        turned = replace(turned, transport="delegate")
    try:
        turned.build()
    except ps.ScheduleError:  # it doesn't take that
        return replace(turned, memory="")
    return turned


def _recomputed(schedule: ps.Schedule) -> ps.Schedule:
    """With about as many forwards run again as it takes to hold two thirds."""
    costs = ps.Costs.uniform(schedule.num_stages, f=1, i=1, w=1)
    costs = replace(costs, kept_by_recompute=0.1)
    limits = [max(1.0, peak * 2 / 3) for peak in ps.simulate(schedule, costs).peak_activations]
    return ps.passes.recompute(schedule, costs, limits)


def _draw(seed: int, rng: random.Random, shape: Shape | None) -> Case:
    ranks = shape[0] if shape else rng.choice([1, 2, 2, 3, 4, 4])
    schedule = rng.choice(list(SCHEDULES))
    num = rng.choice([2, 3, 4, 4, 6, 8, 8])
    flat = shape is None or shape[1] * shape[2] == 1
    replicas = shape[1] if shape else 1
    blocks = _blocks(rng)
    if shape and shape[2] > 1:
        blocks = (*blocks, "gpt block")  # which can be cut
    autocast = rng.random() < 0.2 and not (shape and shape[2] > 1)  # whose shards round by themselves
    sharding = rng.choice(["none", "zero1", "fsdp"]) if replicas > 1 else "none"
    listed = rng.random() < 0.15
    form = rng.choice(["sequential"] * 24 + ["subclass"] * 6 + ["list"] * 15 + ["functions"] * 8 + ["subclass"])
    events = tuple(sorted(rng.sample(EVENTS, rng.choice([0, 0, 1, 1, 2]))))
    if sharding == "fsdp" or (shape and shape[2] > 1):  # the model then has shards, into which no plain values go
        events = tuple(event for event in events if event != "load after")
    if sharding == "fsdp":  # the parameters that are there between steps are parts, to which no backward comes
        events = tuple(event for event in events if event != "hook after")
    if schedule == TOWERS:  # each stage is its own, and what its ops compare has no place for other options
        form, autocast, listed = "list", False, False
        blocks = tuple(name for name in blocks if name in BLOCKS and name != "a gradient kept elsewhere")
    if form == "functions":  # there is no model that a user could do anything to
        events = tuple(event for event in events if event == "accumulate")
    return Case(
        seed,
        blocks,
        form=form,
        schedule=schedule,
        num_ranks=ranks,
        num_microbatches=num,
        separate=rng.random() < 0.25,
        shape=shape,
        samples=num * replicas * 2 + rng.choice([0, 0, 1]),
        listed=listed,
        dispatch=rng.choice(["frozen", "frozen", "dynamic", "auto"]),
        autocast=autocast,
        defer=rng.random() < 0.8,
        optimizer=rng.choice(list(OPTIMIZERS)) if flat else "sgd",
        clip_norm=rng.choice([None, None, 0.5]),
        zero=rng.random() < 0.7,
        sharding=sharding,
        transport=rng.choice(["host", "gloo"]) if shape else "host",
        events=events,
        loss="mean" if schedule == TOWERS else rng.choice(["mean", "mean", "weighted"]),
    )


def _blocks(rng: random.Random) -> tuple[str, ...]:
    names = list(BLOCKS)
    found: list[str] = []
    for _ in range(rng.choice([2, 3, 4, 5, 6, 8, 12])):
        found.append(rng.choice(names))
        if rng.random() < 0.15:
            kind = rng.choice(list(FORKS))
            inner = [
                rng.choice([*["in place"] * (kind not in SHARING), "on first " + rng.choice(names)])
                for _ in range(rng.choice([0, 1, 1, 2]))
            ]
            # A layer may end in a view, which a change in place in another stage finds as a tensor of its own.
            inner = [name for place, name in enumerate(inner) if not place or name != "in place"]
            found += [f"fork {kind}", *inner, "join"]
    if rng.random() < 0.3:
        for _ in range(rng.choice([2, 2, 3])):
            found.insert(_outside(rng, found), rng.choice(["tied", "tied", "tied t"]))
        if rng.random() < 0.1:
            found.insert(_outside(rng, found), "gpt block, tied")
            found.insert(_outside(rng, found), "gpt block, tied")
    if rng.random() < 0.04:
        found.insert(_outside(rng, found), "again")
    return tuple(found)


def _outside(rng: random.Random, blocks: Sequence[str]) -> int:
    """A place that is in no span of several values."""
    depth, places = 0, [0]
    for place, name in enumerate(blocks, start=1):
        depth += name.startswith("fork") - (name == "join")
        if depth == 0:
            places.append(place)
    return rng.choice(places)


# Making.


class Chain(nn.Module):
    """Layers as one stage of a list, which is called with what a tuple or a dict holds."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *values: Any, **named: Any) -> Any:
        value: Any = named or (values if len(values) > 1 else values[0])
        for layer in self.layers:
            value = layer(value)
        return value


def layers_of(case: Case) -> list[nn.Module]:
    torch.manual_seed(case.seed)
    tied = nn.Parameter(torch.randn(D, D) * 0.3)
    made: list[nn.Module] = []
    for name in case.blocks:
        if name == "again":
            # A shared buffer must not change (sentence 5 of the contract), so a layer with buffers is not used again.
            alone = [each for each in made if not isinstance(each, (Fork, OnFirst, Join)) and not [*each.buffers()]]
            made.append(next(iter(alone), nn.Identity()))
        elif name == "gpt block, tied":
            made.append(BLOCKS["gpt block"](D))
            twins = [layer for layer, kind in zip(made, case.blocks) if kind == name]
            made[-1].mlp.up.weight = twins[0].mlp.up.weight  # type: ignore[union-attr]
        elif name.startswith("tied"):
            made.append(Tied(tied, name == "tied t"))
        elif name.startswith("fork "):
            made.append(Fork(D, name.removeprefix("fork ")))
        elif name.startswith("on first "):
            made.append(OnFirst(BLOCKS[name.removeprefix("on first ")](D)))
        elif name == "in place":
            made.append(OnFirst(InPlace()))
        elif name == "join":
            made.append(Join())
        else:
            made.append(BLOCKS[name](D))
    return [layer.to(case.device) for layer in made]


def model_of(case: Case, num_stages: int) -> Any:
    layers = layers_of(case)
    if case.form == "sequential":
        return nn.Sequential(*layers)
    if case.form == "subclass":
        model = Scaled(*layers)
        with suppress(ps.runtime.PartitionError):  # as the pipeline will
            model.paths = [path for paths in ps.split(model, num_stages).layers for path in paths]
            model.whole = False
        return model
    size, more = divmod(len(layers), num_stages)
    ends = [0]
    for stage in range(num_stages):
        ends.append(ends[-1] + size + (stage < more))
    stages = [Chain(layers[a:b]) for a, b in pairwise(ends)]
    if case.form == "functions":  # each makes modules of its own, and parameters that are named as tied are one
        parameters = {id(p): p for stage in stages for p in stage.parameters()}
        stages = [copy.deepcopy(stage, dict(parameters)) for stage in stages]
    return stages


def given_of(model: Any, case: Case) -> tuple[Any, list[list[str]]]:
    """The model as it is given to a pipeline, and which parameters are named as tied."""
    if case.form != "functions":
        return model, []
    names: dict[int, list[str]] = {}
    for name, parameter in as_module(model).named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    groups = [sorted({n.split(".")[0]: n for n in reversed(group)}.values()) for group in names.values()]
    return [partial(_stage, case, len(model), k) for k in range(len(model))], [g for g in groups if len(g) > 1]


def _stage(case: Case, num_stages: int, stage: int) -> nn.Module:
    made: nn.Module = model_of(case, num_stages)[stage]
    return made


def as_module(model: Any) -> nn.Module:
    """With the names that a pipeline gives to parameters."""
    return model if isinstance(model, nn.Module) else named_as(model)


def batch_of(case: Case, step: int) -> tuple[Any, Any]:
    torch.manual_seed(case.seed * 10 + step)
    if case.schedule == TOWERS:
        graph = case.build().graph
        starts = [stage for stage, before in enumerate(graph.sources) if not before]
        return {stage: torch.randn(case.samples, 3, D).to(case.device) for stage in starts}, None
    if not case.listed:
        inputs, targets = torch.randn(case.samples, 3, D), torch.randn(case.samples, 3, D)
        return inputs.to(case.device), targets.to(case.device)
    num = case.num_microbatches * case.num_replicas
    lengths = [random.Random(case.seed + m).choice([2, 3, 4]) for m in range(num)]
    return tuple([torch.randn(2, t, D).to(case.device) for t in lengths] for _ in range(2))  # type: ignore[return-value]


class Scaled(nn.Sequential):
    """Has a forward of its own.

    Attributes:
        whole: whether it can't be traced. paths: those of its layers, in the order of their calls, if it can.
    """

    whole = True
    paths: Sequence[str] = ()

    def forward(self, value: Any) -> Any:
        return super().forward(value) * 1.5


class Mean:
    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (real(output) - target).square().mean()


class Weighted(Mean):
    """A mean over positive targets."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        counted = target > 0
        return ((real(output) - target).square() * counted).sum() / counted.sum().clamp(min=1)

    def weight(self, target: Tensor) -> int:
        return int((target > 0).sum())


LOSSES = {"mean": Mean, "weighted": Weighted}


def before(model: Any, case: Case) -> None:
    """What the user does before the pipeline is made."""
    layer = chosen(model, case)
    if "load before" in case.events:
        load(model, case)
    if "freeze before, thaw after" in case.events:
        layer.requires_grad_(False)
    if "hook before" in case.events:
        hook(layer)


def after(model: Any, case: Case) -> None:
    """What the user does to the model that was given, once the pipeline is made."""
    layer = chosen(model, case)
    if "load after" in case.events:
        load(model, case)
    if "freeze before, thaw after" in case.events:
        for parameter in layer.parameters():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
    if "freeze after" in case.events:
        chosen(model, case, 1).requires_grad_(False)
    if "hook after" in case.events:
        hook(layer)
    if "eval after" in case.events:
        chosen(model, case, 2).eval()


def chosen(model: Any, case: Case, number: int = 0) -> nn.Module:
    """A layer that something is done to: of the tied ones the first, where there is any."""
    layers = list(model) if isinstance(model, nn.Sequential) else [layer for chain in model for layer in chain.layers]
    tied = [layer for layer in layers if isinstance(layer, Tied)]
    if tied and number == 0:
        return tied[0]
    with_parameters = [layer for layer in layers if any(True for _ in layer.parameters())] or layers
    return random.Random(case.seed * 7 + number).choice(with_parameters)


def load(model: Any, case: Case) -> None:
    module = as_module(model)
    generator = torch.Generator().manual_seed(case.seed + 99)
    state = {
        name: value + 0.1 * torch.randn(value.shape, generator=generator).to(value.device)
        if isinstance(value, Tensor) and value.is_floating_point() and "running" not in name
        else value
        for name, value in module.state_dict().items()
    }
    for name, value in module.state_dict().items():  # a tied weight has one value
        for other, twin in module.state_dict().items():
            both = isinstance(value, Tensor) and isinstance(twin, Tensor)
            if both and other < name and value.numel() and value.data_ptr() == twin.data_ptr():
                state[name] = state[other]
    module.load_state_dict(state)


def hook(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.register_hook(_scaled)
            break


def _scaled(gradient: Tensor) -> Tensor:
    return gradient * 0.25


# The plain loop.


@dataclass
class Seen:
    """What a run made, step by step; by the names of the whole model."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    recorded: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    evaluated: Tensor | None = None


def plain(case: Case, schedule: ps.Schedule) -> Seen:
    """The case without a pipeline."""
    model, loss_fn, seen = model_of(case, schedule.num_stages), LOSSES[case.loss](), Seen()
    module = as_module(model)
    before(model, case)
    optimizer = OPTIMIZERS[case.optimizer](list(module.parameters()))
    after(model, case)
    second = case.second()
    for step, update in steps_of(case):
        loss = plain_step(model, case, schedule, step, loss_fn)
        seen.losses.append(loss)
        seen.gradients.append(gradients(module))
        seen.buffers.append({n: b.clone() for n, b in module.named_buffers(remove_duplicate=False)})
        if update:
            if case.clip_norm is not None:
                seen.norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), case.clip_norm))
            optimizer.step()
            optimizer.zero_grad()
            schedule = second
    seen.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    seen.recorded = recorded(module)
    if case.schedule != TOWERS:
        seen.evaluated = plain_evaluate(model, case, schedule, loss_fn)
    return seen


def steps_of(case: Case) -> Iterator[tuple[int, bool]]:
    """Numbers of steps, and whether an update follows each."""
    number = 0
    for update in range(NUM_STEPS):
        if update == 1 and "accumulate" in case.events:
            number += 1
            yield number, False
        number += 1
        yield number, True


def plain_step(model: Any, case: Case, schedule: ps.Schedule, step: int, loss_fn: Any) -> Tensor:
    """Adds a step's gradients; pipelines (and replicas) sum by themselves first, and only the first keeps buffers."""
    if case.schedule == TOWERS:
        return towers_step(model, case, schedule, step)
    module = as_module(model)
    own, replicas = schedule.num_microbatches, case.num_replicas
    num = own * replicas
    inputs, targets = batch_of(case, step)
    scales = weights(inputs, targets, num, loss_fn)
    parts = list(zip(cut(inputs, num), cut(targets, num), strict=True))
    groups: dict[tuple[int, int], list[int]] = {}
    for m in range(num):
        groups.setdefault((m // own, schedule.microbatch_pipeline[m % own]), []).append(m)
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    kept: dict[str, Tensor] = {}
    losses: dict[int, Tensor] = {}
    sums: dict[str, Tensor | None] = {}
    for number, key in enumerate(sorted(groups)):
        if number:
            for p in module.parameters():
                p.grad = None
            _fill(module, buffers)
        with torch.random.fork_rng(devices=[]):
            for m in groups[key]:
                x, target = parts[m]
                with torch.autocast(case.device, torch.bfloat16) if case.autocast else nullcontext():
                    loss = loss_fn(called(model, x, mix(mix(0, step), m)), target) * scales[m]
                if loss.requires_grad:
                    loss.backward()
                losses[m] = loss.detach()
        for name, p in module.named_parameters():
            so_far, part = sums.get(name), p.grad
            sums[name] = part if so_far is None else so_far if part is None else so_far + part
        if not number:
            kept = {n: b.clone() for n, b in module.named_buffers()}
    for name, p in module.named_parameters():
        p.grad = sums[name]
    _fill(module, kept)
    total = losses[0].clone()
    for m in range(1, num):
        total += losses[m]
    return total


def called(model: Any, value: Any, seed: int | None) -> Any:
    """The model's output; a sequential with a forward of its own is one layer, or has those that tracing found."""
    if not isinstance(model, Scaled):
        return call(model, value, seed)
    if model.whole or seed is None:
        return call([model], value, seed)
    with seeded(model, model.paths, seed):
        return model(value)


def compare(call: ps.runtime.OpCall) -> None:
    """What a gather does: a loss of all that both branches ended in."""
    call.add_loss(apart(call.gather()))


def apart(values: dict[tuple[int, int], Tensor]) -> Tensor:
    one, other = (
        torch.cat([v for (s, _), v in sorted(values.items()) if s == stage])
        for stage in sorted({s for s, _ in values})
    )
    return (torch.tanh(one) - other).square().mean()


def towers_step(model: Any, case: Case, schedule: ps.Schedule, step: int) -> Tensor:
    """As `plain_step`: whole branches forward, a loss of several microbatches, and each one's backward in order."""
    num, sources = schedule.num_microbatches * case.num_replicas, schedule.graph.sources
    (gather,) = schedule.graph.registered
    size = schedule.num_microbatches // gather.num_ops
    inputs, _ = batch_of(case, step)
    given = {stage: value.tensor_split(num) for stage, value in inputs.items()}
    scales = weights(next(iter(inputs.values())), None, num, None)  # type: ignore[arg-type]
    total: Tensor | None = None
    module, kept = as_module(model), {}
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        for group in range(num // size):
            if group == gather.num_ops:  # the first replica's buffers are kept, and each starts from the same
                kept = {n: b.clone() for n, b in module.named_buffers()}
            if group and group % gather.num_ops == 0:
                _fill(module, buffers)
            outputs: dict[tuple[int, int], Tensor] = {}
            mine = range(group * size, (group + 1) * size)
            for m in mine:
                for stage, part in enumerate(model):
                    value = outputs[sources[stage][0], m] if sources[stage] else given[stage][m]
                    seed_devices(mix(mix(mix(0, step), m), stage))
                    outputs[stage, m] = part(value)
            ends = sorted(set(range(len(model))) - {s for before in sources for s in before})
            leaves = {(s, m): outputs[s, m].detach().requires_grad_() for s in ends for m in mine}
            loss = apart(leaves) * sum(scales[m] for m in mine)
            grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            for m in mine:
                for s in ends:
                    if outputs[s, m].requires_grad:
                        outputs[s, m].backward(grads[s, m])
            for _ in mine:
                share = loss.detach() / size
                total = share.clone() if total is None else total + share
    if kept:
        _fill(module, kept)
    assert total is not None
    return total


def _fill(module: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(values[name])


def plain_evaluate(model: Any, case: Case, schedule: ps.Schedule, loss_fn: Any) -> Tensor:
    module = as_module(model)
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    inputs, targets = batch_of(case, 1)
    num = schedule.num_microbatches * case.num_replicas
    scales = weights(inputs, targets, num, loss_fn)
    losses = []
    with torch.no_grad(), torch.autocast(case.device, torch.bfloat16) if case.autocast else nullcontext():
        for x, target, scale in zip(cut(inputs, num), cut(targets, num), scales, strict=True):
            losses.append(loss_fn(called(model, x, None), target) * scale)
    for m, training in modes:
        m.training = training
    total = losses[0].clone()
    for loss in losses[1:]:
        total += loss
    return total


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in module.named_parameters()}


def recorded(module: nn.Module) -> dict[str, Tensor]:
    """What hooks have taken note of, by the name of their module."""
    return {
        n: m.recorded.clone() for n, m in module.named_modules() if isinstance(getattr(m, "recorded", None), Tensor)
    }


# The pipeline.


def run_in_double(case: Case, place: Any) -> Outcome:
    """The case in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        return run(case, place)
    finally:
        torch.set_default_dtype(torch.float32)


def run(case: Case, place: Any) -> Outcome:
    """The case by the pipeline beside the plain loop.

    Args:
        place: a process group or device mesh; None: all ranks are in this process.
    """
    if case.device == "cuda":  # as far as its kernels can be
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
    threshold, slot_module.MERGE_WORK = slot_module.MERGE_WORK, 0 if case.defer else slot_module.MERGE_WORK
    try:
        schedule = case.build()
        try:
            want = plain(case, schedule)
        except Exception as error:
            return Outcome("invalid", f"{type(error).__name__}: {error}")
        outcome = _run(case, schedule, place, want)
        if outcome.kind == "different" and case.device != "cpu":
            moved = _unrepeated(want, plain(case, schedule))
            if moved:
                return Outcome("invalid", f"the plain loop itself gives other numbers when it is run again: {moved}")
        return outcome
    finally:
        slot_module.MERGE_WORK = threshold
        torch._dynamo.reset() if any("compiled" in name for name in case.blocks) else None


def _unrepeated(want: Seen, again: Seen) -> str:
    """Where a second run of the plain loop differs, in words: some kernels of a GPU add up in no fixed order."""
    found: list[str] = []
    for step, (one, other) in enumerate(zip(want.gradients, again.gradients, strict=True)):
        found += _far(one, other, f"step {step}: gradient of ", 0.0)
    found += _far({"loss": want.losses[0]}, {"loss": again.losses[0]}, "", 0.0)
    return "; ".join(found[:3])


def _run(case: Case, schedule: ps.Schedule, place: Any, want: Seen) -> Outcome:
    try:
        pipe, model = _pipeline(case, schedule, place)
    except Exception as error:
        if _is_ours(error):
            return Outcome("refused", f"{type(error).__name__}: {error}")
        return Outcome("raw", f"at construction, {described(error)}")
    except SystemExit:
        return Outcome("refused", "as the first rank says")
    found: list[str] = []
    running = Running(case, place, pipe, model)
    try:
        for each in _differences(case, running, want):
            found.append(each)
    except NotTurned as error:
        return Outcome("refused", f"{type(error.__cause__).__name__}: {error.__cause__}")
    except Exception as error:
        late = running.pipe.num_updates == 0 and not found and type(error).__name__ == "RuntimeFailure"
        return Outcome("late" if late else "raw", described(error))
    finally:
        running.pipe.close()
    return Outcome("different", "; ".join(found[:6])) if found else Outcome("same")


def _pipeline(case: Case, schedule: ps.Schedule, place: Any) -> tuple[Any, Any]:
    """The pipeline, and the user's model, to which everything has been done."""
    from penstock.models import parallelize

    model = model_of(case, schedule.num_stages)
    before(model, case)
    given, tied = given_of(model, case)
    tp = case.shape is not None and case.shape[2] > 1
    pipe = ps.Pipeline(
        given,
        schedule,
        loss_fn=None if case.schedule == TOWERS else LOSSES[case.loss](),
        ops={"GATHER": compare} if case.schedule == TOWERS else None,
        optimizer=OPTIMIZERS[case.optimizer],
        mesh=place,
        dispatch=case.dispatch,
        transport=ps.TransportOptions(
            case.transport,
            delegates=ps.runtime.DelegateOptions() if may_delegate(case) else None,
            links=ps.Links({(0, 1): case.late}) if case.late and schedule.num_ranks > 1 else None,
        ),
        timeout=40.0,
        precision=ps.PrecisionOptions(autocast=torch.bfloat16 if case.autocast else None, clip_norm=case.clip_norm),
        parallel=ps.ParallelOptions(
            device=None if case.device == "cpu" else case.device,
            tied=tied,
            parallelize=parallelize if tp else None,
            sharding="none"
            if not case.zero and case.sharding == "none"
            else "copies"
            if case.sharding == "none"
            else case.sharding,
        ),
    )
    try:
        after(model, case)
    except BaseException:
        pipe.close()
        raise
    return pipe, model


def may_delegate(case: Case) -> bool:
    """Whether a switch gives the first link to delegates."""
    return case.shape is not None and case.num_ranks > 1 and "switch" in case.turns and case.transport != "delegate"


class NotTurned(Exception):
    """What a turn asks for is refused by name."""


class Running:
    """The pipeline that runs, and the user's model in it; a turn may put others in their places."""

    def __init__(self, case: Case, place: Any, pipe: Any, model: Any) -> None:
        self.case, self.place, self.pipe, self.model = case, place, pipe, model

    def turn(self) -> None:
        """After the first update."""
        turns = {
            "evaluate": self._evaluate,
            "switch": self._switch,
            "resume": self._resume,
            "hand over": self._hand_over,
        }
        for name in self.case.turns:
            try:
                turns[name]()
            except Exception as error:
                if _is_ours(error):
                    raise NotTurned from error
                raise

    def _evaluate(self) -> None:
        inputs, targets = batch_of(self.case, 7)
        self.pipe.evaluate(inputs, targets)
        self.pipe.predict(inputs)

    def _switch(self) -> None:
        rng = random.Random(self.case.seed)
        schedule = self.pipe.schedule
        other = schedule
        if not self.case.memory.startswith("offload") and schedule.updates is None:  # which the pass doesn't take
            costs = ps.Costs.uniform(schedule.num_stages, f=rng.choice([1, 2, 4]), i=rng.choice([1, 3]), w=1)
            links = ps.Links({(0, 1): rng.choice([0.0, 1.0, 5.0])} if schedule.num_ranks > 1 else {})
            other = ps.passes.separate_gradients(schedule, costs, links)
        caps = tuple(ps.simulate(other, ps.Costs.uniform(other.num_stages, f=1, i=1, w=1)).peak_activations)
        dispatch = ps.dispatch.Dispatch(rng.choice(["frozen", "dynamic"]))
        delegated = ((0, 1),) if may_delegate(self.case) else ()
        self.pipe.reconfigure(ps.control.Configuration(other, dispatch, delegated, caps))

    def _second(self) -> tuple[Any, Any]:
        return _pipeline(self.case, self.case.second(), self.place)

    def _hand_over(self) -> None:
        pipe, model = self._second()
        try:
            self.pipe.hand_over(pipe)
        except BaseException:
            pipe.close()
            raise
        self.pipe.close()
        self.pipe, self.model = pipe, model

    def _resume(self) -> None:
        folder = Path(_of_the_first(self.case, tempfile.mkdtemp))
        try:
            self.pipe.save(folder)
            self.pipe.close()
            self.pipe, self.model = self._second()
            self.pipe.load(folder)
        finally:
            if self.case.shape is not None:
                torch.distributed.barrier()
            shutil.rmtree(folder, ignore_errors=True)


def _of_the_first(case: Case, make: Callable[[], str]) -> str:
    """What the first process makes, in all of them."""
    if case.shape is None:
        return make()
    made: list[Any] = [make() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(made)
    return str(made[0])


def _random_state(case: Case) -> Tensor:
    """Of all generators that a step could have drawn from."""
    states = [torch.get_rng_state()]
    if case.device == "cuda":
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def described(error: Exception) -> str:
    import traceback

    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:400]} ({last.filename.rsplit('/', 2)[-1]}:{last.lineno})"


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.startswith("penstock") and type(error).__name__ not in (
        "DeadlineExceeded",
        "PeerLost",
    )


def _differences(case: Case, running: Running, want: Seen) -> Iterator[str]:
    # In low precision a difference in the last bit of float32 may become one of bfloat16.
    near = partial(
        _far, tolerance=0.0 if case.exact else 3e-2 if case.autocast else TOLERANCE[torch.get_default_dtype()]
    )
    norms, turned = iter(want.norms), False
    pipe = running.pipe
    for number, (step, update) in enumerate(steps_of(case)):
        if number and pipe.num_updates == 1 and not turned:
            running.turn()
            pipe, turned = running.pipe, True
        inputs, targets = batch_of(case, step)
        rng = _random_state(case)
        result = pipe.step(inputs, targets, update=False)
        if not torch.equal(rng, _random_state(case)):
            yield f"step {step}: the global random state changed"
        yield from near({"loss": want.losses[number]}, {"loss": result.loss}, f"step {step}: ")
        mine = {n: None if p.grad is None else whole(p.grad) for n, p in pipe.named_parameters()}
        if case.sharding == "zero1":  # a gradient is summed up where its parameter has its owner
            mine = {n: g for n, g in mine.items() if g is not None}
        yield from near({n: want.gradients[number][n] for n in mine}, mine, f"step {step}: gradient of ")
        here = buffers_here(pipe)
        yield from near({n: want.buffers[number][n] for n in here}, here, f"step {step}: buffer ")
        if update:
            norm = pipe.update()
            if case.clip_norm is not None:
                yield from near({"norm": next(norms)}, {"norm": norm}, f"step {step}: ")
    model = running.model
    mine = {n: whole(p.detach()) for n, p in pipe.named_parameters()}
    yield from near({n: want.parameters[n] for n in mine}, mine, "at the end: ")
    if case.exact:
        notes, module = recorded(as_module(model)), as_module(model)
        hosted = {n.rsplit(".", 2)[0] for n, _ in pipe.named_parameters()}
        one_pipeline = len(set(pipe.schedule.microbatch_pipeline)) == 1  # else hooks see another order
        if one_pipeline and case.form != "functions" and not case.turns:  # what hooks noted is no state
            yield from near(
                {n: t for n, t in want.recorded.items() if n in hosted},
                {n: t for n, t in notes.items() if n in hosted},
                "recorded by ",
            )
        if case.shape is None and case.form != "functions":
            own = {n: p.detach() for n, p in module.named_parameters()}
            yield from near(want.parameters, own, "in the user's model: ")
    if want.evaluated is None:
        return
    evaluated = pipe.evaluate(*batch_of(case, 1)).loss
    yield from near({"loss": want.evaluated}, {"loss": evaluated}, "evaluated: ")


def buffers_here(pipe: Any) -> dict[str, Tensor]:
    return {n: whole(b) for stage in pipe._local.model.stages.values() for n, b in stage.named_buffers()}


def _far(want: dict[str, Tensor | None], got: dict[str, Tensor | None], what: str, tolerance: float) -> Iterator[str]:
    for name in sorted(want.keys() ^ got.keys()):
        yield f"{what}{name} is in one only"
    # A sum that cancels out is as exact as its terms, of which others in the model tell the size.
    sizes = (float(_wide(t.detach()).abs().max()) for t in want.values() if t is not None and t.numel())
    largest = max(sizes, default=0.0)
    for name in sorted(want.keys() & got.keys()):
        a, b = want[name], got[name]
        if a is None or b is None:
            if a is not b:
                got_one, want_one = ("None" if each is None else "a tensor" for each in (b, a))
                yield f"{what}{name} is {got_one}, want {want_one}"
            continue
        a, b = a.detach().cpu(), b.detach().cpu()
        if a.shape != b.shape:
            yield f"{what}{name} has shape {tuple(b.shape)}, want {tuple(a.shape)}"
        elif not torch.equal(_wide(a), _wide(b)):
            scale, apart = (float(each.abs().max()) if a.numel() else 0.0 for each in (_wide(a), _wide(a) - _wide(b)))
            if math.isnan(apart) and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
                continue
            if not apart <= tolerance * max(scale, 0.1 * largest, 1e-3):
                yield f"{what}{name} differs by {apart:g} of {scale:g}"


def _wide(value: Tensor) -> Tensor:
    """In a type that holds it exactly: losses and norms may come in different ones."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


SIMPLE = (("gpipe", 1, 2), ("zb-h1", 1, 2), ("gpipe", 2, 2), ("zb-h1", 2, 2), ("chimera", 2, 2), ("chimera", 2, 4))
"""Schedules to try in place of others, with their ranks and microbatches."""


def smaller(case: Case, still: Callable[[Case], bool]) -> Case:
    """A case with fewer blocks and options of which `still` holds too, found by leaving out one thing at a time."""
    plain = Case(case.seed, ())
    changed = True
    while changed:
        changed = False
        tries = [replace(case, blocks=case.blocks[:i] + case.blocks[i + 1 :]) for i in range(len(case.blocks))]
        spans = [i for i, name in enumerate(case.blocks) if name.startswith("fork")]
        tries += [
            replace(case, blocks=case.blocks[:i] + case.blocks[case.blocks.index("join", i) + 1 :]) for i in spans
        ]
        tries += [replace(case, events=tuple(e for e in case.events if e != event)) for event in case.events]
        kept = (
            "seed",
            "blocks",
            "shape",
            "events",
            "num_ranks",
            "samples",
            "num_microbatches",
            "schedule",
            "options",
        )
        for name, value in vars(plain).items():
            if name not in kept and getattr(case, name) != value:
                tries.append(replace(case, **{name: value}))
        if case.shape is None:
            for schedule, ranks, num in SIMPLE:
                if (case.num_ranks, case.num_microbatches) > (ranks, num):
                    counts = {"num_ranks": ranks, "num_microbatches": num, "samples": 2 * num}
                    tries.append(replace(case, schedule=schedule, options=(), **counts))
        for one in tries:
            if _balanced(one.blocks) and _fits(one) and still(one):
                case, changed = one, True
                break
    return case


def _balanced(blocks: Sequence[str]) -> bool:
    within = False
    for name in blocks:
        if name.startswith("fork"):
            if within:
                return False
            within = True
        elif (name.startswith("on first ") or name in ("in place", "join")) != within:
            return False
        elif name == "join":
            within = False
    return not within


def _fits(case: Case) -> bool:
    try:
        return case.build().num_stages <= len(case.blocks)
    except ps.ScheduleError:
        return False


PLANTED: dict[str, Case] = {
    "tied weights, several pipelines, a process per rank": Case(
        1, ("tied", "linear", "linear", "tied"), schedule="chimera", num_ranks=4, shape=(4, 1, 1)
    ),
    "tied weights, several pipelines, a list of modules": Case(
        1, ("tied", "linear", "linear", "tied"), form="list", schedule="dualpipe", num_ranks=2, shape=(2, 1, 1)
    ),
    "tied weights, sharding fsdp": Case(
        2, ("tied", "linear", "linear", "tied"), shape=(2, 2, 1), samples=16, sharding="fsdp"
    ),
    "tied weights, tensor parallel": Case(
        3, ("gpt block, tied", "linear", "linear", "gpt block, tied"), shape=(2, 1, 2), optimizer="sgd"
    ),
    "tied weights, tensor parallel, v-shape": Case(
        3, ("gpt block, tied", "linear", "linear", "gpt block, tied"), shape=(2, 1, 2), schedule="zb-v"
    ),
    "a sequential with a forward of its own": Case(4, ("linear", "linear"), form="subclass", num_ranks=1),
    "complex linear, split": Case(5, ("linear", "complex linear"), schedule="zb-h1"),
    "complex linear, split, last": Case(6, ("complex linear", "complex linear"), schedule="zb-v", num_ranks=1),
    "double backward, autocast, split": Case(7, ("linear", "double backward"), schedule="zb-h1", autocast=True),
    "several pipelines, loaded after": Case(8, ("linear", "mlp"), schedule="chimera", events=("load after",)),
    "several pipelines, frozen after": Case(8, ("linear", "mlp"), schedule="chimera", events=("freeze after",)),
    "several pipelines, hook after": Case(8, ("linear", "mlp"), schedule="chimera", events=("hook after",)),
    "several pipelines, hook before": Case(8, ("linear", "mlp"), schedule="chimera", events=("hook before",)),
    "several pipelines, eval after": Case(
        8, ("transformer layer", "transformer layer"), schedule="chimera", events=("eval after",)
    ),
    "tied weight frozen, then thawed": Case(
        9, ("tied", "linear", "linear", "tied"), events=("freeze before, thaw after",)
    ),
    "outputs that share memory": Case(10, ("fork a view", "on first linear", "join")),
    "outputs that share memory, between processes": Case(
        10, ("fork a view", "on first linear", "join"), shape=(2, 1, 1)
    ),
    "a tower that wants no gradient": Case(12, ("linear", "nothing"), form="list", schedule="distmm", samples=9),
    "fully sharded replicas that use different layers": Case(
        465,
        ("used in some microbatches", "mixture", "linear"),
        schedule="zb-v",
        num_ranks=1,
        shape=(1, 2, 1),
        samples=16,
        sharding="fsdp",
    ),
    "a fully sharded layer of several types": Case(
        105,
        ("float64 inside", "complex conv", "hooked parameter"),
        num_ranks=1,
        shape=(1, 2, 1),
        samples=16,
        sharding="fsdp",
    ),
    "a fully sharded layer that changes its input in place": Case(
        132,
        ("fork a dict", "in place", "join", "linear"),
        form="list",
        num_ranks=1,
        shape=(1, 2, 1),
        samples=16,
        sharding="fsdp",
    ),
    "a gradient kept elsewhere, split": Case(11, ("a gradient kept elsewhere", "linear"), schedule="zb-h1"),
}
"""Mistakes that were there once, by what was wrong."""
