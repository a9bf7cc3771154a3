"""`penstock train --model FILE.py:NAME` with one process a rank: each imports the file itself."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest

import own_batches
from hf_families import config_of
from train_runs import COMMAND, ENDLESS, Run, checkpoints, losses, metrics, penstock

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

FILE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1)
    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))

class Net(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(depth)), nn.Linear(8, 3)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

loss_fn = nn.CrossEntropyLoss()

def data(train=True):
    torch.manual_seed(1 if train else 2)
    return TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
"""


def trained(folder: Path, name: str, options: str, forks: bool = True) -> list[float]:
    """The losses of a run; it `forks` its ranks in place of starting an interpreter from which they are forked."""
    line = f"--model net.py:Net --data net.py:data --steps 6 {options} --out {name} --json"
    if forks:
        ended = penstock(["train", *line.split()], folder)
    else:
        with Run(folder / name, line, command=[*COMMAND, "train"], cwd=folder) as run:
            ended = run.end()
    assert ended.code == 0, ended.err
    assert ended.json["samples_per_second"] > 0
    return losses(folder / name)


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE)
    alone = trained(tmp_path, "alone", "--ranks 2 --microbatches 8 --in-process")
    assert trained(tmp_path, "pipeline", "--ranks 2 --microbatches 8 --schedule zb-h1", forks=False) == alone
    found = trained(tmp_path, "fsdp", "--pp 2 --dp 2 --microbatches 4 --sharding fsdp")
    assert found == pytest.approx(alone, rel=1e-5)


def test_each_replica_loads_its_own_part(tmp_path: Path) -> None:
    """Of a Hugging Face model, whose labels count unevenly; beside one pipeline that loads the whole batches."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama").to_dict()))
    shutil.copy(own_batches.__file__, tmp_path)
    (tmp_path / "net.py").write_text(PARTS)
    options = "--pp 1 --model config.json --save-every 3"
    alone = trained(tmp_path, "alone", f"{options} --microbatches 8 --data net.py:whole --in-process")
    found = trained(tmp_path, "parts", f"{options} --dp 2 --microbatches 4 --data net.py:parts")
    assert found == pytest.approx(alone, rel=1e-5)
    assert len(set(alone)) == 6


def test_replicas_whose_parts_are_padded_to_other_lengths_save_and_go_on(tmp_path: Path) -> None:
    """A checkpoint was refused: `process 1 was given another meta= than process 0`."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama").to_dict()))
    shutil.copy(own_batches.__file__, tmp_path)
    (tmp_path / "net.py").write_text(PARTS)
    same = "--pp 1 --model config.json --save-every 3 --dp 2 --microbatches 2"
    options = f"{same} --data net.py:padded --set lr_decay=constant"
    whole = trained(tmp_path, "whole", options)
    assert trained(tmp_path, "part", f"{options} --steps 3") == whole[:3]
    ended = penstock(["train", *f"--resume {tmp_path / 'part'} --steps 6 --json".split()], tmp_path)
    assert ended.code == 0, ended.err
    assert losses(tmp_path / "part") == whole


UNEVEN = """
from own_batches import Batches

def rows(*sizes):
    torch.manual_seed(1)
    return [(torch.randn(size, 8), torch.randint(3, (size,))) for size in sizes]

def dealt(replica, num_replicas, train=True):
    return Batches(rows(8, 8 - 5 * replica) if train else rows(8, 8, 5) if replica == 0 else rows(8, 3))

def together(train=True):
    pairs = zip(dealt(0, 2, train), dealt(1, 2, train))
    return Batches([tuple(map(torch.cat, zip(*pair))) for pair in pairs])
"""


def test_parts_with_more_validation_batches_in_one_replica_ended_the_run_at_its_first_evaluation(
    tmp_path: Path,
) -> None:
    shutil.copy(own_batches.__file__, tmp_path)
    (tmp_path / "net.py").write_text(FILE.replace("Dropout(0.1)", "Dropout(0)") + UNEVEN)
    options = "--pp 1 --evaluate-every 2 --set lr_decay=constant"
    trained(tmp_path, "alone", f"{options} --microbatches 8 --data net.py:together --in-process")
    trained(tmp_path, "parts", f"{options} --dp 2 --microbatches 4 --data net.py:dealt")
    found, want = (
        [line["validation_loss"] for line in metrics(tmp_path / name) if "validation_loss" in line]
        for name in ("parts", "alone")
    )
    assert len(found) == 3
    assert found == pytest.approx(want, rel=1e-4)
    report = json.loads((tmp_path / "parts" / "report.json").read_text())
    assert report["samples_per_second"] * report["seconds"] == pytest.approx(3 * (8 + 8 + 8 + 3))


TWO_INPUTS = """
import torch
from torch import nn
from own_batches import Batches

class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.ModuleList(nn.Linear(8, 8) for _ in range(4)) for _ in range(2))
        self.head = nn.Linear(8, 3)
    def forward(self, left, right):
        for layer in self.left:
            left = torch.tanh(layer(left))
        for layer in self.right:
            right = torch.tanh(layer(right)) + left.mean(1, keepdim=True)
        return self.head(right.mean(1))

loss_fn = nn.CrossEntropyLoss()

def rows(replica, num_replicas):
    torch.manual_seed(replica)
    lengths = (30, 4) if replica == 0 else (4, 30)
    return Batches([(*(torch.randn(8, length, 8) for length in lengths), torch.randint(3, (8,)))])

def tokens(replica, num_replicas):
    torch.manual_seed(replica)
    read, written = (30, 4) if replica == 0 else (4, 30)
    drawn = {"input_ids": torch.randint(3, 290, (8, read)), "labels": torch.randint(3, 290, (8, written))}
    return Batches([drawn])
"""


@pytest.mark.parametrize(
    "what", ["--model net.py:TwoInputs --data net.py:rows", "--model config.json --data net.py:tokens"]
)
def test_replicas_cut_the_model_each_by_the_lengths_in_its_own_first_batch(tmp_path: Path, what: str) -> None:
    """It ended the run: `rank 1 was given another stage 0 than rank 0`."""
    shutil.copy(own_batches.__file__, tmp_path)
    (tmp_path / "net.py").write_text(TWO_INPUTS)
    (tmp_path / "config.json").write_text(json.dumps(config_of("t5").to_dict()))
    uncut = trained(tmp_path, "uncut", f"{what} --microbatches 2 --pp 1 --dp 2")
    assert trained(tmp_path, "cut", f"{what} --microbatches 2 --pp 2 --dp 2") == pytest.approx(uncut, rel=1e-5)


PARTS = """
import torch
from own_batches import Batches

def padded(replica, num_replicas):
    torch.manual_seed(replica)
    parts = [torch.randint(3, 290, (8, 6 + replica + k)) for k in range(4)]
    return Batches([{"input_ids": part, "labels": part} for part in parts])

def whole():
    torch.manual_seed(1)
    tokens = torch.randint(3, 290, (64, 8))
    labels = tokens.masked_fill(torch.arange(8) < torch.randint(6, (64, 1)), -100)
    return Batches([{"input_ids": tokens[k : k + 16], "labels": labels[k : k + 16]} for k in range(0, 64, 16)])

def parts(replica, num_replicas):
    return Batches([{k: v.chunk(num_replicas)[replica] for k, v in batch.items()} for batch in whole()])
"""


def test_a_signal_saves_before_any_validation_data_is_evaluated(tmp_path: Path) -> None:
    """All of it was evaluated first, and a launcher that lost its patience meanwhile ended the run without a save."""
    looks = """        if not self.training and Path('run/metrics.jsonl').exists():
            with open("seen", "a") as seen:
                seen.write(f"{len(list(Path('run/checkpoints').glob('step-????????')))} ")
"""
    head = "    def forward(self, x):\n"
    block = f"{head}        return x +"
    assert block in FILE
    looking = FILE.replace(block, f"{head}{looks}        return x +")
    (tmp_path / "net.py").write_text(f"from pathlib import Path\n{looking}")
    options = "--ranks 2 --microbatches 4 --save-every 0 --evaluate-every 0 --out run"
    line = f"--model net.py:Net --data net.py:data {ENDLESS} {options}"
    with Run(tmp_path / "run", line, cwd=tmp_path) as run:
        run.wait_for(lambda: run.steps() >= 2)
        run.signal(signal.SIGTERM)
        ended = run.end()
    assert ended.code == 143, ended.err
    assert set((tmp_path / "seen").read_text().split()) == {"1"}


WITH_WORKERS = """
from torch.utils.data import DataLoader

class Counted(DataLoader):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

def loader():
    return Counted(data(), batch_size=16, num_workers=2)
"""


def test_torchrun_ended_the_workers_of_a_loader_and_the_run_before_it_had_saved(tmp_path: Path) -> None:
    """It passes SIGTERM on to the whole group of each rank. A worker died of it, and its rank of that."""
    (tmp_path / "net.py").write_text(FILE + WITH_WORKERS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "penstock.train"]
    line = f"--model net.py:Net --data net.py:loader {ENDLESS} --microbatches 4 --save-every 0 --out run"
    with Run(tmp_path / "run", line, command=command, cwd=tmp_path) as run:
        run.wait_for(lambda: run.steps() >= 2)
        run.signal(signal.SIGTERM)
        ended = run.end()
    assert "DataLoader worker" not in ended.err
    assert len(checkpoints(tmp_path / "run")) == 1, ended.err


@pytest.mark.nightly
def test_a_killed_run_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE)
    options = "--ranks 2 --microbatches 4 --save-every 2"
    line = f"--model net.py:Net --data net.py:data {ENDLESS} {options} --out part --json"
    with Run(tmp_path / "part", line, cwd=tmp_path) as run:
        run.wait_for(lambda: run.steps() >= 5)
        run.kill(1)
        assert run.end().code != 0
    num = len(losses(tmp_path / "part")) + 6
    with Run(tmp_path / "part", f"--resume {tmp_path / 'part'} --steps {num} --json") as run:
        ended = run.end()
    assert ended.code == 0, ended.err
    alone = trained(tmp_path, "alone", f"{options} {ENDLESS} --steps {num} --in-process")
    assert len(alone) == num
    assert losses(tmp_path / "part") == alone
