"""What tests of rules for inputs run: a model of several inputs, batches cut by hand, and each process's part."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from plain_loop import differences, gradients, plain_step

T, D = 3, 4
MSE = nn.MSELoss()


class Inputs(nn.Module):
    """Tokens [B, T], positions [3, B, T], a row of the whole batch [1, T], and weights [T, B] by time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(11, D), nn.Embedding(20, D)

    def forward(self, tokens: Tensor, positions: Tensor, row: Tensor, weights: Tensor, scale: Any = 1.0) -> Tensor:
        x = self.embed(tokens) + self.places(positions).mean(0) * scale
        return (x + row[..., None]) * weights.T[..., None]


class ByTime(nn.Module):
    """Its output has the samples in dimension 1, as its targets have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).transpose(0, 1)


RULES = ps.BatchRules(inputs={"positions": 1, "row": ps.WHOLE, "weights": -1}, targets=1)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Inputs(), ByTime()]


def batch(size: int, seed: int = 0) -> tuple[dict[str, Any], Tensor]:
    made = torch.Generator().manual_seed(seed)
    inputs = {
        "tokens": torch.randint(11, (size, T), generator=made),
        "positions": torch.randint(20, (3, size, T), generator=made),
        "row": torch.randn(1, T, generator=made),
        "weights": torch.randn(T, size, generator=made),
        "scale": 0.5,
    }
    return inputs, torch.randn(T, size, 2, generator=made)


DIMENSIONS = {"tokens": 0, "positions": 1, "weights": 1}


def by_hand(inputs: dict[str, Any], targets: Tensor, num: int) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """The microbatches, as their user would cut them."""
    parts = {key: inputs[key].tensor_split(num, dim) for key, dim in DIMENSIONS.items()}
    rest = {"row": inputs["row"], "scale": inputs["scale"]}
    cut = [{**{key: part[m] for key, part in parts.items()}, **rest} for m in range(num)]
    return cut, list(targets.tensor_split(num, 1))


def plain(inputs: dict[str, Any], targets: Tensor, num: int, step: int) -> tuple[Tensor, dict[str, Any]]:
    model = stages()
    loss = plain_step(model, *by_hand(inputs, targets, num), num, MSE, step=step)
    return loss, gradients(model)


def over_processes(process: int, name: str) -> list[str]:
    """What differs from a plain loop over as many microbatches, with batches of several sizes."""
    wrong = []
    pipe = ps.Pipeline(stages(), ps.build(name, 2, 4), loss_fn=MSE, batch=RULES)
    for step, size in enumerate((9, 3, 1, 4, 2), start=1):
        inputs, targets = batch(size, step)
        result = pipe.step(inputs, targets, update=False)
        loss, want = plain(inputs, targets, min(4, size), step)
        got = {key: p.grad for key, p in pipe.named_parameters()}
        wrong += [f"{size} samples: {each}" for each in differences({key: want[key] for key in got}, got)]
        if not torch.equal(result.loss, loss):
            wrong.append(f"{size} samples: loss {result.loss}, want {loss}")
        pipe.zero_grad()
    pipe.close()
    return wrong


def over_two_ways(process: int, options: list[tuple[str, int, str]]) -> list[str]:
    """What differs from a plain loop where a small batch leaves one of two pipelines without a microbatch."""
    wrong = []
    for name, num_replicas, sharding in options:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Dropout(0.0))
        plain, parts = copy.deepcopy(model), [model[:2], model[2:]]
        dispatch = "dynamic" if num_replicas == 1 else "frozen"
        optimizer = torch.optim.AdamW(plain.parameters())
        pipe = ps.Pipeline(
            parts, ps.build(name, 2, 4), loss_fn=MSE, optimizer=torch.optim.AdamW, dispatch=dispatch,
            mesh=ps.runtime.device_mesh(ps.Mesh(2, num_replicas, 1)) if num_replicas > 1 else None,
            parallel=ps.ParallelOptions(sharding=sharding),
        )  # fmt: skip
        for step, size in enumerate((8, 1, 2, 8, 1), start=1):
            x = torch.randn(size * num_replicas, D, generator=torch.Generator().manual_seed(step))
            result = pipe.step(x, x.cos())
            loss = MSE(plain(x), x.cos())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not torch.allclose(result.loss, loss) or not torch.allclose(
                pipe.evaluate(x, x).loss, MSE(plain(x), x)
            ):
                wrong.append(f"{name}, {sharding}, {size} samples: loss {result.loss}, want {loss}")
        want = dict(nn.Sequential(plain[:2], plain[2:]).named_parameters())
        for key, p in pipe.named_parameters():
            if not torch.allclose(p, want[key], atol=1e-5):
                wrong.append(f"{name}, {sharding}: {key}")
        pipe.close()
    return wrong


def over_replicas(process: int) -> list[str]:
    """What differs between whole batches and replicas' parts, and from a plain loop but for rounding."""
    wrong = []
    pipes = [
        ps.Pipeline(
            stages(), ps.build("1f1b", 2, 4), loss_fn=MSE, batch=RULES,
            mesh=ps.runtime.device_mesh(ps.Mesh(2, 2, 1)), parallel=ps.ParallelOptions(batches=batches),
        )
        for batches in ("whole", "replica")
    ]  # fmt: skip
    rank, replica = process // 2, process % 2
    for step, size in enumerate((8, 4, 2, 16), start=1):
        inputs, targets = batch(size, step)
        halves = by_hand(inputs, targets, 2)
        part = halves[0][replica] if rank == 0 else None, halves[1][replica] if rank == 1 else None
        one, other = pipes[0].step(inputs, targets, update=False), pipes[1].step(*part, update=False)
        loss, want = plain(inputs, targets, min(8, size), step)
        torch.testing.assert_close(one.loss, loss)
        if not torch.equal(one.loss, other.loss):
            wrong.append(f"{size} samples: loss {one.loss} and {other.loss}")
        got = [{key: p.grad for key, p in pipe.named_parameters()} for pipe in pipes]
        wrong += [f"{size} samples: {each}" for each in differences(*got)]
        for key, gradient in got[0].items():
            torch.testing.assert_close(gradient, want[key])
        for pipe in pipes:
            pipe.zero_grad()
    for pipe in pipes:
        pipe.close()
    return wrong
