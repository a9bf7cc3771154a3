"""`penstock train` on a GPU that all ranks share: the losses of one process there, however ranks are laid out."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from train_runs import Run, losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

GPT = (
    "--preset nano --depth 4 --width 64 --heads 2 --context 16 --batch 16 --microbatches 4 --evaluate-every 0 "
    "--sample 4 --steps 4 --device cuda"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    draw = random.Random(1)
    path.write_text(" ".join(draw.choice(["rank", "replica", "shard", "mesh", "op"]) for _ in range(3000)))
    return path


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def run(folder: Path, text: Path, options: str) -> list[float]:
    with Run(folder, f"{GPT} --data {text} --json {options} --out {folder}") as started:
        end = started.end(within=200)
    assert end.code == 0, end.out + end.err
    found = losses(folder)
    assert len(found) >= 4
    return found


@pytest.fixture(scope="module")
def in_one_process(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    with pytest.MonkeyPatch.context() as here:
        here.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return run(tmp_path_factory.mktemp("one"), text, "--in-process --pp 2")


@pytest.mark.parametrize(
    "options",
    [
        "--pp 2",
        "--pp 2 --schedule zb-v --dispatch dynamic",
        "--pp 2 --schedule zb-h1 --transport delegate",
        "--pp 4 --transport gloo --adapt",
    ],
)
def test_losses_are_those_of_one_process(
    options: str, text: Path, in_one_process: list[float], tmp_path: Path
) -> None:
    assert run(tmp_path, text, options) == in_one_process


@pytest.mark.parametrize("sharding", ["copies", "zero1"])
def test_replicas_are_near(sharding: str, text: Path, in_one_process: list[float], tmp_path: Path) -> None:
    """Replicas add in another order. Their collectives go through host memory, by gloo."""
    options = f"--pp 2 --dp 2 --microbatches 2 --sharding {sharding}"
    assert run(tmp_path, text, options) == pytest.approx(in_one_process, rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="with a GPU for each rank, NCCL does it")
@pytest.mark.parametrize("options", ["--pp 2 --tp 2", "--pp 2 --dp 2 --microbatches 2 --sharding fsdp"])
def test_parts_of_parameters_are_refused_where_ranks_share_a_gpu(options: str, text: Path, tmp_path: Path) -> None:
    """Over gloo all processes ended by SIGSEGV, in the first step that gathered parts."""
    with Run(tmp_path, f"{GPT} --data {text} --json {options} --out {tmp_path}") as started:
        end = started.end(within=200)
    assert end.code == 1
    assert "gloo would gather parts of parameters on a GPU" in end.out


def test_bfloat16_and_asynchronous_updates_train(text: Path, tmp_path: Path) -> None:
    found = run(tmp_path, text, "--pp 2 --schedule amdp --microbatches 8 --precision bfloat16 --steps 8")
    assert len(found) == 8
    assert all(0 < loss < 7 for loss in found)
    assert found[-1] < found[0]
