"""What a mesh of processes keeps: checkpoints that any other mesh goes on from, and how much each process holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from mesh_runs import Split
from packed import packed
from penstock.models import GPTConfig, gpt_stage, parallelize, tied_parameters
from penstock.models.loss import CrossEntropy
from penstock.runtime import partition
from penstock.runtime.errors import RuntimeFailure
from processes import run_ranks_to_end
from tiers import NIGHTLY

pytestmark = pytest.mark.multiproc

CONFIG = GPTConfig(vocab_size=37, context=8, depth=4, width=16, num_heads=4, tied=True)
MICROBATCHES = 4
RUN: list[tuple[Split, str]] = [
    ((2, 2, 1), "zero1"),
    ((1, 2, 2), "none"),
    ((1, 1, 4), "none"),
    ((4, 1, 1), "none"),
    ((1, 4, 1), "zero1"),
    ((2, 1, 2), "zero1"),
]
"""Each goes on from the checkpoint of the one before."""
WHOLE: list[tuple[Split, str]] = [((2, 2, 1), "fsdp"), ((1, 2, 2), "fsdp"), ((1, 4, 1), "zero1")]
"""The same with embedding and head apart, as FSDP2 wants it."""


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 37, (2, 8, 8), generator=generator)
    tokens[1, 2:5, 3:] = -100  # more targets on one replica than on another
    return tokens[0].clamp(min=0), tokens[1]


def pipeline(split: Split | None, sharding: str, tied: bool) -> ps.Pipeline:
    config = CONFIG if tied else GPTConfig(vocab_size=37, context=8, depth=4, width=16, num_heads=4)
    pp, dp, _ = split or (1, 1, 1)
    schedule = ps.build("zb-h1" if pp > 1 else "1f1b", pp, MICROBATCHES // dp)
    parts = partition([1.0] * config.num_layers, pp)
    return ps.Pipeline(
        [lambda part=part: gpt_stage(config, list(part), 0) for part in parts],  # type: ignore[misc]
        schedule,
        loss_fn=CrossEntropy(),
        optimizer=torch.optim.AdamW,
        mesh=None if split is None else init_device_mesh("cpu", split, mesh_dim_names=("pp", "dp", "tp")),
        precision=ps.PrecisionOptions(clip_norm=1.0),
        parallel=ps.ParallelOptions(tied=tied_parameters(config), parallelize=parallelize, sharding=sharding),
    )


def leg(pipe: ps.Pipeline) -> list[float]:
    """Some training, ending between two updates."""
    inputs, targets = batch()
    first = pipe.step(inputs, targets)
    again = pipe.step(inputs, targets, update=False)
    evaluated = pipe.evaluate(inputs, targets).loss
    predicted = torch.cat([output.float() for output in pipe.predict(inputs)])
    assert predicted.shape == (8, 8, 37)
    assert first.grad_norm is not None
    return [float(first.loss), float(first.grad_norm), float(again.loss), float(evaluated), float(predicted.std())]


def legs(rank: int, folder: str, run: list[tuple[Split, str]], tied: bool) -> list[Any]:
    found: list[Any] = []
    saved = None
    for number, (split, sharding) in enumerate(run):
        pipe = pipeline(split, sharding, tied)
        if saved is not None:
            assert pipe.load(saved) == {"leg": number - 1}
        found.append((leg(pipe), pipe.state_bytes()))
        saved = pipe.save(Path(folder) / str(number), meta={"leg": number})
        pipe.close()
    return found


def in_one_process(num: int, tied: bool) -> list[list[float]]:
    pipe = pipeline(None, "none", tied)
    return [leg(pipe) for _ in range(num)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "tied"),
    [(RUN if NIGHTLY else RUN[::2], True), (WHOLE if NIGHTLY else WHOLE[:2], False)],
    ids=["zero1", "fsdp"],
)
def test_each_mesh_goes_on_from_the_checkpoint_of_another(
    tmp_path: Path, run: list[tuple[Split, str]], tied: bool
) -> None:
    """Parameters, optimizer state, gradients that wait and counters, whole in the file and cut anew by each."""
    torch.set_num_threads(1)
    expected = in_one_process(len(run), tied)
    outcomes = run_ranks_to_end(4, legs, str(tmp_path), run, tied)
    for outcome in outcomes:
        for (numbers, _), wanted in zip(outcome.value, expected, strict=True):
            assert numbers == pytest.approx(wanted, rel=2e-5)
    in_full = 4 * (CONFIG if tied else GPTConfig(37, 8, 4, 16, 4)).num_parameters
    for (split, sharding), (_, held) in zip(run, outcomes[0].value, strict=True):
        pp, dp, tp = split
        if sharding == "fsdp":
            assert sum(rank["parameters"] for rank in held) < 1.1 * in_full / dp
        if sharding != "none" and tp == 1:  # AdamW keeps two numbers a parameter, and counts its steps
            assert sum(rank["optimizer"] for rank in held) < 1.35 * 2 * in_full / dp
        assert len(held) == pp


def refused(rank: int) -> list[str]:
    """What each of these says, in this process."""
    said = []
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    cases: list[dict[str, Any]] = [
        {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))},
        {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "rows"))},
        {"mesh": init_device_mesh("cpu", (2, 2))},
        {"mesh": flat, "sharding": "zero3"},
        {"mesh": flat, "schedule": ps.build("1f1b", 4, 4)},
        {"mesh": flat, "sharding": "zero1" if rank == 1 else "none"},
    ]
    for options in cases:
        schedule = options.pop("schedule", ps.build("1f1b", 2, 4))
        stages = [torch.nn.Linear(2, 2) for _ in range(schedule.num_stages)]
        try:
            ps.Pipeline(stages, schedule, loss_fn=torch.nn.MSELoss(), optimizer=torch.optim.Adam, **packed(**options))
        except RuntimeFailure as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_what_a_mesh_cannot_run_is_told() -> None:
    outcomes = run_ranks_to_end(4, refused)
    wanted = [
        "parallelize=penstock.models.parallelize",
        "2 dimensions, named pp, rows; name them pp, dp and tp",
        "2 dimensions, named nothing",
        "sharding is 'zero3'; give one of none, copies, zero1, fsdp",
        "the schedule is for 4 ranks and the process group has 2",
        "rank 1 was given another sharding than rank 0",
    ]
    for outcome in outcomes:
        for said, words in zip(outcome.value, wanted, strict=True):
            assert words in said
