"""Several runs of one method trained as one model: every parameter is a stack of the runs' own.

    samples of run 0 | of run 1 | of run 2      [R n, T, D]
         x W[0]          x W[1]     x W[2]      one batched product, [R, in, out]

The runs share a schedule, and so the ops and their order; they differ in first weights, data or learning rate. No
number of one enters another's: a run's rows meet its own weights alone, losses are added up, and optimizers work by
element or run by run. So each comes to what it would come to alone, up to rounding. For models as small as these,
whose time goes into starting kernels, three runs take half the time that they take one after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.optim import Optimizer

from penstock.models.bert import BERTEmbedding
from penstock.models.gpt import Embedding
from penstock.runtime.parameters.muon import leave_to_adamw
from penstock.runtime.tensors.dtensor import standing_for


class StackedLinear(nn.Module):
    """`nn.Linear` of R runs on [R n, ..., in]."""

    def __init__(self, runs: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = _stack([run.weight.T for run in runs])  # R, in, out
        self.bias = None if runs[0].bias is None else _stack([run.bias for run in runs])  # R, out

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = x.reshape(len(self.weight), -1, x.shape[-1]), self.weight
        out = rows @ weight if self.bias is None else torch.baddbmm(self.bias.unsqueeze(1), rows, weight)
        return out.view(*x.shape[:-1], -1)


class StackedLayerNorm(nn.Module):
    """`nn.LayerNorm` of R runs on [R n, ..., D]."""

    def __init__(self, runs: Sequence[nn.LayerNorm]) -> None:
        super().__init__()
        self.eps = runs[0].eps
        self.weight = _stack([run.weight for run in runs])  # R, D
        self.bias = _stack([run.bias for run in runs])

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.layer_norm(x, x.shape[-1:], eps=self.eps).reshape(len(self.weight), -1, x.shape[-1])
        return torch.addcmul(self.bias.unsqueeze(1), normed, self.weight.unsqueeze(1)).view_as(x)


class StackedEmbedding(nn.Module):
    """The embedding of a GPT or a BERT of R runs, with the same interface."""

    def __init__(self, runs: Sequence[Embedding | BERTEmbedding]) -> None:
        super().__init__()
        tables = ("token", "position", "segment") if isinstance(runs[0], BERTEmbedding) else ("token", "position")
        for name in tables:
            self.register_parameter(name, _stack([getattr(run, name).weight for run in runs]))  # R, rows, D
            leave_to_adamw(self.get_parameter(name))
        self._gives_dict = isinstance(runs[0], BERTEmbedding)

    def forward(self, given: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        value = {"tokens": given} if isinstance(given, Tensor) else given
        tokens = value["tokens"]  # R n, T
        place = torch.arange(tokens.shape[-1]).expand_as(tokens)
        hidden = _looked_up(self.token, tokens) + _looked_up(self.position, place)
        if not self._gives_dict:
            return hidden
        hidden = hidden + _looked_up(self.segment, value.get("segments", torch.zeros_like(tokens)))
        return {"hidden": hidden} if "real" not in value else {"hidden": hidden, "real": value["real"].bool()}


def _looked_up(table: Parameter, rows: Tensor) -> Tensor:
    """table[R, rows, D] by rows[R n, T] to [R n, T, D]."""
    num_runs, size, _ = table.shape
    first = torch.arange(0, num_runs * size, size).repeat_interleave(len(rows) // num_runs).unsqueeze(-1)
    return functional.embedding(rows + first, table.flatten(0, 1))


def _stack(parameters: Iterable[Tensor]) -> Parameter:
    return Parameter(torch.stack([each.detach() for each in parameters]))


STACKED: Sequence[tuple[tuple[type[nn.Module], ...], Callable[[Any], nn.Module]]] = (
    ((Embedding, BERTEmbedding), StackedEmbedding),
    ((nn.Linear,), StackedLinear),
    ((nn.LayerNorm,), StackedLayerNorm),
)


def stacked(runs: Sequence[nn.Module]) -> nn.Module:
    """The first run's module with the parameters of all, which are of one shape; it takes [R n, ...].

    Raises:
        TypeError: a module with parameters of its own that is not among `STACKED`.
    """
    for kinds, made in STACKED:
        if isinstance(runs[0], kinds):
            return made(runs)
    if own := [name for name, _ in runs[0].named_parameters(recurse=False)]:
        raise TypeError(f"{type(runs[0]).__name__} has parameters of its own ({', '.join(own)}) and no stacked form")
    for name, _ in list(runs[0].named_children()):
        setattr(runs[0], name, stacked([run.get_submodule(name) for run in runs]))
    return runs[0]


class SumOfLosses:
    """The sum of the runs' losses, of which each is the mean over its own samples; keeps what was evaluated apart."""

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor], num_runs: int) -> None:
        self._loss_fn, self._num_runs = loss_fn, num_runs
        self._seen: list[list[float]] = []

    def __call__(self, output: Any, targets: Any) -> Tensor:
        if torch.is_grad_enabled():  # all runs have as many samples, and these as many tokens
            return self._loss_fn(output, targets) * self._num_runs
        parts = zip(_dealt(output, self._num_runs), _dealt(targets, self._num_runs), strict=True)
        losses = torch.stack([self._loss_fn(*part) for part in parts])
        self._seen.append(losses.tolist())
        return losses.sum()

    def means(self) -> list[float]:
        """Each run's mean over what was evaluated since this was last asked."""
        seen, self._seen = self._seen, []
        return [statistics.mean(losses) for losses in zip(*seen, strict=True)]


def _dealt(value: Any, num_runs: int) -> Sequence[Any]:
    if isinstance(value, Tensor):
        return value.chunk(num_runs)
    parts = {name: _dealt(each, num_runs) for name, each in value.items()}
    return [{name: part[run] for name, part in parts.items()} for run in range(num_runs)]


def joined(values: Sequence[Any]) -> Any:
    """The runs' samples, one run's after the other's."""
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))
    return {name: joined([value[name] for value in values]) for name in values[0]}


class RunByRun(Optimizer):
    """An optimizer for each run, over the run's own slices of the stacks, at a rate of its own.

    Args:
        params: stacks, [R, ...].
        make: of an optimizer from parameters and `lr`.
        lr: of the run whose factor is one.
        factors: of each run, by what its rate is above that.
    """

    def __init__(
        self, params: Iterable[Parameter], make: Callable[..., Optimizer], lr: float, factors: Sequence[float]
    ) -> None:
        super().__init__(list(params), {"lr": lr})
        self._factors = factors
        self._stacks = [stack for group in self.param_groups for stack in group["params"]]
        self._slices = [
            [standing_for(stack, stack.data[run]) for stack in self._stacks] for run in range(len(factors))
        ]
        self._optimizers = [make(own, lr=lr * factor) for own, factor in zip(self._slices, factors, strict=True)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (rate,) = {group["lr"] for group in self.param_groups}
        for run, (optimizer, own, factor) in enumerate(
            zip(self._optimizers, self._slices, self._factors, strict=True)
        ):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            for stack, part in zip(self._stacks, own, strict=True):
                part.data = stack.data[run]  # whoever has the stack may have given it other memory
                part.grad = None if stack.grad is None else stack.grad[run]
            optimizer.step()
