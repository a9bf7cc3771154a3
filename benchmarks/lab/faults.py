"""Faults in a lab while two hosts train: how long until messages arrive again, and that nothing else changed.

    python benchmarks/lab/faults.py --faults interface --count 20 --out benchmarks/lab/interface.json

One training is run again and again, first without a fault; then one comes at a random moment of each. Links carry
1 Gbit/s, so that a message of 16 MB takes 134 ms, and the fault comes while one is on its way. The report has:

- the longest that a message took after the fault, in each direction, beside that of the run without faults;
- the longest step beside the median of the run without faults;
- whether losses and final parameters are those of the run without faults, to the bit;
- how many messages arrived beside how many there are, and what the delegates counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lab.faults_rank import MICROBATCHES, FaultJob
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.lab import HostProcess, Lab

TIMEOUT = 60.0
PATIENCE = 120.0
"""Seconds that one run may take, fault and all."""
MOVING = 200_000
"""Bytes within 5 ms that mean that a message is on its way; 1 Gbit/s carries three times as many."""
LINKS = ("0:1=bandwidth:1Gbit/s",)
DATA, AGREED = 1, 0
"""The network that data prefers, and that over which ranks agree; data goes there when the other dies."""


class StoreServer:
    """A Redis on host 0, where the runs are steered by one."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.address = f"redis://{lab.address(0)}:6379/0"
        self.start()

    def start(self) -> None:
        """Returns when it takes connections."""
        words = ["redis-server", "--bind", self._lab.address(0), "--save", "", "--protected-mode", "no"]
        self._server = self._lab.start(0, words, stdout=subprocess.PIPE)
        assert self._server.popen.stdout is not None
        for line in self._server.popen.stdout:
            if "Ready to accept" in line:
                return
        raise RuntimeError("redis-server ended before it took connections")

    def kill(self) -> None:
        self._server.stop(grace=0.0)


@dataclass(frozen=True)
class FaultTargets:
    """What a fault may touch: the lab, the ranks' processes by host, the store if there is one, and chance. A fault
    calls `begun` as soon as it is in force: ranks wait for that before their last step."""

    lab: Lab
    ranks: Sequence[HostProcess]
    store: StoreServer | None
    chance: random.Random
    begun: Callable[[], None]


Fault = Callable[[FaultTargets], dict[str, Any]]
"""Does it, says `begun`, waits as long as it lasts, undoes it; tells what it did. `at` is when it began, in ns."""


def nothing(targets: FaultTargets) -> dict[str, Any]:
    """No fault, for comparison."""
    targets.begun()
    return {}


def interface(targets: FaultTargets) -> dict[str, Any]:
    """An interface dies, and comes back after the run or in the middle of it."""
    host = targets.chance.randrange(2)
    at = time.perf_counter_ns()
    targets.lab.interface_down(host, DATA)
    done = time.perf_counter_ns()
    targets.begun()
    back = targets.chance.choice([None, 1.0])
    if back is not None:
        time.sleep(back)
        targets.lab.interface_up(host, DATA)
    return {"at": at, "down": done, "host": host, "back_after_s": back}


def cut(targets: FaultTargets) -> dict[str, Any]:
    """The data network carries nothing any more, and no host is told."""
    at = time.perf_counter_ns()
    targets.lab.link(0, 1, "down", nic=DATA)
    targets.begun()
    return {"at": at}


def loss(targets: FaultTargets) -> dict[str, Any]:
    """1% of packets get lost from here on."""
    at = time.perf_counter_ns()
    targets.lab.link(0, 1, "bandwidth:1Gbit/s+loss:1%", nic=DATA)
    targets.begun()
    return {"at": at}


def stopped(targets: FaultTargets) -> dict[str, Any]:
    """A rank's process stands still for 5 s."""
    host = targets.chance.randrange(2)
    at = time.perf_counter_ns()
    os.kill(targets.ranks[host].pid, signal.SIGSTOP)
    targets.begun()
    time.sleep(5.0)
    os.kill(targets.ranks[host].pid, signal.SIGCONT)
    return {"at": at, "host": host, "lasted_s": 5.0}


def still(targets: FaultTargets) -> dict[str, Any]:
    """A delegate stands still for 5 s."""
    host = targets.chance.randrange(2)
    victim = targets.chance.choice(delegates_of(targets.ranks[host].pid))
    at = time.perf_counter_ns()
    os.kill(victim, signal.SIGSTOP)
    targets.begun()
    time.sleep(5.0)
    os.kill(victim, signal.SIGCONT)
    return {"at": at, "host": host, "lasted_s": 5.0}


def silence(targets: FaultTargets) -> dict[str, Any]:
    """The network over which ranks agree, and where the store is, carries nothing for 2 s."""
    at = time.perf_counter_ns()
    targets.lab.link(0, 1, "down", nic=AGREED)
    targets.begun()
    time.sleep(2.0)
    targets.lab.link(0, 1, "up", nic=AGREED)
    return {"at": at, "lasted_s": 2.0}


def store(targets: FaultTargets) -> dict[str, Any]:
    """The store by which the run is steered is killed, and is back after 2 s with nothing in it."""
    assert targets.store is not None
    at = time.perf_counter_ns()
    targets.store.kill()
    targets.begun()
    time.sleep(2.0)
    targets.store.start()
    return {"at": at, "lasted_s": 2.0}


FAULTS: dict[str, Fault] = {
    "none": nothing,
    "interface": interface,
    "cut": cut,
    "loss": loss,
    "stopped": stopped,
    "still": still,
    "silence": silence,
    "store": store,
}


def delegates_of(pid: int) -> list[int]:
    """The delegates among the children of a rank's process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"from carrier." in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


class FaultTraining:
    """The ranks' processes, and what they tell."""

    def __init__(self, lab: Lab, job: FaultJob) -> None:
        self.job = job
        self._told: SimpleQueue[tuple[int, dict[str, Any] | str]] = SimpleQueue()
        words = ["python", str(Path(__file__).with_name("faults_rank.py")), job.to_json()]
        self.ranks = [
            lab.start(host, words, rank_environment(host), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for host in lab.hosts
        ]
        for process in self.ranks:
            for stream in (process.popen.stdout, process.popen.stderr):
                threading.Thread(target=self._listen, args=(process, stream), daemon=True).start()
        self.errors: dict[int, list[str]] = {host: [] for host in lab.hosts}

    def hear(self, run: int, word: str) -> dict[int, dict[str, Any]]:
        """What each rank tells of a run that has `word` in it. Raises RuntimeError when one ends instead."""
        heard: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + PATIENCE
        while len(heard) < len(self.ranks):
            try:
                host, line = self._told.get(timeout=1.0)
            except Empty:
                gone = [process for process in self.ranks if process.poll() is not None]
                if gone or time.monotonic() > end:
                    raise RuntimeError(f"run {run}: no {word} from all ranks; {self.said()}") from None
                continue
            if isinstance(line, str):
                self.errors[host].append(line)
            elif line["run"] == run and word in line:
                heard[line["rank"]] = line
        return heard

    def said(self) -> str:
        """How ranks ended, and what they wrote to stderr."""
        return "; ".join(
            f"rank {process.host} (exit code {process.poll()}): {' | '.join(self.errors[process.host][-6:])}"
            for process in self.ranks
        )

    def _listen(self, process: HostProcess, stream: Any) -> None:
        with stream:
            for line in stream:
                whole = line.startswith("{")
                self._told.put((process.host, json.loads(line) if whole else line.rstrip()))


def rank_environment(host: int) -> dict[str, str]:
    """What `init_process` wants of a rank a host."""
    return {
        "RANK": str(host),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def training_in_a_lab(
    num_runs: int, num_steps: int, timeout: float, steered: bool = False
) -> Iterator[tuple[Lab, FaultTraining, StoreServer | None]]:
    """Two hosts, a rank on each that is to train `num_runs` times, and a store if the runs are steered."""
    with tempfile.TemporaryDirectory() as folder, Lab(2, 2, LINKS) as lab:
        server = StoreServer(lab) if steered else None
        job = FaultJob(folder, num_runs, num_steps, timeout, None if server is None else server.address)
        yield lab, FaultTraining(lab, job), server


def run(faults: Sequence[str], seed: int, num_steps: int) -> list[dict[str, Any]]:
    """One row a run: the one without faults first, then one for each name in `faults`."""
    names = ["none", *faults]
    rows: list[dict[str, Any]] = []
    with training_in_a_lab(len(names), num_steps, TIMEOUT, "store" in names) as (lab, training, server):
        usual = 0.0
        for number, name in enumerate(names):
            chance = random.Random(f"{seed} {number}")
            training.job.go(number).touch()
            # Connections stand after the first step; ranks wait with the last one until the fault is there.
            training.hear(number, f"step {chance.randrange(num_steps - 2)}")
            if name != "none":
                time.sleep(chance.uniform(0.0, 0.7 * usual))
                await_transfer(lab, chance)
            fault = FAULTS[name](FaultTargets(lab, training.ranks, server, chance, training.job.begun(number).touch))
            reports = training.hear(number, "equal")
            _restore(lab)
            rows.append(row_of(name, fault, reports, rows[0] if rows else None))
            usual = rows[0]["median_step_s"]
            print(line_of(rows[-1]), flush=True)
    return rows


def await_transfer(lab: Lab, chance: random.Random) -> None:
    """Returns at a random moment of a message's 134 ms on the data network."""
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        if _moving(lab):
            time.sleep(chance.uniform(0.0, 0.06))
            if _moving(lab):
                return


def _moving(lab: Lab) -> bool:
    """Whether a message is on its way over the data network."""
    before = _carried(lab)
    time.sleep(0.005)
    return _carried(lab) - before > MOVING


def _carried(lab: Lab) -> int:
    return sum(way["num_bytes"] for way in lab.ways() if way["nic"] == DATA)


def _restore(lab: Lab) -> None:
    """All is well again, for the next run."""
    for host in lab.hosts:
        lab.interface_up(host, DATA)
    for nic in (DATA, AGREED):
        lab.link(0, 1, "bandwidth:1Gbit/s", nic=nic)


def row_of(
    name: str, fault: dict[str, Any], reports: dict[int, dict[str, Any]], usual: dict[str, Any] | None
) -> dict[str, Any]:
    """What a run showed. Seconds, unless a name says otherwise."""
    steps = [(end - begin) / 1e9 for begin, end in reports[0]["steps"][1:]]
    crossings = [crossing for each in reports.values() for crossing in each["crossings"]]
    at = fault.get("at", min(each["steps"][0][1] for each in reports.values()))
    row: dict[str, Any] = {
        "fault": name,
        "what": {key: value for key, value in fault.items() if key not in ("at", "down")},
        "median_step_s": statistics.median(steps),
        "longest_step_s": max(steps),
        "equal": all(each["equal"] for each in reports.values()),
        "losses": reports[0]["losses"],
        "num_messages": sum(each["counters"]["messages"] for each in reports.values()),
        "num_messages_due": 2 * MICROBATCHES * len(reports[0]["steps"]),
        "counters": {rank: each["counters"] for rank, each in reports.items()},
    }
    row["notices"] = sorted({notice for each in reports.values() for notice in each["notices"]})
    row["same_losses"] = usual is None or row["losses"] == usual["losses"]
    row["after_first_step_s"] = (at - max(each["steps"][0][1] for each in reports.values())) / 1e9
    row["before_the_end"] = at < max(each["steps"][-1][1] for each in reports.values())
    row["in_transfer"] = any(one[3] < at < one[5] for one in crossings)
    row["wait_s"] = waits(crossings, at)
    return row


def waits(crossings: Sequence[Sequence[int]], at: int) -> dict[str, float]:
    """For each direction: the longest that a message took of those that were there after `at`, in seconds.

    Counted from when it was sent, or the one before it was there, or `at`, whichever came last.
    """
    found: dict[str, float] = {}
    for source, target in sorted({(one[0], one[1]) for one in crossings}):
        before = at
        ways = sorted((one[5], one[3]) for one in crossings if (one[0], one[1]) == (source, target))
        for arrived, sent in ways:
            if arrived > at:
                name = f"{source}>{target}"
                found[name] = max(found.get(name, 0.0), (arrived - max(before, sent)) / 1e9)
                before = arrived
    return found


def line_of(row: dict[str, Any]) -> str:
    """A row in words."""
    waited = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in row.get("wait_s", {}).items())
    counted = {
        name: sum(each[name] for each in row["counters"].values()) for name in ("failovers", "failbacks", "resent")
    }
    return (
        f"{row['fault']:<10} longest step {row['longest_step_s']:.2f} s"
        + f" (median {row['median_step_s']:.2f} s), longest wait for a message {waited or 'not told'}"
        + f"; {row['num_messages']} of {row['num_messages_due']} messages, "
        + ", ".join(f"{name} {count}" for name, count in counted.items())
        + ("; equal" if row["equal"] and row["same_losses"] else "; NOT EQUAL")
    )


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What counts of the runs with each fault; of each run the longest wait for a message counts."""
    found = {}
    for name in dict.fromkeys(row["fault"] for row in rows):
        alike = [row for row in rows if row["fault"] == name]
        waited = [
            max(row["wait_s"].values()) for row in alike if row["wait_s"]
        ]  # steered runs keep them to themselves
        found[name] = {
            "num_runs": len(alike),
            "num_in_transfer": sum(row["in_transfer"] for row in alike),
            "median_wait_s": statistics.median(waited) if waited else None,
            "longest_wait_s": max(waited, default=None),
            "longest_step_s": max(row["longest_step_s"] for row in alike),
            "all_equal": all(row["equal"] and row["same_losses"] for row in alike),
            "all_messages_once": all(row["num_messages"] == row["num_messages_due"] for row in alike),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default="interface", help=f"apart by commas: {', '.join(FAULTS)}")
    parser.add_argument("--count", type=int, default=20, help="how often each")
    parser.add_argument("--steps", type=int, default=4, help="at least 3: one to begin with, one after the fault")
    parser.add_argument("--seed", type=int, help="of the moments and hosts; drawn where not given")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    rows = run([name for name in given.faults.split(",") for _ in range(given.count)], seed, given.steps)
    total = summary(rows)
    for name, figures in total.items():
        print(f"{name}: {json.dumps(figures)}")
    if given.out is not None:
        result = {**record(), "seed": seed, "summary": total}
        save_summary(given.out, result)
    return 0 if all(figures["all_equal"] and figures["all_messages_once"] for figures in total.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
