"""Each of two networks is cut during transfers while hosts train, on every transport: does training go on as it was?

    python benchmarks/faults/links.py --transport gloo --transport delegate --out benchmarks/faults/links.json
    python benchmarks/faults/links.py --transport direct --transport late --out benchmarks/faults/bounded.json
    python benchmarks/faults/links.py --transport nccl --out benchmarks/faults/nccl.json      needs a GPU
    python benchmarks/faults/links.py --readme        writes the README's tables from the files of results

A cell is

- a transport: "gloo", by which "host" goes between hosts too, "delegate", "late", which is gloo with messages that
  arrive 20 ms later by injected conditions, "direct", which is "late" with two such messages on a link at most, or
  "nccl", with all ranks on one GPU of which each thinks that it is another host's, so that NCCL goes by a network of
  the lab;
- a mesh: pp (a rank on each of two hosts), or pp x dp (four ranks on two hosts, so that both the links of a pipeline
  and those between its replicas cross);
- a network: 0, on which gloo meets, sums and agrees and carries messages, or 1, by which "delegate" and "nccl" do;
- how it is cut: "interface" (of one of the hosts, whose kernel knows at once) or "silent" (the network carries
  nothing, and nobody is told).

In each cell one training is run `count` + 1 times by the same processes: first without a fault, then each time with
one at a random moment after its first step, while a message is on its way (more than 20 kB crossed that cell's
network within 5 ms; where that network carries no messages, at any moment). Networks carry 200 Mbit/s; a message from
stage to stage is 2 MiB and takes 84 ms, and a step has 8 of them in each pipeline. A run has 4 steps. Its ranks wait
with the last one until the network is cut, so that no cut comes after the end. The network comes back when the run
has ended.

A run is right if it ended on every rank with losses and parameters that are bitwise those of the run without a fault.
A cut may cost one step, which is repeated; by "delegate" a network that carries no sums of gradients costs none.
Told besides: the longest step beside the median of the run without faults, and in how many runs the fault came before
the end, and in a transfer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.readme import write_between
from experiments.common.record import record
from experiments.common.summary import save_summary
from penstock.lab import HostProcess, Lab

TRANSPORTS = ("gloo", "delegate", "direct", "late", "nccl")
MESHES, NETWORKS, HOWS = ("pp", "pp x dp"), (0, 1), ("interface", "silent")
CARRYING = {"gloo": 0, "delegate": 1, "direct": 0, "late": 0, "nccl": 1}
"""Transports, and by which network their messages go."""
LATE = {"pp": "0:1=latency:20ms", "pp x dp": "0:2=latency:20ms 1:3=latency:20ms"}
"""Between the stages of each pipeline. Over replicas links join nodes, numbered rank * dp + replica."""
FOLDER = Path(__file__).parent
TABLES = {
    "links.json": "results by gloo and delegates",
    "bounded.json": "results",
    "nccl.json": "results over NCCL",
}
"""Results, and where their tables stand in the README."""
WIDTH, ROWS, MICROBATCHES, NUM_STEPS = 32, 2**14, 4, 4
"""A message is WIDTH * ROWS * 4 bytes: 2 MiB."""
LINK = "bandwidth:200Mbit/s"
MOVING = 20_000
PATIENCE = 120.0
TIMEOUT = 30.0
# Of each host, (rank, its place in the mesh): both dimensions cross hosts.
RANKS = {"pp": ((0,), (1,)), "pp x dp": ((0, 3), (1, 2))}


@dataclass(frozen=True)
class LinkJob:
    """What a rank's process is to do."""

    folder: str
    transport: str
    mesh: str
    num_runs: int

    def go(self, run: int) -> Path:
        """The file whose being there starts a run."""
        return Path(self.folder) / f"go-{run}"

    def cut(self, run: int) -> Path:
        """The file that is there once the run's network is cut, or is to stay whole."""
        return Path(self.folder) / f"cut-{run}"


# A rank.


def rank_main(job: LinkJob) -> int:
    import torch
    import torch.distributed as dist

    from benchmarks.lab.faults_rank import wait_for
    from penstock.runtime.launch import init_process

    torch.set_num_threads(1)
    if job.transport == "nccl":  # before CUDA or NCCL have read the environment
        interface = os.environ["PENSTOCK_INTERFACES"].split(",")[0]  # that which delegates prefer
        os.environ |= {
            "NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "=" + name_of(interface),
            "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1",
        }  # fmt: skip
    rank, _ = init_process(TIMEOUT)
    reference: Any = None
    for run in range(job.num_runs):
        wait_for(job.go(run), PATIENCE)
        told, state = train(job, run, rank)
        if reference is None:
            reference = state
        told["equal"] = state.keys() == reference.keys() and all(
            torch.equal(state[name], reference[name]) for name in state
        )
        say(told)
    wait_for(job.go(job.num_runs), PATIENCE)
    dist.destroy_process_group()
    return 0


def train(job: LinkJob, run: int, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One run: what it tells, and this rank's parameters and losses at its end."""
    import torch
    from torch import nn

    import penstock as ps
    from benchmarks.lab.faults_rank import wait_for

    torch.manual_seed(1)
    stages: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)),
    ]
    dp, device = 1 if job.mesh == "pp" else 2, "cuda:0" if job.transport == "nccl" else "cpu"
    inputs = torch.randn(dp * MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    targets = inputs.sum(1, keepdim=True)
    links = ps.Links.parse(LATE[job.mesh])
    steps, losses = [], []
    with ps.Pipeline(
        stages,
        ps.build("1f1b", num_ranks=2, num_microbatches=MICROBATCHES),
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.AdamW,
        mesh=None if dp == 1 else ps.runtime.device_mesh(ps.Mesh(pp=2, dp=2)),
        dispatch="dynamic",
        transport={
            "late": ps.TransportOptions("gloo", links=links),
            "direct": ps.TransportOptions("direct", links=links),
        }.get(job.transport, job.transport),
        timeout=TIMEOUT,
        parallel=ps.ParallelOptions(device=device),
    ) as pipe:
        for step in range(NUM_STEPS):
            if step == NUM_STEPS - 1:
                wait_for(job.cut(run), PATIENCE)
            begin = time.perf_counter_ns()
            losses.append(pipe.step(inputs, targets).losses)
            steps.append([begin, time.perf_counter_ns()])
            say({"run": run, "rank": rank, f"step {step}": steps[-1][1]})
        state = {name: parameter.detach().cpu().clone() for name, parameter in pipe.named_parameters()}
        state["losses"] = torch.cat(losses).cpu()
        told = {"run": run, "rank": rank, "steps": steps, "notices": pipe.notices}
        counters = getattr(pipe._local.transport, "counters", None)
        told["repeats"] = pipe._local.attempts.num_repeats if pipe._local.attempts is not None else 0
        told["counters"] = {} if counters is None else {key: n for key, n in asdict(counters).items() if n}
    return told, state


def name_of(address: str) -> str:
    """The interface of this host that has an address."""
    from penstock.runtime.mesh.interfaces import local_addresses

    return next(name for _, name in socket.if_nameindex() if local_addresses([name]) == (address,))


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


# The lab.


class LinkTraining:
    """The ranks' processes, and what they tell."""

    def __init__(self, lab: Lab, job: LinkJob) -> None:
        self.job = job
        self._told: SimpleQueue[dict[str, Any] | str] = SimpleQueue()
        self.errors: list[str] = []
        words = ["python", str(Path(__file__).resolve()), "--rank", json.dumps(asdict(job))]
        ranks = RANKS[job.mesh]
        self.ranks: list[HostProcess] = []
        for host, here in enumerate(ranks):
            for local, rank in enumerate(here):
                env = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(sum(map(len, ranks))),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(len(here)),
                    "OMP_NUM_THREADS": "1",
                }
                one = lab.start(host, words, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                self.ranks.append(one)
                for stream in (one.popen.stdout, one.popen.stderr):
                    threading.Thread(target=self._listen, args=(stream,), daemon=True).start()

    def _listen(self, stream: Any) -> None:
        with stream:
            for line in stream:
                self._told.put(json.loads(line) if line.startswith("{") else line.rstrip())

    def hear(self, run: int, word: str) -> dict[int, dict[str, Any]]:
        """What each rank tells of a run that has `word` in it. Raises RuntimeError when one ends instead."""
        heard: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + PATIENCE
        while len(heard) < len(self.ranks):
            try:
                line = self._told.get(timeout=1.0)
            except Empty:
                gone = [one for one in self.ranks if one.poll() is not None]
                if gone or time.monotonic() > end:
                    raise RuntimeError(
                        f"run {run}: no {word} from all ranks: {' | '.join(self.errors[-8:])}"
                    ) from None
                continue
            if isinstance(line, str):
                self.errors.append(line)
            elif line["run"] == run and word in line:
                heard[line["rank"]] = line
        return heard


def cell(transport: str, mesh: str, network: int, how: str, count: int, seed: int = 0) -> dict[str, Any]:
    """The runs of one cell. A run that ends with an error ends the cell."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, Lab(2, 2, (f"0:1={LINK}",)) as lab:
        training = LinkTraining(lab, LinkJob(folder, transport, mesh, count + 1))
        usual, error = 0.0, ""
        for run in range(count + 1):
            chance = random.Random(f"{seed} {transport} {mesh} {network} {how} {run}")
            training.job.go(run).touch()
            try:
                training.hear(run, f"step {0 if run == 0 else chance.randrange(NUM_STEPS - 2)}")
                at, moving = 0, False
                if run:
                    time.sleep(chance.uniform(0.0, 0.7 * usual))
                    moving = CARRYING[transport] == network and await_transfer(lab, network, 2 * usual)
                    at = cut(lab, network, how, chance.randrange(2))
                training.job.cut(run).touch()
                told = training.hear(run, "equal")
            except RuntimeError as failed:
                error = str(failed)
                break
            finally:
                restore(lab, network)
            steps = [(end - begin) / 1e9 for begin, end in told[0]["steps"][1:]]
            usual = usual or statistics.median(steps)
            rows.append(
                {
                    "equal": all(each["equal"] for each in told.values()),
                    "in_transfer": moving,
                    "before_the_end": at < max(each["steps"][-1][1] for each in told.values()),
                    "longest_step_s": max(steps),
                    "repeats": max(each["repeats"] for each in told.values()),
                    "counters": {rank: each["counters"] for rank, each in sorted(told.items())},
                    "notices": sorted({notice for each in told.values() for notice in each["notices"]}),
                }
            )
        training.job.go(count + 1).touch()
        for one in training.ranks:
            one.wait(60.0)
    return {
        "transport": transport,
        "mesh": mesh,
        "network": network,
        "how": how,
        "usual_s": usual,
        "error": error,
        "runs": rows,
    }


def await_transfer(lab: Lab, network: int, seconds: float) -> bool:
    """Returns when a message is on its way over a network, or none was for so long; says which."""
    end = time.monotonic() + seconds
    before = carried(lab, network)
    while time.monotonic() < end:
        time.sleep(0.005)
        now = carried(lab, network)
        if now - before > MOVING:
            return True
        before = now
    return False


def carried(lab: Lab, network: int) -> int:
    return sum(way["num_bytes"] for way in lab.ways() if way["nic"] == network)


def cut(lab: Lab, network: int, how: str, host: int) -> int:
    at = time.perf_counter_ns()
    if how == "interface":
        lab.interface_down(host, network)
    else:
        lab.link(0, 1, "down", nic=network)
    return at


def restore(lab: Lab, network: int) -> None:
    for host in lab.hosts:
        lab.interface_up(host, network)
    lab.link(0, 1, LINK, nic=network)


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """What counts of a cell."""
    runs = row["runs"][1:]
    return {
        **{key: row[key] for key in ("transport", "mesh", "network", "how", "error")},
        "runs": len(runs),
        "equal": sum(each["equal"] for each in row["runs"][1:]),
        "in_transfer": sum(each["in_transfer"] for each in runs),
        "before_the_end": sum(each["before_the_end"] for each in runs),
        "most_repeats": max((each["repeats"] for each in runs), default=0),
        "usual_step_s": round(row["usual_s"], 2),
        "median_longest_step_s": round(statistics.median([each["longest_step_s"] for each in runs] or [0]), 2),
        "longest_step_s": round(max([each["longest_step_s"] for each in runs] or [0]), 2),
    }


def table(cells: Sequence[dict[str, Any]]) -> str:
    """The table of the README: times are seconds of a step."""
    lines = [
        "| transport | mesh | network | cut | right | in a transfer | usual step | median after the cut | longest |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in cells:
        moving = row["in_transfer"] if CARRYING[row["transport"]] == row["network"] else ""
        lines.append(
            f"| {row['transport']} | {row['mesh']} | {row['network']} | {row['how']} | "
            f"{row['equal']} of {row['runs']} | {moving} | {row['usual_step_s']:.2f} | "
            f"{row['median_longest_step_s']:.2f} | {row['longest_step_s']:.2f} |"
        )
    return "\n".join(lines)


def fill_readme() -> None:
    for name, mark in TABLES.items():
        cells = json.loads((FOLDER / name).read_text())["cells"]
        write_between(FOLDER / "README.md", mark, table(cells))


def in_turn(row: dict[str, Any]) -> tuple[int, ...]:
    """A cell's place among all."""
    those = {"transport": TRANSPORTS, "mesh": MESHES, "network": NETWORKS, "how": HOWS}
    return tuple(values.index(row[name]) for name, values in those.items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--readme", action="store_true", help="write the README's table, and run nothing")
    for name, choices in (("transport", TRANSPORTS), ("mesh", MESHES), ("network", NETWORKS), ("how", HOWS)):
        parser.add_argument(f"--{name}", type=type(choices[0]), choices=choices, action="append")
    given = parser.parse_args(argv)
    if given.rank:
        return rank_main(LinkJob(**json.loads(given.rank)))
    if given.readme:
        fill_readme()
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = json.loads(given.out.read_text())["cells"] if given.out and given.out.exists() else []
    cells = [
        (transport, mesh, network, how)
        for transport in given.transport or TRANSPORTS
        for mesh in given.mesh or MESHES
        for network in given.network or NETWORKS
        for how in given.how or HOWS
    ]
    for one in cells:
        known = record()
        run_by = {"seed": 0, "load": known["load"], "commit": known["commit"], "command": known["command"]}
        row = {**summary(cell(*one, given.count)), **run_by}
        found = [each for each in found if (each["transport"], each["mesh"], each["network"], each["how"]) != one]
        found.append(row)
        found.sort(key=in_turn)
        print(json.dumps(row), flush=True)
        if given.out:
            gpu = {"gpu": gpu_name()} if any(row["transport"] == "nccl" for row in found) else {}
            said = {"machine": known["machine"] | gpu, "count": given.count, "cells": found}
            save_summary(given.out, said)
    return int(any(row["error"] or row["equal"] < row["runs"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
