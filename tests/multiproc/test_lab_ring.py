"""A ring of gradients between hosts of a lab, one of whose links becomes slow while they train."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from labs import START, needs_lab, until
from penstock.lab import Lab
from train_runs import metrics

pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("lab"), needs_lab, pytest.mark.timeout(900)]

SMALL = "--preset nano --ranks 2 --dp 2 --steps 100000 --sample 0 --adapt"
HEALTHY = 40
"""Steps before the link becomes slow: costs have been measured by then."""


def answers(folder: Path, link: str) -> list[dict[str, Any]]:
    """The decisions to move nodes, and the reasons why none moves, that name a link between nodes."""
    path = folder / "control.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    moves = [each["decision"] for each in lines if each.get("decision", {}).get("action") == "move nodes"]
    stays = [each["unanswered"] for each in lines if each.get("unanswered", {}).get("nodes")]
    return [each for each in (*moves, *stays) if link in each.get("reason", each.get("nodes"))]


@pytest.mark.nightly
def test_a_ring_at_5_mbit_was_neither_named_nor_answered(tmp_path: Path) -> None:
    """Probes of small messages saw nothing of its bandwidth, and steps became four times as long."""
    words = ["torchrun", "-m", "penstock.train", *SMALL.split(), "--out", str(tmp_path)]
    with Lab(num_hosts=4) as lab:
        ranks = [lab.start(host, words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for host in lab.hosts]
        assert until(lambda: len(metrics(tmp_path)) >= HEALTHY, START), ranks[0].read(5)
        assert not answers(tmp_path, "2:3")
        lab.link(2, 3, "bandwidth:5Mbit/s")
        assert until(lambda: bool(answers(tmp_path, "2:3")), 3 * START), metrics(tmp_path)[-1]
