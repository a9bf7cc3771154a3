"""Tiny models over meshes of processes beside the same model in one process, by autograd alone.

    run_ranks(8, run_jobs, packed(jobs))        of every job in each process, how far it is from its model alone

A job says what is trained over which mesh and by which schedule; Hypothesis draws jobs. What they are compared to is
the plain loop: the whole model, microbatch by microbatch, and torch's own clipping and optimizer.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import penstock as ps
from mesh_runs import Split
from penstock.models import (
    CLIP,
    BERTConfig,
    BERTLoss,
    CLIPConfig,
    CLIPStages,
    ContrastiveLoss,
    CrossEntropy,
    GPTConfig,
    TowerConfig,
    bert_layers,
    bert_stage,
    bert_tied_parameters,
    build_layers,
    gpt_stage,
    parallelize,
    tied_parameters,
)
from penstock.passes import reorder_microbatches
from penstock.runtime import partition
from penstock.runtime.tensors.dtensor import whole
from plain_loop import call, cut, plain_evaluate, plain_step, weights
from waiting import PATIENCE

MODELS = ("gpt", "bert", "clip")
VOCABULARY, CONTEXT, HEADS, WIDTH = 37, 6, 8, 32
RATE, MOMENTUM = 0.1, 0.9
TOLERANCE = 1e-5
"""Of float32, relative, where replicas or shards add up in another order than one process."""

GPT = GPTConfig(VOCABULARY, CONTEXT, depth=2, width=WIDTH, num_heads=HEADS)
BERT = BERTConfig(VOCABULARY, CONTEXT, depth=2, width=WIDTH, num_heads=HEADS)
TOWERS = CLIPConfig(
    {
        "audio": TowerConfig(CONTEXT, 1, WIDTH, HEADS, num_features=5),
        "text": TowerConfig(CONTEXT, 2, WIDTH, HEADS, vocab_size=VOCABULARY),
        "video": TowerConfig(CONTEXT, 1, WIDTH, HEADS, num_features=7),
    },
    shared_width=16,
)


@dataclass(frozen=True)
class Job:
    """Training of a model over a mesh: one update, of a batch or of a batch twice.

    Attributes:
        name, options: of the schedule in the library, for the pp ranks; a CLIP has a program of its own instead.
        microbatches: that each replica runs.
        samples: of the whole batch; the last microbatches have one less where they do not divide.
        masked: of how many microbatches, from the last on, nearly all targets are left out.
        dropout: only without tp, whose ranks draw their own for the heads they have.
        backward: the order of the backwards' microbatches.
    """

    model: str
    split: Split
    name: str
    microbatches: int
    samples: int
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0
    masked: int = 0
    dropout: float = 0.0
    num_steps: int = 1
    tied: bool = False
    dispatch: str = "frozen"
    sharding: str = "none"
    clip_norm: float | None = None
    backward: str = "ascending"

    @cached_property
    def schedule(self) -> ps.Schedule:
        pp, options = self.split[0], dict(self.options)
        if self.model != "clip":
            made = ps.build(self.name, pp, self.microbatches, **options)
            return reorder_microbatches(made, backward="reversed") if self.backward == "reversed" else made
        stages = clip_cut(pp).graph()
        placement = ps.placements.circular(pp, stages.num_stages)
        return ps.Program(placement, self.microbatches, stages=stages, name=self.name, **options).build()

    @property
    def num_microbatches(self) -> int:
        """Of the whole batch."""
        return self.split[1] * self.microbatches

    @property
    def is_pipeline(self) -> bool:
        """Whether every sum is made in the order of one process, so that bits must be the same."""
        return self.split[1] == self.split[2] == 1

    def __repr__(self) -> str:
        pp, dp, tp = self.split
        return (
            f"{self.model} pp {pp} dp {dp} tp {tp}, {self.name} {dict(self.options)} of {self.microbatches}, "
            f"{self.samples} samples, {self.num_steps} steps, seed {self.seed}, masked {self.masked}, "
            f"dropout {self.dropout}, "
            f"{'tied, ' * self.tied}{self.dispatch}, sharding {self.sharding}, clip {self.clip_norm}"
        )


@dataclass(frozen=True)
class Wanted:
    """What one process makes of a job: in the last step, after an update, and then of an evaluation."""

    loss: Tensor
    gradients: dict[str, Tensor]
    norm: float
    parameters: dict[str, Tensor]
    evaluated: Tensor


@dataclass(frozen=True)
class Found:
    """How far a job's numbers in a process are from one process's.

    Attributes:
        loss, norm, evaluated: relative differences.
        gradient, parameter: the largest difference of one, by its largest entry.
        worst: the parameter with the gradient that is farthest.
        equal: whether the loss, the gradients and the evaluation are the same to the bit.
        names: the parameters whose gradients were compared: those of the process's stages, and under ZeRO-1 of them
            those that it owns.
    """

    loss: float
    gradient: float
    worst: str
    parameter: float
    norm: float
    evaluated: float
    equal: bool
    names: tuple[str, ...]

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.parameter, self.norm, self.evaluated)


# Models. A pipeline's stages, and the model in one module with the same names.


def config_of(job: Job) -> Any:
    if job.model == "clip":
        towers = {name: replace(tower, dropout=job.dropout) for name, tower in TOWERS.towers.items()}
        return CLIPConfig(towers, TOWERS.shared_width)
    made: Any = replace(GPT if job.model == "gpt" else BERT, dropout=job.dropout, tied=job.tied)
    return replace(made, depth=max(2, job.schedule.num_stages - 2))


def clip_cut(pp: int, config: CLIPConfig = TOWERS) -> CLIPStages:
    """A stage a tower and the contrast's; more of the towers where there are more ranks."""
    counts = (2, 3, 2) if pp == 8 else (1, 1, 1)
    return CLIPStages(config, dict(zip(config.towers, counts, strict=True)))


def stages_of(job: Job) -> list[Any]:
    config = config_of(job)
    if job.model == "clip":
        return list(clip_cut(job.split[0], config).sources(job.seed))
    make = gpt_stage if job.model == "gpt" else bert_stage
    parts = partition([1.0] * config.num_layers, job.schedule.num_stages)
    return [lambda part=part: make(config, list(part), job.seed) for part in parts]


def loss_of(job: Job) -> Any:
    return {"gpt": CrossEntropy, "bert": BERTLoss, "clip": ContrastiveLoss}[job.model]()


def batch_of(job: Job) -> tuple[Any, Any]:
    """Inputs as the model in one module takes them, and targets; None for CLIP."""
    generator = torch.Generator().manual_seed(job.seed)

    def tokens(below: int = VOCABULARY) -> Tensor:
        return torch.randint(below, (job.samples, CONTEXT), generator=generator)

    if job.model == "clip":
        features = {name: tower.num_features for name, tower in TOWERS.towers.items()}
        drawn = {
            name: torch.randn(job.samples, CONTEXT, num, generator=generator) if num else tokens()
            for name, num in features.items()
        }
        return drawn, None
    inputs, targets = tokens(), tokens()
    targets[targets % 3 == 0] = -100
    for part in targets.tensor_split(job.num_microbatches)[job.num_microbatches - job.masked :]:
        part[:, 1:] = -100
        part[1:] = -100
    if job.model == "gpt":
        return inputs, targets
    real = torch.arange(CONTEXT) < torch.randint(2, CONTEXT + 1, (job.samples, 1), generator=generator)
    follows = torch.randint(2, (job.samples,), generator=generator)
    return {"tokens": inputs, "segments": tokens(2), "real": real}, {"tokens": targets, "next": follows}


def whole_model(job: Job) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    config = config_of(job)
    if job.model == "clip":
        model: nn.Module = CLIP(config, job.seed)
        return model, dict(model.named_parameters())
    layers = build_layers(config, None, job.seed) if job.model == "gpt" else bert_layers(config, None, job.seed)
    model = nn.Sequential(*layers)
    return model, {f"layers.{name}": p for name, p in model.named_parameters()}


# In one process.


def wanted(job: Job) -> Wanted:
    """The job by the plain loop."""
    model, parameters = whole_model(job)
    inputs, targets = batch_of(job)
    for step in range(1, job.num_steps + 1):
        if job.model == "clip":
            loss = clip_step(model, inputs, job)
        else:
            num, loss_fn = job.num_microbatches, loss_of(job)
            loss = plain_step(model, inputs, targets, num, loss_fn, step=step)  # type: ignore[arg-type]
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), job.clip_norm or float("inf")))
    sgd(parameters.values()).step()
    if job.model == "clip":
        evaluated = clip_evaluated(model, inputs, job)
    else:
        evaluated = plain_evaluate(model, inputs, targets, job.num_microbatches, loss_of(job))  # type: ignore[arg-type]
    return Wanted(loss, gradients, norm, {name: p.detach() for name, p in parameters.items()}, evaluated)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), RATE, MOMENTUM)


def clip_parts(inputs: Any, job: Job) -> list[tuple[dict[str, Tensor], float]]:
    """A CLIP's microbatches, and what each weighs in the loss."""
    parts = cut(inputs, job.num_microbatches)
    return list(zip(parts, weights(inputs["audio"], None, job.num_microbatches, loss_of(job)), strict=True))


def clip_step(model: nn.Module, inputs: Any, job: Job) -> Tensor:
    """As `plain_step`; towers have no dropout, which would be seeded stage by stage."""
    total = torch.zeros(())
    for part, weight in clip_parts(inputs, job):
        loss = loss_of(job)(call([model], {"given": part}, None)) * weight
        loss.backward()
        total = total + loss.detach()
    return total


def clip_evaluated(model: nn.Module, inputs: Any, job: Job) -> Tensor:
    """As `plain_evaluate`."""
    model.eval()
    total = torch.zeros(())
    with torch.no_grad():
        for part, weight in clip_parts(inputs, job):
            total = total + loss_of(job)(model(part)) * weight
    return total


# Over a mesh.


def packed(jobs: Sequence[Job]) -> bytes:
    """Jobs with what is wanted of them, for processes to run; as bytes, since tensors would be shared by files."""
    return pickle.dumps([(job, wanted(job)) for job in jobs])


def run_jobs(rank: int, given: bytes) -> list[Found]:
    """All jobs in turn, over the meshes that these processes make."""
    meshes: dict[Split, DeviceMesh] = {}
    found = []
    for job, one in pickle.loads(given):
        if job.split not in meshes:
            meshes[job.split] = init_device_mesh("cpu", job.split, mesh_dim_names=("pp", "dp", "tp"))
        try:
            found.append(run_job(job, meshes[job.split], one))
        except Exception as error:
            error.add_note(f"in {job}")
            raise
    return found


def run_job(job: Job, mesh: DeviceMesh, one: Wanted) -> Found:
    """The job over its mesh, each process beside the model in one process."""
    config, (inputs, targets) = config_of(job), batch_of(job)
    tied = {"gpt": tied_parameters, "bert": bert_tied_parameters, "clip": lambda _: []}[job.model](config)
    pipe = ps.Pipeline(
        stages_of(job),
        job.schedule,
        loss_fn=loss_of(job),
        optimizer=sgd,
        mesh=mesh,
        dispatch=job.dispatch,
        timeout=PATIENCE,
        precision=ps.PrecisionOptions(clip_norm=job.clip_norm),
        parallel=ps.ParallelOptions(tied=tied, parallelize=parallelize, sharding=job.sharding),
    )
    given = clip_cut(job.split[0]).inputs(inputs) if job.model == "clip" else inputs
    try:
        for _ in range(job.num_steps):
            loss = pipe.step(given, targets, update=False).loss
        gradients = {n: whole(p.grad).clone() for n, p in pipe.named_parameters() if p.grad is not None}
        norm = pipe.update()
        parameters = {n: whole(p.detach()).clone() for n, p in pipe.named_parameters()}
        evaluated = pipe.evaluate(given, targets).loss
    finally:
        pipe.close()
    apart = {n: distance(g, one.gradients[n]) for n, g in gradients.items()}
    worst = max(apart, key=apart.__getitem__, default="")
    pairs = [(loss, one.loss), (evaluated, one.evaluated), *((g, one.gradients[n]) for n, g in gradients.items())]
    return Found(
        distance(loss, one.loss),
        apart.get(worst, 0.0),
        worst,
        max((distance(p, one.parameters[n]) for n, p in parameters.items()), default=0.0),
        0.0 if norm is None else abs(float(norm) - one.norm) / one.norm,
        distance(evaluated, one.evaluated),
        all(torch.equal(a, b) for a, b in pairs),
        tuple(gradients),
    )


def wrong(jobs: Sequence[Job], found: Sequence[Sequence[Found]]) -> list[str]:
    """In words, the jobs that are too far from one process; `found` is what each process has of every job."""
    problems = []
    for number, job in enumerate(jobs):
        mine = [process[number] for process in found]
        worst = max(mine, key=lambda one: one.largest)
        if not worst.largest <= TOLERANCE:
            problems.append(f"{job!r}: {worst}")
        if job.is_pipeline and not all(one.equal for one in mine):
            problems.append(f"{job!r}: not the same bits")
        missing = set(whole_model(job)[1]) - {name for one in mine for name in one.names}
        if missing:
            problems.append(f"{job!r}: no gradient of {sorted(missing)}")
    return problems


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference by the largest entry; 0 for equal ones."""
    found, wanted = found.cpu(), wanted.cpu()
    if torch.equal(found, wanted):
        return 0.0
    scale = wanted.detach().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((found.double() - wanted.double()).abs().max() / scale)


# Drawn.

CHAINS = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe-v", "zb")


@st.composite
def jobs(draw: st.DrawFn, model: str, split: Split) -> Job:
    """A schedule for the mesh, a batch that may be ragged, and what else a user may choose."""
    pp, dp, tp = split
    name, num, options = draw(towers() if model == "clip" else chains(pp))
    total = dp * num
    tied = model != "clip" and draw(st.booleans())
    shardings = ["none", "zero1", "fsdp"] if dp > 1 else ["none"]
    sharding = draw(st.sampled_from(shardings))
    return Job(
        model,
        split,
        name,
        num,
        # Two samples a microbatch at least: a CLIP has nothing to tell apart in one.
        samples=draw(st.integers(2, 3)) * total + draw(st.integers(0, total - 1)),
        options=options,
        seed=draw(st.integers(0, 2**20)),
        masked=draw(st.integers(0, total - 1)),
        num_steps=draw(st.integers(1, 2)),
        dropout=draw(st.sampled_from([0.0, 0.2])) if tp == 1 and model != "clip" else 0.0,
        tied=tied,
        dispatch=draw(st.sampled_from(["frozen", "dynamic"])),
        sharding=sharding,
        clip_norm=draw(st.sampled_from([None, 0.01])),
    )


Named = tuple[str, int, tuple[tuple[str, Any], ...]]
"""A schedule's name, microbatches and options."""


@st.composite
def chains(draw: st.DrawFn, pp: int) -> Named:
    """A library schedule of one pipeline, split backwards among them."""
    name = draw(st.sampled_from(CHAINS))
    least = {"zb-h2": 2 * pp - 1, "dualpipe-v": 2 * pp}.get(name, 1)
    num = max(least, pp * draw(st.integers(1, 2)))
    if name != "zb":
        return name, num, ()
    slack = draw(st.integers(1, 3))
    return name, num, (("warmup", tuple(slack * (pp - i - 1) + 1 for i in range(pp))),)


def towers() -> st.SearchStrategy[Named]:
    """A program of the towers, circular where there are fewer ranks than stages."""
    options = st.booleans().map(lambda split: (("split", split),))
    return st.tuples(st.just("towers"), st.integers(1, 4), options)
