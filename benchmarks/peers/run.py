"""Peers' schedules beside our plans: makespan at equal peak memory, under equal costs.

    python benchmarks/peers/run.py --checkout PATH --dualpipe PATH    # runs/peers/peers.json: what the peers make
    python benchmarks/peers/run.py --plan                             # plans for each of its settings: results.json

PATH are checkouts of sail-sg/zero-bubble-pipeline-parallelism and of deepseek-ai/DualPipe; torch's schedules come
from the torch that is installed. The peers' own code makes the orders and is only imported from there. Every order is
checked and simulated by penstock, so that all are timed alike; what is kept is the makespan, the peak and the commit.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import penstock as ps
from experiments.common.record import commit, record
from experiments.common.summary import save_summary
from penstock.schedule import Op, Placement, circular, declare_shown_order, one_to_one, v_shape
from penstock.schedule.placement import bidirectional

HERE = Path(__file__).resolve().parent
ROWS = HERE.parents[1] / "runs/peers"
"""Where the rows of all settings lie, which git does not keep."""
COSTS = ((10.0, 10.0, 10.0, 0.0), (10.0, 12.0, 8.0, 0.0), (10.0, 11.0, 9.0, 2.0))
"""ms of F, I and W on every stage, and of a message."""

SECONDS = 1.0
PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "one-to-one": one_to_one,
    "V": v_shape,
    "circular": lambda num_ranks: circular(num_ranks, 2 * num_ranks),
    "bidirectional": lambda num_ranks: bidirectional(one_to_one(num_ranks)),
}
Rows = list[list[Op]]


@dataclass(frozen=True)
class Setting:
    """What a peer is asked for: `cap` is the most stage activations per rank, where the peer takes one."""

    peer: str
    placement: str
    num_ranks: int
    num_microbatches: int
    costs: tuple[float, float, float, float]
    cap: int | None = None


def settings() -> Iterator[Setting]:
    """All settings, in the order in which they stand in the results."""

    def each(
        peer: str, placement: str, sizes: list[tuple[int, int]], caps: Callable[[int], tuple[int | None, ...]]
    ) -> Iterator[Setting]:
        for num_ranks, num_microbatches in sizes:
            for cap in caps(num_ranks):
                for costs in COSTS:
                    yield Setting(peer, placement, num_ranks, num_microbatches, costs, cap)

    def none(num_ranks: int) -> tuple[None]:
        return (None,)

    most = [(p, times * p) for p in (4, 6, 8, 12) for times in (1, 2, 4)]
    few = [(p, times * p) for p in (4, 6, 8) for times in (2, 4)]
    yield from each("sail zb-v", "V", [*most, (16, 16), (16, 32)], none)
    yield from each("sail v-half", "V", most, none)
    yield from each("sail v-min", "V", most, none)
    yield from each("sail building blocks", "V", [(4, 4), (4, 8), (4, 16)], lambda p: (5, 6, 7, 8))
    yield from each("sail building blocks", "V", [(6, 6), (6, 12)], lambda p: (8, 10, 11, 12))
    yield from each("sail zb", "one-to-one", most, lambda p: (p, 3 * p // 2, 2 * p))
    yield from each("sail zb", "one-to-one", [(16, 16), (16, 32)], lambda p: (p, 2 * p))
    for peer, placement in (
        ("torch Interleaved1F1B", "circular"),
        ("torch LoopedBFS", "circular"),
        ("torch InterleavedZeroBubble", "circular"),
        ("torch ZBVZeroBubble", "V"),
        ("torch DualPipeV", "V"),
        ("DualPipe", "bidirectional"),
        ("DualPipeV", "V"),
    ):
        yield from each(peer, placement, few, none)


class Sail:
    """sail-sg's generators, imported from a checkout without the training framework around them."""

    PACKAGES = ("megatron", "megatron.core", "megatron.core.pipeline_parallel")
    SCHEDULER = "megatron.core.pipeline_parallel.zerobubble.scheduler"

    def __init__(self, checkout: Path) -> None:
        for name in (*self.PACKAGES, self.SCHEDULER.rpartition(".")[0], self.SCHEDULER):
            package = ModuleType(name)
            package.__path__ = [str(checkout.joinpath(*name.split(".")))]
            sys.modules[name] = package
        solver: Any = ModuleType("pulp")  # asked only for the value of what is a number already
        solver.value = lambda number: number
        sys.modules.setdefault("pulp", solver)
        blocks = self._module("v_auto_schedule")
        made = functools.cache(lambda p, m, text, cap: self._by_block(p, m, json.loads(text), cap))
        self._by_block = blocks.schedule_by_building_block
        blocks.schedule_by_building_block = lambda p, m, block, cap: made(p, m, json.dumps(block), cap)
        self.commit = commit(checkout, ["."])

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"{self.SCHEDULER}.{name}")

    def _config(self, setting: Setting, num_chunks: int) -> Any:
        p, (f, i, w, delay) = setting.num_ranks, setting.costs
        return self._module("graph").GraphConfig(
            mem_f=[1.0] * p, mem_b=[0.0] * p, mem_w=[-1.0] * p,
            max_mem=None if setting.cap is None else [float(setting.cap)] * p,
            cost_f=[f] * p, cost_b=[i] * p, cost_w=[w] * p, cost_comm=delay, max_chunks=num_chunks,
            n_stages=p, n_micro=setting.num_microbatches,
        )  # fmt: skip

    def rows(self, setting: Setting) -> Rows:
        p, num, (f, i, w, delay) = setting.num_ranks, setting.num_microbatches, setting.costs
        if setting.peer == "sail building blocks":
            made = self._module("v_auto_schedule").schedule(p, num, setting.costs, setting.cap)
            return [
                [
                    Op({"F": "F", "B": "I", "W": "W"}[node.type], 2 * p - 1 - r if node.chunk else r, node.minibatch)
                    for node in row
                ]
                for r, row in enumerate(made)
            ]
        if setting.peer == "sail zb":
            nodes = self._module("zb").create_schedule(self._config(setting, 1))
        elif setting.peer == "sail zb-v":
            graph = self._module("zbv").PipelineGraph(p, num, f, i, w, delay, 1, 0, -1)
            nodes = graph.create_schedule(self._config(setting, 2))
        else:
            kind = setting.peer.removeprefix("sail v-")
            graph = self._module("zbv_greedy").PipelineGraph(p, num, kind, f, i, w, delay)
            nodes = graph.create_schedule(self._config(setting, 2))
        kinds = {"F": "F", "B": "I", "W": "W"}
        return [[Op(kinds[node.type.value], node.layer_group_idx, node.microbatch) for node in row] for row in nodes]


class Torch:
    """The schedules of `torch.distributed.pipelining`, made without processes."""

    def __init__(self) -> None:
        import torch

        self.commit = torch.__version__

    def rows(self, setting: Setting) -> Rows:
        from torch.distributed.pipelining import schedules

        p, num = setting.num_ranks, setting.num_microbatches
        name = setting.peer.removeprefix("torch ")
        chunks = PLACEMENTS[setting.placement](p).num_stages // p
        stages = [
            SimpleNamespace(num_stages=p * chunks, group_size=p, group_rank=0, stage_index=k * p, is_first=k == 0,
                            is_last=False, submod=None, has_backward=True)
            for k in range(chunks)
        ]  # fmt: skip
        made = getattr(schedules, f"Schedule{name}")(stages, num, loss_fn=lambda *_: None)
        rows: Rows = []
        for r in range(p):
            row = []
            for action in made.pipeline_order[r]:
                for each in () if action is None else action.sub_actions or (action,):
                    row.append(Op(each.computation_type.value, each.stage_index, each.microbatch_index))
            rows.append(row)
        return rows


class DualPipe:
    """DeepSeek's two classes: their step runs, and what it would compute is written down."""

    def __init__(self, checkout: Path) -> None:
        sys.path.insert(0, str(checkout))
        self.commit = commit(checkout, ["."])

    def rows(self, setting: Setting) -> Rows:
        import torch

        both = setting.peer == "DualPipe"
        module = importlib.import_module("dualpipe.dualpipe" if both else "dualpipe.dualpipev")
        peer, store = getattr(module, setting.peer), module.WeightGradStore
        module.comm.TENSOR_SHAPES, module.comm.TENSOR_DTYPE = [(1,)], torch.float32
        module.scatter = lambda inputs, num, dim: [[] for _ in range(num)]
        p = setting.num_ranks
        rows: Rows = []
        for rank in range(p):
            row: list[Op] = []
            turned = both and rank >= p // 2
            late: list[Op] = []
            count = {(kind, phase): 0 for kind in "FB" for phase in (0, 1)}

            def number(
                kind: str, phase: int, rank: int = rank, turned: bool = turned, count: dict[Any, int] = count
            ) -> tuple[int, int]:
                k = count[kind, phase]
                count[kind, phase] += 1
                down = (phase == 0) != turned
                if both:
                    return (rank, 2 * k) if down else (p - 1 - rank, 2 * k + 1)
                return (rank if phase == 0 else 2 * p - 1 - rank), k

            def forward(self: Any, phase: int, number: Any = number, row: list[Op] = row) -> None:
                row.append(Op("F", *number("F", phase)))

            def backward(
                self: Any,
                phase: int,
                enable_zb: bool = False,
                number: Any = number,
                row: list[Op] = row,
                late: list[Op] = late,
            ) -> None:
                stage, m = number("B", phase)
                row.append(Op("I" if enable_zb else "B", stage, m))
                if enable_zb:
                    late.append(Op("W", stage, m))

            def weight(self: Any, row: list[Op] = row, late: list[Op] = late) -> None:
                row.append(late.pop(0))

            def nothing(self: Any, *_: Any, **__: Any) -> None:
                pass

            written = type(
                "Written",
                (peer,),
                {
                    "__init__": nothing, "_forward_compute_chunk": forward, "_backward_compute_chunk": backward,
                    "_weight_chunk": weight, "_recv_forward": nothing, "_send_forward": nothing,
                    "_recv_backward": nothing, "_send_backward": nothing, "_commit_and_wait_comm": nothing,
                    "_free_tensors": nothing, "overlapped_forward_backward": False,
                    "__getattr__": lambda self, name: object.__getattribute__(self, name),
                    "__setattr__": object.__setattr__,
                },
            )()  # fmt: skip
            written.rank, written.num_ranks, written.batch_dim = rank, p, 0
            written.is_first_rank, written.is_last_rank = rank == 0, rank == p - 1
            written.is_in_second_half = rank >= p // 2
            written.is_middle_rank = rank in (p // 2 - 1, p // 2)
            store.clear()
            stacked, torch.stack = torch.stack, lambda *_: None  # type: ignore[assignment]
            try:
                written.step(num_chunks=setting.num_microbatches, criterion=lambda *_: None)
            finally:
                torch.stack = stacked
            rows.append(row)
        return rows


def schedule_of(setting: Setting, rows: Rows) -> ps.Schedule:
    placement = PLACEMENTS[setting.placement](setting.num_ranks)
    pipelines = tuple(m % placement.num_pipelines for m in range(setting.num_microbatches))
    made = ps.Schedule(setting.peer.replace(" ", "-"), placement, tuple(tuple(row) for row in rows), pipelines)
    return declare_shown_order(made)


def peak_of(schedule: ps.Schedule) -> int:
    """Most stage activations that a rank holds, from F to W or B."""
    peak = 0
    for row in schedule.order:
        held = 0
        for op in row:
            held += {"F": 1, "I": 0, "W": -1, "B": -1}[op.kind]
            peak = max(peak, held)
    return peak


def conditions(setting: Setting, num_stages: int) -> tuple[ps.Costs, ps.Links]:
    f, i, w, delay = setting.costs
    return ps.Costs.uniform(num_stages, f=f, i=i, w=w), ps.Links(default=delay)


def make_peers(checkout: Path, dualpipe: Path) -> dict[str, Any]:
    """Every peer's makespan and peak."""
    peers = {"sail": Sail(checkout), "torch": Torch(), "dualpipe": DualPipe(dualpipe)}
    rows = []
    for setting in settings():
        family = "dualpipe" if setting.peer.startswith("DualPipe") else setting.peer.split()[0]
        found: dict[str, Any] = {**asdict(setting), "commit": peers[family].commit}
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                made = peers[family].rows(setting)
            schedule = schedule_of(setting, made)
            ps.check(schedule)
            costs, links = conditions(setting, schedule.num_stages)
            found["makespan"] = ps.simulate(schedule, costs, links=links).makespan
            found["peak"] = peak_of(schedule)
            found["split"] = any(op.kind == "W" for row in schedule.order for op in row)
        except Exception as error:  # the peer's own; what it cannot make is counted apart
            found["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        rows.append(found)
    return {"rows": rows}


def make_plans(peers: dict[str, Any], every: int, part: tuple[int, int]) -> list[dict[str, Any]]:
    """Our plan for each setting that a peer solved, at the peer's peak."""
    asked = [row for row in peers["rows"] if "makespan" in row][::every]
    first, last = (len(asked) * k // part[1] for k in (part[0] - 1, part[0]))
    rows = []
    for row in asked[first:last]:
        placement = PLACEMENTS[row["placement"]](row["num_ranks"])
        f, i, w, delay = row["costs"]
        before = time.perf_counter()
        made = ps.plan(
            ps.Costs.uniform(placement.num_stages, f=f, i=i, w=w), row["num_ranks"], row["num_microbatches"],
            ps.Links(default=delay), placement=placement, max_in_flight=row["peak"], time_limit=SECONDS,
            split=row["split"],
        )  # fmt: skip
        ours = {"ours": made.makespan, "bound": made.lower_bound, "how": made.how}
        rows.append({**row, **ours, "seconds": round(time.perf_counter() - before, 2)})
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each peer and for all: their commits, how often ours is shorter and longer, and ours over theirs."""
    found = []
    for peer in [*dict.fromkeys(row["peer"] for row in rows), "all"]:
        mine = [row for row in rows if peer in (row["peer"], "all")]
        ratios = [row["ours"] / row["makespan"] for row in mine]
        found.append(
            {
                "peer": peer,
                "peer_commits": [] if peer == "all" else sorted({row["commit"] for row in mine}),
                "settings": len(mine),
                "shorter": sum(ratio < 1 - 1e-9 for ratio in ratios),
                "longer": sum(ratio > 1 + 1e-9 for ratio in ratios),
                "mean": sum(ratios) / len(ratios),
                "worst": max(ratios),
            }
        )
    return found


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| peer | settings | shorter | equal | longer | mean ours / theirs | worst |", f"|---|{'---:|' * 6}"]
    for row in found:
        equal = row["settings"] - row["shorter"] - row["longer"]
        lines.append(
            f"| {row['peer']} | {row['settings']} | {row['shorter']} | {equal} | {row['longer']} | "
            f"{row['mean']:.3f} | {row['worst']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--checkout", type=Path, help="of sail-sg/zero-bubble-pipeline-parallelism")
    parser.add_argument("--dualpipe", type=Path, help="a checkout of deepseek-ai/DualPipe")
    parser.add_argument("--plan", action="store_true", help="plan for the settings in peers.json")
    parser.add_argument("--every", type=int, default=1, help="plan for every so manieth setting only")
    parser.add_argument("--part", default="1/1", help="of the plans: 2/4 is the second quarter")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    asked = parser.parse_args()
    if asked.plan:
        part = tuple(int(number) for number in asked.part.split("/"))
        peers, plans = json.loads((ROWS / "peers.json").read_text()), ROWS / "plans.json"
        rows = make_plans(peers, asked.every, (part[0], part[1]))
        if part[0] > 1:
            rows = [*json.loads(plans.read_text()), *rows]
        plans.write_text(json.dumps(rows, indent=1) + "\n")
        found = summary(rows)
        save_summary(asked.out, {**record(), "seconds": SECONDS, "rows": found})
        print(table(found))
    elif asked.checkout and asked.dualpipe:
        made = make_peers(asked.checkout, asked.dualpipe)
        ROWS.mkdir(parents=True, exist_ok=True)
        (ROWS / "peers.json").write_text(json.dumps({**record(), **made}, indent=1) + "\n")
        print(f"{sum('makespan' in row for row in made['rows'])} of {len(made['rows'])} settings were made")
    else:
        parser.error("give --checkout and --dualpipe, or --plan")


if __name__ == "__main__":
    main()
