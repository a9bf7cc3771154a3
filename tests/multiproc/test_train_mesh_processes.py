"""`penstock train` over a mesh: the losses of one process, through breaks and changes of the mesh, under torchrun."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
import torch

from penstock.cli import main
from train_runs import COMMAND, Ended, Run, losses, metrics

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

GPT = (
    "--preset nano --depth 4 --width 16 --heads 2 --context 16 --batch 16 --evaluate-every 0 --sample 4 "
    "--set lr_decay=constant --set lr_warmup=0 --threads 1"
)
CLIP = "--model clip --batch 32 --microbatches 2 --steps 3 --evaluate-every 0 --threads 1"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    draw = random.Random(1)
    path.write_text(" ".join(draw.choice(["rank", "replica", "shard", "mesh", "op"]) for _ in range(3000)))
    return path


def ended(folder: Path, options: str, command: list[str] | None = None) -> Ended:
    with Run(folder, f"{options} --json", command) as run:
        end = run.end(within=300)
    assert end.code == 0, end.err
    return end


def one_process(folder: Path, options: str) -> list[float]:
    threads = torch.get_num_threads()
    try:
        assert main(["train", *f"{options} --in-process --out {folder} --json".split()]) == 0
    finally:
        torch.set_num_threads(threads)
    return losses(folder)


@pytest.mark.nightly
def test_a_run_changes_its_mesh_on_the_way(text: Path, tmp_path: Path) -> None:
    """Replicas, then shards of two pipelines that cross; its losses are those of one process."""
    expected = one_process(tmp_path / "one", f"{GPT} --data {text} --pp 2 --dp 2 --microbatches 2 --steps 6")
    folder = tmp_path / "run"
    told = ended(
        folder, f"{GPT} --data {text} --pp 2 --dp 2 --sharding zero1 --microbatches 2 --steps 3 --out {folder}"
    )
    assert (told.json["mesh"], told.json["sharding"]) == ({"pp": 2, "dp": 2, "tp": 1}, "zero1")
    assert len(told.json["peak_memory"]) == 4
    told = ended(folder, f"--resume {folder} --schedule chimera --dp 1 --tp 2 --microbatches 4 --steps 6")
    assert told.json["mesh"] == {"pp": 2, "dp": 1, "tp": 2}
    assert losses(folder) == pytest.approx(expected, rel=1e-5)
    assert [(line["pp"], line["dp"], line["tp"]) for line in metrics(folder)] == [(2, 2, 1)] * 3 + [(2, 1, 2)] * 3


@pytest.mark.nightly
def test_updates_among_the_ops_of_replicas(text: Path, tmp_path: Path) -> None:
    """Without mismatch both are the synchronous run; embedding and head share their weight."""
    options = (
        f"{GPT} --schedule amdp --set tied=true --max-mismatch 0 --steps 4 --drain-every 2 --sample 0 --data {text}"
    )
    mesh, one = tmp_path / "mesh", tmp_path / "one"
    ended(mesh, f"{options} --pp 2 --dp 2 --microbatches 4 --sharding zero1 --out {mesh}")
    ended(one, f"{options} --ranks 2 --microbatches 8 --in-process --out {one}")
    assert len(losses(mesh)) == 4
    assert losses(mesh) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.nightly
def test_predictions_of_tied_weights_over_replicas_however_these_share_out_state(text: Path, tmp_path: Path) -> None:
    """XPipe's rule on AMDP's order. A run may go on with state shared out in another way."""
    options = (
        f"{GPT} --schedule amdp --rule xpipe --set tied=true --pp 2 --dp 2 --microbatches 4 --sample 0 --data {text}"
    )
    for sharding in ("none", "zero1", "fsdp"):
        folder = tmp_path / sharding
        ended(folder, f"{options} --window 4 --steps 4 --drain-every 2 --sharding {sharding} --out {folder}")
    assert losses(tmp_path / "none") == losses(tmp_path / "zero1") == losses(tmp_path / "fsdp")
    for before, after in (("none", "fsdp"), ("zero1", "copies")):
        ended(tmp_path / before, f"--resume {tmp_path / before} --sharding {after} --steps 6")
    assert losses(tmp_path / "none") == losses(tmp_path / "zero1")
    assert len(losses(tmp_path / "none")) == 6


@pytest.mark.nightly
def test_towers_under_torchrun(tmp_path: Path) -> None:
    """torchrun says how many processes there are, and so the ranks of a pipeline."""
    expected = one_process(tmp_path / "one", f"{CLIP} --pp 2 --dp 2")
    command = [COMMAND[0], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    folder = tmp_path / "run"
    told = ended(folder, f"{CLIP} --dp 2 --out {folder}", [*command, "-m", "penstock.train"])
    assert told.json["mesh"] == {"pp": 2, "dp": 2, "tp": 1}
    assert losses(folder) == pytest.approx(expected, rel=1e-5)
    assert told.json["num_parameters"] == 81_921


MOVE = "move nodes"
REPLICAS = f"{GPT} --pp 2 --dp 2 --microbatches 2 --save-every 0"


def moved(folder: Path, options: str) -> Ended:
    """The end of a run over a late link, interrupted after six steps with moved nodes. When these move depends on how
    busy the machine is: of 27 steps that are soon over, all may be before the decision.
    """

    def has_moved() -> bool:
        log = folder / "control.jsonl"
        lines = map(json.loads, log.read_text().splitlines(keepends=True)[:-1] if log.exists() else [])
        moves = [line["decision"]["number"] for line in lines if line.get("decision", {}).get("action") == MOVE]
        return bool(moves) and sum(row["plan"] >= moves[0] for row in metrics(folder)) >= 6

    command = f"{options} --steps 100000 --adapt --link 2:3=latency:150ms --out {folder} --json"
    with Run(folder, command) as run:
        run.wait_for(has_moved)
        run.signal(signal.SIGINT)
        end = run.end()
    assert end.code == 128 + signal.SIGINT, end.err
    return end


@pytest.mark.usefixtures("interruptible")
@pytest.mark.nightly  # a pipeline of test_adapt_mesh_processes and a run of test_train_adapts do so by day
def test_nodes_move_from_a_late_link_and_losses_stay(text: Path, tmp_path: Path) -> None:
    """Link 2:3 carries the gradients of the last rank; afterwards it does not."""
    folder = tmp_path / "run"
    told = moved(folder, f"{REPLICAS} --data {text}")
    expected = one_process(tmp_path / "one", f"{REPLICAS} --data {text} --steps {len(losses(folder))}")
    assert losses(folder) == pytest.approx(expected, rel=1e-5)
    moves = [each for each in told.json["steered"]["decisions"] if each["action"] == MOVE]
    assert moves, told.json["notices"]
    assert "between nodes 2:3 late by " in moves[0]["reason"]
    assert moves[0]["measured_after"] < moves[0]["measured_before"]
    assert "change places" in moves[0]["reason"]
    assert main(["report", str(folder), "--json"]) == 0


@pytest.mark.usefixtures("interruptible")
@pytest.mark.nightly
def test_nodes_of_two_shards_move_together(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    told = moved(folder, f"{REPLICAS} --data {text} --tp 2")
    expected = one_process(tmp_path / "one", f"{REPLICAS} --data {text} --steps {len(losses(folder))}")
    assert losses(folder) == pytest.approx(expected, rel=1e-5)
    assert [each["action"] for each in told.json["steered"]["decisions"]][:1] == [MOVE], told.json["notices"]
