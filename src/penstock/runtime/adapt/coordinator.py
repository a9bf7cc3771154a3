"""Rank 0's side: gathers all reports, has the controller decide, and hands out plans. It runs in its own threads.

    reports --> collector --> costs, until they are known --> controller --> decision --> a plan for every process
                                                                ^
    news from the training: switched, dropped, not all have it -+

The records of the run are files in a folder, with one JSON object per line (`RunLog`):

    control.jsonl      the controller's log: `penstock.control.replay` makes the same decisions of it
    iterations.jsonl   one line an iteration
    timelines.jsonl    when every op ran, of some iterations: an early one, and those around each switch

Failed records do not stop training. If one cannot be written, all records end there, with whole lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from penstock.control import Configuration, Event, IterationEnded, Job, Switched, Unanswered
from penstock.control.events import as_type
from penstock.control.log import event_line, header
from penstock.cost import Costs, Mesh
from penstock.cost.measured import WARMUP_ITERATIONS, MeasuredCosts
from penstock.runtime.adapt.options import AdaptOptions
from penstock.runtime.adapt.report import RankReport, ReportCollector, lines_of
from penstock.runtime.adapt.store import Rendezvous
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.transport.choose import TransportChoice
from penstock.simulation.simulator import as_dispatch

CONTROL, ITERATIONS, TIMELINES = "control.jsonl", "iterations.jsonl", "timelines.jsonl"


class RunLog:
    """Writes the files; keeps nothing where there is no folder.

    Args:
        ended: called once where a file cannot be written to any more, with the reason. From then on nothing is.

    Raises:
        RuntimeFailure: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path | None, ended: Callable[[str], None]) -> None:
        self._files: dict[str, BinaryIO] = {}
        self._folder, self._ended = folder, ended
        self._lock = threading.RLock()
        if folder is None:
            return
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            _put_aside(path)
            self._files = {name: (path / name).open("wb", buffering=0) for name in (CONTROL, ITERATIONS, TIMELINES)}
        except OSError as error:
            raise RuntimeFailure(f"{folder}: {error.strerror}; give another folder for the records") from None

    def timeline(self, reports: Sequence[RankReport], number: int, why: str) -> None:
        """When each op of an iteration ran, in ms from the first one's start, by rank 0's clock."""
        rows = [(report.rank, *row) for report in reports for row in report.ops]
        origin = min((row[4] for row in rows), default=0.0)
        ops = [[*row[:4], round(row[4] - origin, 4), round(row[5] - origin, 4)] for row in rows]
        value = {"iteration": reports[0].iteration, "number": number, "why": why, "ops": ops}
        self.write(TIMELINES, json.dumps(value))

    def close(self) -> None:
        with self._lock:
            while self._files:
                with contextlib.suppress(OSError):  # a quota's word may come this late
                    self._files.popitem()[1].close()

    def write(self, name: str, line: str) -> None:
        """Writes a line to one of the files, or nothing of it."""
        data = line.encode() + b"\n"
        with self._lock:
            file = self._files.get(name)
            if file is None:
                return
            end = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError as error:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                self.close()
                self._ended(f"records in {self._folder} end here: {name}: {error.strerror}; training goes on")


def _put_aside(folder: Path) -> None:
    """Gives the files of an earlier run the first number that is free."""
    old = [folder / name for name in (CONTROL, ITERATIONS, TIMELINES) if (folder / name).exists()]
    if not any(path.stat().st_size for path in old):
        return
    number = next(n for n in count(1) if not any(path.with_stem(f"{path.stem}-{n}").exists() for path in old))
    for path in old:
        path.rename(path.with_stem(f"{path.stem}-{number}"))


STARTING_STEPS = 8
"""Steps at the start of a run that trains which are neither usual nor evidence."""
POLL_S = 0.05
"""Seconds that one look at the reports may last."""
THREAD_EXIT_S, ABANDONED_EXIT_S = 1.0, 10.0
"""Seconds that threads have to end, and other processes to say that they have; and once nothing holds them: the
coordinator's may wait for a controller that is far behind, the agent's for the store.
"""


@dataclass(frozen=True)
class RunSetting:
    """What a job runs on, as far as deciding needs it.

    Attributes:
        start: what runs first. costs: None where they are to be measured.
        choice: what carries the messages.
        stretch: milliseconds of the clock to one of the costs' time.
        num_copies: of the pipeline, over a mesh.
        mesh: whose nodes are probed; None for none. nodes_stay: why they cannot move, empty if they may.
        gradient_bytes: of each stage, where there is a mesh.
        num_starting: see `penstock.control.Job`; `STARTING_STEPS` where a model trains.
    """

    start: Configuration
    costs: Costs | None
    choice: TransportChoice
    stretch: float = 1.0
    num_copies: int = 1
    mesh: Mesh | None = None
    nodes_stay: str = ""
    gradient_bytes: tuple[float, ...] = ()
    num_starting: int = 0

    def job(self, options: AdaptOptions, costs: Costs) -> Job:
        """What the controller works on, with these costs.

        Raises:
            ControlError: invalid numbers, or caps below what the start needs.
            ScheduleError: an unknown dispatch.
        """
        costs = options.with_host_copies(costs)
        return Job(
            costs if self.mesh is None else replace(costs, gradient_bytes=self.gradient_bytes),
            self.start,
            host_memory=options.host_memory,
            transport=self.choice.simulated,
            prices=options.prices,
            least_gain=options.least_gain,
            least_delay=options.least_delay,
            dispatches=tuple(as_dispatch(each) for each in options.dispatches),
            may_replan=options.may_replan,
            may_delegate=options.may_delegate and self.choice.has_delegates,
            mesh=self.mesh,
            ring=options.ring,
            nodes_stay=self.nodes_stay,
            num_starting=self.num_starting,
        )


class Coordinator:
    """Adapts the run from rank 0's process.

    Args:
        rendezvous: whose queues reports and plans go by.
        take: called with every decision, as the log has it: rank 0's own does not go by the store, so that rank 0
            always knows what it waits for.
        stop: called where deciding cannot go on, with the reason.
        notice: called with what a person should know.

    Attributes:
        decisions: all so far, as the log has them.
        num_before: steps of the run before the log's first iteration. Notices tell the run's steps.
    """

    def __init__(
        self,
        options: AdaptOptions,
        setting: RunSetting,
        rendezvous: Rendezvous,
        take: Callable[[Mapping[str, Any]], None],
        stop: Callable[[str], None],
        notice: Callable[[str], None],
    ) -> None:
        self.decisions: list[dict[str, Any]] = []
        self._is_calm = self.wants_probes = False
        self._options, self._setting, self._rendezvous = options, setting, rendezvous
        self._take_plan, self._stop, self._notice = take, stop, notice
        self._run_log = RunLog(options.folder, notice)
        self._report_collector = ReportCollector(setting.start.schedule.num_ranks, setting.num_copies)
        self._measured_costs = MeasuredCosts(setting.start.num_updates)
        self._due: list[tuple[int, Event]] = []
        self._digests = {0: setting.start.digest}
        self._number = self._num_since = self.num_before = 0
        self._last: Sequence[RankReport] = ()
        self._controller_process = ControllerProcess(self._hear, stop)
        self._closed = threading.Event()
        if setting.costs is not None:
            self._begin(setting.costs)
        self._thread = threading.Thread(target=self._work, name="penstock-coordinator", daemon=True)
        self._thread.start()

    @property
    def is_calm(self) -> bool:
        """Whether the controller has nothing to find out, and hears no news but of how long steps take."""
        return self._is_calm and all(isinstance(event, IterationEnded) for _, event in self._due)

    # From rank 0's training.

    def note(self, iteration: int, event: Event) -> None:
        """Takes news of a decision, which the controller hears before what iteration `iteration` brought."""
        self._due.append((iteration, event))

    def stop(self) -> None:
        """Asks the thread to end; what the controller still says is not heard."""
        self._closed.set()

    def close(self) -> None:
        """Ends the thread and the controller."""
        self._closed.set()
        for seconds in (THREAD_EXIT_S, ABANDONED_EXIT_S):  # it may stand still while the controller reads nothing
            self._thread.join(seconds)
            if not self._thread.is_alive():
                self._learn(sys.maxsize)
            self._controller_process.close()
        self._run_log.close()

    # In threads.

    def _work(self) -> None:
        try:
            while not self._closed.is_set():
                data = self._rendezvous.pop(self._rendezvous.reports, POLL_S)
                if data is None:
                    continue
                complete = self._report_collector.add(RankReport(**json.loads(data)))
                if complete is not None:
                    self._take(complete)
        except Exception as error:
            self._stop(f"rank 0 failed while it gathered reports: {error!r}")

    def _take(self, reports: Sequence[RankReport]) -> None:
        """Hands on what one iteration brought."""
        self._learn(reports[0].iteration)
        if not self._controller_process.has_begun:
            rows = ((kind, stage, end - start) for each in reports for kind, stage, _, start, end in each.ops)
            if (costs := self._measured_costs.feed(rows)) is not None:
                self._begin(costs)
        self._controller_process.feed(*lines_of(reports))
        record = self._record(reports[0].iteration, max(report.ms for report in reports), reports)
        if not self._controller_process.has_begun:
            self._run_log.write(ITERATIONS, json.dumps(record))
        else:
            self._controller_process.feed(json.dumps({"record": record}))
        self._num_since += 1
        if self._num_since == WARMUP_ITERATIONS + 1:
            self._run_log.timeline(reports, self._number, f"after {self._number}" if self._number else "start")
        self._last = reports

    def _learn(self, iteration: int) -> None:
        """Passes on the news that is due before an iteration's events."""
        due = [each for each in list(self._due) if each[0] <= iteration]
        for when, event in due:
            self._due.remove((when, event))
            if isinstance(event, Switched):
                if self._last:
                    self._run_log.timeline(self._last, self._number, f"before {event.number}")
                self._number, self._num_since = event.number, 0
            self._controller_process.feed(event_line(event))
            if isinstance(event, IterationEnded):
                self._controller_process.feed(json.dumps({"record": self._record(event.number, event.ms)}))

    def _record(self, iteration: int, ms: float, reports: Sequence[RankReport] = ()) -> dict[str, object]:
        return {
            "iteration": iteration,
            "ms": round(ms, 4),
            "number": self._number,
            "digest": self._digests[self._number],
            "links": {link: ms for report in reports for link, ms in (report.links or {}).items()},
            "peaks": [report.peak for report in sorted(reports, key=lambda report: report.rank)],
            "counters": dict(sum((Counter(report.counters or {}) for report in reports), Counter())),
        }

    def _begin(self, costs: Costs) -> None:
        if not self._closed.is_set():
            self._controller_process.begin(self._setting.job(self._options, costs))

    def _hear(self, line: str) -> None:
        """A line of the controller's output."""
        value = json.loads(line)
        if "record" in value:
            self._is_calm, self.wants_probes = value["calm"], value["probe"]
            self._run_log.write(ITERATIONS, json.dumps(value["record"]))
            return
        self._run_log.write(CONTROL, line)
        if "unanswered" in value:
            found = as_type(value["unanswered"], Unanswered)
            self._notice(f"after iteration {found.iteration + 1 + self.num_before}: {found}")
        if "decision" in value:
            decision = value["decision"]
            self.decisions.append(decision)
            self._digests[decision["number"]] = decision["digest"]
            for first in self._rendezvous.processes[1:]:  # at once, for iterations may be short
                self._rendezvous.push(self._rendezvous.plans(first), json.dumps(decision).encode())
            self._take_plan(decision)


END, START = 2.0, 20.0
"""Seconds that the process has to end by itself: once a record has come back, and while it may still be starting."""


class ControllerProcess:
    """A controller in a process of its own. The process starts while ranks do, so no step pays for its start.

    A decision simulates all that could run. In a thread of rank 0 that would keep the interpreter's lock from the
    rank's ops; here it runs beside, at a lower priority. It watches rank 0's process and
    ends with it, since a signal to the rank's process group does not reach the controller's own group.

    Args:
        take: called, in a thread, with every line of its output: the log's, and records.
        ended: called where the process ends though nobody closed it, with the reason.

    Attributes:
        has_begun: whether the controller knows its job.
    """

    def __init__(self, take: Callable[[str], None], ended: Callable[[str], None]) -> None:
        self._take, self._ended = take, ended
        self._closed = self._has_answered = self.has_begun = False
        self._held: list[str] = []
        path = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.control", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            process_group=0,  # the terminal's Ctrl-C is for the ranks
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._reader = threading.Thread(target=self._read, name="penstock-controller", daemon=True)
        self._reader.start()

    def begin(self, job: Job) -> None:
        """Tells the controller the job that it decides about, and all that was fed before."""
        self.has_begun = True
        self.feed(header(job), *self._held)

    def feed(self, *lines: str) -> None:
        """Hands on events, as lines of the log, and records, which come back once the events were heard. Waits where
        the process is far behind. Until the controller knows its job, the lines are kept.
        """
        if not self.has_begun:
            self._held += lines
            return
        with contextlib.suppress(OSError, ValueError):  # its end is told by the reader
            self._input.write("\n".join(lines) + "\n")
            self._input.flush()

    def close(self) -> None:
        """Ends the process, with what it was doing, and the thread that reads its words.

        One that has just been started still says what the first iterations brought, however short the run.
        """
        self._closed = True
        late = threading.Timer(START if self.has_begun and not self._has_answered else END, self._process.kill)
        late.start()
        with contextlib.suppress(OSError, ValueError):
            self._input.close()
        self._process.wait()
        late.cancel()
        self._reader.join(END)

    def _read(self) -> None:
        with self._output as lines:
            try:
                for line in lines:
                    self._has_answered = self._has_answered or line.startswith('{"record"')
                    self._take(line.rstrip("\n"))
            except Exception as error:
                # Nobody reads what it says from here on: it would stand still, and whoever feeds it, too.
                self._process.kill()
                reason = f"rank 0 failed to read what the controller wrote: {error!r}"
            else:
                reason = f"the controller's process ended with exit code {self._process.wait()}"
        if not self._closed:
            self._ended(reason)
