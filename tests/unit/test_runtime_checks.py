"""What a pipeline's calls must do besides gradients, all ranks in this process."""

from __future__ import annotations

import pytest
import torch

from runtime_checks import CHECKS, run

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_in_one_process(name: str, ranks: int) -> None:
    torch.set_num_threads(1)
    run(name, ranks)
