"""Batches of the user's own go on where a checkpoint left them, whatever their loader does when a pass begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.train.checks import SettingsError
from penstock.train.tasks.own_data import IteratedBatches, OwnSource, opened
from penstock.train.tasks.task import Example

pytestmark = pytest.mark.unit

LOADER = """
import random
import torch

class Loader:
    '''Starts anew where it is told of a pass, and draws numbers for each batch.'''
    def __init__(self):
        self.epoch = self.position = 0
    def set_epoch(self, epoch):
        self.epoch, self.position = epoch, 0
    def __iter__(self):
        while self.position < 3:
            self.position += 1
            drawn = torch.rand(()) + random.random()
            yield torch.full((4, 2), 10.0 * self.epoch + self.position) + drawn, torch.ones(4)
    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}
    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]

def data():
    return Loader()
"""


@pytest.mark.parametrize("done", range(8))
def test_a_loader_that_a_new_pass_takes_back_gave_its_first_batches_again(done: int, tmp_path: Path) -> None:
    """It was told of the pass after it had got its state; and random numbers were those of the first batches."""
    path = tmp_path / "own_loader.py"
    path.write_text(LOADER)

    def batches() -> IteratedBatches:
        source = OwnSource(f"{path}:data", 4, 0)
        return IteratedBatches(source, source.make(), lambda batch, what: Example(*batch))

    def drawn(of: IteratedBatches, steps: range) -> list[Tensor]:
        return [of[step].inputs for step in steps]

    straight, stopped, resumed = batches(), batches(), batches()
    drawn(stopped, range(done))
    drawn(resumed, range(1))  # as every run looks at its first batch
    resumed.load_state_dict(stopped.state_dict())
    want = drawn(straight, range(8))[done:]
    assert all(map(torch.equal, drawn(resumed, range(done, 8)), want))


SAMPLES = """
import random
import torch

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, number):
        return torch.full((2,), random.random()), torch.ones(())

class Broken(Noisy):
    def __getitem__(self, number):
        raise OSError("no such picture")
"""


def test_bug_samples_with_random_numbers_were_other_data_in_each_process(tmp_path: Path) -> None:
    """Their digest was drawn without a seed, so no checkpoint could be written. It also read a sample unwatched."""
    path = tmp_path / "own_samples.py"
    path.write_text(SAMPLES)

    def digest(name: str) -> str:
        return opened(OwnSource(f"{path}:{name}", 4, 0), 4, lambda batch, what: Example(*batch)).digest

    assert digest("Noisy") == digest("Noisy")
    with pytest.raises(SettingsError, match=r"samples 0, \.\.\. fails: .*own_samples\.py:13"):
        digest("Broken")
