"""One rank of the runs that faults hit: the same short training again and again, told in lines of JSON.

Messages of 16 MB over a chain of two stages, one a host, by delegates. Before each run it waits for a file that says
go, and before its last step for one that says that the fault has begun; it tells of each step when it has ended.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock as ps
from penstock.runtime.launch import init_process

WIDTH = 16
ROWS = 2**24 // (4 * WIDTH)
"""Samples of a microbatch: what goes from stage to stage is 16 MiB."""
MICROBATCHES = 4
WAIT = 300.0
"""Seconds to wait for the next run at most."""


@dataclass(frozen=True)
class FaultJob:
    """What a rank is to do while links and processes fail.

    Attributes:
        folder: where files say go, and that a fault has begun.
        num_runs: how often to train; num_steps: each time; timeout: of any wait, s.
        store: by which the runs are steered, see `ps.AdaptOptions`; None: they are not.
    """

    folder: str
    num_runs: int
    num_steps: int
    timeout: float
    store: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def go(self, run: int) -> Path:
        """The file whose being there starts a run."""
        return Path(self.folder) / f"go-{run}"

    def begun(self, run: int) -> Path:
        """The file that is there once the run's fault has begun."""
        return Path(self.folder) / f"begun-{run}"


def main(argv: list[str]) -> int:
    job = FaultJob(**json.loads(argv[0]))
    torch.set_num_threads(1)
    rank, _ = init_process(job.timeout)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    reference: dict[str, Tensor] | None = None
    for run in range(job.num_runs):
        wait_for(job.go(run))
        report, state = train(job, run, rank, inputs, targets)
        if reference is None:
            reference = state
        equal = state.keys() == reference.keys() and all(torch.equal(state[name], reference[name]) for name in state)
        say({**report, "equal": equal})
    return 0


def train(
    job: FaultJob, run: int, rank: int, inputs: Tensor, targets: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One run: what it tells, and this rank's parameters at its end."""
    torch.manual_seed(1)
    stages: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)),
    ]
    schedule = ps.build("1f1b", num_ranks=len(stages), num_microbatches=MICROBATCHES)
    pipe = ps.Pipeline(
        stages,
        schedule,
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.AdamW,
        dispatch="dynamic",
        transport="delegate",
        timeout=job.timeout,
        adapt=None if job.store is None else ps.AdaptOptions(store=job.store),
    )
    transport: Any = pipe._local.transport
    steps, losses, crossings = [], [], []
    try:
        for step in range(job.num_steps):
            if step == job.num_steps - 1:
                wait_for(job.begun(run))
            begin = time.perf_counter_ns()
            losses.append(pipe.step(inputs, targets).loss.item())
            steps.append([begin, time.perf_counter_ns()])
            crossings += transport.crossings()
            say({"run": run, "rank": rank, f"step {step}": steps[-1][1]})
        state = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        report = {
            "run": run,
            "rank": rank,
            "steps": steps,
            "losses": losses,
            "crossings": [list(each) for each in crossings],
            "counters": pipe._local.choice.seen(transport)[1],
            "notices": pipe.notices,
        }
    finally:
        pipe.close()
    dist.barrier()
    return report, state


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def wait_for(path: Path, seconds: float = WAIT) -> None:
    """Returns once a file is there; ends the process where it does not come."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise SystemExit(f"{path.name} did not come within {seconds:g} s")
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
