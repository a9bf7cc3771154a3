"""Figure 21 with real computation: training steps on one GPU, all links by delegates against shared memory.

    PYTHONPATH=src:. python -m experiments.pipemorph.figure21_gpu --ranks 2 --out FOLDER      less than a minute
    PYTHONPATH=src:. python -m experiments.pipemorph.figure21_gpu --ranks 4 --out FOLDER      the same

Protocol, written before the run. A GPT of 16 blocks (width 4096, 32 heads, 16,384 words, 1,024 tokens a microbatch,
bf16; 3.4 billion parameters) trains by `zb` on 2 and on 4 ranks, a process each, 3 microbatches a rank, SGD. A
message has 8 MB. All ranks share one GPU. No link is late. Each rank has two pipelines with the same weights,
transport `host` (memory that processes share) and transport `delegate` (every link by delegates), which are given the
same batches in turn: 2 steps each that do not count, then 10, the first of a pair being now one and now the other. A
step is timed from barrier to barrier, with the device at rest. Then one process runs all ranks' ops in turn on the
same batches, with no message at all: about the least that their computation takes. Compared is the median step by
delegates over that by `host`, and over that of one process. All losses must be the same at the first step, as
forwards are; later ones may differ in the last digits, as attention's backward adds in any order on a GPU.

At last one more step of each transport under torch.profiler: the time that copies of messages take out of a middle
rank's part of the GPU and into it, and the share of it that lies beside the rank's own kernels. What lies between
(delegates and loopback) is the time from `send` until the message lay in its receiver's host memory, less a copy out.
All three are given as shares of the step, each added up over a rank's messages as if nothing overlapped, as the
paper's are.

Ranks share a device here. So an iteration's time is the sum of all ranks' computation, where the paper's ranks
compute at the same time, and what a rank waits for is hidden behind the others' work more than it would be on GPUs of
their own. And `host`, too, copies through host memory, which is not pinned: one GPU has nothing like the paper's
GPU-direct path, to which one process without messages comes nearest. Processes that take turns on a GPU lose some
time to that, which one process does not. A copy's share of a step is smaller here than with a GPU for each rank, by
the number of ranks.

`--device cpu` runs a tiny model, for the tests; its numbers mean nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common.command import options
from experiments.common.results import Row, draw, find, save, table
from experiments.pipemorph import RESULTS
from penstock.draw.chart import Axis, Figure, Line, line_chart
from penstock.draw.style import percent

TRANSPORTS = ("host", "delegate")
ALONE = "one process"
PARTS = ("copies out", "between", "copies in", "copies beside kernels")
TARGET = 0.03
"""Delegates over `host`, at most; as for emulated devices."""
PAPER = "copies out 0.6 to 1.2%, in 2.6 to 4.4%, network 5.7 to 10.5%; an iteration longer by up to 16.4% (30B, 60B)"
HOST_MEMORY = 512 << 20
TIMEOUT = 60.0


@dataclass(frozen=True)
class Protocol21:
    """What is run: the model's sizes, ranks, microbatches a rank, steps of each transport."""

    ranks: int
    device: str = "cuda"
    depth: int = 16
    width: int = 4096
    num_heads: int = 32
    vocab_size: int = 16_384
    tokens: int = 1024
    microbatches_a_rank: int = 3
    warm_ups: int = 2
    steps: int = 10
    schedule: str = "zb"

    @property
    def num_microbatches(self) -> int:
        return self.ranks * self.microbatches_a_rank

    @property
    def message_bytes(self) -> int:
        return self.tokens * self.width * (2 if self.device == "cuda" else 4)


TINY: dict[str, Any] = {
    "device": "cpu", "depth": 4, "width": 32, "num_heads": 2, "vocab_size": 64, "tokens": 16, "steps": 2,
}  # fmt: skip


def measure(protocol: Protocol21) -> tuple[list[Row], dict[str, Any]]:
    """Trains in a process a rank; returns a row a transport, and what it was measured on."""
    from experiments.pipemorph.gpu import QUEUES  # here, so that tables are made without torch
    from penstock.runtime.launch import launch

    with tempfile.TemporaryDirectory(prefix="penstock-figure-") as folder:
        (Path(folder) / "protocol").write_text(json.dumps(asdict(protocol)), encoding="utf-8")
        program = ["-m", "experiments.pipemorph.figure21_gpu", "--rank", folder]
        code = launch(program, protocol.ranks, env=QUEUES)
        if code != 0:
            raise SystemExit(f"a rank ended with exit code {code}; the messages above say why")
        found = json.loads((Path(folder) / "result").read_text(encoding="utf-8"))
        threads = {"OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *program, "--alone"], check=True, env={**os.environ, **QUEUES, **threads})
        alone = json.loads((Path(folder) / "result").read_text(encoding="utf-8"))
    return [*alone["rows"], *found["rows"]], found["facts"]


def rank_main(folder: Path, alone: bool) -> None:
    """One rank; all of them in turn where it is alone."""
    import torch

    import penstock as ps
    from experiments.pipemorph.gpu import device_facts
    from penstock.runtime.launch import init_process

    protocol = Protocol21(**json.loads((folder / "protocol").read_text(encoding="utf-8")))
    rank = 0 if alone else init_process(TIMEOUT)[0]
    device = torch.device(f"{protocol.device}:0" if protocol.device == "cuda" else "cpu")
    delegates = ps.runtime.DelegateOptions(host_memory=HOST_MEMORY)

    def pipeline(transport: ps.TransportOptions | None) -> ps.Pipeline:
        return ps.Pipeline(
            [stage_of(protocol, stage, device) for stage in range(protocol.ranks)],
            ps.build(protocol.schedule, protocol.ranks, protocol.num_microbatches),
            loss_fn=ps.models.CrossEntropy(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            timeout=TIMEOUT,
            parallel=ps.ParallelOptions(device=device),
            transport=transport,
        )

    with ExitStack() as stack:
        if alone:
            pipes = {ALONE: stack.enter_context(pipeline(None))}
        else:
            options = [ps.TransportOptions("host"), ps.TransportOptions("delegate", delegates=delegates)]
            pipes = {each.name: stack.enter_context(pipeline(each)) for each in options}
        rows = train(protocol, pipes, device)
        facts = device_facts(device)
    if rank == 0:
        (folder / "result").write_text(json.dumps({"rows": rows, "facts": facts}), encoding="utf-8")


def stage_of(protocol: Protocol21, stage: int, device: Any) -> Callable[[], Any]:
    """Makes a stage where it runs: a share of the blocks, with the embedding before the first and the head last."""

    def make() -> Any:
        import torch
        from torch import nn

        from penstock.models.gpt import Embedding, GPTBlock, GPTConfig, Head

        config = GPTConfig(protocol.vocab_size, protocol.tokens, protocol.depth, protocol.width, protocol.num_heads)
        torch.manual_seed(stage)
        with torch.device(device):
            blocks = [GPTBlock(config.width, config.num_heads) for _ in range(protocol.depth // protocol.ranks)]
            first = [Embedding(config)] if stage == 0 else []
            last = [Head(config)] if stage == protocol.ranks - 1 else []
            made = nn.Sequential(*first, *blocks, *last)
        return made.to(torch.bfloat16) if protocol.device == "cuda" else made

    return make


def train(protocol: Protocol21, pipes: dict[str, Any], device: Any) -> list[Row]:
    """Steps in turn; a row a transport."""
    import torch
    import torch.distributed as dist

    from experiments.pipemorph.spans import copies, inside, merged, profiled

    generator = torch.Generator().manual_seed(0)
    steps_ms: dict[str, list[float]] = {name: [] for name in pipes}
    losses: dict[str, list[float]] = {name: [] for name in pipes}

    def batch() -> tuple[Any, Any]:
        shape = (protocol.num_microbatches, protocol.tokens + 1)
        drawn = torch.randint(protocol.vocab_size, shape, generator=generator).to(device)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def meet() -> None:
        at_rest(device)
        if dist.is_initialized():
            dist.barrier()

    def timed(name: str, inputs: Any, targets: Any) -> float:
        meet()
        began = time.perf_counter()
        losses[name].append(float(pipes[name].step(inputs, targets).loss))
        meet()
        return (time.perf_counter() - began) * 1e3

    for step in range(protocol.warm_ups + protocol.steps):
        given = batch()
        for name in list(pipes) if step % 2 == 0 else list(pipes)[::-1]:
            steps_ms[name].append(timed(name, *given))
    rows = []
    least, given = protocol.message_bytes, batch()
    for name, pipe in pipes.items():
        row: Row = {"ranks": protocol.ranks, "transport": name, "num_microbatches": protocol.num_microbatches}
        row |= {"message_bytes": least, "steps_ms": steps_ms[name][protocol.warm_ups :]}
        transport: Any = pipe._local.transport
        if transport is None:  # nothing is sent
            rows.append(row | {"losses": [loss.hex() for loss in losses[name]]})
            continue
        transport.crossings()
        with profiled(device) as found:
            ms = timed(name, *given)
        crossed = [(each.arrived - each.sent) / 1e6 for each in transport.crossings() if each.num_bytes >= least]
        mine = {
            "out_ms": [span.ms for span in copies(found.spans, "out", least)],
            "in_ms": [span.ms for span in copies(found.spans, "in", least)],
            "crossing_ms": crossed,
            "inside": inside(found.spans, least),
            "kernels_ms": sum(end - begin for begin, end in merged(found.spans, "compute", 0.0)),
            "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0,
        }
        everyone: list[Any] = [None] * protocol.ranks
        dist.all_gather_object(everyone, mine)
        row |= {"losses": [loss.hex() for loss in losses[name]], "profiled_ms": ms, "by_rank": everyone}
        rows.append(row)
    return rows


def at_rest(device: Any) -> None:
    """Returns when the device has done all that it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratio(rows: Sequence[Row], base: str) -> float:
    """The median step by delegates over another."""
    other, delegate = (median(find(rows, transport=name)["steps_ms"]) for name in (base, "delegate"))
    return delegate / other


def shares(row: Row) -> dict[str, float | None]:
    """Of a middle rank's messages: parts of the profiled step, and what of the copies lies beside its kernels."""
    if "by_rank" not in row:
        return dict.fromkeys(PARTS)
    mine = row["by_rank"][len(row["by_rank"]) // 2]
    whole, out = row["profiled_ms"], mine["out_ms"]
    between = [ms - (median(out) if out else 0.0) for ms in mine["crossing_ms"]]
    return {
        "copies out": sum(out) / whole if out else None,
        "between": sum(between) / whole if between else None,
        "copies in": sum(mine["in_ms"]) / whole if mine["in_ms"] else None,
        "copies beside kernels": mine["inside"],
    }


def lines(rows: Sequence[Row]) -> Iterator[str]:
    first = rows[0]
    yield (
        f"{first['ranks']} ranks on one GPU, {first['num_microbatches']} microbatches, messages of "
        f"{first['message_bytes'] / 2**20:.3g} MB; median step (ms), its range, and parts of one profiled step"
    )
    body = []
    for name in (ALONE, *TRANSPORTS):
        row = find(rows, transport=name)
        steps = row["steps_ms"]
        cells = ["" if share is None else f"{share:.1%}" for share in shares(row).values()]
        body.append([name, f"{median(steps):.1f}", f"{min(steps):.1f} to {max(steps):.1f}", *cells])
    yield from table(["", "step", "range", *PARTS], body)
    losses = [[float.fromhex(each) for each in find(rows, transport=name)["losses"]] for name in (ALONE, *TRANSPORTS)]
    same = "the same" if len({each[0] for each in losses}) == 1 else "NOT the same"
    num = min(map(len, losses))
    most = max((max(step) - min(step)) / abs(step[0]) for step in zip(*(each[:num] for each in losses), strict=True))
    over = ", ".join(f"over {base}: {ratio(rows, base) - 1:+.1%}" for base in ("host", ALONE))
    yield f"delegates {over} (target: at most {TARGET:+.0%} over host)"
    yield f"losses: {same} at the first step, apart by {most:.1e} of them at most in {num} steps"
    yield f"paper, a GPU a rank, over GPU-direct: {PAPER}"


def chart(rows: Sequence[Row]) -> Figure:
    """All steps, from the fastest to the slowest."""
    steps = {name: sorted(find(rows, transport=name)["steps_ms"]) for name in (ALONE, *TRANSPORTS)}
    return line_chart(
        [Line(name, [(place + 1) / len(row) for place in range(len(row))], row) for name, row in steps.items()],
        title="Figure 21: training steps where no link is slow",
        note=f"{rows[0]['ranks']} ranks on one GPU",
        x=Axis("share of the steps that took at most as long", show=percent),
        y=Axis("step (ms)", show="{:.0f}".format),
    )


def main() -> None:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--schedule", default=Protocol21.schedule, help="a schedule of the library")
    parser.add_argument("--steps", type=int, help="steps of each transport that count")
    parser.add_argument("--rank", metavar="FOLDER", type=Path, help="one rank; who starts it gives this")
    parser.add_argument("--alone", action="store_true", help="with --rank: all ranks in one process")
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, given.alone)
        return
    small = TINY if given.device == "cpu" else {}
    more = {} if given.steps is None else {"steps": given.steps}
    protocol = Protocol21(**{"ranks": given.ranks, "schedule": given.schedule, **small, **more})
    began = time.perf_counter()
    rows, facts = measure(protocol)
    seconds = round(time.perf_counter() - began, 1)
    name = f"figure21_{'gpu' if given.device == 'cuda' else 'cpu'}-{given.ranks}ranks"
    save(given.out, name, rows, seeds=[0], figure="figure21_gpu", seconds=seconds, protocol=asdict(protocol), **facts)
    print("\n".join(lines(rows)))
    draw(given.out, name, chart(rows))


if __name__ == "__main__":
    main()
