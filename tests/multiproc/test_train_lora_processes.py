"""`penstock train --lora` with one process a rank, and replicas that share out what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_families import model_of
from train_runs import Run, losses

pytest.importorskip("peft", reason="peft is not installed: pip install 'penstock[peft]'")

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def trained(folder: Path, name: str, options: str) -> list[float]:
    with Run(folder / name, f"{options} --out {name} --json", cwd=folder) as run:
        ended = run.end()
    assert ended.code == 0, ended.err
    return losses(folder / name)


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    """Also where each replica loads its own part of the batches and keeps parts of frozen weights, and where a run
    goes on upon another mesh: the loader stands where it stood.
    """
    model_of("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "rows.py").write_text(ROWS)
    options = (
        "--model base --data rows.py:Rows --lr 0.05 --lr-decay constant --lr-warmup 0 --evaluate-every 0 --steps 4"
    )
    lora = """--lora {"r":4,"modules_to_save":["lm_head"]}"""
    alone = trained(tmp_path, "alone", f"{options} {lora} --ranks 2 --microbatches 8 --in-process --steps 6")
    assert len(set(alone)) == 6
    assert trained(tmp_path, "pipeline", f"{options} {lora} --ranks 2 --microbatches 8 --schedule zb-h1") == alone[:4]
    fsdp = f"{options} {lora} --pp 2 --dp 2 --microbatches 4 --sharding fsdp"
    assert trained(tmp_path, "fsdp", fsdp) == pytest.approx(alone[:4], rel=1e-5)
    with Run(tmp_path / "fsdp", "--resume fsdp --steps 6 --sharding zero1", cwd=tmp_path) as run:
        assert run.end().code == 0
    assert losses(tmp_path / "fsdp") == pytest.approx(alone, rel=1e-5)


ROWS = """
import torch

class Rows:
    def __init__(self, replica, num_replicas):
        self.replica, self.num_replicas, self.step = replica, num_replicas, 0
    def __iter__(self):
        while True:
            self.step += 1
            tokens = torch.randint(3, 290, (8, 16), generator=torch.Generator().manual_seed(self.step))
            labels = tokens.clone()
            for row in range(8):
                labels[row, : 2 * row] = -100
            batch = {"input_ids": tokens, "labels": labels}
            yield {name: value.chunk(self.num_replicas)[self.replica] for name, value in batch.items()}
    def state_dict(self):
        return {"step": self.step}
    def load_state_dict(self, state):
        self.step = state["step"]
"""
