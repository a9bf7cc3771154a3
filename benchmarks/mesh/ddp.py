"""Data parallelism under a split backward: torch's DDP beside ours, and both beside one process.

    python benchmarks/mesh/ddp.py --out benchmarks/mesh/ddp.json
    python benchmarks/mesh/ddp.py --readme      writes the table of README.md from ddp.json

Two replicas of a pipeline of two ranks run the same network on the same batch, each replica half of it. Torch's side
is `torch.distributed.pipelining` with every stage in DistributedDataParallel; both sides have equal microbatches, so
that its mean over replicas is ours. Two numbers a side and schedule, the largest over the parameters, each by the
parameter's largest gradient: how far the replicas are from each other, and how far they are from one process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel

import penstock as ps

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.readme import markdown, write_between
from experiments.common.record import record
from experiments.common.summary import save_summary
from processes import run_ranks

PP, DP, NUM_MICROBATCHES, WIDTH = 2, 2, 4, 16
FAR = ("between replicas", "from one process")
SCHEDULES = ("1f1b", "zb-v")
LOSS = nn.MSELoss()


def stage(number: int, num_stages: int) -> nn.Sequential:
    """A part of eight layers with weights of their own."""
    each = 8 // num_stages
    layers = []
    for index in range(number * each, (number + 1) * each):
        torch.manual_seed(index)
        layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * DP * NUM_MICROBATCHES, WIDTH, generator=draws)
    return inputs, torch.randn(inputs.shape, generator=draws)


def one_process() -> dict[str, Tensor]:
    """Gradients by layer and name."""
    model = stage(0, 1)
    inputs, targets = batch()
    LOSS(model(inputs), targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ours(name: str, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Of this process's stages."""
    schedule = ps.build(name, PP, NUM_MICROBATCHES)
    stages = [stage(number, schedule.num_stages) for number in range(schedule.num_stages)]
    pipe = ps.Pipeline(stages, schedule, loss_fn=LOSS, mesh=mesh)
    pipe.step(*batch(), update=False)
    found: dict[str, Tensor] = {}
    for name, parameter in pipe.named_parameters():
        number, place, rest = name.split(".", 2)
        layer = int(number) * (8 // schedule.num_stages) + int(place)
        assert parameter.grad is not None
        found[f"{layer}.{rest}"] = parameter.grad.clone()
    pipe.close()
    return found


def torchs(name: str, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Of this process's stages, each in DistributedDataParallel."""
    schedule = ps.build(name, PP, NUM_MICROBATCHES)
    num_stages, rank = schedule.num_stages, mesh.get_local_rank("pp")
    numbers = sorted(schedule.stages_of(rank))
    modules = [DistributedDataParallel(stage(n, num_stages), process_group=mesh.get_group("dp")) for n in numbers]
    stages = [
        PipelineStage(module, n, num_stages, torch.device("cpu"), group=mesh.get_group("pp"))
        for n, module in zip(numbers, modules, strict=True)
    ]
    runner: Any = (
        Schedule1F1B(stages[0], NUM_MICROBATCHES, LOSS)
        if name == "1f1b"
        else ScheduleZBVZeroBubble(list(stages), NUM_MICROBATCHES, LOSS)
    )
    inputs, targets = (part.chunk(DP)[mesh.get_local_rank("dp")] for part in batch())
    last = num_stages - 1 in numbers
    runner.step(*((inputs,) if 0 in numbers else ()), target=targets if last else None, losses=[] if last else None)
    each = 8 // num_stages
    found: dict[str, Tensor] = {}
    for n, module in zip(numbers, modules, strict=True):
        for name, parameter in module.module.named_parameters():
            place, rest = name.split(".", 1)
            assert parameter.grad is not None
            found[f"{n * each + int(place)}.{rest}"] = parameter.grad.clone()
    return found


def compare(rank: int) -> dict[str, dict[str, dict[str, float]]]:
    """By schedule and side, this process's numbers."""
    mesh = init_device_mesh("cpu", (PP, DP), mesh_dim_names=("pp", "dp"))
    wanted = one_process()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in SCHEDULES:
        found[name] = {}
        for side, run in (("ours", ours), ("torch's DDP", torchs)):
            gradients = run(name, mesh)
            first = {key: gradient.clone() for key, gradient in gradients.items()}
            for gradient in first.values():
                dist.broadcast(gradient, group=mesh.get_group("dp"), group_src=0)
            found[name][side] = {
                "between replicas": max(apart(gradients[key], first[key]) for key in gradients),
                "from one process": max(apart(gradients[key], wanted[key]) for key in gradients),
            }
    return found


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of README.md; in bold what is no rounding."""
    body = [[row["schedule"], row["side"], *(_shown(row[what]) for what in FAR)] for row in rows]
    return markdown(["schedule", "side", "between the replicas", "from one process"], body)


def _shown(far: float) -> str:
    return "0" if far == 0 else f"**{far:.1f}**" if far > 1e-3 else f"{far:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--readme", action="store_true", help="only write the table of README.md")
    given = parser.parse_args()
    if given.readme:
        folder = Path(__file__).parent
        write_between(folder / "README.md", "ddp", table(json.loads((folder / "ddp.json").read_text())["rows"]))
        return
    torch.set_num_threads(1)
    outcomes = run_ranks(PP * DP, compare)
    if failed := [outcome.text for outcome in outcomes if outcome.code != 0]:
        sys.exit(failed[0])
    rows = [
        {"schedule": name, "side": side} | {what: max(o.value[name][side][what] for o in outcomes) for what in FAR}
        for name in SCHEDULES
        for side in ("ours", "torch's DDP")
    ]
    for row in rows:
        print(f"{row['schedule']:6} {row['side']:12} {row['between replicas']:.1e} {row['from one process']:.1e}")
    if given.out is not None:
        save_summary(given.out, {**record(), "rows": rows})


if __name__ == "__main__":
    main()
