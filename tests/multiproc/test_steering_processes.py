"""The closed loop between processes: a real model over gloo, measured, decided and switched while it trains."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.control import replay
from penstock.cost import LinkConditions
from processes import run_ranks

pytestmark = pytest.mark.multiproc

NUM_RANKS, NUM_MICROBATCHES = 3, 6
LATE = LinkConditions.parse("1:2=latency:steps:0ms/0ms,900ms/25ms,10min/0ms")
"""The link to the last rank turns late while the job runs, after its costs have been measured."""


class Busy(nn.Module):
    """A layer that takes some milliseconds, so that there is something to overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.003)
        return torch.tanh(self.linear(x))


def pipeline(steering: ps.Steering | None, links: LinkConditions | None, **options: Any) -> ps.Pipeline:
    torch.manual_seed(3)
    schedule = ps.build("1f1b", NUM_RANKS, NUM_MICROBATCHES)
    model = [Busy() for _ in range(NUM_RANKS)]
    return ps.Pipeline(
        model,
        schedule,
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.AdamW,
        links=links,
        steering=steering,
        timeout=30,
        **options,
    )


def losses(pipe: ps.Pipeline, num_steps: int) -> list[torch.Tensor]:
    found = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 8, generator=generator)
        found.append(pipe.step(x, x.cos()).loss)
    return found


def steered(rank: int, folder: str, num_steps: int) -> dict[str, Any]:
    pipe = pipeline(ps.Steering(folder=folder if rank == 0 else None, max_held=6.0), LATE)
    numbers, got = [], []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 8, generator=generator)
        helm = pipe._helm
        assert helm is not None
        numbers.append((helm.number, helm.digest, pipe.configuration.digest))
        got.append(pipe.step(x, x.cos()).loss)
    notices = pipe.notices
    pipe.close()
    plain = pipeline(None, None)
    want = losses(plain, num_steps)
    same = [torch.equal(a, b) for a, b in zip(want, got, strict=True)]
    same += [torch.equal(a, b) for a, b in zip(plain.parameters(), pipe.parameters(), strict=True)]
    return {"numbers": numbers, "same": same, "notices": notices}


def test_a_model_is_steered_around_a_late_link_with_the_same_losses(tmp_path: Path) -> None:
    outcomes = run_ranks(NUM_RANKS, steered, str(tmp_path), 24)
    assert [o.code for o in outcomes] == [0] * NUM_RANKS, outcomes[0].text
    found = [o.value for o in outcomes]
    assert all(all(each["same"]) and len(each["same"]) > 24 for each in found)
    assert found[0]["numbers"] == found[1]["numbers"] == found[2]["numbers"]
    assert all(proved == ran for _, proved, ran in found[0]["numbers"]), "what a rank says is what it runs"
    assert found[0]["numbers"][-1][0] >= 1, (outcomes[0].text, found[0]["notices"])
    assert [each["notices"] for each in found] == [[], [], []]
    lines = (tmp_path / "control.jsonl").read_text().splitlines()
    decisions = replay(lines)
    digests = dict(number[:2] for number in found[0]["numbers"])
    assert all(digests.get(d.number, d.configuration.digest) == d.configuration.digest for d in decisions)
    records = [json.loads(line) for line in (tmp_path / "iterations.jsonl").read_text().splitlines()]
    assert [r["iteration"] for r in records] == sorted(r["iteration"] for r in records)
    for record in records:
        assert (record["number"], record["digest"]) == found[0]["numbers"][record["iteration"]][:2]
