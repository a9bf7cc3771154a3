"""Ops of the user's own kinds: which function runs them, and what it is told.

    ps.Program(..., ops=[ps.NewOp("SNAPSHOT", stage=1, after={("F", 1): 2}, before={("B", 1): 2}, run=keep)])
    ps.Pipeline(..., program.build(), ops=program.callables)

    rank 1 | F0 F1 SNAPSHOT0 B0 B1 ...      keep(OpCall(op=SNAPSHOT0, microbatches=(0, 1), ...))

What such an op waits for, and what waits for it, the stage graph's `Needs` say. Where both ends of a need lie on
one rank the decision core counts it; between ranks a message without content (a token) tells that an op has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.groups import meeting_groups
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.mesh.weak_group import WeakGroup
from penstock.runtime.stage.outputs import Forward, OutputGathering, Outputs, Values
from penstock.schedule import Op, Schedule
from penstock.schedule.dependencies import predecessors
from penstock.schedule.op import FORWARD
from penstock.schedule.short_repr import short_repr


@dataclass(frozen=True)
class OpCall:
    """What a function is told when the runtime calls it for an op of its kind.

    Attributes:
        rank: where it runs.
        stage: the op's stage.
        op: the op; `op.kind` is its kind.
        index: its number among its like, from 0.
        microbatches: those whose ops it comes after, ascending: the ones that it needs itself, or through other
            registered ops. Empty where it needs nothing.
        module: the stage, its parameters under their plain names; None where the op runs on a rank that does not
            host the stage.
        forwards: (stage, microbatch) of each forward that it comes after, itself or through other registered ops.
        ranks: those that run it together, `rank` alone where nobody else does. Between processes the function is
            called on each of them; in one process once, on the first of them, when all have come to it, and it stands
            there for all.
        group: of these ranks' processes; None where they are all in this one.

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
    """Those of the ranks that the call stands for: `rank`, or all `ranks` in one process."""
    _group: WeakGroup | None = None
    timeout: float = 60.0
    """Seconds that any wait may last."""
    _outputs: Outputs | None = None

    __repr__ = short_repr

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self._group is None else self._group()

    @property
    def outputs(self) -> Values:
        """What those of the forwards returned that ran where the call stands for, by (stage, microbatch): leaves, of
        which a loss has a gradient.
        """
        return self._here().values(self.forwards, self.stages)

    def gather(self) -> Values:
        """The outputs of all the forwards on all ranks of the op. Waits for them: DeadlineExceeded, PeerLost."""
        gathering = self.gathering()
        gathering.wait()
        assert gathering.result is not None
        return gathering.result

    def gathering(self) -> OutputGathering:
        """The same, to be waited for: what an asynchronous op returns, and an op that comes after it reads."""
        return OutputGathering(self.outputs, self._group, self.rank, self.timeout)

    def add_loss(self, loss: Tensor) -> None:
        """Adds a loss of the forwards, a mean over their samples, which has a gradient in what `outputs` gave: their
        backwards start from that. Where several ranks call it with the same loss, it counts once.

        Raises:
            RuntimeFailure: it is not one number, or one stage has the loss.
        """
        self._here().add_loss(loss, self.forwards, self.stages)

    def _here(self) -> Outputs:
        if self._outputs is None:
            raise RuntimeFailure(f"{self.op} was called outside a step")
        return self._outputs


OpFunction = Callable[[OpCall], Any]
"""Called at an op's place in the order of its rank. What it returns is ignored; an asynchronous op's returns what to
wait for, by `wait()` (a torch.distributed work, say) or `result()` (a future), or None where it has ended.
"""


def functions_of(schedule: Schedule, given: Mapping[str, OpFunction]) -> dict[str, OpFunction]:
    """The function of each registered kind of the schedule.

    Raises:
        RuntimeFailure: a kind without a function, a function for a kind that is not there, or something that
            cannot be called.
    """
    kinds = sorted({registered.kind for registered in schedule.graph.registered})
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
    for kind, function in given.items():
        if not callable(function):
            raise RuntimeFailure(f"ops= has {function!r} for kind {kind}; give a function of one argument, the call")
    return dict(given)


Calls = Mapping[tuple[int, Op], tuple[OpFunction, OpCall]]
"""By rank and registered op its function and what that is told."""


def calls_of(
    schedule: Schedule,
    functions: Mapping[str, OpFunction],
    stages: Mapping[int, nn.Module],
    peers: Peers,
    timeout: float,
) -> Calls:
    """The calls of a schedule's registered ops. `stages` are those in this process. Every process must call it."""
    if not functions:
        return {}
    between = isinstance(peers, GroupPeers)
    groups = meeting_groups(schedule, peers) if isinstance(peers, GroupPeers) else {}
    number = {op: index for index, op in enumerate(op for row in schedule.order for op in row)}
    followed: dict[Op, frozenset[Op]] = {}

    def follow(op: Op) -> frozenset[Op]:
        if op not in followed:
            found: set[Op] = set()
            for before in predecessors(op, schedule.graph, number):
                found |= follow(before) if before.kind in functions else {before}
            followed[op] = frozenset(found)
        return followed[op]

    calls: dict[tuple[int, Op], tuple[OpFunction, OpCall]] = {}
    for rank, row in enumerate(schedule.order):
        for op in row:
            if op.kind in functions:
                module = stages.get(op.stage) if op.stage in schedule.stages_of(rank) else None
                before = sorted(follow(op))
                ranks = schedule.hosts(op)
                here = (rank,) if between else ranks
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
    """A function's name for an error."""
    return str(getattr(function, "__qualname__", None) or repr(function))
