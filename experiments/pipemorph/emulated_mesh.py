"""A mesh of emulated devices: replicas of a pipeline, and rings that add up their gradients, all in real time.

    with EmulatedMesh(configuration, costs, ps.Mesh(4, 2), links=conditions) as mesh:
        measured = mesh.step()
        print(measured.iteration, mesh.simulated().iteration)
        mesh.switch(ps.Mesh(4, 2, nodes=(0, 2, 1, 3, 4, 5, 6, 7)), configuration)

Each node has a thread for its pipeline's ops, and another one for its rings and its update. So gradients cross links
while ops run.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from penstock.control import Configuration
from penstock.control.closed_loop_simulation import as_run
from penstock.cost import Costs, LinkCondition, Links, Mesh, Ring
from penstock.runtime.emulation.backend import sharpen_timers
from penstock.runtime.emulation.pipeline import EmulatedPipeline, EmulatedStep
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.mesh.peers import LocalPeers
from penstock.runtime.transport.choose import DelegateOptions, TransportOptions
from penstock.runtime.transport.link_conditions import Conditions, sleep_until
from penstock.schedule import Op
from penstock.schedule.messages import remove_communication
from penstock.simulation.mesh import (
    MeshTimeline,
    TimedReduction,
    gradient_bytes,
    last_gradients,
    require_mesh,
    simulate_mesh,
)

Parts = list[list[float]]
"""Of each part of a vector, a number a chunk."""


class MeshMessage(NamedTuple):
    """A message: when it is there (ns of the monotonic clock), its place in the order, what it carries."""

    due: int
    number: int
    value: float


class _Inbox:
    """What was sent to one member."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: list[MeshMessage] = []


class EmulatedRing:
    """The ring of one rank: a thread a replica calls `all_reduce` for one stage after the other.

        step 0, 1, ..., dp - 2          member i sends part i - step on, and the next one adds it to its own
        step dp - 1, ..., 2 (dp - 1)    the parts that are whole now go round once more, and replace what is there

    A chunk leaves when its part has come that far, when the chunk before has left, and when no more than a window of
    chunks is under way: the rule of `penstock.cost.mesh`, run by the clock. No sleep ends on time, so a chunk counts
    as handed over at the moment when what it waited for was there; what a member is late does not add up over
    hundreds.

    Args:
        conditions: of the links between members, from each to the next.
        timeout: seconds that any wait may last.
    """

    def __init__(self, ring: Ring, conditions: Conditions, num_members: int, timeout: float) -> None:
        self._ring, self._conditions, self._num, self._timeout = ring, conditions, num_members, timeout
        self._boxes = [_Inbox() for _ in range(num_members)]
        self._met = threading.Barrier(num_members)
        self._lost = False

    def lose(self) -> None:
        """Lets all members know that something failed."""
        self._lost = True
        self._met.abort()
        for box in self._boxes:
            with box.changed:
                box.changed.notify()

    def all_reduce(self, member: int, num_bytes: float, own: float) -> tuple[int, int, Parts]:
        """Adds up `own`, a number that stands for each chunk of the member's bytes, over all members.

        Returns:
            When all members were there and when this one had the sum (ns of the monotonic clock), and the sum.

        Raises:
            DeadlineExceeded, PeerLost: a member or a chunk did not come.
        """
        count, size = self._ring.chunks(num_bytes, self._num)
        parts = [[own] * count for _ in range(self._num)]
        self._meet(member)
        begin = time.perf_counter_ns()
        total, under_way = 2 * (self._num - 1) * count, self._ring.under_way
        after = (member + 1) % self._num
        came: list[int] = []
        dues: list[int] = []
        while len(dues) < total or len(came) < total:
            for chunk in self._arrived(member):
                if chunk.number != len(came):
                    raise RuntimeFailure(f"member {member} of a ring got chunk {chunk.number}, not {len(came)}")
                step, place = divmod(len(came), count)
                part = parts[(member - 1 - step) % self._num]
                part[place] = part[place] + chunk.value if step < self._num - 1 else chunk.value
                came.append(chunk.due)
            room_at = None
            while (number := len(dues)) < total and len(came) > number - count:
                room_at = dues[number - under_way] if under_way and number >= under_way else begin
                if room_at > time.perf_counter_ns():
                    break
                moment = max(room_at, came[number - count] if number >= count else begin)
                step, place = divmod(number, count)
                due = self._conditions.due(member, after, size, moment)
                self._put(after, MeshMessage(due, number, parts[(member - step) % self._num][place]))
                dues.append(due)
                room_at = None
            if len(dues) < total or len(came) < total:
                self._wait(member, room_at, len(came))
        return begin, time.perf_counter_ns(), parts

    def _meet(self, member: int) -> None:
        """Waits for all members, as a collective of a communicator does."""
        try:
            self._met.wait(self._timeout)
        except threading.BrokenBarrierError:
            if self._lost:
                raise PeerLost(
                    f"member {member} of a ring waits for the others, and another part of the run failed"
                ) from None
            raise DeadlineExceeded(
                f"member {member} of a ring waited {self._timeout:g} s for the other members"
            ) from None

    def _put(self, member: int, chunk: MeshMessage) -> None:
        box = self._boxes[member]
        with box.changed:
            heapq.heappush(box.waiting, chunk)
            box.changed.notify()

    def _arrived(self, member: int) -> list[MeshMessage]:
        box, found = self._boxes[member], []
        with box.changed:
            while box.waiting and box.waiting[0].due <= time.perf_counter_ns():
                found.append(heapq.heappop(box.waiting))
        return found

    def _wait(self, member: int, room_at: int | None, came: int) -> None:
        """Waits until a chunk is there, or the window has room at `room_at` (ns)."""
        box, end = self._boxes[member], time.monotonic() + self._timeout
        with box.changed:
            while True:
                if self._lost:
                    raise PeerLost(
                        f"member {member} of a ring waits for chunk {came}, and another part of the run failed"
                    )
                moments = [chunk.due for chunk in box.waiting[:1]] + ([] if room_at is None else [room_at])
                left = (min(moments) - time.perf_counter_ns()) / 1e9 if moments else end - time.monotonic()
                if left <= 0:
                    if moments:
                        return
                    raise DeadlineExceeded(f"member {member} of a ring waited {self._timeout:g} s for chunk {came}")
                box.changed.wait(left)


class OpEndTimes:
    """When ops ended that others wait for, by replica."""

    def __init__(self, awaited: set[tuple[int, Op]], timeout: float) -> None:
        self._at: dict[tuple[int, Op], int] = {}
        self._awaited, self._timeout = awaited, timeout
        self._changed = threading.Condition()
        self._lost = False

    def note(self, replica: int, op: Op) -> None:
        if (replica, op) in self._awaited:
            with self._changed:
                self._at[replica, op] = time.perf_counter_ns()
                self._changed.notify_all()

    def lose(self) -> None:
        """Lets all who wait know that something failed."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def wait(self, replica: int, op: Op) -> int:
        """When it ended (ns of the monotonic clock). Raises DeadlineExceeded, PeerLost."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._lost or (replica, op) in self._at, self._timeout)
            if self._lost:
                raise PeerLost(f"replica {replica} waits for {op}, and another part of the run failed")
            if not came:
                raise DeadlineExceeded(f"{op} of replica {replica} did not end within {self._timeout:g} s")
            return self._at[replica, op]


@dataclass(frozen=True)
class _NodeStep:
    """What one node measured besides its ops (ns of the monotonic clock): (stage, ready, start, end), and its end."""

    reductions: list[tuple[int, int, int, int]]
    end: int


def _run_at_once(works: Sequence[Callable[[], None]], lose: Callable[[], None]) -> None:
    """Runs functions to their ends, each in a thread. The first failure loses the others, and is raised."""
    with ThreadPoolExecutor(len(works), "penstock-node") as pool:
        runs = [pool.submit(work) for work in works]
        try:
            for run in as_completed(runs):
                run.result()
        except BaseException:
            lose()
            raise


class EmulatedMesh:
    """Replicas of an emulated pipeline on the nodes of a mesh, all in this process.

    Args:
        links: conditions of links between nodes, injected in addition to the time that threads take.
        costs: costs of each stage.
        ring: how rings move bytes.
        stretch: the factor by which ops and links are slowed down.
        depth: most messages under way on a link that is not delegated. None: any number.
        timeout: the longest time that any wait may last (seconds).

    Attributes:
        mesh, configuration: what the next step runs.

    Raises:
        ScheduleError, CostError: what `simulate_mesh` refuses.
        RuntimeFailure: an invalid depth.

    Examples:
        >>> import penstock as ps
        >>> from experiments.pipemorph.emulated_mesh import EmulatedMesh
        >>> costs = ps.cost.costs_preset("gpt2-7b", num_stages=2)
        >>> s = ps.build("1f1b", 2, 2)
        >>> start = ps.control.Configuration(s, "frozen", caps=ps.simulate(s, costs).peak_activations)
        >>> with EmulatedMesh(start, costs, ps.Mesh(pp=2, dp=2)) as pair:
        ...     ran = pair.step()
        >>> len(ran.replicas), ran.iteration > 0
        (2, True)
    """

    def __init__(
        self,
        configuration: Configuration,
        costs: Costs,
        mesh: Mesh,
        *,
        links: Links | None = None,
        ring: Ring | None = None,
        stretch: float = 1.0,
        depth: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.link_conditions, self._ring = Links.of(links), ring or Ring()
        self._costs, self._stretch, self._timeout, self._depth = costs, stretch, timeout, depth
        self._replicas: list[EmulatedPipeline] = []
        self.configuration: Configuration
        self.switch(mesh, configuration)

    def __enter__(self) -> EmulatedMesh:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def switch(self, mesh: Mesh, configuration: Configuration | None = None) -> None:
        """Switches to other places of the nodes, and to another configuration, from the next step on."""
        configuration = configuration or self.configuration
        require_mesh(configuration.schedule, self._costs, mesh, self.link_conditions)
        self.close()
        self.mesh, self.configuration = mesh, configuration
        self._replicas = [self._replica_of(replica) for replica in range(mesh.dp)]

    def step(self) -> MeshTimeline:
        """Runs one iteration. Times are as if the stretch were 1.

        Raises:
            DeadlineExceeded, PeerLost: a message did not arrive.
        """
        mesh, schedule = self.mesh, remove_communication(self.configuration.schedule)
        last = last_gradients(schedule)
        final = [row[-1] for row in schedule.order]
        awaited = {*(op for ops in last for op in ops), *final}
        ended = OpEndTimes({(replica, op) for replica in range(mesh.dp) for op in awaited}, self._timeout)
        rings = [self._ring_of(rank) for rank in range(mesh.pp)]
        steps: dict[int, EmulatedStep] = {}
        nodes: dict[tuple[int, int], _NodeStep] = {}

        def lose() -> None:
            ended.lose()
            for ring in rings:
                ring.lose()

        def pipeline(replica: int) -> None:
            steps[replica] = self._replicas[replica].step(lambda op: ended.note(replica, op))

        def node(rank: int, replica: int) -> None:
            nodes[rank, replica] = self._rings_and_update(rank, replica, last[rank], final[rank], ended, rings[rank])

        works = [partial(pipeline, replica) for replica in range(mesh.dp)]
        works += [partial(node, rank, replica) for rank in range(mesh.pp) for replica in range(mesh.dp)]
        _run_at_once(works, lose)
        return self._measured(steps, nodes)

    def simulated(self) -> MeshTimeline:
        """Simulates the next step."""
        now = self.configuration
        return simulate_mesh(
            now.schedule,
            self._costs,
            self.mesh,
            ring=self._ring,
            **as_run("decoupled" if self._depth is None else f"blocking:{self._depth}", now, self.link_conditions),
        )

    def close(self) -> None:
        """Closes the transports."""
        for replica in self._replicas:
            replica.close()
        self._replicas = []

    def _replica_of(self, replica: int) -> EmulatedPipeline:
        now, depth = self.configuration, self._depth
        made = EmulatedPipeline(
            now.schedule,
            self._costs,
            links=self.mesh.links_of(self.link_conditions, replica),
            dispatch=now.dispatch,
            memory_limit=now.caps or None,
            stretch=self._stretch,
            timeout=self._timeout,
            mesh=LocalPeers(self.mesh.pp),
            transport=TransportOptions(
                "host" if depth is None else "direct", depth=depth, delegates=DelegateOptions()
            ),
        )
        made.reconfigure(now)  # with its delegated links
        return made

    def _ring_of(self, rank: int) -> EmulatedRing:
        links = self.mesh.ring_links(self.link_conditions, rank)
        around: dict[tuple[int, int], LinkCondition] = {
            (member, (member + 1) % self.mesh.dp): link for member, link in enumerate(links) if link is not None
        }
        conditions = Conditions(Links(around, base=self.link_conditions.base), self._stretch)
        return EmulatedRing(self._ring, conditions, self.mesh.dp, self._timeout)

    def _rings_and_update(
        self, rank: int, replica: int, last: Sequence[Op], final: Op, ended: OpEndTimes, ring: EmulatedRing
    ) -> _NodeStep:
        """A node's second thread: each stage's ring as soon as it may go round, then the update."""
        sharpen_timers()
        weighs, found = gradient_bytes(self._costs), []
        for op in last if self.mesh.dp > 1 else ():
            ready = ended.wait(replica, op)
            own = float(op.stage + replica)
            start, end, parts = ring.all_reduce(replica, weighs[op.stage], own)
            whole = sum(float(op.stage + each) for each in range(self.mesh.dp))
            if any(value != whole for part in parts for value in part):
                raise RuntimeFailure(f"the ring of rank {rank} did not add up stage {op.stage} on replica {replica}")
            found.append((op.stage, ready, start, end))
        begin = max(ended.wait(replica, final), *(end for *_, end in found), 0)
        due = begin + round(sum(self._costs.duration("U", op.stage) for op in last) * self._stretch * 1e6)
        sleep_until(due)
        return _NodeStep(found, time.perf_counter_ns())

    def _measured(self, steps: dict[int, EmulatedStep], nodes: dict[tuple[int, int], _NodeStep]) -> MeshTimeline:
        origin = min(step.began for step in steps.values())

        def ms(moment: float) -> float:
            return (moment - origin) / 1e6 / self._stretch

        timelines = tuple(step.timeline for _, step in sorted(steps.items()))
        reductions: list[TimedReduction] = []
        for rank in range(self.mesh.pp):
            members: list[Any] = [nodes[rank, replica].reductions for replica in range(self.mesh.dp)]
            for of_stage in zip(*members, strict=True):
                _, ready, start, end = (max(values) for values in zip(*of_stage, strict=True))
                reductions.append(TimedReduction(rank, of_stage[0][0], ms(ready), ms(start), ms(end)))
        return MeshTimeline(self.mesh, timelines, tuple(reductions), max(ms(node.end) for node in nodes.values()))
