"""Ranks that run an op together meet here, and processes whose ops wait for one another decide alike.

The op runs when the last of its ranks has come:

    rank 0 | F0 F1 ........ GATHER0 B0      stands until rank 1 is there, then runs the op
    rank 1 | F0 .. F1 F2    GATHER0 B0      finds the result

Ranks that take turns in one thread have a `Gang`: the first of them runs the op for all. Ranks with a thread or a
process of their own each run their own part, and the op itself brings the parts together, with a collective for
example.

Processes with shards of the same stages, or with replicas if updates are ops (each update sums over the replicas),
are in `Lockstep`: the first decides what runs next, and the others follow.

    shard 0 | picks W3 -> runs W3 | picks F7 -> runs F7      by what has come in here
                 |                     |
    shard 1 |    '-> waits for what W3 needs, runs it        whatever has come in there

A decision is the number of an op. Decisions of one step come in order, so the first op of a step is never confused
with one of another step. Asynchronous ops need no decision: each process starts its own as soon as what they need is
there, even while it has no decision to follow. A thread then receives the decisions, and wakes the rank.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from penstock.dispatch import Dispatch, Dispatcher, Graph
from penstock.runtime.mesh.collective import WeakGroup, wait_for
from penstock.runtime.mesh.peers import GroupPeers, groups_of_processes
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.schedule import Op


class Gang:
    """Who has arrived at which op, in one step of the ranks of this process, which take turns."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._sizes = [last - first for first, last in pairwise(graph.gang_first)]
        self._arrived: list[set[int]] = [set() for _ in self._sizes]
        self._outcomes: dict[Op, tuple[Any, int]] = {}
        """What came of ops, and how many ranks have still to take it."""

    def arrive(self, number: int) -> None:
        """A rank stands ready for its part of an op."""
        self._arrived[self._graph.gang[number]].add(number)

    def is_whole(self, number: int) -> bool:
        """Whether all ranks of an op have arrived at it."""
        gang = self._graph.gang[number]
        return len(self._arrived[gang]) == self._sizes[gang]

    def may_run(self, number: int) -> bool:
        """Whether all have arrived, and the first of the ranks has run it, where this is another one's part."""
        return self.is_whole(number) and (self.is_first(number) or self._graph.ops[number] in self._outcomes)

    def is_first(self, number: int) -> bool:
        """Whether this part of an op is that of the first of its ranks, which runs it."""
        return self._graph.number[self._graph.ops[number]] == number

    def once(self, op: Op, is_first: bool, run: Callable[[], Any]) -> Any:
        """Runs an op on the first of its ranks, which comes before the others. Returns what came of it on each rank.

        Args:
            is_first: whether the rank that calls is the first.
        """
        if is_first:
            outcome, num_left = run(), self._sizes[self._graph.gang[self._graph.number[op]]]
        else:
            outcome, num_left = self._outcomes.pop(op)
        if num_left > 1:
            self._outcomes[op] = outcome, num_left - 1
        return outcome

    def absent(self, number: int) -> list[int]:
        """The ranks that have not arrived."""
        graph, gang = self._graph, self._graph.gang[number]
        members = graph.gang_ops[graph.gang_first[gang] : graph.gang_first[gang + 1]]
        return [graph.host(n) for n in members if n not in self._arrived[gang]]


_DECISION_TAG = 1
"""Of decisions, among messages of the shards' group."""


class Lockstep:
    """The processes that decide together.

    Args:
        group: theirs; its first one decides.
        timeout: seconds that any wait may last.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._group, self._timeout = WeakGroup(group), timeout
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._heard: SimpleQueue[int | Exception] | None = None
        """Decisions that came in and are not taken; None where whoever follows waits for them itself."""

    @property
    def is_first(self) -> bool:
        return self._rank == 0

    def tell(self, op: int) -> None:
        """Tells the others what is run next."""
        decision = torch.tensor([op], device="cpu")
        for other in range(1, self._size):
            self._sent.append((self._group().send([decision], other, _DECISION_TAG), decision))
        while len(self._sent) > 2 * self._size and self._sent[0][0].is_completed():
            self._sent.popleft()

    def listen(self, num_ops: int, wake: Callable[[], None]) -> None:
        """Starts a step of a follower that has asynchronous ops: decisions come in beside it, and none is waited for.

        Args:
            num_ops: decisions of the step. wake: ends the rank's wait for messages; called in another thread.
        """
        heard: SimpleQueue[int | Exception] = SimpleQueue()

        def hear() -> None:
            try:
                for _ in range(num_ops):
                    heard.put(self._receive())
                    wake()
            except Exception as error:
                heard.put(error)
                wake()

        self._heard = heard
        threading.Thread(target=hear, name="penstock-decisions", daemon=True).start()

    def follow(self) -> int | None:
        """What the first one runs next; None where `listen` was called and nothing has come in yet.

        Raises DeadlineExceeded, PeerLost.
        """
        if self._heard is None:
            return self._receive()
        try:
            found = self._heard.get_nowait()
        except Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def _receive(self) -> int:
        decision = torch.zeros(1, dtype=torch.int64, device="cpu")
        wait_for(self._group().recv([decision], 0, _DECISION_TAG), self._rank, 0, "its next decision", self._timeout)
        return int(decision)

    def end(self) -> None:
        """Ends a step: all decisions have been taken."""
        while self._sent:
            wait_for(self._sent.popleft()[0], self._rank, None, "decisions to be taken", self._timeout)
        self._heard = None


def lockstep_of(mesh: ProcessMesh, has_updates: bool, timeout: float) -> Lockstep | None:
    """The processes that decide together with this one; None where it decides alone. All of the mesh must call it.

    Args:
        has_updates: the schedule has updates as ops.
    """
    if not has_updates or not isinstance(mesh.replicas, GroupPeers):
        return None if mesh.shards is None else Lockstep(mesh.shards.get_group(), timeout)
    if mesh.shards is None:
        return Lockstep(mesh.replicas.group, timeout)
    holders = mesh.holders.mesh.flatten().tolist()
    group = groups_of_processes({None: holders}, timeout, whole=False)[None]
    assert group is not None  # this process is one of them
    return Lockstep(group, timeout)


class LockstepDispatcher(Dispatcher):
    """One rank's decisions in this process: made and told to the others, or those of the first one, each run once all
    that it needs is here.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        graph: Graph,
        rank: int,
        dispatch: Dispatch,
        memory_change: Sequence[float],
        cap: float,
    ) -> None:
        super().__init__(graph, rank, dispatch, memory_change, cap)
        self._lockstep = lockstep
        self._due: int | None = None
        """What was decided and can't run yet."""
        self._undecided = 0 if lockstep.is_first else graph.first[rank + 1] - graph.first[rank]
        """Ops of the rank, asynchronous ones left out, of which no decision has come in."""

    def next(self) -> int | None:
        if self._lockstep.is_first:
            op = super().next()
            if op is not None:
                self._lockstep.tell(op)
            return op
        if self._due is None and self._undecided:
            self._due = self._lockstep.follow()
            self._undecided -= self._due is not None
        if self._due is None or self._missing[self._due]:
            return None
        op, self._due = self._due, None
        return self._take(self.rank, op)

    def first_awaited(self) -> int | None:
        return super().first_awaited() if self._due is None else self._due
