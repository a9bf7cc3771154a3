"""Ops of the user's own kinds: the functions that run them, and what these functions are given.

    ps.Program(..., ops=[ps.NewOp("SNAPSHOT", stage=1, after={("F", 1): 2}, before={("B", 1): 2}, run=keep)])
    ps.Pipeline(..., program.build(), ops=program.callables)

    rank 1 | F0 F1 SNAPSHOT0 B0 B1 ...      keep(OpCall(op=SNAPSHOT0, microbatches=(0, 1), ...))

The stage graph's `Needs` say what such an op waits for, and what waits for it. If both ends of a need are on one
rank, the decision core counts it. Between ranks, a message without content (a token) says that an op has run.

Ops of the user's kinds can read the outputs of forwards, and can add to the loss.

    rank 1 | F0 F1 GATHER0 B0 B1        GATHER0 reads the outputs of F0 and F1, of all its ranks, and adds a loss of
    rank 3 | F0 F1 GATHER0 B0 B1        them; B0 and B1 start from its gradient

So a loss that compares the outputs of several towers can train them, even if the towers end in no common stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.collective import WeakGroup, explained
from penstock.runtime.mesh.peers import GroupPeers, Peers, meeting_groups
from penstock.runtime.stage.host_memory import SavedTensors
from penstock.runtime.stage.ops import StageRunner
from penstock.runtime.stage.stage import Copy
from penstock.schedule import Op, Schedule
from penstock.schedule.async_ops import MOVES, OFFLOAD, RELOAD
from penstock.schedule.dependencies import predecessors
from penstock.schedule.op import BUILT_IN, FORWARD
from penstock.schedule.short_repr import short_repr
from penstock.schedule.updates import OWNER

Forward = tuple[int, int]
"""(stage, microbatch)."""
Values = dict[Forward, Tensor]


class StageOutputs:
    """The outputs of forwards in this process, and the losses that ops add, in one step.

    Args:
        runners: the runners of the copies of stages in this process.
        end: the stage whose rank reports the losses that ops add. None if the stage with the loss reports them.
    """

    def __init__(self, runners: Mapping[Copy, StageRunner], end: int | None) -> None:
        self._runners, self._end = runners, end

    def values(self, forwards: Sequence[Forward], stages: Sequence[int]) -> Values:
        """Those of some forwards' outputs that are in this process: leaves, which may have a gradient."""
        return {(s, m): self._leaf(s, m) for s, m in forwards if s in stages}

    def _leaf(self, stage: int, microbatch: int) -> Tensor:
        leaves = self._runners[OWNER, stage].leaves(microbatch)
        if len(leaves) != 1:
            raise RuntimeFailure(
                f"stage {stage} returned {len(leaves)} tensors to an op that reads its output; an op reads that of a "
                "stage that returns one tensor, or one alone that wants a gradient"
            )
        return leaves[0]

    def add_loss(self, loss: Tensor, forwards: Sequence[Forward], stages: Sequence[int]) -> None:
        """Adds a loss of forwards, a mean over their samples. Their backwards on `stages` start from its gradient.

        Raises:
            RuntimeFailure: the loss is not one number, a stage of the model computes the loss already, or none of the
                forwards belongs to the stage that reports losses.
        """
        if self._end is None:
            raise RuntimeFailure("one stage has the loss, by loss_fn; an op may add one where no stage does")
        if loss.numel() != 1:
            raise RuntimeFailure(f"a loss is one number, not a tensor of shape {tuple(loss.shape)}")
        microbatches = sorted({m for s, m in forwards if s == self._end})
        if not microbatches:
            raise RuntimeFailure(
                f"a loss that comes after no forward of stage {self._end} has no samples to weigh it by"
            )
        runner = next(iter(self._runners.values()))
        scales = [runner.settings.microbatches.scales[m] for m in microbatches]
        weighed = loss * sum(scales)
        places = [(s, m) for s, m in forwards if s in stages]
        leaves = [self._leaf(s, m) for s, m in places]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad(weighed, wanted, allow_unused=True) if wanted else ()
        gradients = dict(zip(map(id, wanted), found, strict=True))
        for (stage, m), leaf in zip(places, leaves, strict=True):
            self._runners[OWNER, stage].start_from(m, gradients.get(id(leaf)))
        if (end := self._runners.get((OWNER, self._end))) is not None and self._end in stages:
            for m in microbatches:
                share = weighed.detach().reshape(()) / len(microbatches)
                end.losses[m] = end.losses[m] + share if m in end.losses else share
            end.has_gradient = True  # as far as can be told here: another rank's outputs may be those that want one


class OutputGathering:
    """Gathers the outputs of all ranks of an op on each of them. It begins when somebody waits for it.

    Attributes:
        result: the outputs by (stage, microbatch), once somebody has waited. A rank's own outputs are leaves, which
            may have a gradient. Those of other ranks are on the same device.
    """

    def __init__(self, own: Values, group: WeakGroup | None, rank: int, timeout: float) -> None:
        self.result: Values | None = None
        self._own, self._group, self._rank, self._timeout = own, group, rank, timeout

    def wait(self) -> bool:
        """Waits for the outputs. Raises DeadlineExceeded, PeerLost."""
        if self.result is None:
            self.result = self._own if self._group is None else self._gathered(self._group())
        return True

    def _gathered(self, group: dist.ProcessGroup) -> Values:
        here = next((value.device for value in self._own.values()), torch.device("cpu"))
        gathered: list[Any] = [None] * dist.get_world_size(group)
        mine = {place: value.detach().cpu().clone() for place, value in self._own.items()}  # without a view's base
        with explained(self._rank, None, "what they gather", self._timeout):
            dist.all_gather_object(gathered, mine, group=group)
        theirs = {place: value.to(here) for each in gathered for place, value in sorted(each.items())}
        return {**theirs, **self._own}


@dataclass(frozen=True)
class OpCall:
    """The argument of the user's function for an op. The runtime calls it when the op runs.

    Attributes:
        rank: the rank that runs it.
        stage: the op's stage.
        op: the op; `op.kind` is its kind.
        index: the op's number among the ops of its kind and stage, from 0.
        microbatches: the microbatches whose ops it comes after, ascending, directly or through other registered ops.
            Empty if it needs nothing.
        module: the stage, with its parameters under the model's names. None if the op runs on a rank that does not
            host the stage.
        forwards: (stage, microbatch) of each forward that it comes after, directly or through other registered ops.
        ranks: the ranks that run it together, or only `rank`. With one process per rank, the function is called on
            each of them. In one process it is called once for all, on the first of them, when all have reached the
            op.
        group: the process group of these ranks. None if all of them are in this process.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> seen = []
        >>> def watch(call):
        ...     seen.append((call.rank, str(call.op), call.microbatches))
        >>> look = ps.NewOp("LOOK", stage=0, after={("B", 0): 2}, run=watch)
        >>> program = ps.Program(ps.placements.one_to_one(2), num_microbatches=4, ops=[look])
        >>> stages = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)]
        >>> with ps.Pipeline(stages, program.build(), loss_fn=torch.nn.MSELoss(), ops=program.callables) as pipe:
        ...     result = pipe.step(torch.randn(8, 8), torch.randn(8, 1))
        >>> seen
        [(0, '0LOOK0', (0, 1)), (0, '0LOOK1', (2, 3))]
    """

    rank: int
    stage: int
    op: Op
    index: int
    microbatches: tuple[int, ...]
    module: nn.Module | None
    forwards: tuple[Forward, ...] = ()
    ranks: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    """The stages of the ranks that the call stands for: of `rank`, or in one process of all `ranks`."""
    _group: WeakGroup | None = None
    timeout: float = 60.0
    """The longest time that any wait may last (seconds)."""
    _outputs: StageOutputs = field(default_factory=lambda: StageOutputs({}, None))

    __repr__ = short_repr

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self._group is None else self._group()

    @property
    def outputs(self) -> Values:
        """The outputs of the forwards that ran where the call stands for, by (stage, microbatch).

        They are leaves, so a loss of them has a gradient.
        """
        return self._outputs.values(self.forwards, self.stages)

    def gather(self) -> Values:
        """The outputs of all the forwards on all ranks of the op. Waits for them: DeadlineExceeded, PeerLost."""
        gathering = self.gathering()
        gathering.wait()
        assert gathering.result is not None
        return gathering.result

    def gathering(self) -> OutputGathering:
        """Like `gather`, but without waiting. An asynchronous op returns it, and an op after it reads its result."""
        return OutputGathering(self.outputs, self._group, self.rank, self.timeout)

    def add_loss(self, loss: Tensor) -> None:
        """Adds a loss of the forwards, a mean over their samples, computed from what `outputs` gave.

        The backwards of the forwards start from its gradient. If several ranks call it with the same loss, it counts
        once.

        Raises:
            RuntimeFailure: the loss is not one number, or a stage of the model computes the loss already.
        """
        self._outputs.add_loss(loss, self.forwards, self.stages)


OpFunction = Callable[[OpCall], Any]
"""A function that is called at an op's place in the order of its rank. Its result is ignored, unless the op is
asynchronous. Then it returns something to wait for, with `wait()` (such as a torch.distributed work) or `result()` (a
future), or None if the op has ended.
"""


def functions_of(schedule: Schedule, given: Mapping[str, OpFunction]) -> dict[str, OpFunction]:
    """The function of each registered kind of the schedule, but for the kinds that the runtime moves activations by.

    Raises:
        RuntimeFailure: a kind without a function, a function for a kind that the schedule does not have, or something
            that can't be called.
    """
    moved = frozenset() if MOVES & set(given) else MOVES
    kinds = sorted({registered.kind for registered in schedule.graph.registered} - moved)
    if missing := [kind for kind in kinds if kind not in given]:
        raise RuntimeFailure(
            f"{schedule.name} has ops of kind {missing[0]}, and no function was given for them; give one, "
            f"ps.Pipeline(..., ops={{{missing[0]!r}: function}})"
        )
    if unknown := [kind for kind in given if kind not in kinds]:
        raise RuntimeFailure(
            f"ops= has a function for kind {unknown[0]}, of which {schedule.name} has no ops "
            f"(its registered kinds: {', '.join(kinds) or 'none'}); leave it out or build the schedule with such ops"
        )
    return dict(given)


Calls = Mapping[tuple[int, Op], tuple[OpFunction, OpCall]]
"""For each rank and registered op its function, and the argument of that."""


def calls_of(
    schedule: Schedule,
    functions: Mapping[str, OpFunction],
    stages: Mapping[int, nn.Module],
    peers: Peers,
    timeout: float,
) -> Calls:
    """The calls of a schedule's registered ops, for the `stages` in this process. Every process must call it."""
    if not functions:
        return {}
    groups = meeting_groups(schedule, peers) if isinstance(peers, GroupPeers) else {}
    number = {op: index for index, op in enumerate(op for row in schedule.order for op in row)}
    followed: dict[Op, frozenset[Op]] = {}

    def follow(op: Op) -> frozenset[Op]:
        if op not in followed:
            found: set[Op] = set()
            for before in predecessors(op, schedule.graph, number):
                found |= {before} if before.kind in BUILT_IN else follow(before)
            followed[op] = frozenset(found)
        return followed[op]

    calls: dict[tuple[int, Op], tuple[OpFunction, OpCall]] = {}
    for rank, row in enumerate(schedule.order):
        for op in row:
            if op.kind in functions:
                module = stages.get(op.stage) if op.stage in schedule.stages_of(rank) else None
                before = sorted(follow(op))
                ranks = schedule.hosts(op)
                here = (rank,) if isinstance(peers, GroupPeers) else ranks
                calls[rank, op] = (
                    functions[op.kind],
                    OpCall(
                        rank,
                        op.stage,
                        op,
                        op.microbatch,
                        tuple(sorted({each.microbatch for each in before})),
                        module,
                        tuple((each.stage, each.microbatch) for each in before if each.kind == FORWARD),
                        ranks,
                        tuple(sorted({stage for r in here for stage in schedule.stages_of(r)})),
                        groups.get((op.kind, op.stage)),
                        timeout,
                    ),
                )
    return calls


def name_of(function: OpFunction) -> str:
    """A function's name, for an error."""
    return str(getattr(function, "__qualname__", None) or repr(function))


def require_round_trips(schedule: Schedule) -> None:
    """Raises RuntimeFailure if an activation has only one of OFFLOAD and RELOAD, or belongs to a shared stage."""
    moves = {(op.kind, op.stage, op.microbatch) for row in schedule.order for op in row if op.kind in MOVES}
    shared = {stage for stage, _ in schedule.placement.shared}
    for stage, m in sorted({(stage, m) for _, stage, m in moves}):
        if stage in shared or not {(OFFLOAD, stage, m), (RELOAD, stage, m)} <= moves:
            raise RuntimeFailure(
                f"{OFFLOAD} moves what a forward saved to host memory, and microbatch {m} of stage {stage} has one "
                f"of {OFFLOAD} and {RELOAD} alone, or belongs to a stage that several ranks share; leave the two "
                "ops out there, or give functions of your own for both in ops="
            )


def moves_of(
    schedule: Schedule, ranks: Sequence[int], saved: Callable[[int, int], SavedTensors], timeout: float
) -> Calls:
    """The calls of OFFLOAD and RELOAD for every activation on these ranks: a later schedule may move any of them.

    Args:
        saved: a function of (stage, microbatch) that gives what its forward saved.
    """
    run: dict[str, OpFunction] = {
        OFFLOAD: lambda call: saved(call.stage, call.index).offload(),
        RELOAD: lambda call: saved(call.stage, call.index).reload(),
    }
    return {
        (rank, op): (function, OpCall(rank, stage, op, m, (), None, (), (rank,), timeout=timeout))
        for rank in ranks
        for stage in schedule.stages_of(rank)
        for m in range(schedule.num_microbatches)
        for kind, function in run.items()
        for op in [Op(kind, stage, m)]
    }
