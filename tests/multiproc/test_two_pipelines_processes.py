"""Two pipelines of one model between processes, of which one is made while the other is in use."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from processes import run_ranks
from waiting import PATIENCE

pytestmark = pytest.mark.multiproc


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return model


def trained(rank: int, pp: int, dp: int, meanwhile: bool) -> list[float]:
    """Losses of three steps; a second pipeline of the model evaluates before each of them."""
    model, losses = tied(), []
    mesh = init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))

    def made(schedule: str) -> ps.Pipeline:
        return ps.Pipeline(
            model,
            ps.build(schedule, pp, 4 // dp),
            loss_fn=nn.MSELoss(),
            optimizer=torch.optim.SGD,
            mesh=mesh,
            timeout=PATIENCE,
        )

    pipe = made("1f1b")
    for step in range(3):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        if meanwhile:
            other = made("gpipe")
            other.evaluate(x, x)
            other.close()
        losses.append(float(pipe.step(x, x).loss))
    pipe.close()
    return losses


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 2)])
def test_a_second_pipeline_that_gave_holders_their_values_again_was_taken_for_a_change_of_the_callers(
    pp: int, dp: int
) -> None:
    alone, meanwhile = (run_ranks(2, trained, pp, dp, other) for other in (False, True))
    for one, two in zip(alone, meanwhile, strict=True):
        assert (one.code, two.code) == (0, 0), two.text
        assert one.value == two.value
