"""A model with causal attention that takes a sequence slice by slice, as a grid of stages: its parts by the slices.

Stage `part * num_slices + j` runs a part of the model on slice j. It takes the slice from the part before it, and
from its own part the keys and values of the slices before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps

WIDTH, TOKENS = 8, 12


def grid(num_parts: int, num_slices: int) -> ps.schedule.StageGraph:
    """Each slice comes after itself in the part before, and after the slice before in its own part."""
    stages = range(num_parts * num_slices)
    down = [(s, s + num_slices) for s in stages if s + num_slices in stages]
    along = [(s, s + 1) for s in stages if (s + 1) % num_slices]
    return ps.schedule.StageGraph(len(stages), tuple(sorted(down + along)))


def sliced(num_parts: int, num_slices: int, num_microbatches: int, split: bool = False) -> ps.Program:
    """1F1B over slices (Seq1F1B), a part of the model on each rank."""
    placement = ps.placements.table([[part for part in range(num_parts) for _ in range(num_slices)]])
    cap = [(num_parts - part + 1) * num_slices - 1 for part in range(num_parts)]
    each = 1 / num_slices
    costs = ps.Costs.uniform(placement.num_stages, each, each, each, activation=each)
    rules = ps.Rules(max_in_flight=cap, forward=ps.program.by_microbatch())
    stages = grid(num_parts, num_slices)
    return ps.Program(placement, num_microbatches, rules, split, costs, stages=stages, name="seq1f1b")


class Part(nn.Module):
    """A causal attention and a linear layer, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: (B, T, D), a slice; keys, values: (B, P, D) of the P tokens before it. Returns those with its own."""
        query, key, value = self.attend(x).chunk(3, dim=-1)
        key, value = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        places = torch.arange(x.shape[1])[:, None] + keys.shape[1]
        scores = query @ key.transpose(1, 2)
        scores = scores.masked_fill(torch.arange(key.shape[1]) > places, -torch.inf)
        return x + self.out(scores.softmax(-1) @ value), key, value


class Slice(nn.Module):
    """A part of the model for one slice. The first part hands on the tokens to come, the last what it has made."""

    def __init__(self, part: Part, at: tuple[int, int], num_parts: int, num_slices: int) -> None:
        super().__init__()
        self.part, self.size = part, TOKENS // num_slices
        self.is_first, self.is_last = at[0] == 0, at[0] == num_parts - 1
        self.starts, self.ends = at[1] == 0, at[1] == num_slices - 1

    def forward(self, *given: Any) -> Any:
        """What the part before and the slice before gave, in this order, of those that there are."""
        if self.is_first and self.starts:
            x, kept = given[0], None
        elif self.is_first:
            kept = given[0] if isinstance(given[0], tuple) else given
            x = kept[3]
        elif self.starts:
            below, kept = (given[0] if isinstance(given[0], tuple) else given), None
            x = below[0]
        else:
            x, kept = given[0][0], given[1]
        left = x[:, self.size :]
        x = x[:, : self.size]
        none = x[:, :0]
        out, keys, values = self.part(x, *(kept[1:3] if kept else (none, none)))
        made = torch.cat([kept[3], out], 1) if self.is_last and kept else out
        if self.is_last and self.ends:
            return made
        return out, keys, values, left if self.is_first else made if self.is_last else none


def stages_of(parts: list[Part], num_slices: int) -> list[Slice]:
    """The modules of the grid; a part's slices share their parameters."""
    return [Slice(part, (i, j), len(parts), num_slices) for i, part in enumerate(parts) for j in range(num_slices)]


def parts_of(num_parts: int) -> list[Part]:
    torch.manual_seed(0)
    return [Part() for _ in range(num_parts)]


def whole(parts: list[Part], x: Tensor) -> Tensor:
    """The model on whole sequences."""
    for part in parts:
        x, _, _ = part(x, x[:, :0], x[:, :0])
    return x
