"""What a microbatch of sequences costs, from their lengths alone: known before it runs.

    ms, or bytes  =  fixed + per_token * sum of l + per_square * sum of l**2          l: the length of each sequence

The part by token is what linear layers take; the part by square is attention, in which a token sees its own sequence
only. So two microbatches with as many tokens differ where one has longer sequences.

    costs = fit_costs(samples, num_stages=4)          measured ops, each with the lengths of its microbatch
    costs.of([[512, 300, 40], [1800]])                ps.Costs of two microbatches, to simulate and plan with

Where a model has towers, like an encoder of images before a decoder of text, each stage takes the lengths of its own:

    costs.of({"images": [[196, 196], []], "text": [[512, 300], [1800]]})
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, combinations
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.errors import CostError
from penstock.cost.uneven import Array
from penstock.schedule.short_repr import short_repr

Lengths = Sequence[int]
"""Of the sequences of one microbatch, tokens each."""
Microbatches = Sequence[Lengths] | Mapping[str, Sequence[Lengths]]
"""Lengths by microbatch; by tower where there are several."""

KINDS = {"F": "f", "I": "i", "W": "w", "B": "b"}
"""Kinds of op, and the fields with their costs."""


@dataclass(frozen=True)
class LengthLine:
    """`fixed + per_token * tokens + per_square * squares`, in ms or bytes.

    Attributes:
        fixed: ms or bytes for each microbatch.
        per_token: ms or bytes for each token.
        per_square: ms or bytes for each squared length, summed over sequences.

    Raises:
        CostError: a part that is below 0 or not a number.

    Examples:
        >>> import penstock as ps
        >>> line = ps.cost.LengthLine(fixed=1.0, per_token=0.01)
        >>> line.fixed + line.per_token * 500
        6.0
    """

    fixed: float = 0.0
    per_token: float = 0.0
    per_square: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise CostError(f"{each.name} of a cost by length is {value!r}: give a number of at least 0")

    @property
    def row(self) -> tuple[float, float, float]:
        return self.fixed, self.per_token, self.per_square

    def __add__(self, other: LengthLine) -> LengthLine:
        return LengthLine(*(a + b for a, b in zip(self.row, other.row, strict=True)))


@dataclass(frozen=True)
class CostsByLength:
    """Costs of every stage by the lengths of a microbatch's sequences, one entry per stage.

    Attributes:
        f, i, w: ms of the forward and of the two halves of the backward.
        b: ms of a whole backward; i + w where not given.
        activation: bytes, or units, that a forward keeps.
        message_bytes: that a forward sends on.
        freed_by_input: as in `Costs`.
        towers: the name of each stage's tower, whose lengths it takes; where not given, all stages take the same.

    Raises:
        CostError: rows of different lengths, or none.

    Examples:
        >>> import penstock as ps
        >>> line = ps.cost.LengthLine(per_token=0.01, per_square=1e-5)
        >>> costs = ps.cost.CostsByLength(f=[line] * 2, i=[line] * 2, w=[line] * 2)
        >>> round(costs.of([[1000], [500, 500]]).duration("F", 0, 0), 3)
        20.0
    """

    f: Sequence[LengthLine]
    i: Sequence[LengthLine]
    w: Sequence[LengthLine]
    b: Sequence[LengthLine] = ()
    activation: Sequence[LengthLine] = ()
    message_bytes: Sequence[LengthLine] = ()
    freed_by_input: float = 0.5
    towers: Sequence[str] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        num = len(self.f)
        if not num:
            raise CostError("costs by length need at least one stage")
        whole = [i + w for i, w in zip(self.i, self.w, strict=False)]
        given = {"f": self.f, "i": self.i, "w": self.w, "b": tuple(self.b) or tuple(whole)}
        given["activation"] = tuple(self.activation) or (LengthLine(per_token=1.0),) * num
        given["message_bytes"] = tuple(self.message_bytes) or (LengthLine(),) * num
        for name, lines in given.items():
            if len(lines) != num:
                raise CostError(f"{name} has {len(lines)} entries; give one per stage, {num} in all")
            object.__setattr__(self, name, tuple(lines))
        names = tuple(self.towers)
        if names and (len(names) != num or not all(isinstance(name, str) for name in names)):
            raise CostError(f"towers are {names!r}: give the name of each stage's tower, {num} in all")
        object.__setattr__(self, "towers", names)

    @property
    def num_stages(self) -> int:
        return len(self.f)

    @property
    def tower_names(self) -> tuple[str, ...]:
        """Each tower once, in the order of its first stage; empty where all stages take the same lengths."""
        return tuple(dict.fromkeys(self.towers))

    def sums(self, microbatches: Microbatches) -> Array:
        """`length_sums` of each tower side by side, [M, 3 T]; of microbatches by tower where there are several.

        Raises:
            CostError: lengths of other towers, of different numbers of microbatches, or no whole numbers above 0.
        """
        names = self.tower_names
        if not isinstance(microbatches, Mapping):
            if len(names) > 1:
                raise CostError(f"the stages take lengths of {', '.join(names)}: give those of each, by its name")
            return length_sums(microbatches)
        if set(microbatches) != set(names):
            raise CostError(
                f"lengths are given of {', '.join(map(repr, microbatches))}, and stages take those of "
                f"{', '.join(map(repr, names)) or 'no tower by name'}"
            )
        if len({len(own) for own in microbatches.values()}) > 1:
            counts = ", ".join(f"{len(own)} of {name}" for name, own in microbatches.items())
            raise CostError(f"lengths of {counts} microbatches: give each tower's, empty where it has none")
        return np.concatenate([length_sums(microbatches[name]) for name in names], axis=1)

    def of(self, microbatches: Microbatches) -> Costs:
        """The costs of microbatches of these lengths, op by op.

        Raises:
            CostError: as of `sums`.
        """
        return self.of_sums(self.sums(microbatches))

    def of_sums(self, sums: Array) -> Costs:
        """The costs of microbatches by their `sums`."""
        names = [*KINDS.values(), "activation"]
        if any(any(line.row) for line in self.message_bytes):
            names.append("message_bytes")
        rows: dict[str, Any] = {name: (self._lines(name) @ sums.T).tolist() for name in names}
        return Costs.by_microbatch(**rows, freed_by_input=self.freed_by_input)

    def work(self, sums: Array) -> Array:
        """Ms of all ops of each microbatch, on all stages: of `sums`, one number each."""
        return sums @ (self._lines("f") + self._lines("b")).sum(axis=0)

    def work_by_tower(self, sums: Array) -> Array:
        """Ms of all ops of each microbatch on the mean stage of each tower, [M, T]."""
        lines, names = self._lines("f") + self._lines("b"), self.towers or ("",) * self.num_stages
        means = [lines[[name == tower for name in names]].mean(axis=0) for tower in dict.fromkeys(names)]
        return sums @ np.array(means).T

    def _lines(self, name: str) -> Array:
        """The parts of each stage's line, in the columns of its tower, (S, 3 T)."""
        rows = np.array([line.row for line in getattr(self, name)])
        names = self.tower_names
        if len(names) < 2:
            return rows
        placed = np.zeros((len(rows), 3 * len(names)))
        for stage, tower in enumerate(self.towers):
            first = 3 * names.index(tower)
            placed[stage, first : first + 3] = rows[stage]
        return placed


def length_sums(microbatches: Sequence[Lengths]) -> Array:
    """Of each microbatch (1, sum of lengths, sum of their squares), [M, 3]. Raises CostError."""
    found = np.empty((len(microbatches), 3))
    for m, lengths in enumerate(microbatches):
        row = np.asarray(lengths, np.float64)
        if row.ndim != 1 or not np.isfinite(row).all() or (row < 1).any():
            raise CostError(f"the lengths of microbatch {m} are {lengths!r}: give whole numbers above 0")
        found[m] = 1.0, row.sum(), row @ row
    return found


class LengthSample(NamedTuple):
    """An op that was measured: its kind and stage, the lengths of its microbatch, and what it took.

    Attributes:
        kind: F, B, I or W.
        stage: of the op.
        lengths: tokens of each sequence in the microbatch.
        ms: how long the op took.

    Examples:
        >>> import penstock as ps
        >>> sample = ps.cost.LengthSample("F", stage=0, lengths=(100, 200), ms=3.1)
        >>> sum(sample.lengths), sample.ms
        (300, 3.1)
    """

    kind: str
    stage: int
    lengths: Lengths
    ms: float


@dataclass(frozen=True)
class FitError:
    """How far a fitted cost is from what it was fitted to, as shares of what was measured.

    Attributes:
        kind, stage: of the ops. num_samples: of them.
        median, worst: of the single samples' errors.
        total: of the sum of all samples.
    """

    kind: str
    stage: int
    num_samples: int
    median: float
    worst: float
    total: float


@dataclass(frozen=True)
class FittedCosts:
    """Costs by length as they were fitted, and how well they fit.

    Attributes:
        costs: the fitted lines.
        errors: how far each sample is from them.

    Examples:
        >>> import penstock as ps
        >>> samples = [ps.cost.LengthSample(kind, 0, (n,), 0.01 * n) for kind in "FB" for n in (100, 200, 400)]
        >>> fitted = ps.cost.fit_costs(samples, num_stages=1)
        >>> fitted.median_error < 1e-6
        True
    """

    costs: CostsByLength
    errors: tuple[FitError, ...]

    __repr__ = short_repr

    @property
    def median_error(self) -> float:
        """Of the kinds and stages, the median of their median errors."""
        return median(each.median for each in self.errors)


def fit_costs(
    samples: Iterable[LengthSample],
    num_stages: int,
    *,
    activation: Sequence[LengthLine] = (),
    message_bytes: Sequence[LengthLine] = (),
    towers: Sequence[str] = (),
) -> FittedCosts:
    """Costs by length from ops that were measured, of a few lengths at least.

    The errors' squares are least, each sample's as a share of what it took, and no part is below 0. Of one
    length alone time is proportional to tokens, as more cannot be known. A stage that ran whole backwards has half of
    one for I and half for W.

    Args:
        num_stages: of the model.
        samples: those of kinds other than F, B, I and W are passed over. Lengths are those of the stage's tower.
        activation: what a forward keeps, a line per stage, as `CostsByLength` takes it.
        message_bytes: what a stage sends on, a line per stage, as `CostsByLength` takes it.
        towers: the name of each stage's tower, as `CostsByLength` takes it.

    Raises:
        CostError: no sample of some stage's forward or backward, times below 0, or a stage that is not there.

    Examples:
        >>> import penstock as ps
        >>> samples = [ps.cost.LengthSample(kind, 0, (n,), 0.01 * n) for kind in "FB" for n in (100, 200, 400)]
        >>> fitted = ps.cost.fit_costs(samples, num_stages=1)
        >>> round(fitted.costs.of([[1000]]).duration("F", 0, 0), 3)
        10.0
    """
    by_op: dict[tuple[str, int], list[LengthSample]] = {}
    for sample in samples:
        if sample.kind not in KINDS:
            continue
        if not 0 <= sample.stage < num_stages or not 0 <= sample.ms < math.inf:
            raise CostError(
                f"a sample of {sample.kind} on stage {sample.stage} takes {sample.ms} ms: give stages from 0 to "
                f"{num_stages - 1}, and times of at least 0"
            )
        by_op.setdefault((sample.kind, sample.stage), []).append(sample)
    lines: dict[tuple[str, int], LengthLine] = {}
    errors = []
    for (kind, stage), own in sorted(by_op.items()):
        sums, ms = length_sums([each.lengths for each in own]), np.array([each.ms for each in own])
        lines[kind, stage] = line = _fitted(sums, ms)
        off = np.abs(sums @ line.row - ms) / np.maximum(ms, _LEAST_MS)
        total = abs(float((sums @ line.row).sum() / max(ms.sum(), _LEAST_MS)) - 1)
        errors.append(FitError(kind, stage, len(own), float(np.median(off)), float(off.max()), total))
    found = _whole(lines, num_stages, activation, message_bytes)
    return FittedCosts(replace(found, towers=towers), tuple(errors))


_LEAST_MS = 1e-9
"""Below this a time is 0."""


def _fitted(sums: Array, ms: Array) -> LengthLine:
    """Least squares with no part below 0: the best over all choices of parts, of which there are seven."""
    weight = 1 / np.maximum(ms, max(float(ms.max()) * 1e-3, _LEAST_MS))
    rows, wanted = sums * weight[:, None], ms * weight
    best: tuple[float, Array] = math.inf, np.zeros(3)
    for chosen in chain.from_iterable(combinations((1, 2, 0), count) for count in (1, 2, 3)):
        part = rows[:, chosen]
        scale = np.linalg.norm(part, axis=0)
        found, _, rank, _ = np.linalg.lstsq(part / scale, wanted, rcond=1e-9)
        if rank < len(chosen) or (found < 0).any():
            continue
        left = float(np.sum((part / scale @ found - wanted) ** 2))
        if left < best[0] * (1 - 1e-9):
            row = np.zeros(3)
            row[list(chosen)] = found / scale
            best = left, row
    return LengthLine(*map(float, best[1]))


def _whole(
    lines: Mapping[tuple[str, int], LengthLine],
    num_stages: int,
    activation: Sequence[LengthLine],
    message_bytes: Sequence[LengthLine],
) -> CostsByLength:
    """Raises CostError where a stage's forward or backward was not measured."""

    def half(kind: str, stage: int) -> LengthLine:
        if (kind, stage) in lines:
            return lines[kind, stage]
        whole = lines.get(("B", stage))
        if whole is None:
            raise CostError(f"no {kind} and no B of stage {stage} was measured: give a step that has run all stages")
        return LengthLine(*(each / 2 for each in whole.row))

    stages = range(num_stages)
    if missing := [stage for stage in stages if ("F", stage) not in lines]:
        raise CostError(f"no F of stage {missing[0]} was measured: give a step that has run all stages")
    i, w = ([half(kind, stage) for stage in stages] for kind in "IW")
    b = [lines.get(("B", stage), i[stage] + w[stage]) for stage in stages]
    return CostsByLength([lines["F", stage] for stage in stages], i, w, b, activation, message_bytes)
