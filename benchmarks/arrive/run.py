"""Plans in torch's own runtime beside what we say that they take, over a late link of a lab. See README.md.

python benchmarks/arrive/run.py --out benchmarks/arrive/results.json
python benchmarks/arrive/run.py --readme
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import penstock as ps
from experiments.common.readme import markdown, write_between
from experiments.common.record import record
from penstock.integrations.torch import costs_in_torch

FOLDER = Path(__file__).resolve().parent
NUM_RANKS, NUM_MICROBATCHES, MS = 4, 12, 160.0
LATE = "2:3=latency:120ms"
ROUNDS, STEPS = 5, 3
WIDTH = 64
WAYS = ("1f1b", "zb", "planned", "placed", "zb-v", "planned zb-v", "placed zb-v")


def costs_of(num_stages: int) -> ps.Costs:
    ms = MS / num_stages
    return costs_in_torch(ps.Costs.uniform(num_stages, f=ms, i=ms, w=ms))


def schedule_of(way: str, folder: Path) -> ps.Schedule:
    """The order of a way; plans are those that `plan_all` has left in a folder."""
    if way in ("1f1b", "zb", "zb-v"):
        return ps.build(way, NUM_RANKS, NUM_MICROBATCHES)
    return ps.load(folder / ("zb-v.json" if way.endswith("zb-v") else "one.json"))


def plan_all(folder: Path) -> None:
    links = ps.Links.parse(LATE)
    for name, num_stages, placement in (("one", 4, "one-to-one"), ("zb-v", 8, "v-shape")):
        plan = ps.plan(
            costs_of(num_stages), NUM_RANKS, NUM_MICROBATCHES, links, placement=placement, time_limit=10.0, seed=0
        )
        ps.save(plan.schedule, folder / f"{name}.json")


def simulated(way: str, late: bool, folder: Path) -> float:
    """Milliseconds of a step as the way is meant: in torch's lowering too, were its messages placed for gloo."""
    schedule = schedule_of(way, folder)
    links = ps.Links.parse(LATE) if late else ps.Links()
    return ps.simulate(schedule, costs_of(schedule.num_stages), links, channels="gloo").makespan


# ---- one rank


def run_rank(folder: Path) -> None:
    """All rounds of one rank; rank 0 writes them to a file."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import Schedule1F1B
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    from benchmarks.arrive.ranks import SleepingStage, timed_step
    from penstock.integrations.torch import PlannedSchedule

    torch.set_num_threads(1)
    rank = int(os.environ["PENSTOCK_HOST"])
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)

    def stages_of(schedule: ps.Schedule) -> list[Any]:
        made = []
        for stage in schedule.stages_of(rank):
            torch.manual_seed(stage)
            module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            made.append(SleepingStage(module, stage, costs_of(schedule.num_stages)))
        return made

    def runtime_of(way: str, schedule: ps.Schedule, stages: list[Any]) -> Any:
        if way == "1f1b":
            return Schedule1F1B(stages[0], NUM_MICROBATCHES, nn.MSELoss())
        if way.startswith("placed"):
            return PlannedSchedule(stages, schedule, loss_fn=nn.MSELoss())
        runtime = _PipelineScheduleRuntime(stages, NUM_MICROBATCHES, nn.MSELoss())
        path = folder / f"{way}.csv"
        if rank == 0:
            ps.save(schedule, path, dialect="torch:compute_only")
        dist.barrier()
        runtime._load_csv(str(path))
        return runtime

    draws = torch.Generator().manual_seed(5)
    x, y = (torch.randn(NUM_MICROBATCHES, WIDTH, generator=draws) for _ in range(2))
    made = {}
    for way in WAYS:
        schedule = schedule_of(way, folder)
        stages = stages_of(schedule)
        made[way] = runtime_of(way, schedule, stages), stages
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    gradients: dict[str, list[Any]] = {}
    for _ in range(ROUNDS):
        for way, (runtime, stages) in made.items():
            numbers = {stage.stage_index for stage in stages}
            for number in range(1 + STEPS):
                for stage in stages:
                    stage.submod.zero_grad()
                arguments = [x] * (0 in numbers)
                target = y if stages[0].num_stages - 1 in numbers else None
                ms = timed_step(partial(runtime.step, *arguments, target=target))
                if number:
                    found[way].append(ms)
            gradients[way] = [p.grad.clone() for stage in stages for p in stage.submod.parameters()]
    same = all(
        torch.equal(a, b)
        for one, other in (("planned", "placed"), ("planned zb-v", "placed zb-v"))
        for a, b in zip(gradients[one], gradients[other], strict=True)
    )
    every: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(every, same)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps({"ms": found, "bitwise": all(every)}))
    dist.destroy_process_group()


# ---- all ranks, in a lab


def run_lab(late: bool, folder: Path) -> dict[str, Any]:
    from penstock.lab import Lab

    with Lab(num_hosts=NUM_RANKS, num_nics=1, links=LATE if late else ()) as lab:
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", str(folder)]
        processes = [lab.start(host, command) for host in range(NUM_RANKS)]
        for process in processes:
            if code := process.wait(3600.0):
                raise SystemExit(f"a rank ended with {code}")
    return dict(json.loads((folder / "found.json").read_text()))


def measure(out: Path) -> None:
    results: dict[str, Any] = {"record": record(), "cases": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan_all(folder)
        for case, late in (("late", True), ("healthy", False)):
            ran = run_lab(late, folder)
            results["cases"][case] = {
                "bitwise": ran["bitwise"],
                "ways": {
                    way: {
                        "ms": [round(each, 1) for each in ran["ms"][way]],
                        "simulated": round(simulated(way, late, folder), 3),
                    }
                    for way in WAYS
                },
            }
    text = re.sub(r"\[\s+([^\]{]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(results, indent=1))
    out.write_text(text + "\n", encoding="utf-8")


def table(results: dict[str, Any]) -> list[str]:
    rows = []
    for way in WAYS:
        row = [way]
        for case in ("late", "healthy"):
            found = results["cases"][case]["ways"][way]
            ms = statistics.median(found["ms"])
            row += [f"{ms:,.0f}", f"{found['simulated']:,.0f}", f"{ms / found['simulated']:.3f}"]
        rows.append(row)
    return markdown(["way", "late link, ms", "simulated", "ratio", "no delay, ms", "simulated", "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        run_rank(given.rank)
    if given.out:
        measure(given.out)
    if given.readme:
        write_between(FOLDER / "README.md", "results", table(json.loads((FOLDER / "results.json").read_text())))


if __name__ == "__main__":
    main()
