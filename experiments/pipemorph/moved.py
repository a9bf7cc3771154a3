"""A link that turns late under a real all-reduce: found by probes, and the nodes moved away from it while training.

    python -m experiments.pipemorph.moved            two minutes; needs what `penstock lab` needs

Four hosts in a box train a small model as (DP 2, PP 2) with real TCP between them. After some steps the link between
hosts 2 and 3, the ring of the last stage, turns 30 ms late. Hosts probe all links now and then, and move. A probe
takes longer where a link is late, and the next one waits until it is 4% of the time since, as under `ps.Pipeline`
(`ProbePace`). The raw results are the time of every step and of every probe, and the losses: those of the same run
without a late link and without a move.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common.command import options
from experiments.common.results import save
from experiments.pipemorph import RESULTS

HOSTS, LINK = 4, (2, 3)
DELAY_MS = 30.0
BATCH, MICROBATCHES = 32, 4
TIMEOUT = 60.0


@dataclass(frozen=True)
class Order:
    """What hosts are to do.

    Attributes:
        steps: so many. late_from: the step from which on the link is late. width: of the layers.
        probe_every: steps from one round of probes to the next.
    """

    steps: int = 300
    late_from: int = 24
    probe_every: int = 5
    width: int = 512
    moves: bool = True


def main() -> None:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--rank", metavar="FOLDER", help="one host of the lab; who starts it gives this")
    given = parser.parse_args()
    if given.rank is not None:
        rank(Path(given.rank))
        return
    with tempfile.TemporaryDirectory(prefix="penstock-moved-") as folder:
        rows = [run(Path(folder), Order(moves=moves)) for moves in (False, True)]
    save(given.out, "moved-lab", rows, seeds=[0, 1], figure="moved", backend="lab")
    print("\n".join(lines(rows)))


def run(folder: Path, order: Order) -> dict[str, Any]:
    """Trains in a lab of its own; the link turns late where nodes may move, and in the other run it does not."""
    (folder / "order").write_text(json.dumps(asdict(order)))
    from penstock.lab import Lab

    with Lab(HOSTS) as lab:
        command = [sys.executable, "-m", "experiments.pipemorph.moved", "--rank", str(folder)]
        ranks = [lab.start(host, command) for host in range(HOSTS)]
        try:
            if order.moves:
                _await(folder / "late", ranks)
                lab.link(*LINK, f"latency:{DELAY_MS:g}ms")
                (folder / "is-late").touch()
            codes = [process.wait(4 * TIMEOUT) for process in ranks]
        finally:
            for process in ranks:
                process.stop()
    if any(codes):
        raise SystemExit(f"hosts ended with exit codes {codes}; the messages above say why")
    found: dict[str, Any] = json.loads((folder / "result").read_text())
    for path in folder.iterdir():
        path.unlink()
    return found


def _await(path: Path, ranks: list[Any]) -> None:
    end = time.monotonic() + 2 * TIMEOUT
    while not path.exists():
        if time.monotonic() > end or any(process.poll() for process in ranks):
            raise SystemExit(f"{path.name} did not appear: a host has failed")
        time.sleep(0.01)


def rank(folder: Path) -> None:
    """One host."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import penstock as ps
    from penstock.control import Configuration, Job, Orchestrator
    from penstock.control.configuration import peaks
    from penstock.control.events import Probed
    from penstock.runtime.mesh.peers import GroupPeers
    from penstock.runtime.mesh.probe import probe

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://", rank=_host(), world_size=HOSTS)
    order = Order(**json.loads((folder / "order").read_text()))
    width = order.width
    schedule = ps.build("zb-h1", 2, MICROBATCHES)

    def stage() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    torch.manual_seed(0)
    mesh = ps.Mesh(pp=2, dp=2)
    pipe = ps.Pipeline(
        [stage, stage],
        schedule,
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.AdamW,
        mesh=ps.runtime.device_mesh(mesh),
        timeout=TIMEOUT,
    )
    weights = 4.0 * 2 * (width * width + width)
    costs = ps.Costs.uniform(2, f=2.0, i=2.0, w=2.0)
    costs = ps.Costs(costs.f, costs.i, costs.w, gradient_bytes=[weights] * 2)
    job = Job(
        costs,
        Configuration(schedule, "frozen", (), tuple(peaks(schedule, costs))),
        may_delegate=False,
        may_replan=False,
        least_delay=2.0,
        ring=ps.cost.Ring(window=2e6),
    )
    orchestrator, world = Orchestrator(job, mesh), dist.group.WORLD
    assert world is not None
    everyone = GroupPeers(world, TIMEOUT)
    generator = torch.Generator().manual_seed(1)
    told: dict[str, Any] = {"order": asdict(order), "losses": [], "steps_ms": [], "probes_ms": [], "done": []}
    for step in range(order.steps):
        if order.moves and step == order.late_from:
            if dist.get_rank() == 0:
                (folder / "late").touch()
            while not (folder / "is-late").exists():
                time.sleep(0.01)
        x, y = (torch.randn(BATCH, width, generator=generator) for _ in range(2))
        dist.barrier()
        begin = time.perf_counter()
        told["losses"].append(float(pipe.step(x, y).loss))
        dist.barrier()
        told["steps_ms"].append((time.perf_counter() - begin) * 1e3)
        begin = time.perf_counter()
        if order.moves and (step + 1) % order.probe_every == 0:
            found = None
            if orchestrator.verifies(Probed.of(probe([[node] for node in range(HOSTS)], everyone))):
                if orchestrator.answer() is None and orchestrator.search is not None:
                    orchestrator.take(orchestrator.search())
                found = orchestrator.answer()
            if found is not None and not orchestrator.gains(found):
                found = None
            if found is not None:
                pipe.reconfigure(replace(pipe.configuration, nodes=found.mesh.nodes))
                orchestrator.switched(found.mesh, found.configuration)
            if found is None:
                told["probes_ms"].append((time.perf_counter() - begin) * 1e3)
            else:
                told["done"].append(
                    {
                        "after_step": step,
                        "mesh": str(found.mesh),
                        "late": {f"{a}:{b}": delay for (a, b), delay in orchestrator.late.items()},
                        "use": str(found.mesh.use(*LINK)),
                        "predicted_ms": [found.ms_now, found.ms_then],
                    }
                )
    if dist.get_rank() == 0:
        (folder / "result").write_text(json.dumps(told))
    pipe.close()
    dist.destroy_process_group()


def _host() -> int:
    import os

    return int(os.environ["PENSTOCK_HOST"])


def lines(rows: list[dict[str, Any]]) -> list[str]:
    stays, moves = rows
    said = []
    for done in moves["done"]:
        took = moves["steps_ms"][done["after_step"] + 1]
        said.append(
            f"after step {done['after_step']}: {done['late']} ms late; nodes {done['mesh']}, the link {done['use']}; "
            f"the next step, which moved them, took {took:.0f} ms"
        )
    if not moves["done"]:
        return ["nothing was moved"]
    after, late_from = moves["done"][-1]["after_step"] + 1, moves["order"]["late_from"]
    parts = {
        "healthy": moves["steps_ms"][2:late_from],
        "late": moves["steps_ms"][late_from:after],
        "moved": moves["steps_ms"][after + 1 :],
    }
    said.append(", ".join(f"{name} {median(part):.0f} ms a step" for name, part in parts.items()))
    probes, steps = sum(moves["probes_ms"]), sum(moves["steps_ms"])
    said.append(
        f"{len(moves['probes_ms'])} probes of all links, {median(moves['probes_ms']):.1f} ms in the median, "
        f"{max(moves['probes_ms']):.1f} at most: {probes / (probes + steps):.1%} of the time of steps and probes"
    )
    same = "are" if stays["losses"] == moves["losses"] else "are NOT"
    said.append(f"losses of all {len(moves['losses'])} steps {same} those of the run that stayed")
    return said


if __name__ == "__main__":
    main()
