"""TorchTitan's own trainer runs plans: losses, gradients and weights are those of its own schedules, to the bit."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchtitan_runs
from documents import ROOT, blocks, commands
from labs import needs_lab
from processes import run_ranks_to_end
from torchtitan_runs import Runs, titan_on_cpu

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.nightly,
    pytest.mark.skipif(torchtitan_runs.IS_MISSING, reason="needs torchtitan, which `make titan` installs"),
]


def results(num_ranks: int, function: Callable[..., Runs], folder: Path) -> list[Runs]:
    outcomes = run_ranks_to_end(num_ranks, function, str(folder))
    return [o.value for o in outcomes]


def joined(parts: list[Runs]) -> Runs:
    """Of each run the losses, gradients and weights of all ranks of a pipeline."""
    return {name: {key: value for part in parts for key, value in part[name].items()} for name in parts[0]}


def is_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_losses_and_gradients_are_those_of_torchtitans_own_schedules(tmp_path: Path) -> None:
    titan_on_cpu.write_data(tmp_path)
    theirs = joined(results(2, torchtitan_runs.by_name, tmp_path))
    runs = joined(results(2, torchtitan_runs.by_plans, tmp_path))
    assert {"losses", "tok_embeddings.weight", "gradient of norm.weight", "lm_head.weight"} < theirs["1F1B"].keys()
    assert is_same(theirs["Interleaved1F1B"], theirs["1F1B"])
    differs = []
    for name, found in runs.items():
        if "bfloat16" in name:
            expected = theirs["ZBVZeroBubble, bfloat16"]
        else:
            expected = theirs["1F1B, chunked loss" if "chunked" in name else "1F1B"]
        if not is_same(found, expected):
            differs.append(name)
    assert differs == []
    assert len(runs) == len(torchtitan_runs.PLANS)
    trap = theirs["1F1B, chunked loss"].keys() - theirs["ZBVZeroBubble, chunked loss"].keys()
    assert trap == {"gradient of norm.weight"}, "planned() refuses this; if TorchTitan is mended it need not"


def test_sharded_parameters_get_the_same_gradients(tmp_path: Path) -> None:
    titan_on_cpu.write_data(tmp_path)
    ranks = results(4, torchtitan_runs.with_shards, tmp_path)  # ranks 0 and 2 are a pipeline, 1 and 3 another
    for replica in range(2):
        runs = joined(ranks[replica::2])
        assert "gradient of norm.weight" in runs["1F1B"]
        assert [name for name, found in runs.items() if not is_same(found, runs["1F1B"])] == []


@needs_lab
@pytest.mark.xdist_group("lab")
@pytest.mark.timeout(600)
def test_the_tutorial_on_a_slow_link_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands as they stand, with fewer steps."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = blocks(ROOT / "docs" / "tutorials" / "torchtitan-slow-link.md")
    losses = []
    for words in (words for block in page if block.language in ("sh", "text") for words in commands(block)):
        if words[:2] == ["penstock", "lab"]:
            words += ["--training.steps", "5" if words[-1] == "measured" else "2"]
        if words[0] != "penstock":
            continue
        ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr
        if words[1] == "lab":
            losses.append(re.findall(r"step: +\d+ +loss: +([\d.]+)", ran.stdout))
        if words[1] == "analyze" and "--try" not in words:
            assert re.search(r"link (3 to 2|2 to 3)", ran.stdout)
    before, measured, after = losses
    assert len(before) == 2
    assert before == measured[:2] == after
