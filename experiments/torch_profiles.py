"""Records profiles of torch's own pipeline schedules whose ops take known times: `tests/golden/torch_profiles`.

python -m experiments.torch_profiles                 all of them, in about two minutes
python -m experiments.torch_profiles gpipe zbv       some of them

Every op sleeps for a known time, so more processes than cores do no harm. On a busy machine run it with priority
(`chrt -f 20 python ...`), as sleeps end late there. Each process exports its own trace, as the
tutorial says. What goes out of the traces is said in `trimmed`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile, record_function

HERE = Path(__file__).parents[1] / "tests" / "golden" / "torch_profiles"
FACTS = HERE / "facts.json"
"""By name, what was recorded and the true ms of ops."""
FORWARD, INPUT, WEIGHT, LOSS = 60.0, 45.0, 30.0, 20.0
"""Ms of an op of stage 0: its forward, and the two halves of its backward; of the loss, and of each further stage's
op, `LONGER` times as long as that of the stage before."""
LONGER = 1.25
WIDTH, ROWS = 8, 2
WARMUP, ACTIVE = 1, 2


class Recording(NamedTuple):
    """One recorded job.

    Attributes:
        schedule: torch's class.
        ranks: of a pipeline. chunks: stages of each.
        names: who names the ops: "torch", "ranges" of our own, "stacks", or nobody.
        options: of the profiler.
        replicas: pipelines side by side, with groups of a device mesh.
        marks_steps: whether the profiler is told of steps, and so writes `ProfilerStep#3`.
    """

    schedule: str
    ranks: int
    chunks: int
    microbatches: int
    loss: float = 0.0
    names: str = "torch"
    options: Sequence[str] = ()
    replicas: int = 1
    marks_steps: bool = True


RECORDINGS = {
    "gpipe": Recording("ScheduleGPipe", 3, 1, 4),
    "gpipe-loss": Recording("ScheduleGPipe", 2, 1, 4, loss=LOSS, options=("record_shapes",)),
    "gpipe-replicas": Recording("ScheduleGPipe", 2, 1, 3, loss=LOSS, replicas=2, marks_steps=False),
    "1f1b": Recording("Schedule1F1B", 3, 1, 5, names="nobody"),
    "1f1b-ranges": Recording("Schedule1F1B", 3, 1, 5, loss=LOSS, names="ranges"),
    "1f1b-stacks": Recording("Schedule1F1B", 3, 1, 5, names="stacks", options=("with_stack",)),
    "looped-bfs": Recording("ScheduleLoopedBFS", 2, 2, 4),
    "interleaved": Recording("ScheduleInterleaved1F1B", 2, 2, 4, loss=LOSS),
    "interleaved-zb": Recording("ScheduleInterleavedZeroBubble", 2, 2, 4),
    "zbv": Recording("ScheduleZBVZeroBubble", 3, 2, 6),
    "dualpipe-v": Recording("ScheduleDualPipeV", 2, 2, 4),
}


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_ms = backward
        time.sleep(forward / 1e3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.backward_ms / 1e3)
        return grads[0].clone(), None, None


class Stage(torch.nn.Module):
    """Sleeps in its forward, in the gradient of what comes in and in that of a weight."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.times = times_of(number)
        self.first = torch.nn.Parameter(torch.ones(WIDTH))
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slow_weight = _Slow.apply(self.weight, 0.0, self.times["W"])
        result: torch.Tensor = _Slow.apply(x * self.first, self.times["F"], self.times["I"]) + slow_weight
        return result


def times_of(stage: int) -> dict[str, float]:
    """True ms of a stage's ops, the loss left out."""
    scale = LONGER**stage
    return {"F": FORWARD * scale, "I": INPUT * scale, "W": WEIGHT * scale, "B": (INPUT + WEIGHT) * scale}


def stages_of(recording: Recording, rank: int) -> list[int]:
    """The stages of a rank: looped, or back and forth."""
    ranks = recording.ranks
    if recording.schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * chunk for chunk in range(recording.chunks)]


def named(run: Callable[..., Any], word: str) -> Callable[..., Any]:
    """A stage's method under a range of its own: what the tutorial says for `Schedule1F1B`."""

    def call(chunk: int, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"{word} {chunk}"):
            return run(chunk, *args, **kwargs)

    return call


def one_process(process: int, recording: Recording, folder: str) -> None:
    """Trains a few steps on one rank under the profiler."""
    torch.set_num_threads(1)
    size = recording.ranks * recording.replicas
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=process, world_size=size)
    group, rank = None, process
    if recording.replicas > 1:
        mesh = init_device_mesh("cpu", (recording.ranks, recording.replicas), mesh_dim_names=("pp", "dp"))
        group, rank = mesh.get_group("pp"), mesh.get_local_rank("pp")
    total = recording.ranks * recording.chunks
    stages = [
        PipelineStage(Stage(number), number, total, torch.device("cpu"), group=group)
        for number in stages_of(recording, rank)
    ]
    if recording.names == "ranges":
        for stage in stages:
            stage.forward_one_chunk = named(stage.forward_one_chunk, "Forward")
            stage.backward_one_chunk = named(stage.backward_one_chunk, "Backward")

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(recording.loss / 1e3)
        return (output - target).square().mean()

    kind = getattr(schedules, recording.schedule)
    given = stages[0] if recording.chunks == 1 else stages
    schedule = kind(given, recording.microbatches, loss_fn=loss)
    optimizer = torch.optim.SGD([weight for stage in stages for weight in stage.submod.parameters()], lr=1e-3)
    batch = torch.ones(ROWS * recording.microbatches, WIDTH)
    inputs = [batch] if any(stage.is_first for stage in stages) else []
    targets = {"target": batch} if any(stage.is_last for stage in stages) else {}

    def step() -> None:
        schedule.step(*inputs, **targets)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()  # so that no process writes its trace while another still runs

    path = f"{folder}/rank{process}.json"
    options = {"activities": [ProfilerActivity.CPU], **dict.fromkeys(recording.options, True)}
    if recording.marks_steps:
        steps = torch.profiler.schedule(wait=0, warmup=WARMUP, active=ACTIVE, repeat=1)
        with profile(
            schedule=steps, on_trace_ready=lambda found: found.export_chrome_trace(path), **options
        ) as found:
            for _ in range(WARMUP + ACTIVE):
                step()
                found.step()
    else:
        step()
        with profile(**options) as found:
            for _ in range(ACTIVE):
                step()
        found.export_chrome_trace(path)
    dist.destroy_process_group()


KEPT_KEYS = ("schemaVersion", "distributedInfo", "displayTimeUnit", "baseTimeNanoseconds", "traceEvents")
SHORTEST_US = 100.0
KEPT_FUNCTIONS = ("forward_one_chunk", "backward_one_chunk")


def trimmed(trace: dict[str, Any]) -> dict[str, Any]:
    """A trace without what names this machine. Of Python's functions, of which a profile with stacks has thousands,
    it keeps those that run a stage, and of torch's operators those that take time.
    """
    events = []
    for event in trace["traceEvents"]:
        if event.get("cat") == "cpu_op" and event["dur"] < SHORTEST_US:
            continue
        if event.get("cat") == "python_function":
            if not event["name"].endswith(KEPT_FUNCTIONS):
                continue
            event["name"] = event["name"][max(event["name"].find("torch/distributed"), 0) :]
        events.append(event)
    return {key: events if key == "traceEvents" else trace[key] for key in KEPT_KEYS}


def record(name: str) -> None:
    recording = RECORDINGS[name]
    target = HERE / name
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        size = recording.ranks * recording.replicas
        mp.spawn(one_process, (recording, folder), size)
        for rank in range(size):
            trace = json.loads(Path(folder, f"rank{rank}.json").read_text())
            text = json.dumps(trimmed(trace), separators=(",", ":")).encode()
            (target / f"rank{rank}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))
    facts = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    total = recording.ranks * recording.chunks
    facts[name] = {
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} CPU cores, no accelerator; gloo over 127.0.0.1",
        **recording._asdict(),
        "stages": [stages_of(recording, rank) for rank in range(recording.ranks)],
        "steps": ACTIVE,
        "ms": {letter: [times_of(stage)[letter] for stage in range(total)] for letter in "FIWB"},
    }
    FACTS.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Records profiles of torch's own pipeline schedules.")
    parser.add_argument("names", nargs="*", choices=[*RECORDINGS, []], help="which; all by default")
    for name in parser.parse_args().names or RECORDINGS:
        record(name)
        sizes = [path.stat().st_size for path in sorted((HERE / name).glob("*.gz"))]
        sys.stdout.write(f"{name}: {sizes} bytes\n")


if __name__ == "__main__":
    main()
