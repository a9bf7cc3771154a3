"""Peak resident memory of each of 4 ranks that train a model of a person's own, above importing.

    python benchmarks/own_model/run.py

A transformer of 319 MB, whose constructor initialises every layer once more at its end, is trained for two steps of
SGD by `penstock train --model FILE.py:Net` in 4 processes. Once its weights lie in a file until a rank takes its own,
and once they do not, because TMPDIR names a folder that takes no file. Losses must be the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FILE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self, depth=24, width=512, words=4000):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, words)
        self.apply(self.again)

    def again(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)

loss_fn = nn.CrossEntropyLoss()

def make_data():
    tokens = torch.randint(0, 4000, (64, 8), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens, tokens.roll(1, 1))
"""
IMPORTED = """
import resource, torch
import penstock.train.run_job, penstock.train.tasks.own
torch.ones(2) @ torch.ones(2)
print(int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize())
"""
OPTIONS = "--model net.py:Net --data net.py:make_data --ranks 4 --microbatches 4 --batch 4 --steps 2 --optimizer SGD"
NO_FILE = "/proc"
"""A folder in which none can be made."""


def trained(folder: Path, name: str, scratch: str | None) -> tuple[list[int], list[float], int]:
    """Peak bytes of each rank, the losses, and the model's bytes."""
    command = [sys.executable, "-m", "penstock.train", *OPTIONS.split(), "--out", name, "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **({} if scratch is None else {"TMPDIR": scratch})}
    done = subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True)
    report = json.loads(done.stdout)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return report["peak_memory"], [json.loads(line)["loss"] for line in lines], 4 * report["num_parameters"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "net.py").write_text(FILE)
        done = subprocess.run([sys.executable, "-c", IMPORTED], check=True, capture_output=True, text=True)
        imported = int(done.stdout)
        found = {}
        for way, scratch in (("in memory", NO_FILE), ("in a file", None)):
            peaks, losses, size = trained(folder, way.replace(" ", "-"), scratch)
            found[way] = losses
            print(way, *(f"{(peak - imported) / size:.3f}" for peak in peaks), flush=True)
        print(f"{size / 1e6:.0f} MB, {imported / 1e6:.0f} MB for importing, losses", end=" ")
        print("the same" if found["in memory"] == found["in a file"] else "DIFFER")


if __name__ == "__main__":
    main()
