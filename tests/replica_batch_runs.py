"""What `test_replica_batches_processes` runs in each process: the same steps with whole batches and with parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime import RuntimeFailure

N = 4
"""Microbatches of a replica."""


class Counted:
    """A mean over the targets that are not 0."""

    def weight(self, targets: Tensor) -> float:
        return float((targets != 0).sum())

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return ((output - targets).square() * (targets != 0)).sum() / (targets != 0).sum().clamp(min=1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Dropout(0.1))), nn.Linear(6, 1))


def pipeline(schedule: str, dims: tuple[int, int], batches: str, loss: Any) -> ps.Pipeline:
    pp, dp = dims
    return ps.Pipeline(
        model(),
        ps.build(schedule, pp, N),
        loss_fn=loss,
        optimizer=torch.optim.SGD,
        mesh=ps.runtime.device_mesh(ps.Mesh(pp, dp, 1)) if dp > 1 else None,
        parallel=ps.ParallelOptions(batches=batches),
    )


def given(pipe: ps.Pipeline, schedule: str, pp: int, dp: int, whole: tuple[Tensor, Tensor], process: int) -> Any:
    """This process's part: of its replica, and of that what its stages take."""
    rank, replica = process // dp, process % dp
    inputs, targets = (part.chunk(dp)[replica] for part in whole)
    placement = ps.build(schedule, pp, N).placement
    first = any(ranks[0] == rank for ranks in placement.pipelines)
    last = any(ranks[-1] == rank for ranks in placement.pipelines)
    return inputs if first else None, targets if last else None


def compared(process: int, cases: list[tuple[str, int, int]]) -> list[str]:
    """What differs between whole batches and parts."""
    wrong = []
    for schedule, pp, dp in cases:
        for loss in (nn.MSELoss(), Counted()):
            a = pipeline(schedule, (pp, dp), "whole", loss)
            b = pipeline(schedule, (pp, dp), "replica", loss)
            draws = torch.Generator().manual_seed(1)
            seen = []
            for step, size in enumerate((8 * dp, 4 * dp, 12 * dp)):
                whole = torch.randn(size, 6, generator=draws), torch.randn(size, 1, generator=draws).round()
                part = given(b, schedule, pp, dp, whole, process)
                one, other = a.step(*whole, update=step == 2), b.step(*part, update=step == 2)
                same = torch.equal(one.loss, other.loss) and torch.equal(one.losses, other.losses)
                for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
                    gradients = p.grad is None or torch.equal(p.grad, q.grad)
                    same = same and torch.equal(p, q) and gradients and (p.grad is None) == (q.grad is None)
                    if not same:
                        wrong.append(f"{schedule} {pp}x{dp} {type(loss).__name__} step {step}: {name}")
                        break
                if not torch.equal(a.evaluate(*whole).loss, b.evaluate(*part).loss):
                    wrong.append(f"{schedule} {pp}x{dp} {type(loss).__name__} step {step}: evaluation")
                seen.append((whole, part))
            means = [pipe.evaluate(each) for pipe, each in zip((a, b), map(iter, zip(*seen)))]
            if not torch.equal(means[0].loss, means[1].loss):
                wrong.append(f"{schedule} {pp}x{dp} {type(loss).__name__}: evaluation over a loader")
            predicted = zip(a.predict(whole[0]), b.predict(part[0]), strict=True)
            if not all(torch.equal(x, y) for x, y in predicted):
                wrong.append(f"{schedule} {pp}x{dp} {type(loss).__name__}: predictions")
            a.close()
            b.close()
    return wrong


def refused(process: int) -> list[str]:
    """Mistakes of one process, each an error in all; afterwards a step works."""
    pipe = pipeline("1f1b", (2, 2), "replica", nn.MSELoss())
    whole = torch.randn(16, 6), torch.randn(16, 1)
    inputs, targets = given(pipe, "1f1b", 2, 2, whole, process)
    said = []
    for one, x, y in (
        (1, None, targets),
        (3, inputs, None),
        (0, inputs if inputs is None else inputs[:3], targets),
        (2, inputs, torch.ones(7, 1)),
        (0, inputs if inputs is None else [inputs[:4], inputs[4:]], targets),
        (0, inputs, "text"),
    ):
        given_now = (x, y) if process == one else (inputs, targets)
        try:
            pipe.step(*given_now)
            said.append("nothing")
        except RuntimeFailure as error:
            said.append(str(error))
    said.append(f"{float(pipe.step(inputs, targets).loss) > 0}")
    pipe.close()
    return said


def uneven(process: int) -> tuple[float, float, list[Tensor]]:
    """How far an evaluation, a step and its gradients are from the whole batch, if replica 1 has a small part."""
    parts = [(torch.arange(6.0 * size).view(size, 6).sin(), torch.ones(size, 1)) for size in (8, 3)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    mesh, parallel = ps.runtime.device_mesh(ps.Mesh(1, 2, 1)), ps.ParallelOptions(batches="replica")
    with ps.Pipeline(model, ps.build("1f1b", 1, N), loss_fn=nn.MSELoss(), mesh=mesh, parallel=parallel) as pipe:
        evaluated, trained = pipe.evaluate(*parts[process]), pipe.step(*parts[process])
        gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    want = nn.functional.mse_loss(whole(torch.cat([x for x, _ in parts])), torch.ones(11, 1))
    want.backward()
    apart = [
        (p.grad - g).abs().max() for p, g in zip(whole.parameters(), gradients, strict=True) if p.grad is not None
    ]
    return abs(float(evaluated.loss - want)), abs(float(trained.loss - want)), apart


def mistyped(process: int) -> str:
    """Each replica gives its own inputs; the rule is for a key that these do not have."""
    mesh = ps.runtime.device_mesh(ps.Mesh(1, 2, 1))
    parallel, rules = ps.ParallelOptions(batches="replica"), ps.BatchRules(inputs={"inputs": 0})
    model = [nn.Linear(6, 1)]
    with ps.Pipeline(
        model, ps.build("1f1b", 1, 2), loss_fn=nn.MSELoss(), mesh=mesh, parallel=parallel, batch=rules
    ) as pipe:
        try:
            pipe.step({"input": torch.randn(4, 6)}, torch.randn(4, 1))
        except RuntimeFailure as error:
            return str(error)
    return "nothing"


class GivesLoss(nn.Linear):
    """A model that returns its share of the loss of 16 samples."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(x).square().sum() / 16}


def without_targets(process: int) -> list[Any]:
    """The loss and gradients of a batch without targets, whole and in parts, and what is said of a counting loss."""
    found: list[Any] = []
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))

    def of_model(output: dict[str, Tensor], _: None) -> Tensor:
        return output["loss"]

    loss_fn: Any = of_model
    loss_fn.adds_up = True
    for batches, given_now in (("whole", inputs), ("replica", inputs.chunk(2)[process])):
        for loss in (loss_fn, Counted()):
            torch.manual_seed(0)
            pipe = ps.Pipeline(
                nn.Sequential(GivesLoss(6, 6)),
                ps.build("1f1b", 1, 4),
                loss_fn=loss,
                mesh=ps.runtime.device_mesh(ps.Mesh(1, 2, 1)),
                parallel=ps.ParallelOptions(batches=batches),
            )
            try:
                found.append((pipe.step(given_now).loss.item(), [p.grad.clone() for p in pipe.parameters()]))
            except RuntimeFailure as error:
                found.append(str(error))
            pipe.close()
    return found
