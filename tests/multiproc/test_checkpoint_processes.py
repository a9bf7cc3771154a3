"""Processes that save and load together: all of them load one checkpoint, or none loads anything."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from checkpoint_cases import flip_tensor
from packed import packed
from penstock.runtime.checkpoint import CheckpointError, Reader
from processes import run_ranks_to_end

pytestmark = pytest.mark.multiproc

WIDTH = 8


class Counted(nn.Module):
    """Keeps as extra state how much it has seen, which differs between replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + x.detach().sum()
        return x

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Loader:
    """A place in data of this process's own."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> int:
        return self.position

    def load_state_dict(self, state: int) -> None:
        self.position = state


def pipeline(schedule: str = "1f1b", ranks: int = 2, layers: int = 4, **options: Any) -> ps.Pipeline:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)), Counted(), nn.Linear(WIDTH, 1))
    given: dict[str, Any] = {"loss_fn": nn.MSELoss(), "optimizer": torch.optim.AdamW, **options}
    return ps.Pipeline(net, ps.build(schedule, ranks, 4), **packed(**given))


def mesh(pp: int, dp: int) -> Any:
    return init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))


def train(pipe: ps.Pipeline, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        losses.append(float(pipe.step(x, x.sum(1, keepdim=True)).loss))
    return losses


def seen(pipe: ps.Pipeline) -> list[Tensor]:
    return [m.seen for stage in pipe._local.model.every_stage() for m in stage.modules() if isinstance(m, Counted)]


def snapshot(pipe: ps.Pipeline) -> str:
    """All that a load may change, in this process."""
    tensors = {name: p.detach().tolist() for name, p in pipe.named_parameters()}
    assert pipe.optimizer is not None
    return repr((tensors, seen(pipe), pipe.optimizer.state_dict(), pipe.num_steps, pipe.num_updates))


def refused(pipe: ps.Pipeline, load: Callable[[], object]) -> str:
    """The error of a load that changes nothing, here or anywhere."""
    before = snapshot(pipe)
    try:
        load()
    except CheckpointError as error:
        assert snapshot(pipe) == before
        return f"{type(error).__name__}: {error}"
    return ""


def loads(rank: int, folder: str) -> dict[str, str]:
    """Every way in which two processes might have come to load different things."""
    shared, own = Path(folder) / "shared", Path(folder) / f"of-{rank}"
    pipe = pipeline()
    for step in range(3):
        train(pipe, range(step, step + 1))
        pipe.save(shared, keep=3)
    if rank == 0:
        shutil.copytree(shared, Path(folder) / "of-0")
        (Path(folder) / "of-1").mkdir()
        shutil.copytree(shared / "step-00000001", Path(folder) / "of-1" / "step-00000001")
        other = Path(folder) / "of-1" / "step-00000003"
        shutil.copytree(shared / "step-00000003", other)
        manifest = other / "manifest.json"
        manifest.write_text(manifest.read_text() + " ")
    dist.barrier()
    said = {"another": refused(pipe, lambda: pipe.load(own))}
    dist.barrier()
    if rank == 1:
        shutil.rmtree(own / "step-00000003")
    dist.barrier()
    said["older"] = refused(pipe, lambda: pipe.load(own, fallback=True))
    said["call"] = refused(pipe, lambda: pipe.load(shared / f"step-0000000{1 + rank}"))
    said["names"] = refused(pipe, lambda: pipe.load(shared, stateful={"a": Loader(1)} if rank else {}))
    said["saved names"] = refused(pipe, lambda: pipe.save(shared, stateful={"a": Loader(1)} if rank else {}))
    said["nothing"] = refused(pipe, lambda: pipe.load(Path(folder) / "nowhere"))
    # Of two files one is damaged, and only the process that needs it finds out.
    dist.barrier()
    if rank == 0:
        flip_tensor(shared / "step-00000003", "__1_0.distcp")
    dist.barrier()
    said["damaged"] = refused(pipe, lambda: pipe.load(shared))
    wrong = pipeline(optimizer=torch.optim.SGD)
    said["optimizer"] = refused(wrong, lambda: wrong.load(shared / "step-00000002"))
    pipe.load(shared, fallback=True)
    said["notices"] = " ".join(pipe.notices)
    said["then"] = repr((pipe.num_steps, train(pipe, range(2, 4))))
    said["folders"] = " ".join(sorted(path.name for path in shared.iterdir()))
    return said


def test_ranks_could_load_different_checkpoints(tmp_path: Path) -> None:
    outcomes = run_ranks_to_end(2, loads, str(tmp_path))
    first, second = (o.value for o in outcomes)
    wanted = {
        "another": "process 1 and process 0 see different checkpoints at ",
        "older": "process 1 and process 0 see different checkpoints at ",
        "call": "process 1 and process 0 see different checkpoints at ",
        "names": "has no state of a (Loader)",
        "saved names": "process 1 was given another stateful= than process 0",
        "nothing": "nowhere: no checkpoint there",
        "damaged": "__1_0.distcp is not what was written: its checksum differs",
        "optimizer": "holds AdamW, this run has SGD",
    }
    for key, words in wanted.items():
        assert words in first[key], (key, first[key])
        assert words in second[key], (key, second[key])
    assert f'load("{tmp_path}/shared/step-00000002"), or give load(..., fallback=True)' in first["damaged"]
    torch.set_num_threads(1)
    alone = pipeline("1f1b", 2)
    train(alone, range(2))
    for value in (first, second):
        assert "step-00000002 was loaded instead" in value["notices"]
        assert "set aside as step-00000003.damaged" in value["notices"]
        assert value["folders"] == "step-00000001 step-00000002 step-00000003.damaged"
    assert first["then"] == second["then"] == repr((2, train(alone, range(2, 4))))


def given_otherwise(rank: int, folder: str) -> dict[str, str]:
    """What is said of a save to which rank 1 gives something else."""
    said = {}
    pipe = pipeline()
    for name, values in {"meta": ({"best": 1}, {"best": 2}), "number": (1, 2), "keep": (2, 3), "": (0, 0)}.items():
        try:
            saved = pipe.save(folder, **({name: values[rank]} if name else {"meta": {"a": [1], "b": None}}))
            said[name] = saved.name
        except CheckpointError as error:
            said[name] = str(error)
    said["left"] = " ".join(sorted(os.listdir(folder)))
    pipe.close()
    return said


def test_bug_a_save_to_which_ranks_gave_other_meta_wrote_that_of_rank_0(tmp_path: Path) -> None:
    """And with another number it ended with an error about a file that was not there."""
    for outcome in run_ranks_to_end(2, given_otherwise, str(tmp_path)):
        saved = outcome.value.pop("")
        assert outcome.value.pop("left") == saved
        assert outcome.value == {
            name: f"process 1 was given another {name}= than process 0; give all the same"
            for name in ("meta", "number", "keep")
        }


def replicas(rank: int, folder: str) -> dict[str, Any]:
    """State that differs between processes: each gets its own back, or is told why not."""
    found: dict[str, Any] = {}
    grid = mesh(2, 2)
    replica = grid.get_local_rank("dp")
    pipe = pipeline(mesh=grid, sharding="zero1")
    train(pipe, range(2))
    kept = {"same": Loader(5), "replica": Loader(10 + replica), "process": Loader(20 + rank)}
    pipe.save(Path(folder) / "a", stateful=kept)
    found["names"] = [
        n for n in Reader(Path(folder) / "a" / "step-00000002").names() if n[0] in "es" and "#data" in n
    ]
    expected = train(pipe, range(2, 4))
    extra = seen(pipe)
    again = pipeline(mesh=grid, sharding="zero1")
    fresh = {name: Loader(0) for name in kept}
    again.load(Path(folder) / "a", stateful=fresh)
    found["same"] = [each.position for each in fresh.values()] == [5, 10 + replica, 20 + rank]
    found["losses"] = train(again, range(2, 4)) == expected
    found["extra"] = extra == [
        m.seen for s in again._local.model.every_stage() for m in s.modules() if isinstance(m, Counted)
    ]
    wide = pipeline(ranks=4, layers=4)
    found["other mesh"] = refused(wide, lambda: wide.load(Path(folder) / "a", stateful={"replica": Loader(0)}))
    wide.load(Path(folder) / "a", stateful={"same": fresh["same"], "process": Loader(0)})
    found["notices"] = " ".join(wide.notices)
    return found


@pytest.mark.slow
def test_state_that_differs_between_processes(tmp_path: Path) -> None:
    outcomes = run_ranks_to_end(4, replicas, str(tmp_path))
    for outcome in outcomes:
        found = outcome.value
        assert found["names"] == [
            "extra/4@0.0.0#data",
            "extra/4@0.1.0#data",
            *(f"state/process@process-{p}-of-4#data" for p in range(4)),
            "state/replica@replica-0-of-2#data",
            "state/replica@replica-1-of-2#data",
            "state/same#data",
        ]
        assert found["same"]
        assert found["losses"]
        assert found["extra"]
        assert (
            "has no state of replica (Loader), but that of replica-0-of-2, and here is replica-0-of-1"
            in found["other mesh"]
        )
        assert "has the state of replica, which was not loaded" in found["notices"]


def sharded(rank: int, folder: str) -> dict[str, Any]:
    """FSDP: each process writes the shards that it holds, and a full disk on one rank ends the save on both."""
    pipe = pipeline(ranks=1, layers=6, mesh=mesh(1, 2), sharding="fsdp")
    train(pipe, range(2))
    path = pipe.save(folder)
    tensors = json.loads((path / "manifest.json").read_text())["manifest"]["tensors"]
    found: dict[str, Any] = {"chunks": [each["file"] for each in tensors["optimizer/0.weight/exp_avg"]["chunks"]]}
    found["bytes"] = [sum(path.stat().st_size for path in path.glob(f"__{one}_*")) for one in range(2)]
    train(pipe, range(2, 3))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        pipe.save(folder)
    except CheckpointError as error:
        found["full"] = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found["left"] = sorted(os.listdir(folder))
    expected = train(pipe, range(3, 4))
    pipe.save(folder)
    again = pipeline(ranks=1, layers=6, mesh=mesh(1, 2), sharding="fsdp")
    again.load(Path(folder) / "step-00000002")
    found["losses"] = train(again, range(2, 4))[1:] == expected
    return found


@pytest.mark.slow
def test_each_process_writes_the_shards_that_it_holds(tmp_path: Path) -> None:
    outcomes = run_ranks_to_end(2, sharded, str(tmp_path))
    first, second = (o.value for o in outcomes)
    assert "could not be written: File too large" in first["full"]
    assert "0 could not do its part: CheckpointError: checkpoint" in second["full"]
    assert "could not be written: File too large" in second["full"]
    for found in (first, second):
        assert sorted(found["chunks"]) == ["__0_0.distcp", "__1_0.distcp"]
        assert max(found["bytes"]) < 2 * min(found["bytes"])
        assert found["left"] == ["step-00000002"]
        assert found["losses"]
    one, whole = pipeline(ranks=1, layers=6), torch.load(_as_one_file(tmp_path / "step-00000004"))
    one.load(tmp_path / "step-00000004")
    for name, parameter in one.named_parameters():
        assert torch.equal(whole["model"][name], parameter), name


def _as_one_file(path: Path) -> Path:
    """What torch's own tool makes of a checkpoint."""
    dcp_to_torch_save(path, path.parent / "whole.pt")
    return path.parent / "whole.pt"
