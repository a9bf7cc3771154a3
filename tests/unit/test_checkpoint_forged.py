"""Forged checkpoints, with checksums that match: an error that names the file, or a load; never anything else."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.runtime.checkpoint import CheckpointError, Reader
from penstock.runtime.checkpoint.dcp import write
from penstock.runtime.checkpoint.reader import compact

pytestmark = pytest.mark.unit

LONG = pytest.param(2000, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])
MUTATIONS = pytest.mark.parametrize("mutations", [25, LONG])


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state: Any = {"scale": torch.ones(2), "history": [1, (2.5, "a")], "raw": b"xy"}
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.state["scale"].mean()

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Loader:
    def __init__(self) -> None:
        self.state: Any = {"position": 3, "generator": torch.zeros(4, dtype=torch.uint8)}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def pipeline(schedule: str = "1f1b") -> ps.Pipeline:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), Remembering(), nn.BatchNorm1d(3), nn.Linear(3, 1))
    given = {} if schedule == "1f1b" else {"window": 4}
    return ps.Pipeline(net, ps.build(schedule, 2, 4, **given), loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW)


@pytest.fixture(scope="module", params=["1f1b", "pipedream-2bw"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ps.Pipeline]:
    """With gradients that wait for an update, too."""
    pipe = pipeline(request.param)
    for update in (True, False):
        pipe.step(torch.ones(8, 3), torch.ones(8, 1), update=update)
    folder = tmp_path_factory.mktemp("forged")
    return pipe.save(folder, stateful={"loader": Loader()}, meta={"epoch": 1}), pipe


def snapshot(pipe: ps.Pipeline) -> str:
    stages = pipe._local.model.every_stage()
    assert pipe.optimizer is not None
    tensors = [(n, t, t.grad) for s in stages for n, t in (*s.named_parameters(), *s.named_buffers())]
    extra = [m.get_extra_state() for s in stages for m in s.modules() if isinstance(m, Remembering)]
    return repr((tensors, extra, pipe.optimizer.state_dict(), pipe.num_steps, pipe.num_updates, pipe._seed))


def manifest_of(path: Path) -> Any:
    return json.loads((path / "manifest.json").read_text())["manifest"]


def forge(path: Path, inner: Any, version: Any = 3) -> None:
    """A manifest as nobody wrote it, with the checksum that it should have."""
    text = compact(inner)
    head = f'"format":"penstock-checkpoint","version":{json.dumps(version)},"crc32":{zlib.crc32(text.encode())}'
    (path / "manifest.json").write_text(f'{{{head},"manifest":{text}}}')


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to everything inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inside for place in places(each, (*path, key)))]


WRONG: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -0.0, float("nan"), float("inf"), "", "x", "float32",
    "int64", "../../etc/passwd", "/dev/zero", "__0_0.distcp", "__9_9.distcp", ".metadata", "\x00", "\ud800", [], {},
    [0], [-1], [2**62, 2**62], [3, 3, 3], [[]], {"a": 1}, {"tuple": 3}, {"tensor": 7}, "é" * 300,
]  # fmt: skip


def mutate(inner: Any, draw: random.Random) -> Any:
    """Something in it taken away, replaced, doubled, renamed, moved, or wrapped."""
    inner = copy.deepcopy(inner)
    for _ in range(draw.choice([1, 1, 1, 2])):
        *path, last = draw.choice(places(inner)[1:])
        parent = inner
        for key in path:
            parent = parent[key]
        other = draw.choice(places(inner)[1:])
        value = inner
        for key in other:
            value = value[key]
        kind = draw.randrange(6)
        if kind == 0:
            del parent[last]
        elif kind == 1:
            parent[last] = draw.choice(WRONG)
        elif kind == 2:
            parent[last] = copy.deepcopy(value)
        elif kind == 3 and isinstance(parent, dict):
            parent[str(draw.choice([draw.choice(WRONG), other[-1]]))] = parent.pop(last)
        elif kind == 4:
            for _ in range(draw.choice([1, 3, 400])):
                parent[last] = [parent[last]]
        elif type(parent[last]) is int:
            parent[last] += draw.choice([-1, 1, 4096, -(2**40)])
        else:
            parent[last] = draw.choice(WRONG)
    return inner


def require_error_or_load(path: Path, pipe: ps.Pipeline, what: object) -> bool:
    """Whether it was refused: by our own error, with the place, and nothing changed."""
    before, loader = snapshot(pipe), Loader()
    try:
        pipe.load(path, stateful={"loader": loader})
    except CheckpointError as refusal:
        text = str(refusal)
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    else:
        return False
    assert str(path) in text, (what, text)
    assert len(text) < 1500, what
    assert snapshot(pipe) == before, what
    assert repr(loader.state) == repr(Loader().state)
    return True


@MUTATIONS
def test_any_forged_manifest(saved: tuple[Path, ps.Pipeline], tmp_path: Path, mutations: int) -> None:
    source, pipe = saved
    path = Path(shutil.copytree(source, tmp_path / "forged"))
    inner = manifest_of(path)
    refused = 0
    for seed in range(mutations):
        draw = random.Random(seed)
        forged = mutate(inner, draw)
        forge(path, forged, draw.choice([3] * 20 + [0, 1, -1, 4, "3", None, 1.5, True]))
        refused += require_error_or_load(path, pipe, seed)
    assert mutations * 0.7 < refused < mutations


def test_a_manifest_without_a_part(saved: tuple[Path, ps.Pipeline], tmp_path: Path) -> None:
    source, pipe = saved
    path = Path(shutil.copytree(source, tmp_path / "forged"))
    inner = manifest_of(path)
    for part in inner:
        forge(path, {name: each for name, each in inner.items() if name != part})
        assert require_error_or_load(path, pipe, part)


def rewritten(path: Path, name: str, data: bytes) -> Path:
    """The same checkpoint with other bytes in place of a tensor, as a save would write them."""
    reader = Reader(path)
    tensors = reader.load(reader.names()) | {name: torch.tensor(list(data), dtype=torch.uint8)}
    return write(path.parent, reader.step, tensors, reader.meta)


PLAIN: list[bytes] = [
    b"", b"{", b"[[[[", b"[" * 60, b'{"dict":3}', b'{"dict":[[1]]}', b'{"dict":[[[],1]]}', b'{"tensor":5}',
    b'{"tensor":-1}', b'{"tensor":true}', b'{"tuple":{}}', b'{"deque":[[],-1]}', b'{"bytes":"!"}', b"-",
    b'{"complex":["a"]}', b'{"torch.dtype":"torch.nn"}', b'{"torch.device":"moon"}', b'{"torch.Size":["a"]}', b"\xff",
    b'{"set":[[1]]}', b'{"Counter":[[[1],2]]}', b'{"no":1}', b"{}", b'{"a":1,"b":2}', b'{"array":9}',
    b'{"OrderedDict":[1]}',
]  # fmt: skip


def test_forged_plain_data(saved: tuple[Path, ps.Pipeline], tmp_path: Path) -> None:
    source, pipe = saved
    for number, text in enumerate(PLAIN):
        for name in ("extra/1#json", "state/loader#json"):
            path = Path(shutil.copytree(source, tmp_path / f"{number}{name[0]}" / source.name))
            rewritten(path, name, text)
            assert require_error_or_load(path, pipe, (name, text)), (name, text)


class Evil:
    """What runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@MUTATIONS
def test_any_forged_file(saved: tuple[Path, ps.Pipeline], tmp_path: Path, mutations: int) -> None:
    """Bytes changed anywhere, or cut short."""
    source, pipe = saved
    path = Path(shutil.copytree(source, tmp_path / "forged"))
    file, inner = path / "__0_0.distcp", manifest_of(path)
    content = file.read_bytes()
    for seed in range(mutations):
        draw, forged = random.Random(seed), bytearray(content)
        if draw.randrange(2):
            for _ in range(draw.choice([1, 8, 100])):
                forged[draw.randrange(len(forged))] = draw.randrange(256)
        else:
            del forged[draw.randrange(len(forged)) :]
        file.write_bytes(forged)
        forge(path, inner | {"files": inner["files"] | {file.name: len(forged)}})
        if not require_error_or_load(path, pipe, seed):
            Reader(path).verify()


def test_nothing_in_a_checkpoint_executes_code(saved: tuple[Path, ps.Pipeline], tmp_path: Path) -> None:
    """There are pickles in its files, which a load does not read."""
    source, pipe = saved
    path = Path(shutil.copytree(source, tmp_path / "forged"))
    evil = pickle.dumps(Evil(tmp_path / "mark"))
    (path / ".metadata").write_bytes(evil)
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    begin = content.index(b"archive/data.pkl")  # and over the pickle that DCP wrote around a tensor
    file.write_bytes(content[: begin + 16] + evil + content[begin + 16 + len(evil) :])
    with contextlib.suppress(CheckpointError):
        pipeline(pipe.schedule.name).load(path, stateful={"loader": Loader()})
    assert not (tmp_path / "mark").exists()


def test_entries_that_are_no_plain_files(saved: tuple[Path, ps.Pipeline], tmp_path: Path) -> None:
    source, pipe = saved
    harms: list[Callable[[Path], object]] = [
        lambda p: os.mkfifo(p),
        lambda p: p.mkdir(),
        lambda p: p.symlink_to("/dev/zero"),
        lambda p: p.symlink_to(p),
        lambda p: p.symlink_to(p.parent / "nowhere"),
        lambda p: p.symlink_to("/etc/passwd"),
    ]
    for number, harm in enumerate(harms):
        for name in ("manifest.json", "__0_0.distcp"):
            path = Path(shutil.copytree(source, tmp_path / f"{number}{name[0]}"))
            (path / name).unlink()
            harm(path / name)
            assert require_error_or_load(path, pipe, (number, name))
    moved = Path(shutil.copytree(source, tmp_path / "moved"))
    shard = moved / "__0_0.distcp"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    pipeline("1f1b").load(moved)  # a link to the real one


def test_a_name_that_is_there_twice(saved: tuple[Path, ps.Pipeline], tmp_path: Path) -> None:
    source, pipe = saved
    path = Path(shutil.copytree(source, tmp_path / "forged"))
    text = compact(manifest_of(path)).replace('"step":', '"step":9,"step":', 1)
    head = f'"format":"penstock-checkpoint","version":3,"crc32":{zlib.crc32(compact(json.loads(text)).encode())}'
    (path / "manifest.json").write_text(f'{{{head},"manifest":{text}}}')
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: field 'step' is given twice"):
        pipe.load(path)


def test_a_forged_checkpoint_does_not_reach_outside_its_folder(
    saved: tuple[Path, ps.Pipeline], tmp_path: Path
) -> None:
    source, pipe = saved
    path = Path(shutil.copytree(source, tmp_path / "forged"))
    shutil.copy(path / "__0_0.distcp", tmp_path / "__0_0.distcp")
    inner = manifest_of(path)
    for name in ("../__0_0.distcp", str(tmp_path / "__0_0.distcp"), "__0_0.distcp/."):
        forged = copy.deepcopy(inner)
        forged["files"] = {name: inner["files"]["__0_0.distcp"]}
        for entry in forged["tensors"].values():
            entry["chunks"][0]["file"] = name
        forge(path, forged)
        with pytest.raises(CheckpointError, match="is no name of a file of a checkpoint"):
            pipe.load(path)
