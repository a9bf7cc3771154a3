"""A captioner over processes: images of different sizes planned and run by several ranks are those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train_runs import losses, penstock

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

OPTIONS = (
    "--model captioner --batch 10 --microbatches 4 --threads 1 --evaluate-every 0 --steps 3 --ranks 2 --schedule zb-v"
)


def test_ranks_share_a_plan_and_its_losses_are_those_of_one_process(tmp_path: Path) -> None:
    ended = penstock(f"train {OPTIONS} --packing planned --dispatch auto --out {tmp_path / 'run'}".split())
    assert ended.code == 0, ended.err
    assert "batches were planned from lengths, 3 of them" in ended.out
    record = tmp_path / "run" / "batches.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    again = f"{OPTIONS} --packing {record} --in-process --out {tmp_path / 'again'}"
    assert penstock(["train", *again.split()]).code == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "again")
