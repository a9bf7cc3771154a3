"""Meshes whose processes wait for one another inside torch's own ops: every wait ends, and says what it was for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from packed import packed
from penstock.runtime import DeadlineExceeded, RuntimeFailure
from penstock.runtime.tensors.dtensor import whole
from processes import appears, run_ranks_to_end
from tie_runs import by_columns
from waiting import PATIENCE, shorten

pytestmark = pytest.mark.multiproc

MESHES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "fsdp": ((1, 2, 1), {"sharding": "fsdp"}),
    "shards": ((1, 1, 2), {"parallelize": by_columns}),
}


def late(rank: int, name: str, folder: str) -> str:
    """Two steps; process 1 does not come to the second."""
    shape, options = MESHES[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    pipe = ps.Pipeline(
        model, ps.build("1f1b", 1, 2), loss_fn=nn.MSELoss(), mesh=mesh, timeout=PATIENCE, **packed(**options)
    )
    x = torch.randn(8, 4)
    pipe.step(x, x)
    shorten(pipe, 2.0)
    for group in mesh.get_all_groups():
        group.set_timeout(timedelta(seconds=2))
    if rank == 1:
        appears(Path(folder) / "failed")
        return ""
    try:
        pipe.step(x, x)
    except DeadlineExceeded as error:
        return str(error)
    finally:
        (Path(folder) / "failed").touch()
    return "a step went on alone"


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_process_that_is_late_with_its_parts_is_named_when_the_timeout_has_passed(
    name: str, tmp_path: Path
) -> None:
    first, _second = run_ranks_to_end(2, late, name, str(tmp_path))
    what = "parts of a stage" if name == "shards" else "a sum over all ranks"
    assert first.value.startswith(f"rank 0 waited 2 s for {what} from the other ranks"), first.value


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(x) + self.wide(x.double()).float()


def mixed(rank: int) -> dict[str, torch.Tensor]:
    """By how replicas keep it, what becomes of a layer with parameters of several types."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    found = {}
    for sharding in ("none", "fsdp"):
        torch.manual_seed(1)
        made = {"loss_fn": nn.MSELoss(), "optimizer": torch.optim.SGD, "mesh": mesh, "sharding": sharding}
        with torch.no_grad():
            x = torch.randn(8, 4)
        pipe = ps.Pipeline([Mixed()], ps.build("zb-h1", 1, 2), **packed(**made))
        pipe.step(x, x.roll(1, 0))
        found[sharding] = torch.cat([whole(p.detach()).double().flatten() for _, p in pipe.named_parameters()])
    return found


def test_a_layer_of_several_types_trains_under_fsdp() -> None:
    for outcome in run_ranks_to_end(2, mixed):
        assert torch.equal(outcome.value["none"], outcome.value["fsdp"])


def where_interfaces_are_named(rank: int) -> str:
    """What a mesh says of stages on a GPU whose groups NCCL could serve, if there is another interface or not."""
    from penstock.runtime.mesh import process_mesh
    from penstock.runtime.mesh.peers import GroupPeers

    place = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    mesh = process_mesh.read_mesh(place, 1, 30.0, "fsdp")
    gpu = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_mesh.dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        mesh.require_collectives(gpu, False)
        assert isinstance(mesh.replicas, GroupPeers)
        mesh.replicas.guard = object()  # type: ignore[assignment]
        mesh.require_collectives(torch.device("cpu"), False)
        with pytest.raises(ps.runtime.RuntimeFailure) as caught:
            mesh.require_collectives(gpu, False)
        return str(caught.value)


def test_what_gloo_cannot_gather_on_a_gpu_is_refused_where_two_interfaces_are_named() -> None:
    """All that is to go on over another interface goes by gloo, whatever the groups were made with."""
    outcomes = run_ranks_to_end(2, where_interfaces_are_named)
    for refused in (o.value for o in outcomes):
        assert "two interfaces are named" in refused
        assert "name one" in refused


def frozen_in_one_replica(rank: int) -> list[str]:
    """What is said where one of two replicas freezes a parameter, or has a longer buffer."""
    told = []
    for what in ("nothing", "a parameter", "a buffer"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        model[1].register_buffer("table", torch.zeros(3 if what == "a buffer" and rank == 1 else 2))
        model[0].bias.requires_grad_(what != "a parameter" or rank != 1)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
        try:
            pipe = ps.Pipeline(model, ps.build("1f1b", 1, 2), loss_fn=nn.MSELoss(), mesh=mesh, timeout=PATIENCE)
            pipe.step(torch.ones(8, 4), torch.ones(8, 4))
            told.append("")
        except RuntimeFailure as error:
            told.append(str(error))
    return told


def test_a_parameter_frozen_in_one_replica_ended_the_other_processes() -> None:
    """gloo ended a process where sums of gradients were of other lengths."""
    outcomes = run_ranks_to_end(2, frozen_in_one_replica)
    assert outcomes[0].value == outcomes[1].value
    alike, parameter, buffer = outcomes[0].value
    assert not alike
    assert "state of stage 0 than rank 0; rank 0 has 0.bias trained, and rank 1 has 0.bias frozen" in parameter
    assert "has buffer 1.table of shape [2], torch.float32, and rank 1 has buffer 1.table of shape [3]" in buffer


CHANGES: dict[str, Callable[[nn.Module, ps.Pipeline], object]] = {
    "nothing": lambda model, pipe: None,
    "frozen": lambda model, pipe: model[0].bias.requires_grad_(False),
    "data": lambda model, pipe: setattr(model[0].bias, "data", torch.zeros(4)),
    "values": lambda model, pipe: model.load_state_dict({name: 2 * one for name, one in model.state_dict().items()}),
    "gradient": lambda model, pipe: setattr(model[0].bias, "grad", torch.ones(4)),
    "rate": lambda model, pipe: pipe.optimizer.param_groups[0].update(lr=0.5),
    "left out": lambda model, pipe: pipe.optimizer.param_groups[0]["params"].pop(),
}
"""What a caller may do to a pipeline between two steps."""


def changed_in_one_replica(rank: int) -> list[str]:
    """What is said where one of two replicas, and then both, change something after the first step."""
    told = []
    for name, change in CHANGES.items():
        for ranks in ((1,), (0, 1)):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
            optimizer = partial(torch.optim.SGD, lr=0.1)
            schedule = ps.build("1f1b", 1, 2)
            pipe = ps.Pipeline(
                model, schedule, loss_fn=nn.MSELoss(), optimizer=optimizer, mesh=mesh, timeout=PATIENCE
            )
            pipe.step(torch.ones(8, 4), torch.ones(8, 4))
            if rank in ranks:
                change(model, pipe)
            try:
                for _ in range(10):  # values are compared in one of them
                    pipe.step(torch.ones(8, 4), torch.ones(8, 4))
                weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
                first, second = pipe.gather(weights.tolist())
                told.append("" if first == second else f"{name}: replicas became other models")
            except RuntimeFailure as error:
                told.append(str(error))
    return told


@pytest.mark.slow
def test_what_one_replica_changes_between_steps_made_them_other_models() -> None:
    """Without a word; one that froze a parameter ended the other process. What all change alike is right."""
    outcomes = run_ranks_to_end(2, changed_in_one_replica)
    assert outcomes[0].value == outcomes[1].value
    nothing, frozen, data, values, gradient, rate, left_out = outcomes[0].value[::2]
    assert set(outcomes[0].value[1::2]) == {""}
    assert nothing == ""
    between = "between process 0 and process 1"
    assert frozen.startswith(f"parameter 0.bias differs {between}, so they would train other models")
    assert data.startswith(f"parameter 0.bias differs {between}, so they would train other models")
    assert values.startswith(f"parameter 0.weight, parameter 0.bias, parameter 2.weight and 1 more differ {between}")
    assert gradient.startswith(f"parameter 0.bias differs {between}")
    assert rate.startswith(f"the optimizer differs {between}")
    assert left_out.startswith(f"parameter 2.bias differs {between}")
    assert "so they would train other models (sentence 4 of the contract)" in left_out
