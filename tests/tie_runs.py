"""Models some of whose stages share parameters, trained by pipelines and by loops beside them.

Where a schedule has several pipelines, the loop keeps a model a pipeline and adds up their gradients, as
`copies_runs.grouped_step` does; over a mesh it is the plain loop, within the tolerance of a mesh.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import penstock as ps
from copies_runs import grouped_step
from packed import packed
from penstock.runtime import RuntimeFailure
from penstock.runtime.tensors.dtensor import is_sharded, whole
from plain_loop import differences, plain_step
from waiting import PATIENCE

WIDTH = 6
MSE = nn.MSELoss()
ADAM = partial(torch.optim.AdamW, lr=0.05)
TOLERANCE = 1e-5
"""Of float32, where replicas or shards add up in another order than one process."""

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("chimera", {}),
    ("chimera", {"backward": "split"}),
    ("bitpipe", {}),
    ("dualpipe", {}),
    ("amdp", {}),
]
GIVEN = ("sequential", "list", "functions")


def tied_model(num_stages: int, seed: int = 3) -> nn.Sequential:
    """A layer a stage: the first and the last are one module, the first and a middle one share a weight."""
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    layers = [first, *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages - 2)), first]
    if num_stages > 2:
        layers[num_stages // 2][0].weight = first[0].weight
    return nn.Sequential(*layers)


def tied_names(num_stages: int) -> list[list[str]]:
    """What `tied_model` shares, by name."""
    last, middle = num_stages - 1, num_stages // 2
    weights = ["0.0.weight", f"{middle}.0.weight", f"{last}.0.weight"]
    return [list(dict.fromkeys(weights)), ["0.0.bias", f"{last}.0.bias"]]


def as_given(model: nn.Sequential, given: str) -> tuple[Any, Sequence[Sequence[str]]]:
    """A model of a layer a stage as one of GIVEN, and what `tied=` is to be."""
    if given == "sequential":
        return model, ()
    if given == "list":
        return list(model), ()
    return [lambda s=s: copy.deepcopy(model[s]) for s in range(len(model))], tied_names(len(model))


def steps(num_samples: int, count: int = 2) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(num_samples, WIDTH), torch.randn(num_samples, WIDTH)) for _ in range(count)]


def wrong_copies(name: str, options: dict[str, Any], given: str, zero: bool, num_ranks: int = 4) -> list[str]:
    """What is not as in the grouped loop over two updates, the second after two steps, in words."""
    schedule = ps.build(name, num_ranks, 2 * num_ranks, **options)
    model = tied_model(schedule.num_stages)
    plain = copy.deepcopy(model)
    adam = ADAM(plain.parameters())
    source, tied = as_given(model, given)
    pipe = ps.Pipeline(
        source,
        schedule,
        loss_fn=MSE,
        optimizer=ADAM,
        timeout=PATIENCE,
        parallel=ps.ParallelOptions(tied=tied, sharding="copies" if zero else "none"),
    )
    found: list[str] = []
    for number, (x, y) in enumerate(steps(2 * schedule.num_microbatches + 1, 3), start=1):
        loss, want = grouped_step(plain, x, y, schedule, number)
        for n, p in plain.named_parameters():
            p.grad = want[n]
        result = pipe.step(x, y, update=False)
        own = {n: p.grad for n, p in pipe.named_parameters()}
        found += [f"step {number}: {d}" for d in differences({n: want[n] for n in own}, own)]
        found += [] if torch.equal(result.loss, loss) else [f"step {number}: loss {result.loss} is not {loss}"]
        adam.step()
        pipe.update()
        values = {n: p.detach() for n, p in plain.named_parameters()}
        mine = {n: p.detach() for n, p in pipe.named_parameters()}
        found += [f"step {number}: {d}" for d in differences({n: values[n] for n in mine}, mine)]
    pipe.close()
    return found


def by_columns(stage: nn.Module, mesh: Any) -> None:
    """Cuts every linear layer; its output is gathered again."""
    layers = [name for name, module in stage.named_modules() if isinstance(module, nn.Linear)]
    parallelize_module(stage, mesh, {name: ColwiseParallel(output_layouts=Replicate()) for name in layers})


def wrong_mesh(
    shape: tuple[int, int, int],
    name: str,
    sharding: str = "none",
    given: str = "sequential",
    parallelize: Callable[..., Any] | None = None,
    layers: int | None = None,
    thaw: bool = False,
    instance: bool = False,
) -> list[str]:
    """What is farther from the plain loop than a mesh may be, over two updates of two steps each, in words.

    Args:
        layers: of the model; one per stage where not given.
        thaw: everything is frozen but the last bias, until the first update has been made.
        instance: an optimizer is given, and not what makes one.
    """
    pp, dp, _ = shape
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    schedule = ps.build(name, pp, 2 * pp)
    model = tied_model(layers or schedule.num_stages)
    plain = copy.deepcopy(model)
    for each in (model, plain) if thaw else ():
        each.requires_grad_(False)
        each[-1][0].bias.requires_grad_(True)
    adam = ADAM(plain.parameters())
    source, tied = as_given(model, given)
    given_optimizer: Any = ADAM(model.parameters()) if instance else ADAM
    pipe = ps.Pipeline(
        source,
        schedule,
        loss_fn=MSE,
        optimizer=given_optimizer,
        mesh=mesh,
        timeout=PATIENCE,
        parallel=ps.ParallelOptions(tied=tied, parallelize=parallelize, sharding=sharding),
    )
    found: list[str] = []
    if sharding == "fsdp" and dp > 1:
        found += [f"{n} is whole on every replica" for n, p in pipe.named_parameters() if not is_sharded(p)]
    num = dp * schedule.num_microbatches
    for number, (x, y) in enumerate(steps(2 * num + 1, 4), start=1):
        loss = plain_step(plain, x, y, num, MSE, step=number)
        result = pipe.step(x, y, update=False)
        found += _far(f"step {number}: loss", result.loss, loss)
        if number % 2:
            continue
        for n, p in pipe.named_parameters():
            if p.grad is not None:  # of a parameter that another replica owns there is none
                found += _far(f"step {number}: gradient of {n}", whole(p.grad), plain.get_parameter(n).grad)
            elif sharding != "zero1" and p.requires_grad:
                found.append(f"step {number}: no gradient of {n}")
        adam.step()
        adam.zero_grad()
        pipe.update()
        for each in (model, plain):
            each.requires_grad_(True)
        for n, p in pipe.named_parameters():
            found += _far(f"step {number}: {n}", whole(p.detach()), plain.get_parameter(n).detach())
    pipe.close()
    return found


def _far(what: str, found: Tensor, want: Tensor | None) -> list[str]:
    if want is None or found.shape != want.shape or not torch.allclose(found, want, rtol=TOLERANCE, atol=TOLERANCE):
        return [
            f"{what} is {found.flatten()[:3].tolist()}, want {None if want is None else want.flatten()[:3].tolist()}"
        ]
    return []


class Uses(nn.Module):
    """Uses one weight: in a matmul, which autocast casts, and by looking up its rows, which it does not.

    Args:
        uses: a letter for each; upper case where some microbatches alone have it.
    """

    def __init__(self, uses: str, weight: nn.Parameter) -> None:
        super().__init__()
        self.uses, self.weight = uses, weight
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.sum(1) * 10).long() % WIDTH
        some = float(x.detach()[0, 0]) > 0
        for use in [use.lower() for use in self.uses if use.islower() or some]:
            if use == "m":
                x = nn.functional.linear(x, self.weight).tanh()
            elif use == "l":
                x = x + nn.functional.embedding(rows, self.weight)
            else:  # a cast of the user's own
                x = x @ self.weight.to(torch.bfloat16).float()
        return self.linear(x)


def using(uses: Sequence[str]) -> nn.Sequential:
    """A stage for each, all of which use one weight."""
    torch.manual_seed(6)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    return nn.Sequential(*(Uses(use, weight) for use in uses))


def wrong_casts(model: nn.Sequential, schedule: ps.Schedule, dtype: torch.dtype | None = torch.bfloat16) -> list[str]:
    """What is not as in the loop under autocast, in words; without autocast where `dtype` is None."""
    plain, num = copy.deepcopy(model), schedule.num_microbatches
    pipe = ps.Pipeline(model, schedule, loss_fn=MSE, timeout=PATIENCE, precision=ps.PrecisionOptions(autocast=dtype))
    found: list[str] = []
    for number, (x, y) in enumerate(steps(8 * num + 1), start=1):
        if schedule.placement.num_pipelines > 1:
            loss, want = grouped_step(plain, x, y, schedule, number, dtype)
        else:
            loss = plain_step(plain, x, y, num, MSE, step=number, autocast=dtype)
            want = {n: p.grad for n, p in plain.named_parameters()}
        result = pipe.step(x, y, update=False)
        found += [] if torch.equal(result.loss, loss) else [f"loss {result.loss} is not {loss}"]
        got = {n: p.grad for n, p in pipe.named_parameters()}
        found += differences({n: want[n] for n in got}, got)
        pipe.zero_grad()
        plain.zero_grad()
    pipe.close()
    return found


def refused(model: Any, schedule: ps.Schedule, **options: Any) -> str:
    """The message with which a pipeline is refused; empty where it is not."""
    try:
        ps.Pipeline(model, schedule, loss_fn=MSE, optimizer=ADAM, timeout=PATIENCE, **packed(**options)).close()
    except RuntimeFailure as error:
        return str(error)
    return ""


class Table(nn.Module):
    """Adds a row of a table to every sample; the table's gradients are sparse."""

    def __init__(self, table: nn.Embedding | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH, sparse=True) if table is None else table
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table((x.sum(1) * 10).long() % 10)


def sparse_model(num_stages: int, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(5)
    first = Table()
    return nn.Sequential(first, *(Table(first.table if tied else None) for _ in range(num_stages - 1)))


def wrong_sparse(name: str, num_ranks: int, tied: bool = False) -> list[str]:
    """What is not as in the grouped loop, in a step whose gradients are sparse, in words."""
    schedule = ps.build(name, num_ranks, 2 * num_ranks)
    model = sparse_model(schedule.num_stages, tied)
    plain = copy.deepcopy(model)
    pipe = ps.Pipeline(model, schedule, loss_fn=MSE, optimizer=partial(torch.optim.SGD, lr=0.1), timeout=PATIENCE)
    x, y = steps(2 * schedule.num_microbatches + 1, 1)[0]
    _, want = grouped_step(plain, x, y, schedule, 1)
    pipe.step(x, y, update=False)
    got = {n: p.grad for n, p in pipe.named_parameters()}
    found = [f"{n} is not sparse" for n, g in got.items() if g is not None and g.is_sparse != ("table" in n)]
    found += differences(*({n: grads[n].to_dense() for n in got} for grads in (want, got)))  # type: ignore[union-attr]
    pipe.update()
    pipe.close()
    return found
