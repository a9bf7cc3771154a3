"""Better plans in the background: `ps.plan` searches beside the controller, on a share of one core.

    controller    | late link verified: an order by rule, at once | ... | takes the offer
                        | costs, links and caps as measured       ^ Offered, which is an event of the log
    python -m ...       +--> plan for 4 s --> 16 s --> 64 s ------+

The controller's rules make an order in milliseconds. A search takes seconds, and often finds a shorter one. So it
runs in a process of its own, and is stopped whenever it has had its share of one core. It goes on once a core has
been idle meanwhile: where ranks take all cores, a search in the gaps between their ops made steps 30% longer. If
links change, it is killed, and begins again for the links as they then are. A plan is only offered: what runs, the
controller decides.

This module is both ends: `BackgroundPlanner` in the controller's process, and the process that searches.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.control.configuration import Job, job_from_json, job_to_json
from penstock.control.controller import Controller
from penstock.control.decide import in_order
from penstock.control.events import Offered
from penstock.cost import CostError, Links
from penstock.formats.native import from_json, to_json
from penstock.planning import plan
from penstock.schedule import Schedule, ScheduleError

SHARE = 0.25
"""Share of one core that the search may take."""
_SLICE = 0.025
"""Seconds for which it runs before it is stopped again."""


def better_plans(job: Job, links: Links, lengths: Sequence[float] = (4.0, 16.0, 64.0)) -> Iterator[Schedule]:
    """Searches again and again, each time for longer; yields each plan that is shorter than those before.

    The plans have the placement of the job's start and its orders of microbatches, so gradients keep their bits. They
    stay within the start's caps.

    Args:
        job: with costs as measured. Its start has a single chain of stages.
        links: the delays to plan for.
        lengths: seconds of the searches by the clock, of which each has `SHARE`.
    """
    start, least = job.start.schedule, math.inf
    costs = replace(job.costs, uneven=(), overlap=None)
    for seed, seconds in enumerate(lengths):
        try:
            found = plan(
                costs, job.num_ranks, start.num_microbatches, links, memory_limit=job.start.caps,
                time_limit=seconds, placement=start.placement, recompute=False, seed=seed,
            )  # fmt: skip
        except (CostError, ScheduleError):
            return  # costs or caps that `plan` does not take
        if found.makespan < least and (kept := in_order(found.schedule, start)) is not None:
            yield kept
        least = min(least, found.makespan)
        if found.gap < 1e-3:  # no plan is better by more than that share
            return


class BackgroundPlanner:
    """Keeps a search going for the links as a controller knows them. Its methods are for one thread.

    Attributes:
        process: that searches, or has ended its search; None where nothing is to be searched for.
    """

    def __init__(self) -> None:
        self._problem: tuple[Job, Links] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._found: list[Schedule] = []

    def follow(self, controller: Controller) -> None:
        """Offers the controller what was found, and begins anew if links or ops have changed."""
        problem, known = controller.plan_problem(), self._problem
        if problem is None or known is None or not _is_same(*problem, *known):
            self.close()
            self._problem = problem
            if problem is not None:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                arguments = self.process, *problem, self._found
                threading.Thread(target=_tend, args=arguments, name="penstock-background", daemon=True).start()
        del self._found[:-1]  # each is better than those before
        if self._found and controller.would_gain(self._found[0]):
            controller.feed(Offered(self._found.pop(0)))

    def close(self) -> None:
        """Ends the search. What it has found is dropped."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process, self._found = None, []


def _is_same(job: Job, links: Links, known: Job, planned: Links) -> bool:
    """Whether a plan for the one is as good for the other: no delay or op differs by as much as a verified change
    does.
    """
    pairs = [(links.delays.get(way, 0.0), planned.delays.get(way, 0.0)) for way in {*links.delays, *planned.delays}]
    for kind in ("f", "i", "w", "b"):
        pairs += zip(getattr(job.costs, kind), getattr(known.costs, kind), strict=True)
    is_alike = replace(job, costs=known.costs) == known
    return is_alike and all(abs(now - then) <= max(known.smallest_delay, 0.1 * then) for now, then in pairs)


def _tend(process: Any, job: Job, links: Links, found: list[Schedule]) -> None:
    """Lets a process run for its share of the time, until it ends, and takes what it finds."""
    rest, clock = b"", (~process.pid << 3) | 2  # Linux's number for the clock of a process: the time it has run
    with contextlib.suppress(OSError), process.stdout as output:
        with process.stdin as given:
            given.write(json.dumps({"job": job_to_json(job), "links": list(links.delays.items())}).encode())
        os.read(output.fileno(), 1)  # now it ends with this process, even while it is stopped
        while True:
            began, ran = time.monotonic(), time.clock_gettime(clock)
            if select.select([output], [], [], _SLICE)[0]:
                if not (data := os.read(output.fileno(), 1 << 16)):
                    return
                *lines, rest = (rest + data).split(b"\n")
                found += [from_json(line.decode()) for line in lines]
            ran = time.clock_gettime(clock) - ran
            process.send_signal(signal.SIGSTOP)
            while not idles(max(4 * _SLICE, began + ran / SHARE - time.monotonic())) and process.poll() is None:
                pass
            process.send_signal(signal.SIGCONT)


def idles(seconds: float) -> bool:
    """Waits for some seconds. Whether cores were idle meanwhile for as long, all of them together."""
    before = Path("/proc/uptime").read_text(encoding="ascii").split()
    time.sleep(seconds)
    after = Path("/proc/uptime").read_text(encoding="ascii").split()
    return float(after[1]) - float(before[1]) >= 0.8 * seconds  # the second number is of all cores together


_START = f"""
import ctypes, os
ctypes.CDLL(None).prctl(1, {signal.SIGKILL:d})  # which it gets when its parent ends
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # a core that a rank wants is the rank's
print(flush=True)
from {__name__} import search; search()
"""
"""What the process runs that searches."""


def search() -> None:
    """Reads a problem, and writes each plan as a line."""
    value = json.loads(sys.stdin.read())
    links = Links({(source, target): ms for (source, target), ms in value["links"]})
    for schedule in better_plans(job_from_json(value["job"]), links):
        print(to_json(schedule), flush=True)
