"""A GPT trained by a schedule with updates, by hand in one process: each op reads the exact version of the weights.

    one stage, windows of four microbatches           .- known: B0 B1 B2 of window 0 have ended
    F0 F1 B0 F2 B1 F3 B2 | F4 | B3 U0 | F5 B4 ...
                            `- late: it belongs to window 1 and comes before update 0

`plan_of` reads off the order which version each forward and each backward reads. `Loop` trains by that plan:

    none          a forward and a backward read the newest weights
    xpipe         a late forward reads the newest weights, moved by the optimizer's momentum
    tentative     a late forward reads the newest weights, moved by the optimizer's own step on the mean of the
                  window's gradients that are known by then; where none is known, as under `xpipe`. A backward before
                  the update reads the same
    pipedream     a backward reads what its forward read; so does `vnag`
    pipedream-2bw forwards and backwards of window t read the weights after t - 1 updates
    spectrain     forwards and backwards read the newest weights, moved by the momentum
    feedback      as `none`, and the error of a late stage's update goes into the next one
    half          as `none`, and a late microbatch weighs one half in the gradient of the stage where it is late

A gradient depends on the samples and on the weights that the ops read, and on nothing else. So microbatches of a
window that read the same versions on all stages are one group, with one forward and one backward. A run of AMDP's
order then takes three or four forwards a window instead of 32. It differs from a pipeline's run by rounding only.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import penstock as ps
from experiments.amdp.delay_optimizers import ErrorFeedback, Stepped
from experiments.amdp.learning import Batch, cut
from penstock.models import CrossEntropy, GPTConfig
from penstock.models.gpt import build_layers
from penstock.runtime.parameters.muon import mark_ends
from penstock.runtime.tensors.dtensor import standing_for
from penstock.schedule import Schedule
from penstock.schedule.op import BACKWARD, FORWARD, UPDATE
from penstock.schedule.weight_versions import backward_steps, forward_steps

RULES = ("none", "xpipe", "tentative", "pipedream", "vnag", "pipedream-2bw", "spectrain", "feedback", "half")
ASKS_LATE = ("feedback", "half")
"""Rules that treat what is late in another way than by what is read."""
Known = Mapping[tuple[int, int], frozenset[int]]
"""By (stage, update), the microbatches whose gradients a tentative step is made of."""


class Read(NamedTuple):
    """The weights that an op of a stage reads: after `version` updates, moved by `steps` predicted updates.

    If `is_tentative`, the step is the optimizer's own on the gradients that are known, and `steps` is 1.
    """

    version: int
    steps: int = 0
    is_tentative: bool = False


@dataclass(frozen=True)
class Group:
    """Microbatches of one window that read the same weights.

    Attributes:
        members: their numbers in the window.
        forward, backward: what each stage reads.
        late: whether the forward on a stage lacks an update that the window's gradient is applied after; False
            throughout for a rule that is not among `ASKS_LATE`.
        known: whether its gradient on a stage is known when the next window's late forwards read.
    """

    members: tuple[int, ...]
    forward: tuple[Read, ...]
    backward: tuple[Read, ...]
    late: tuple[bool, ...]
    known: tuple[bool, ...]


Plan = tuple[tuple[Group, ...], ...]
"""By window its groups."""


def plan_of(schedule: Schedule, rule: str, known: Known | None = None) -> Plan:
    """Reads the plan off an order.

    Args:
        schedule: a schedule with updates as ops, each backward whole; for rule `tentative` one that has that rule.
        rule: one of `RULES`.
        known: for rule `tentative`, in place of what the schedule's tentative steps know.

    Raises:
        ValueError: a rule of another name; or `tentative` for an order whose forwards lack two updates or more.
    """
    if rule not in RULES:
        raise ValueError(f"no rule {rule!r}; choose {', '.join(RULES)}")
    windows, stages = schedule.windows, range(schedule.num_stages)
    assert windows is not None
    if known is None:
        known = {key: frozenset(members) for key, members in ps.schedule.known_to(schedule).items()}
    forward, backward = _newest_at_ops(schedule)
    plan = []
    for window in range(windows.num_updates):
        members: dict[tuple[tuple[Read, ...], tuple[Read, ...], tuple[bool, ...], tuple[bool, ...]], list[int]]
        members = defaultdict(list)
        for place, m in enumerate(windows.microbatches(window)):
            reads = [
                _reads(rule, schedule, window, stage, forward[stage, m], backward[stage, m], known)
                for stage in stages
            ]
            key = (
                tuple(read for read, _ in reads),
                tuple(read for _, read in reads),
                tuple(rule in ASKS_LATE and forward[stage, m] < window for stage in stages),
                tuple(m in known.get((stage, window), ()) for stage in stages),
            )
            members[key].append(place)
        plan.append(tuple(Group(tuple(group), *key) for key, group in members.items()))
    return tuple(plan)


def _newest_at_ops(schedule: Schedule) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """By (stage, microbatch), the updates that its copy has taken over at its forward, and at its backward."""
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    for row in schedule.order:
        newest: dict[tuple[int, int], int] = defaultdict(int)
        for op in row:
            copy = op.stage, schedule.pipeline_of(op)
            if op.kind == UPDATE:
                newest[copy] += 1
            elif op.kind in (FORWARD, BACKWARD):
                (forward if op.kind == FORWARD else backward)[op.stage, op.microbatch] = newest[copy]
    return forward, backward


def _reads(
    rule: str, schedule: Schedule, window: int, stage: int, at_forward: int, at_backward: int, known: Known
) -> tuple[Read, Read]:
    """What the forward and the backward of a microbatch read."""
    ahead = window - at_forward
    if rule in ("pipedream", "vnag"):
        return Read(at_forward), Read(at_forward)
    if rule == "pipedream-2bw":
        return Read(max(window - 1, 0)), Read(max(window - 1, 0))
    if rule == "spectrain":
        assert schedule.updates is not None
        size = schedule.updates.window
        steps = forward_steps(stage, schedule.num_stages, size)
        return Read(at_forward, steps), Read(at_backward, backward_steps(stage, size))
    if rule == "xpipe":
        return Read(at_forward, ahead), Read(at_backward)
    if rule == "tentative" and ahead:
        if ahead > 1:
            raise ValueError(f"a forward of stage {stage} lacks {ahead} updates; rule 'tentative' makes one step")
        is_known, later = bool(known.get((stage, at_forward))), window - at_backward
        return Read(at_forward, 1, is_known), Read(at_backward, later, is_known and later > 0)
    return Read(at_forward), Read(at_backward)


@dataclass(frozen=True)
class Training:
    """What a run learns by.

    Attributes:
        config: sizes of the GPT.
        num_stages: of the pipeline; blocks are dealt out evenly.
        optimizer: of `Stepped`.
        rates: of each update.
        clip: the largest norm of the gradient of the model. As in a run with updates as ops, each of S stages is
            limited by itself to `clip` over the square root of S. None for no limit.
        seed: of the first weights.
        dtype: of weights and of all sums.
    """

    config: GPTConfig
    num_stages: int
    optimizer: str
    rates: Sequence[float]
    clip: float | None = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.float32


class Weights:
    """A GPT whose parameters lie stage by stage in one row of memory, as do their gradients.

    Attributes:
        model: it computes with what `fill` has written last.
        gradients: of each stage, one row; a backward adds to them.
    """

    def __init__(self, training: Training) -> None:
        layers = build_layers(training.config, seed=training.seed)
        self.model = nn.Sequential(*layers).to(training.dtype)
        self._parameters: list[list[nn.Parameter]] = []
        for stage, part in enumerate(cut(training.config, training.num_stages)):
            module = nn.ModuleList([layers[place] for place in part])
            mark_ends(module, stage == training.num_stages - 1)
            self._parameters.append(list(module.parameters()))
        self._read = [_flat(parameters) for parameters in self._parameters]
        self.gradients = [torch.zeros_like(read) for read in self._read]
        for stage, parameters in enumerate(self._parameters):
            values, gradients = self.views(stage, self._read[stage]), self.views(stage, self.gradients[stage])
            for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
                parameter.data, parameter.grad = value, gradient

    def first(self) -> list[Tensor]:
        """A copy of the weights that the model has now, a row a stage."""
        return [read.clone() for read in self._read]

    def fill(self, stage: int, row: Tensor) -> None:
        """The model computes with this row from now on, in backwards too."""
        self._read[stage].copy_(row)

    def views(self, stage: int, row: Tensor) -> list[Tensor]:
        """A row as tensors of the shapes of the stage's parameters, marked for Muon as these are."""
        parameters = self._parameters[stage]
        parts = row.split([parameter.numel() for parameter in parameters])
        return [
            standing_for(parameter, part.view_as(parameter)).requires_grad_(False)
            for parameter, part in zip(parameters, parts, strict=True)
        ]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class Loop:
    """Trains a GPT by a plan.

    Args:
        training: what is trained, and by which optimizer.
        plan: of `plan_of`.
        rule: the one that the plan was made for.
    """

    def __init__(self, training: Training, plan: Plan, rule: str) -> None:
        self._training, self._plan, self._rule = training, plan, rule
        self._stages = range(training.num_stages)
        self._weights, self._loss_of = Weights(training), CrossEntropy()
        self.newest = self._weights.first()
        """The weights after all updates so far, a row a stage."""
        by_matrix = training.optimizer == "Muon"  # the others step number by number, a row at once
        stepped = [self._weights.views(stage, row) if by_matrix else [row] for stage, row in enumerate(self.newest)]
        self._num_tensors = [len(tensors) for tensors in stepped]
        is_late = [any(group.late[stage] for window in plan for group in window) for stage in self._stages]
        delays = [int(is_late[stage]) for stage in self._stages for _ in stepped[stage]]
        self._stepped = Stepped(
            training.optimizer,
            [tensor for tensors in stepped for tensor in tensors],
            momentum_decay=0.004 * 40_000 / len(plan),  # NAdam's, as in `delay.py`
            feedback=ErrorFeedback(delays) if rule == "feedback" else None,
        )
        self._needs, self._last = _needs_of(plan)
        self._held: dict[tuple[int, Read], Tensor] = {}

    def update(self, number: int, inputs: Tensor, targets: Tensor) -> float:
        """Trains a window and steps. Returns its mean loss.

        Args:
            number: of the window, and of the update after it.
            inputs, targets: [B, T], the samples of all microbatches in their order.
        """
        self._hold_versions(number)
        groups = self._plan[number]
        size = sum(len(group.members) for group in groups)
        total = [torch.zeros_like(row) for row in self.newest]
        known = [torch.zeros_like(row) for row in self.newest]
        weighed, known_share = [0.0 for _ in self._stages], [0.0 for _ in self._stages]
        mean = 0.0
        for group in groups:
            share = len(group.members) / size
            rows = _rows_of(group.members, size, len(inputs))
            mean += share * self._forward_and_backward(group, inputs[rows], targets[rows])
            for stage in self._stages:
                weight = share / 2 if self._rule == "half" and group.late[stage] else share
                total[stage].add_(self._weights.gradients[stage], alpha=weight)
                weighed[stage] += weight
                if group.known[stage]:
                    known[stage].add_(self._weights.gradients[stage], alpha=share)
                    known_share[stage] += share
        with torch.no_grad():
            known = [row / (share or 1.0) for row, share in zip(known, known_share, strict=True)]
            self._hold_tentative(number, known)
            gradients = self._clipped([row / share for row, share in zip(total, weighed, strict=True)])
            self._stepped.step(self._as_stepped(gradients), self._rates(number))
        for key in [key for key in self._held if self._last[key] <= number]:
            del self._held[key]
        return mean

    @torch.no_grad()
    def evaluate(self, held_out: Sequence[Batch]) -> float:
        """The mean loss of the newest weights over some batches."""
        for stage, row in enumerate(self.newest):
            self._weights.fill(stage, row)
        return statistics.mean(float(self._loss_of(self._weights.model(x), y)) for x, y in held_out)

    def _forward_and_backward(self, group: Group, inputs: Tensor, targets: Tensor) -> float:
        """Leaves the mean gradient over the samples in `gradients`, and returns their mean loss."""
        for stage, read in enumerate(group.forward):
            self._weights.fill(stage, self._held[stage, read])
            self._weights.gradients[stage].zero_()
        loss: Tensor = self._loss_of(self._weights.model(inputs), targets)
        for stage, (before, read) in enumerate(zip(group.forward, group.backward, strict=True)):
            if read != before:
                self._weights.fill(stage, self._held[stage, read])
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _hold_versions(self, number: int) -> None:
        """Holds what ops read of the newest weights, and of these moved by the momentum."""
        needed = [key for key in self._needs.get(number, ()) if not key[1].is_tentative]
        steps = {read.steps for _, read in needed} - {0}
        directions = self._by_stage(self._stepped.next_directions()) if steps else self.newest
        for stage, read in needed:
            by = -read.steps * self._training.rates[number] if read.steps else 0.0
            self._held[stage, read] = torch.add(self.newest[stage], directions[stage], alpha=by)

    def _hold_tentative(self, number: int, known: Sequence[Tensor]) -> None:
        """Holds what late forwards read of the weights that a step on the known gradients would make."""
        needed = [key for key in self._needs.get(number, ()) if key[1].is_tentative]
        if needed:
            gradients = self._as_stepped(self._clipped(known))
            moved = self._by_stage(self._stepped.weights_after(gradients, self._rates(number)))
            self._held |= {(stage, read): moved[stage] for stage, read in needed}

    def _clipped(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Each stage's gradient, limited as `torch.nn.utils.clip_grad_norm_` limits it."""
        if self._training.clip is None:
            return list(gradients)
        most = self._training.clip / math.sqrt(len(self._stages))
        return [row * (most / (row.norm() + 1e-6)).clamp(max=1.0) for row in gradients]

    def _rates(self, number: int) -> list[float]:
        return [self._training.rates[number]] * sum(self._num_tensors)

    def _as_stepped(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Rows of all stages as the tensors that the optimizer steps."""
        return [
            tensor
            for stage, row in enumerate(rows)
            for tensor in ([row] if self._num_tensors[stage] == 1 else self._weights.views(stage, row))
        ]

    def _by_stage(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the optimizer as a row a stage, in memory of their own."""
        each: Iterator[Tensor] = iter(tensors)
        return [_flat([next(each) for _ in range(num)]) for num in self._num_tensors]


def _needs_of(plan: Plan) -> tuple[dict[int, list[tuple[int, Read]]], dict[tuple[int, Read], int]]:
    """By version what is read of it as (stage, read), and by that the last window that reads it."""
    last: dict[tuple[int, Read], int] = {}
    for window, groups in enumerate(plan):
        for group in groups:
            for reads in (group.forward, group.backward):
                last |= dict.fromkeys(enumerate(reads), window)
    needs: dict[int, list[tuple[int, Read]]] = defaultdict(list)
    for stage, read in last:
        needs[read.version].append((stage, read))
    return needs, last


def _rows_of(members: Sequence[int], size: int, samples: int) -> Tensor:
    """The rows of a window's samples that these of its `size` microbatches have.

    Microbatches may be parts of a sample, as long as those of one sample are in one group.

    Raises:
        ValueError: they are not.
    """
    rows = sorted({row for m in members for row in range(m * samples // size, -(-(m + 1) * samples // size))})
    if len(rows) * size != len(members) * samples:
        raise ValueError(
            f"a window of {samples} samples has {size} microbatches, of which {len(members)} read alike: "
            "these are no whole number of samples; give a multiple of as many samples"
        )
    return torch.tensor(rows)


def trained(loop: Loop, batches: Callable[[int], Batch], num_updates: int) -> list[float]:
    """The mean loss of each window; a run that diverges ends at the first that is not finite."""
    losses: list[float] = []
    while len(losses) < num_updates and all(map(math.isfinite, losses[-1:])):
        losses.append(loop.update(len(losses), *batches(len(losses))))
    return losses
