"""Runs a schedule on emulated devices: dispatch, messages and clocks are real, and ops only take time.

    run = ps.emulate(ps.build("1f1b", 8, 16), ps.Costs.uniform(8, 10, 10, 10), links=conditions)
    run.timelines[0].makespan, run.simulated[0].makespan, run.median_error

Each rank is a thread of this process, or a process if torch.distributed is set up with several. A rank sleeps through
its ops, so two cores can stand for sixteen accelerators. `emulate_processes` starts one process per rank, with
messages over gloo; each runs `python -m penstock.runtime.emulation FOLDER`.
"""

from __future__ import annotations

import pickle
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.control import Configuration
from penstock.cost import CostError, Costs, Links
from penstock.dispatch import Dispatch
from penstock.renamed import refuse_old
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.emulation.pipeline import KEYWORDS, EmulatedPipeline
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.launch import init_process, launch
from penstock.runtime.transport.choose import TransportOptions
from penstock.schedule import Schedule
from penstock.schedule.placement import ranks_together
from penstock.schedule.short_repr import short_repr
from penstock.simulation import Timeline

ORDER, RESULT = "order", "result"


@dataclass(frozen=True)
class Lateness:
    """How late ops ended, after the moment at which they were due (ms): errors of sleeping, and a busy machine."""

    median: float
    worst: float


@dataclass(frozen=True)
class Emulation:
    """The result of an emulated run, the same on every rank.

    Attributes:
        timelines: the measured timeline of each step.
        simulated: the simulated timeline of each step, under the conditions at that time.
        calibrated: as `simulated`, with `own_latency` added to every link.
        own_latency: milliseconds that a message took in addition to the conditions: the median over messages that a
            rank waited for on links without conditions; 0 if there were none.
        conditions: the conditions of the links.
        starts: when each step began, in milliseconds of the conditions' time.
        late: how late the ops of all ranks ended.
        stretch: the factor by which ops and conditions were slowed down in the run. All times here are without it.
        configurations: what each step ran.
        numbers: for each configuration the number of the decision that it comes from; 0 for the start.
        notices: messages for the user about changes during the run.

    Examples:
        >>> import penstock as ps
        >>> s, costs = ps.build("1f1b", 2, 4), ps.Costs.uniform(2, f=2, i=2, w=2)
        >>> ran = ps.emulate(s, costs)
        >>> len(ran.timelines), ran.timelines[0].source, ran.simulated[0].makespan
        (1, 'measured', 30.0)
    """

    timelines: tuple[Timeline, ...]
    simulated: tuple[Timeline, ...]
    calibrated: tuple[Timeline, ...]
    own_latency: float
    conditions: Links
    starts: tuple[float, ...]
    late: Lateness
    stretch: float
    configurations: tuple[Configuration, ...] = ()
    numbers: tuple[int, ...] = ()
    notices: tuple[str, ...] = ()

    __repr__ = short_repr

    @property
    def errors(self) -> tuple[float, ...]:
        """`measured / simulated - 1` of each step's makespan."""
        return _errors(self.timelines, self.simulated)

    @property
    def calibrated_errors(self) -> tuple[float, ...]:
        """`measured / calibrated - 1` of each step's makespan."""
        return _errors(self.timelines, self.calibrated)

    @property
    def median_error(self) -> float:
        """The median over the steps of the error of the simulated makespan, in either direction, as a share."""
        return statistics.median(map(abs, self.errors))


def _errors(measured: Sequence[Timeline], simulated: Sequence[Timeline]) -> tuple[float, ...]:
    return tuple(m.makespan / s.makespan - 1 if s.makespan else 0.0 for m, s in zip(measured, simulated, strict=True))


@refuse_old(KEYWORDS, RuntimeFailure)
def emulate(
    schedule: Schedule,
    costs: Costs,
    *,
    links: Links | None = None,
    dispatch: Dispatch | str = Dispatch.FROZEN,
    memory_limit: float | Sequence[float] | None = None,
    num_steps: int = 1,
    stretch: float = 1.0,
    timeout: float = 60.0,
    mesh: Any = None,
    transport: TransportOptions | str | None = None,
    adapt: AdaptOptions | None = None,
) -> Emulation:
    """Runs a schedule on emulated devices, and measures it.

    An emulated device computes nothing: each op takes the time that the costs give. Messages are real. They carry
    `costs.message_bytes`, and 16 bytes that identify them. With several processes, every rank makes the same call and
    gets the same result.

    Args:
        schedule: the schedule to run.
        costs: costs of its stages: milliseconds, and bytes of messages.
        num_steps: how many times to run it, one after another.
        links: delays and conditions of links between ranks. This and all that follows are as for `EmulatedPipeline`.
        dispatch: how a rank picks its next op: "frozen", "hinted", "dynamic" or "auto".
        memory_limit: most activations per rank, in the unit of the costs, if dispatch is not frozen.
        stretch: factor by which all ops and conditions are slowed down.
        timeout: how long a rank waits for a message (seconds).
        mesh: the processes to run over. Default: all ranks are threads of this process.
        transport: what carries messages; see `TransportOptions`.
        adapt: how to measure links and respond to slow ones; see `AdaptOptions`.

    Raises:
        ScheduleError: the schedule is not valid, or a cap is below what it needs.
        CostError: costs for another number of stages, a link that does not exist, or an invalid number.
        RuntimeFailure: a schedule that the runtime can't run (the error names what), or other calls on other ranks.
        DeadlineExceeded, PeerLost: a message did not arrive.

    Examples:
        >>> import penstock as ps
        >>> found = ps.emulate(ps.build("1f1b", 2, 4), ps.Costs.uniform(2, f=2, i=2, w=2))
        >>> found.timelines[0].source, found.simulated[0].makespan
        ('measured', 30.0)
    """
    if not isinstance(num_steps, int) or num_steps < 1:
        raise CostError(f"num_steps is {num_steps!r}: give a whole number of at least 1")
    with EmulatedPipeline(
        schedule,
        costs,
        links=links,
        dispatch=dispatch,
        memory_limit=memory_limit,
        stretch=stretch,
        timeout=timeout,
        mesh=mesh,
        transport=transport,
        adapt=adapt,
    ) as pipe:
        steps = [pipe.step() for _ in range(num_steps)]
    measured = tuple(step.timeline for step in steps)
    own = _own_latency(measured, pipe.link_conditions)
    late = [ms for step in steps for ms in step.late]
    return Emulation(
        measured,
        pipe.simulated(steps),
        pipe.simulated(steps, base=own),
        own,
        pipe.link_conditions,
        tuple(step.start for step in steps),
        Lateness(statistics.median(late), max(late)) if late else Lateness(0.0, 0.0),
        stretch,
        tuple(step.configuration for step in steps),
        tuple(step.number for step in steps),
        tuple(pipe.notices),
    )


def emulate_processes(schedule: Schedule, costs: Costs, *, timeout: float = 60.0, **options: Any) -> Emulation:
    """Like `emulate`, with one process per rank. The processes end with the call.

    Raises:
        RuntimeFailure: a rank failed. Its message is on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-emulate-") as name:
        folder = Path(name)
        (folder / ORDER).write_bytes(pickle.dumps((schedule, costs, timeout, options)))
        code = launch(["-m", "penstock.runtime.emulation", name], schedule.num_ranks)
        if code != 0:
            raise RuntimeFailure(f"the emulated ranks ended with exit code {code}; the messages above say why")
        found: Emulation = pickle.loads((folder / RESULT).read_bytes())
        return found


def run_rank(folder: Path) -> None:
    """Runs one rank. `emulate_processes` made and filled the folder."""
    schedule, costs, timeout, options = pickle.loads((folder / ORDER).read_bytes())
    rank, _ = init_process(timeout)
    found = emulate(schedule, costs, timeout=timeout, **options)
    if rank == 0:
        (folder / RESULT).write_bytes(pickle.dumps(found))


def _own_latency(timelines: Sequence[Timeline], conditions: Links) -> float:
    """The median time from an op's end to the start of the op that waited for its message."""
    found = []
    for timeline in timelines:
        sent = {(m.source, m.target, m.target_rank): (m.source_rank, m.sent) for m in timeline.messages}
        together = ranks_together(timeline.schedule)
        for timed in timeline.ops:
            if timed.waited_for is None or timed.op in together:  # that may have waited for its other ranks
                continue
            source, end = sent.get((timed.waited_for, timed.op, timed.rank), (timed.rank, 0.0))
            if source != timed.rank and conditions.named(source, timed.rank)[1] is None:
                found.append(max(0.0, timed.start - end))
    return statistics.median(found) if found else 0.0
