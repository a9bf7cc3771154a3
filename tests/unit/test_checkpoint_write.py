"""Checkpoints: what is written is read, by any number of ranks, and a failure leaves the last good one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint_cases import on_ranks
from penstock.runtime.checkpoint import CheckpointError, Reader, candidates, complete, latest
from penstock.runtime.checkpoint.dcp import write
from penstock.runtime.checkpoint.folder import match
from penstock.runtime.checkpoint.save_load import export_model
from penstock.runtime.tensors.pytree import DTYPES
from processes import printed_by
from tiers import sample

pytestmark = pytest.mark.unit


def model(num_tensors: int = 11) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_tensors)
    return {f"model/layers.{i}.weight": torch.randn(i + 1, 3, generator=generator) for i in range(num_tensors)}


def share(tensors: dict[str, Tensor], rank: int, num_ranks: int) -> dict[str, Tensor]:
    return {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % num_ranks == rank}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
    )


def test_four_ranks_write_two_read_and_write_three_read(tmp_path: Path) -> None:
    whole = model()
    meta = {"seed": 3, "data": {"position": [1, 2.5, None]}}
    path = tmp_path
    for step, num_ranks in enumerate((4, 2, 3)):

        def act(peers: Any, step: int = step, path: Path = path) -> object:
            owned = share(whole, peers.here[0], peers.num_ranks)
            if step:
                owned = Reader(path).load(owned)
            return write(tmp_path, step, owned, meta, peers=peers)

        assert on_ranks(num_ranks, act) == [tmp_path / f"step-{step:08d}"] * num_ranks
        path = latest(tmp_path) or tmp_path
        assert len(list(path.glob("*.distcp"))) == num_ranks
    reader = Reader(path)
    assert (reader.step, reader.meta) == (2, meta)
    assert reader.names() == sorted(whole)
    assert same(reader.load(whole), whole)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_every_dtype_and_layout(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32)
    plain = {code: dtype for code, dtype in DTYPES.items() if not dtype.is_complex and "bits" not in code}
    plain = {code: dtype for code, dtype in plain.items() if not re.search(r"^q|int[1-7]$|float4|e8m0", code)}
    tensors = {code: (base % 2).to(dtype) for code, dtype in plain.items()}
    tensors |= {
        "complex64": torch.view_as_complex(base.view(12, 2)),
        "complex128": torch.tensor(complex(-0.0, float("nan")), dtype=torch.complex128),
        "float8_e8m0fnu": torch.arange(24, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "whole": base,
        "tied": base,
        "overlapping": base[3:9],
        "transposed": base.view(4, 6).t(),
        "strided": base[::5],
        "expanded": base[:1].expand(3, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    path = write(tmp_path, 1, tensors, None)
    loaded = Reader(path).load(tensors)
    for name, tensor in tensors.items():
        held = loaded[name]
        assert (held.shape, held.dtype) == (tensor.shape, tensor.dtype), name
        assert held.is_contiguous()
        as_bytes = [
            each.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (held, tensor)
        ]
        assert torch.equal(*as_bytes), name
        assert Reader(path).kinds("")[name] == (tuple(tensor.shape), tensor.dtype)
    loaded["whole"][0] = 9
    assert loaded["tied"][0] == 0


def test_asking_for_a_name_reads_no_tensor(tmp_path: Path) -> None:
    path = write(tmp_path, 1, {"a": torch.ones(2)}, {})
    (path / "__0_0.distcp").unlink()
    reader = Reader(path)
    assert ("a" in reader, "b" in reader, len(reader)) == (True, False, 1)


def test_only_needed_shards_are_opened(tmp_path: Path) -> None:
    whole = model(4)
    on_ranks(2, lambda peers: write(tmp_path, 1, share(whole, peers.here[0], 2), {}, peers=peers))
    (tmp_path / "step-00000001" / "__1_0.distcp").unlink()
    names = list(share(whole, 0, 2))
    assert same(Reader(tmp_path / "step-00000001").load(names), share(whole, 0, 2))
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing"):
        Reader(tmp_path / "step-00000001").load(whole)
    assert not complete(tmp_path / "step-00000001")


def test_a_step_is_replaced_and_old_ones_are_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3, 4, 4):
        write(tmp_path, step, {"a": torch.full((2,), float(step))}, {"again": step}, keep=3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (2, 3, 4)]
    write(tmp_path, 4, {"a": torch.zeros(2)}, {"again": "new"}, keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000004"]
    assert Reader(tmp_path / "step-00000004").meta == {"again": "new"}


def test_the_checkpoint_just_written_is_never_pruned(tmp_path: Path) -> None:
    for step in (7, 8, 2):
        write(tmp_path, step, {"a": torch.zeros(2)}, {}, keep=1)
    assert (tmp_path / "step-00000002").is_dir()


def test_latest_does_not_go_back_past_one_that_is_damaged(tmp_path: Path) -> None:
    assert latest(tmp_path / "nothing") is None
    for step in (1, 2, 3, 4):
        write(tmp_path, step, {"a": torch.zeros(2)}, {}, keep=9)
    (tmp_path / ".step-00000009.writing").mkdir()
    (tmp_path / "step-00000099.damaged").mkdir()
    (tmp_path / "step-junk").mkdir()
    (tmp_path / "step-00000008").write_text("a file")
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    (tmp_path / "step-00000003" / "__0_0.distcp").unlink()
    assert latest(tmp_path) == tmp_path / "step-00000004"
    found = candidates(tmp_path)
    assert [(path.name[-1], complete(path)) for path in found] == [
        ("4", False),
        ("3", False),
        ("2", True),
        ("1", True),
    ]
    assert latest(tmp_path / "step-00000002") == tmp_path / "step-00000002"
    assert candidates(tmp_path / "step-00000003") == found[1:]
    write(tmp_path, 5, {"a": torch.zeros(2)}, {}, keep=9)
    assert not (tmp_path / ".step-00000009.writing").exists()


def test_a_replaced_checkpoint_counts_until_its_successor_is_there(tmp_path: Path) -> None:
    path = write(tmp_path, 1, {"a": torch.zeros(2)}, {})
    path.rename(tmp_path / "step-00000001.old")
    assert latest(tmp_path) == tmp_path / "step-00000001.old"
    write(tmp_path, 1, {"a": torch.ones(2)}, {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_bug_a_whole_replaced_checkpoint_went_before_the_successor_of_a_damaged_one_was_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, old = write(tmp_path, 1, {"a": torch.zeros(2)}, {}), tmp_path / "step-00000001.old"
    shutil.copytree(path, old)
    (path / "__0_0.distcp").unlink()
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name.endswith(".writing"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write(tmp_path, 1, {"a": torch.ones(2)}, {})
    assert latest(tmp_path) == old
    assert complete(old)


def test_bug_a_folder_that_cannot_be_reached_had_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="loop cannot be read"):
        candidates(tmp_path / "loop")


def test_a_failed_rank_fails_all_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1, {"a": torch.zeros(2)}, {})

    def act(peers: Any) -> object:
        (rank,) = peers.here
        tensor = torch.zeros(2).to_sparse() if rank == 1 else torch.zeros(2)
        return write(tmp_path, 2, {f"b{rank}": tensor}, {}, peers=peers)

    errors = on_ranks(3, act)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert str(errors[1]).startswith("b1 is torch.sparse_coo")
    assert str(errors[0]) == str(errors[2]) == f"rank 1 could not do its part: CheckpointError: {errors[1]}"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    small, big = {"model/a": torch.zeros(8)}, {"model/a": torch.zeros(1 << 16)}
    write(tmp_path, 1, small, {})
    export_model(tmp_path / "m.safetensors", tmp_path)
    write(tmp_path / "big", 1, big, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        with pytest.raises(CheckpointError, match="could not be written: File too large"):
            write(tmp_path, 2, big, {})
        with pytest.raises(CheckpointError, match=r"could not be written: .*File too large"):
            export_model(tmp_path / "m.safetensors", tmp_path / "big")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["big", "m.safetensors", "step-00000001"]
    assert load_file(tmp_path / "m.safetensors")["a"].shape == (8,)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        write(tmp_path / "file", 2, small, {})


def test_another_model_is_named(tmp_path: Path) -> None:
    reader = Reader(
        write(tmp_path, 1, {"model/a": torch.zeros(2, 3), "model/b": torch.zeros(1), "x": torch.ones(1)}, {})
    )
    real = torch.float32
    match("it", reader.kinds("model/"), {"model/a": ((2, 3), real), "model/b": ((1,), real)})
    with pytest.raises(CheckpointError) as caught:
        match(
            "it",
            reader.kinds("model/"),
            {"model/a": ((2, 4), real)} | {f"model/c{i}": ((1,), real) for i in range(5)},
        )
    text = str(caught.value)
    assert "it is of another model" in text
    assert "model/a is ((2, 3), torch.float32) there and ((2, 4), torch.float32) here" in text
    assert "model/b is ((1,), torch.float32) there and None here" in text
    assert "and 4 more" in text
    with pytest.raises(CheckpointError, match="has no tensor 'y'"):
        reader.load(["y"])


def test_export_by_plain_names(tmp_path: Path) -> None:
    whole = model(5) | {"model/flag": torch.tensor([True, False, True]), "optimizer/x/step": torch.tensor(3.0)}
    on_ranks(3, lambda peers: write(tmp_path, 1, share(whole, peers.here[0], 3), {}, peers=peers))
    path = export_model(tmp_path / "deep" / "model.safetensors", tmp_path)
    plain = {name.removeprefix("model/"): tensor for name, tensor in whole.items() if name.startswith("model/")}
    assert same(dict(sorted(load_file(path).items())), dict(sorted(plain.items())))
    assert [entry.name for entry in path.parent.iterdir()] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match="would be empty"):
        export_model(path, write(tmp_path / "none", 1, {}, {}))


class Evil:
    """What runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_a_checkpoint_executes_code(tmp_path: Path) -> None:
    """There are pickles in its files, which a load does not read."""
    path = write(tmp_path, 1, {"a": torch.ones(2)}, {})
    evil = pickle.dumps(Evil(tmp_path / "mark"))
    (path / ".metadata").write_bytes(evil)
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    begin = content.index(b"archive/data.pkl")  # and over the pickle that DCP wrote around a tensor
    file.write_bytes(content[: begin + 16] + evil + content[begin + 16 + len(evil) :])
    with contextlib.suppress(CheckpointError):
        Reader(path).load(["a"])
    assert not (tmp_path / "mark").exists()


def damaged(path: Path, **changes: object) -> None:
    value = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: (path / "manifest.json").unlink(), "is not a checkpoint: it has no manifest.json"),
        (lambda path: damaged(path, version=9), "format version 9, and this release of penstock reads 4"),
        (lambda path: damaged(path, format="other"), "its checksum does not match"),
        (lambda path: (path / "manifest.json").write_text("[]"), "is damaged: its checksum"),
        (lambda path: (path / "manifest.json").write_text("[" * 100_000), "is damaged: its checksum"),
        (lambda path: damaged(path, manifest={"step": 3}), "checksum does not match"),
    ],
)
def test_a_manifest_that_is_wrong(tmp_path: Path, harm: Callable[[Path], object], message: str) -> None:
    path = write(tmp_path, 1, {"a": torch.zeros(2)}, {})
    harm(path)
    with pytest.raises(CheckpointError, match=message):
        Reader(path)


def test_latest_does_not_go_back_past_a_newer_format(tmp_path: Path) -> None:
    write(tmp_path, 1, {"a": torch.zeros(2)}, {})
    damaged(write(tmp_path, 2, {"a": torch.zeros(2)}, {}), version=5)
    assert latest(tmp_path) == tmp_path / "step-00000002"


def test_tools_of_torch_read_it_by_plain_names(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    given = {f"model/{name}": each for name, each in net.named_parameters()}
    path = write(tmp_path, 1, given | {"optimizer/weight/exp_avg": torch.ones(2, 3)}, {})
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert sorted(found) == ["model.bias", "model.weight", "optimizer.weight.exp_avg"]
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    other = torch.nn.Linear(3, 2)
    other.load_state_dict(torch.load(tmp_path / "whole.pt")["model"])
    assert torch.equal(other.weight, net.weight)
    state = {"model": torch.nn.Linear(3, 2).state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert torch.equal(state["model"]["weight"], net.weight)


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from penstock.runtime.checkpoint import Reader, latest
from penstock.runtime.checkpoint.dcp import write

torch.set_num_threads(1)
folder, random = Path(sys.argv[1]), random.Random(5)


def go_on(number, pipe):
    while True:
        number += 1
        tensors = {f"model/{i}": torch.full((64, 64), float(number * 10 + i)) for i in range(8)}
        write(folder, number // 3, tensors, {"number": number}, keep=1)
        os.write(pipe, b"%d\\n" % number)


last = 0
for _ in range(int(sys.argv[2])):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        go_on(last, writing)
    os.close(writing)
    with open(reading) as file:
        seen = [file.readline() for _ in range(random.randrange(4))]  # so many are written, on any machine
        time.sleep(random.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done = max([last, *map(int, seen), *map(int, file.read().split())])
    path = latest(folder)
    if path is None:
        assert done == 0, done
        continue
    reader = Reader(path)
    last = reader.meta["number"]
    assert last in (done, done + 1), (last, done)
    assert reader.step == last // 3
    held = reader.load(reader.names())
    assert [int(held[f"model/{i}"][0, 0]) for i in range(8)] == [last * 10 + i for i in range(8)]
print(last)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # the disk is waited for at every write
def test_kills_each_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    """Every step is written three times over: replacing a checkpoint is killed as often as adding one."""
    num_kills = sample(20, 6)
    script = tmp_path / "kills.py"
    script.write_text(KILLS)
    assert int(printed_by(script, str(tmp_path / "run"), str(num_kills), deadline=850)) > num_kills
