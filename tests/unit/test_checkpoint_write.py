"""Checkpoints: what is written is read, by any number of ranks, and a failure leaves the last good one."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from penstock.runtime.checkpoint import CheckpointError, Reader, candidates, complete, export, latest, match, write
from penstock.runtime.checkpoint.format import DTYPES, as_bytes

pytestmark = pytest.mark.unit


def on_ranks(num_ranks: int, act: Callable[[int, Callable[[], None]], object]) -> list[object]:
    """Runs one thread a rank; an error of a rank is its result."""
    barrier = threading.Barrier(num_ranks)

    def one(rank: int) -> object:
        try:
            return act(rank, lambda: barrier.wait(60) and None)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))


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

        def act(
            rank: int, barrier: Callable[[], None], num_ranks: int = num_ranks, step: int = step, path: Path = path
        ) -> object:
            owned = share(whole, rank, num_ranks)
            if step:
                owned = Reader(path).load(owned)
            return write(tmp_path, step, owned, meta, rank=rank, num_ranks=num_ranks, barrier=barrier)

        assert on_ranks(num_ranks, act) == [tmp_path / f"step-{step:08d}"] * num_ranks
        path = latest(tmp_path) or tmp_path
        assert len(list(path.glob("*.safetensors"))) == num_ranks
    reader = Reader(path)
    assert (reader.step, reader.meta) == (2, meta)
    assert reader.names() == sorted(whole)
    assert same(reader.load(whole), whole)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_every_dtype_and_layout(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32)
    tensors = {code: (base % 2).to(dtype) for code, dtype in DTYPES.items() if not code.startswith("F8")}
    tensors |= {
        code: torch.arange(24, dtype=torch.uint8).view(dtype)
        for code, dtype in DTYPES.items()
        if code.startswith("F8")
    }
    tensors |= {
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
        assert (Reader(path).shape(name), Reader(path).dtype(name)) == (tuple(tensor.shape), tensor.dtype)
    assert load_file(path / "rank-00000.safetensors").keys() == tensors.keys()
    loaded["whole"][0] = 9
    assert loaded["tied"][0] == 0


def test_only_needed_shards_are_opened(tmp_path: Path) -> None:
    whole = model(4)
    on_ranks(
        2,
        lambda rank, barrier: write(tmp_path, 1, share(whole, rank, 2), {}, rank=rank, num_ranks=2, barrier=barrier),
    )
    (tmp_path / "step-00000001" / "rank-00001.safetensors").unlink()
    names = list(share(whole, 0, 2))
    assert same(Reader(tmp_path / "step-00000001").load(names), share(whole, 0, 2))
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is missing"):
        Reader(tmp_path / "step-00000001").load(whole)
    assert not complete(tmp_path / "step-00000001")


def test_a_step_is_replaced_and_old_ones_are_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3, 4, 4):
        write(tmp_path, step, {"a": torch.full((2,), float(step))}, {"again": step}, keep=3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (2, 3, 4)]
    write(tmp_path, 4, {"a": torch.zeros(2)}, {"again": "new"}, keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000004"]
    assert Reader(tmp_path / "step-00000004").meta == {"again": "new"}


def test_a_file_where_a_replaced_checkpoint_goes_stood_in_the_way_of_every_save(tmp_path: Path) -> None:
    for name in ("step-00000001.old", ".step-00000001.writing", ".step-00000001.old.deleting"):
        (tmp_path / name).write_text("")
    for _ in range(2):
        assert complete(write(tmp_path, 1, {"a": torch.ones(3)}, {}))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_the_checkpoint_just_written_is_never_pruned(tmp_path: Path) -> None:
    for step in (7, 8, 2):
        write(tmp_path, step, {"a": torch.zeros(2)}, {}, keep=1)
    assert (tmp_path / "step-00000002").is_dir()


def test_regression_a_header_that_safetensors_does_not_read_was_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"would have 1 tensors, whose names and shapes take 1000000.. bytes"):
        write(tmp_path, 1, {"a" * 10**8: torch.empty(0)}, {})
    assert list(tmp_path.iterdir()) == []


def test_latest_does_not_go_back_past_one_that_is_damaged(tmp_path: Path) -> None:
    assert latest(tmp_path / "nothing") is None
    for step in (1, 2, 3, 4):
        write(tmp_path, step, {"a": torch.zeros(2)}, {}, keep=9)
    (tmp_path / ".step-00000009.writing").mkdir()
    (tmp_path / "step-00000099.damaged").mkdir()
    (tmp_path / "step-junk").mkdir()
    (tmp_path / "step-00000008").write_text("a file")
    (tmp_path / "step-00000004" / "index.json").unlink()
    (tmp_path / "step-00000003" / "rank-00000.safetensors").unlink()
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


def test_complex128_could_not_be_stored(tmp_path: Path) -> None:
    """safetensors has no code for it; there are pairs of numbers in its place, and the file says of which names."""
    values = {
        "a": torch.randn(2, 3, dtype=torch.complex128),
        "b": torch.randn(4, dtype=torch.complex128).conj()[::2],
        "c": torch.tensor(complex(-0.0, float("nan")), dtype=torch.complex128),
        "d": torch.zeros(0, 2, dtype=torch.complex128),
        "e": torch.arange(3),
    }
    reader = Reader(write(tmp_path, 1, values, {}))
    found = reader.load(values)
    for name, value in values.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert as_bytes(found[name]) == as_bytes(value)
    reader.verify()
    model = write(tmp_path, 2, {f"model/{name}": value for name, value in values.items()}, {})
    with safe_open(export(tmp_path / "model.safetensors", Reader(model)), framework="pt") as file:
        assert json.loads(file.metadata()["complex128"]) == ["a", "b", "c", "d"]
        assert torch.equal(torch.view_as_complex(file.get_tensor("a")), values["a"])
        assert torch.equal(file.get_tensor("e"), values["e"])


def test_a_failed_rank_fails_all_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1, {"a": torch.zeros(2)}, {})

    def act(rank: int, barrier: Callable[[], None]) -> object:
        tensor = torch.zeros(2).to_sparse() if rank == 1 else torch.zeros(2)
        return write(tmp_path, 2, {f"b{rank}": tensor}, {}, rank=rank, num_ranks=3, barrier=barrier)

    errors = on_ranks(3, act)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert "rank 1: b1 is torch.sparse_coo" in str(errors[0])
    assert "b1 is torch.sparse_coo" in str(errors[1])
    assert "not completed by rank 0" in str(errors[2])
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_copies_of_a_tied_tensor_on_two_ranks_must_be_equal(tmp_path: Path) -> None:
    def act(rank: int, barrier: Callable[[], None], value: float) -> object:
        return write(tmp_path, 1, {"a": torch.tensor(value)}, {}, rank=rank, num_ranks=2, barrier=barrier)

    path = on_ranks(2, lambda rank, barrier: act(rank, barrier, 1.0))[0]
    assert Reader(str(path)).load(["a"])["a"] == 1
    errors = on_ranks(2, lambda rank, barrier: act(rank, barrier, float(rank)))
    assert "a was given with different contents by rank-00000.safetensors and rank-00001" in str(errors[0])
    assert Reader(str(path)).load(["a"])["a"] == 1


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    small, big = {"model/a": torch.zeros(8)}, {"model/a": torch.zeros(1 << 16)}
    write(tmp_path, 1, small, {})
    export(tmp_path / "m.safetensors", small)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        with pytest.raises(CheckpointError, match="could not be written: File too large"):
            write(tmp_path, 2, big, {})
        with pytest.raises(CheckpointError, match="could not be written: File too large"):
            export(tmp_path / "m.safetensors", big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.safetensors", "step-00000001"]
    assert load_file(tmp_path / "m.safetensors")["model/a"].shape == (8,)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        write(tmp_path / "file", 2, small, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1}, "step is 0 or more"),
        ({"meta": {"a": object()}}, "meta must be plain JSON"),
        ({"meta": {"a": [{0: 0.5}]}}, "the key 0 is of type int, and would come back as text"),
        ({"step": 10**18}, "at most 999999999999999999"),
        ({"tensors": {"": torch.zeros(1)}}, "non-empty text"),
        ({"tensors": {"a": 3}}, "a is a int"),
        ({"tensors": {"a": torch.zeros(2).to_sparse()}}, "only dense tensors"),
        ({"keep": 0}, "keep is 1 or more"),
    ],
)
def test_misuse(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write(**{"directory": tmp_path, "step": 1, "tensors": {}, "meta": {}} | arguments)
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_named(tmp_path: Path) -> None:
    reader = Reader(
        write(tmp_path, 1, {"model/a": torch.zeros(2, 3), "model/b": torch.zeros(1), "x": torch.ones(1)}, {})
    )
    real = torch.float32
    match(reader, {"model/a": ((2, 3), real), "model/b": ((1,), real)}, prefix="model/")
    with pytest.raises(CheckpointError) as caught:
        match(reader, {"model/a": ((2, 4), real)} | {f"model/c{i}": ((1,), real) for i in range(5)}, prefix="model/")
    text = str(caught.value)
    assert "is of another model (2 tensors, 6 wanted)" in text
    assert "5 missing: model/c0, model/c1, model/c2 and 2 more" in text
    assert "1 unexpected: model/b" in text
    assert "model/a (2, 3) here, (2, 4) wanted" in text
    with pytest.raises(CheckpointError, match="has no tensor 'y'"):
        reader.load(["y"])


def test_export_by_plain_names(tmp_path: Path) -> None:
    whole = model(5) | {"model/flag": torch.tensor([True, False, True]), "optimizer/x/step": torch.tensor(3.0)}
    on_ranks(
        3,
        lambda rank, barrier: write(tmp_path, 1, share(whole, rank, 3), {}, rank=rank, num_ranks=3, barrier=barrier),
    )
    path = export(tmp_path / "deep" / "model.safetensors", Reader(tmp_path / "step-00000001"))
    plain = {name.removeprefix("model/"): tensor for name, tensor in whole.items() if name.startswith("model/")}
    assert same(dict(sorted(load_file(path).items())), dict(sorted(plain.items())))
    assert [entry.name for entry in path.parent.iterdir()] == ["model.safetensors"]
    export(path, {"a": torch.ones(2, 2).t()})
    assert load_file(path)["a"].shape == (2, 2)
    with pytest.raises(CheckpointError, match="would be empty"):
        export(path, {})


def damaged(path: Path, **changes: object) -> None:
    value = json.loads((path / "index.json").read_text()) | changes
    (path / "index.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: (path / "index.json").unlink(), "is not a checkpoint: it has no index.json"),
        (lambda path: damaged(path, version=9), "format version 9; this release reads up to 2: upgrade"),
        (lambda path: damaged(path, version="x"), "its format version is 'x'"),
        (lambda path: damaged(path, version=True), "its format version is True"),
        (lambda path: damaged(path, format="other"), "its format is 'other'"),
        (lambda path: (path / "index.json").write_text("[]"), "its format is 'list'"),
        (lambda path: (path / "index.json").write_text("[" * 100_000), "damaged: not JSON"),
        (lambda path: damaged(path, index={"step": 3}), "checksum does not match"),
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, harm: Callable[[Path], object], message: str) -> None:
    path = write(tmp_path, 1, {"a": torch.zeros(2)}, {})
    harm(path)
    with pytest.raises(CheckpointError, match=message):
        Reader(path)


def test_latest_does_not_go_back_past_a_newer_format(tmp_path: Path) -> None:
    write(tmp_path, 1, {"a": torch.zeros(2)}, {})
    damaged(write(tmp_path, 2, {"a": torch.zeros(2)}, {}), version=3)
    assert latest(tmp_path) == tmp_path / "step-00000002"


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from penstock.runtime.checkpoint import Reader, latest, write

torch.set_num_threads(1)
folder, random = Path(sys.argv[1]), random.Random(5)


def go_on(number, pipe):
    while True:
        number += 1
        tensors = {f"model/{i}": torch.full((64, 64), float(number * 10 + i)) for i in range(8)}
        write(folder, number // 3, tensors, {"number": number}, keep=1)
        os.write(pipe, b"%d\\n" % number)


last = 0
for _ in range(20):
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
def test_twenty_kills_each_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    """Every step is written three times over: replacing a checkpoint is killed as often as adding one."""
    script = tmp_path / "kills.py"
    script.write_text(KILLS)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
