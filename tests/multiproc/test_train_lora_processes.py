"""`penstock train --lora` with one process a rank, and replicas that share out what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_families import model_of
from train_runs import losses, penstock

pytest.importorskip("peft", reason="peft is not installed: pip install '.[peft]'")

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

LOADED = ("transformers.models.llama.modeling_llama", "peft")
"""What takes each rank seconds to load."""


def trained(folder: Path, name: str, options: str) -> list[float]:
    ended = penstock(["train", *options.split(), "--out", name, "--json"], folder, LOADED)
    assert ended.code == 0, ended.err
    return losses(folder / name)


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    """Also where replicas keep parts of frozen weights, and a run goes on upon another mesh."""
    model_of("llama").save_pretrained(tmp_path / "base")
    options = (
        "--model base --context 16 --batch 8 --sample 0 --lr 0.05 --set lr_decay=constant --set lr_warmup=0 "
        "--evaluate-every 0 --steps 4"
    )
    lora = """--lora {"r":4,"modules_to_save":["lm_head"]}"""
    alone = trained(tmp_path, "alone", f"{options} {lora} --ranks 2 --microbatches 8 --in-process")
    assert trained(tmp_path, "pipeline", f"{options} {lora} --ranks 2 --microbatches 8 --schedule zb-h1") == alone
    fsdp = f"{options} {lora} --pp 2 --dp 2 --microbatches 4 --sharding fsdp"
    assert trained(tmp_path, "fsdp", fsdp) == pytest.approx(alone, rel=1e-5)
    assert penstock(["train", "--resume", "fsdp", "--steps", "6", "--sharding", "zero1"], tmp_path, LOADED).code == 0
    assert losses(tmp_path / "fsdp")[-1] < alone[0]
