"""Ops of the user's own kinds, and branches of a model: for programs that are more than a chain of stages."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from penstock.program.rules import Rules
from penstock.schedule import Placement, ScheduleError
from penstock.schedule.short_repr import short_repr
from penstock.unknown_names import refuse_unknown

StageName = int | tuple[str, int]
"""A stage, as a number or as (branch, number within the branch); -1 is a branch's last stage."""


@refuse_unknown(ScheduleError)
@dataclass(frozen=True)
class NewOp:
    """A kind of op of your own, besides forward and backward.

        NewOp("GATHER", stage=3, after={("F", 3): 4}, before={("B", 3): 4}, time=2.0)

    adds one gather after every four forwards of stage 3. The backwards of those four wait for it.

    Attributes:
        kind: the name of the kind, an upper-case letter or word.
        stage: the stage that the op belongs to. The stage's ranks run it unless `on` says otherwise.
        after: how many ops of a (kind, stage) must run before each op of this kind. Where backwards are split, "B"
            stands for their W, with which the gradients are complete; name "I" for the input gradients alone.
        before: how many ops of a (kind, stage) wait for each op of this kind. Where backwards are split, "B" stands
            for their I.
        on: stages whose ranks run the op together. Default: the ranks of `stage`.
        num_ops: how many ops of this kind there are. Default: computed from `after` or `before`.
        time: how long one op takes (ms). Default: what the program's costs say of the kind, else 0.
        memory: memory that the op adds, in the unit of the costs' activations. Positive memory is held from the op's
            start. Negative memory is freed at its end. Default: what the program's costs say of the kind, else 0. A
            schedule's file keeps `holds` alone.
        holds: memory as a share of the stage's activation: -1 for an offload to host memory, 1 for the reload. It is
            added to `memory`.
        last: whether the op runs only when nothing else can, instead of before everything else.
        asynchronous: whether the op runs beside the rank's other ops. The rank starts it as soon as it may begin and
            goes on computing; ops that need it wait for its end. Asynchronous ops of a rank run one after another.
        passed_on: whether op m waits for op m - 1, whichever rank ran that. For what circulates over the ranks, such
            as weights.
        run: the function that the runtime calls. Simulation and proof do not need it.

    Raises:
        ScheduleError: an invalid kind, stage or number.

    Examples:
        >>> import penstock as ps
        >>> gather = ps.NewOp("GATHER", stage=1, after={("F", 1): 2}, before={("B", 1): 2}, time=2.0)
        >>> s = ps.Program(ps.placements.one_to_one(2), num_microbatches=4, ops=[gather]).build()
        >>> print("\\n".join(str(s).splitlines()[-2:]))
        rank 0 | F0      F1      F2      F3      .       B0      B1      .       .       .       B2      B3
        rank 1 | .       F0      F1      GATHER0 B0      B1      F2      F3      GATHER1 B2      B3

    References:
        FlexPipe, Figure 6: registered instructions.
    """

    kind: str
    stage: StageName
    after: Mapping[tuple[str, StageName], int] = field(default_factory=dict)
    before: Mapping[tuple[str, StageName], int] = field(default_factory=dict)
    on: tuple[StageName, ...] = ()
    num_ops: int | None = None
    time: float = 0.0
    memory: float = 0.0
    last: bool = False
    run: Callable[..., Any] | None = None
    asynchronous: bool = False
    holds: float = 0.0
    passed_on: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name in ("after", "before"):
            groups = getattr(self, name)
            keys = list(groups) if isinstance(groups, Mapping) else [groups]
            if wrong := [key for key in keys if not (isinstance(key, tuple) and len(key) == 2)]:
                raise ScheduleError(
                    f"op kind {self.kind}: {name} has {reprlib.repr(wrong[0])}; give how many of which kind and "
                    'stage, like {("F", 0): 1}',
                    rule="dependencies",
                )
        if not isinstance(self.on, tuple):
            raise ScheduleError(
                f"op kind {self.kind}: on is {reprlib.repr(self.on)}; give a tuple of stages, like (0, 1)",
                rule="kind",
            )
        if not self.after and not self.before and self.num_ops is None:
            raise ScheduleError(
                f"op kind {self.kind}: say what comes before or after it, or how many there are (num_ops)",
                rule="kind",
            )
        for key, count in [*self.after.items(), *self.before.items()]:
            if not isinstance(count, int) or count < 1:
                raise ScheduleError(
                    f"op kind {self.kind}: {key} goes in groups of {count!r}: give at least 1", rule="dependencies"
                )
        if self.num_ops is not None and (not isinstance(self.num_ops, int) or self.num_ops < 1):
            raise ScheduleError(f"op kind {self.kind} has {self.num_ops!r} ops: give at least 1", rule="kind")
        numbers = isinstance(self.time, Real) and isinstance(self.memory, Real)
        if not numbers or not 0 <= self.time < math.inf or not math.isfinite(self.memory):
            raise ScheduleError(
                f"op kind {self.kind} takes {self.time!r} ms and {self.memory!r} of memory: give finite numbers, "
                "milliseconds of at least 0",
                rule="kind",
            )
        if self.asynchronous and (self.memory or self.last):
            raise ScheduleError(
                f"op kind {self.kind} is asynchronous and has memory={self.memory:g}, last={self.last}: say what "
                "it holds in stage activations (holds=), which can be proved; it starts as soon as it may, so leave "
                "both out",
                rule="kind",
            )


@refuse_unknown(ScheduleError)
@dataclass(frozen=True)
class Branch:
    """A part of the model with its own placement, microbatches and rules, such as one modality.

    Attributes:
        placement: one pipeline, over ranks counted from 0 within the branch.
        ranks: the ranks of the whole program that these are. Default: the next free ones.
        num_microbatches: how many microbatches go through this branch in a step.
        rules: how the branch's ranks choose among ready ops. Default: `Rules()`.
        feeds: names of the branches whose first stages take the output of this branch's last stage.

    Raises:
        ScheduleError: a placement with several pipelines, fewer than one microbatch, or `feeds` that is not a tuple.

    Examples:
        >>> import penstock as ps
        >>> text = ps.Branch(ps.placements.one_to_one(1), 4, feeds=("joint",))
        >>> image = ps.Branch(ps.placements.one_to_one(2), 4, feeds=("joint",))
        >>> joint = ps.Branch(ps.placements.one_to_one(1), 4)
        >>> s = ps.Program.of_branches({"text": text, "image": image, "joint": joint}).build()
        >>> s.num_ranks, s.num_stages
        (4, 4)

    References:
        FlexPipe, section 7.2: models of several modalities.
    """

    placement: Placement
    num_microbatches: int
    rules: Rules = field(default_factory=Rules)
    ranks: tuple[int, ...] | None = None
    feeds: tuple[str, ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.placement.num_pipelines != 1:
            raise ScheduleError(
                f"a branch has {self.placement.num_pipelines} pipelines; lay it over its ranks in one",
                rule="placement",
            )
        if not isinstance(self.num_microbatches, int) or self.num_microbatches < 1:
            raise ScheduleError(
                f"a branch has {self.num_microbatches!r} microbatches: give at least 1", rule="options"
            )
        if isinstance(self.feeds, str):
            raise ScheduleError(
                f"feeds is {self.feeds!r}: give a tuple of branches, ({self.feeds!r},)", rule="stages"
            )
