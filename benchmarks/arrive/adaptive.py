"""A link turns late amid training in torch's own runtime, and heals: when comes another plan? See README.md.

python benchmarks/arrive/adaptive.py --seeds 0-9 --out benchmarks/arrive/adaptive.json
python benchmarks/arrive/adaptive.py --readme
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import penstock as ps
from experiments.common.readme import markdown, write_between
from experiments.common.record import record
from penstock.integrations.torch import PlannedSchedule, Replanner, costs_in_torch
from penstock.passes import remove_communication

FOLDER = Path(__file__).resolve().parent
NUM_RANKS, NUM_MICROBATCHES, WIDTH = 4, 12, 64
LATE, HEALED, STEPS, IN_FLIGHT = 30, 50, 70, 4
SECONDS = 0.5
"""How long the planner may search."""


def late_ms(seed: int) -> int:
    return 60 if seed % 2 == 0 else 120


def costs_of(seed: int) -> ps.Costs:
    """Milliseconds of F, I and W, drawn for each stage."""
    draws = random.Random(seed)
    f, i, w = ([draws.uniform(24, 36) for _ in range(NUM_RANKS)] for _ in range(3))
    return costs_in_torch(ps.Costs(f, i, w))


# ---- one rank


def run_rank(seed: int, folder: Path) -> None:
    """The adaptive run and the static one, of one rank; each rank writes a file."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage

    torch.set_num_threads(1)
    rank = int(os.environ["PENSTOCK_HOST"])
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    costs, first = costs_of(seed), ps.load(folder / "first.json")

    class SleepingStage(PipelineStage):
        """A stage whose ops take at least their milliseconds."""

        def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            time.sleep(costs.duration("F", rank) / 1e3)
            return super().forward_one_chunk(*args, **kwargs)

        def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            time.sleep(costs.duration("B" if kwargs.get("full_backward", True) else "I", rank) / 1e3)
            return super().backward_one_chunk(*args, **kwargs)

        def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            time.sleep(costs.duration("W", rank) / 1e3)
            return super().backward_weight_one_chunk(*args, **kwargs)

    def train(kind: type[PipelineStage], replan: Replanner | None) -> dict[str, Any]:
        """All steps: the moments when each began and ended, its loss, the weights at the end, and the changes."""
        torch.manual_seed(rank)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        stage = kind(module, rank, NUM_RANKS, torch.device("cpu"))
        schedule = PlannedSchedule(stage, first, loss_fn=nn.MSELoss(), replan=replan or False)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        draws = torch.Generator().manual_seed(seed)
        spans, losses = [], []
        for step in range(STEPS):
            if replan and rank == 0 and step in (LATE, HEALED):
                (folder / str(step)).touch()
            x, y = (torch.randn(NUM_MICROBATCHES, WIDTH, generator=draws) for _ in range(2))
            found: list[torch.Tensor] = []
            begun = time.time()
            optimizer.zero_grad()
            schedule.step(*[x] * (rank == 0), target=y if rank == NUM_RANKS - 1 else None, losses=found)
            optimizer.step()
            spans.append((begun, time.time()))
            losses.append([loss.item() for loss in found])
        weights = [p.detach().flatten().tolist() for p in module.parameters()]
        changes = [asdict(each) | {"links": sorted(each.links.items())} for each in schedule.replanned]
        is_first = remove_communication(schedule.plan).order == first.order
        return {"spans": spans, "numbers": [losses, weights], "changes": changes, "is_first": is_first}

    adaptive = train(SleepingStage, Replanner(seconds=SECONDS))
    dist.barrier()
    static = train(PipelineStage, None)
    adaptive["bitwise"] = adaptive.pop("numbers") == static["numbers"]
    (folder / f"rank{rank}.json").write_text(json.dumps(adaptive))
    dist.barrier()
    dist.destroy_process_group()


# ---- all ranks, in a lab


def run_lab(seed: int) -> dict[str, Any]:
    """One run: the link changes while the ranks train."""
    from penstock.lab import Lab

    with tempfile.TemporaryDirectory() as name, Lab(num_hosts=NUM_RANKS, num_nics=1) as lab:
        folder = Path(name)
        plan = ps.plan(costs_of(seed), NUM_RANKS, NUM_MICROBATCHES, max_in_flight=IN_FLIGHT, time_limit=2.0)
        ps.save(plan.schedule, folder / "first.json")
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", str(seed), name]
        processes = [lab.start(host, command) for host in range(NUM_RANKS)]
        for step, ms in ((LATE, late_ms(seed)), (HEALED, 0)):
            while not (folder / str(step)).exists():
                if any(process.poll() not in (None, 0) for process in processes):
                    raise SystemExit(f"a rank of seed {seed} ended early")
                time.sleep(0.005)
            lab.link(2, 3, f"latency:{ms}ms")
        for process in processes:
            if process.wait(600.0):
                raise SystemExit(f"a rank ended with {process.poll()}")
        return judge(seed, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)])


def judge(seed: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What README.md asks of a run. A step lasts from the last rank's end of the step before to its own."""
    ends = [1e3 * max(rank["spans"][step][1] for rank in ranks) for step in range(STEPS)]
    took = [b - a for a, b in zip([1e3 * min(rank["spans"][0][0] for rank in ranks), *ends], ends, strict=False)]
    changes = ranks[0]["changes"]
    late = [each for each in changes if LATE < each["step"] <= HEALED]
    healed = [each for each in changes if each["step"] > HEALED]
    to_late = late[0]["step"] if late else HEALED
    to_first = healed[-1]["step"] if healed else STEPS
    phases = {
        "before": took[2:LATE],
        "late, first plan": took[LATE + 1 : to_late],
        "late, new plan": took[to_late:HEALED],
        "healed, late plan": took[HEALED + 1 : to_first],
        "healed": took[to_first:],
    }
    usual = {phase: statistics.median(ms) for phase, ms in phases.items() if ms}
    longest = max(ms - usual[phase] for phase, all_ms in phases.items() for ms in all_ms)
    run = {
        "seed": seed,
        "late_ms": late_ms(seed),
        "changes": [[each["detected"], each["step"]] for each in changes],
        "false": sum(each["step"] <= LATE for each in changes),
        "ms": {phase: round(ms) for phase, ms in usual.items()},
        "pause": round(longest),
        "is_first": all(rank["is_first"] for rank in ranks),
        "bitwise": all(rank["bitwise"] for rank in ranks),
        "together": all(
            [each["step"] for each in rank["changes"]] == [each["step"] for each in changes] for rank in ranks
        ),
    }
    return run | {"holds": holds(run)}


def holds(run: dict[str, Any]) -> bool:
    """Whether a run is as README.md asks."""
    late, *healed = [each for each in run["changes"] if each[1] > LATE] or [[0, 99]]
    return bool(
        late[1] <= HEALED
        and healed
        and all(step - detected <= 3 for detected, step in run["changes"])
        and run["pause"] <= run["ms"]["before"]
        and run["ms"]["late, new plan"] < run["ms"]["late, first plan"]
        and run["is_first"] * run["bitwise"] * run["together"]
        and not run["false"]
    )


def table(runs: list[dict[str, Any]]) -> list[str]:
    rows = []
    for run in runs:
        changes = ", ".join(f"{detected} → {step}" for detected, step in run["changes"])
        figures = [run["seed"], run["late_ms"], changes, *run["ms"].values(), run["pause"], run["false"]]
        rows.append([str(each) for each in figures])
    phases = [f"{phase}, ms" for phase in runs[0]["ms"]]
    return markdown(["seed", "late by, ms", "detected → new plan", *phases, "longest pause, ms", "false"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-9")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        run_rank(int(given.rank[0]), Path(given.rank[1]))
        return
    if given.out:
        begin, _, end = given.seeds.partition("-")
        seeds = range(int(begin), int(end or begin) + 1)
        before = json.loads(given.out.read_text())["runs"] if given.out.exists() else []
        runs = [each for each in before if each["seed"] not in seeds] + [run_lab(seed) for seed in seeds]
        text = ",\n".join(json.dumps(run) for run in sorted(runs, key=lambda run: int(run["seed"])))
        given.out.write_text(f'{{"record": {json.dumps(record())},\n"runs": [\n{text}\n]}}\n')
    if given.readme:
        write_between(
            FOLDER / "README.md", "adaptive", table(json.loads((FOLDER / "adaptive.json").read_text())["runs"])
        )


if __name__ == "__main__":
    main()
