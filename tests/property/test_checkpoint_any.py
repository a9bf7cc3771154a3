"""Any tensors, any sharding, any damage."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpoint_cases import on_ranks
from penstock.runtime.checkpoint import CheckpointError, Reader, latest
from penstock.runtime.checkpoint.dcp import write
from penstock.runtime.checkpoint.save_load import export_model
from penstock.runtime.tensors.pytree import DTYPES
from tiers import examples

pytestmark = pytest.mark.property

Tensors = dict[str, Tensor]

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=12)
dtypes = [
    dtype
    for name, dtype in DTYPES.items()
    if name[0] in "bcfiu" and not re.search(r"bits|int[1-7]$|float4|complex32", name)
]
metas = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def tensors(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = dtypes) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(dtypes))
    data = torch.randint(
        0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8
    )
    tensor = data.view(dtype).reshape(shape)
    if len(shape) >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if shape and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 2))]
    return tensor


def raw(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def write_on(folder: Path, step: int, whole: Tensors, owners: dict[str, int], num_ranks: int, meta: object) -> None:
    def act(peers: Any) -> Path:
        owned = {name: tensor for name, tensor in whole.items() if owners[name] % num_ranks == peers.here[0]}
        return write(folder, step, owned, meta, peers=peers)

    assert set(on_ranks(num_ranks, act)) == {folder / f"step-{step:08d}"}


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(
    whole=st.dictionaries(names, tensors(), max_size=6),
    meta=metas,
    ranks=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    data=st.data(),
)
def test_any_tensors_survive_any_sharding(
    whole: Tensors, meta: object, ranks: list[int], data: st.DataObject
) -> None:
    owners = {name: data.draw(st.integers(0, 3)) for name in whole}
    with tempfile.TemporaryDirectory() as folder:
        held = whole
        for step, num_ranks in enumerate(ranks):
            write_on(Path(folder), step, held, owners, num_ranks, meta)
            path = latest(folder)
            assert path is not None
            reader = Reader(path)
            assert (reader.step, reader.meta, reader.names()) == (step, meta, sorted(whole))
            held = reader.load(whole)
            for name, tensor in whole.items():
                assert (held[name].shape, held[name].dtype) == (tensor.shape, tensor.dtype)
                assert torch.equal(raw(held[name]), raw(tensor))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    folder = tmp_path_factory.mktemp("written")
    torch.manual_seed(0)
    whole = {f"model/{i}": torch.randn(3, 5) for i in range(4)} | {"optimizer/0/step": torch.tensor(4.0)}
    write_on(folder, 3, whole, {name: i for i, name in enumerate(whole)}, 2, {"lr": 0.125, "text": "abc"})
    return folder / "step-00000003", whole


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_any_damage_is_a_checkpoint_error_or_harmless(written: tuple[Path, Tensors], data: st.DataObject) -> None:
    path, whole = written
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        shutil.copytree(path, copy)
        victim = data.draw(st.sampled_from(sorted(copy.iterdir())))
        content = bytearray(victim.read_bytes())
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        else:
            for _ in range(data.draw(st.integers(1, 3))):
                content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        victim.write_bytes(content)
        latest(folder)
        with contextlib.suppress(CheckpointError):
            reader = Reader(copy)
            loaded = reader.load(reader.names())
            assert (reader.step, reader.meta) == (3, {"lr": 0.125, "text": "abc"})
            assert loaded.keys() == whole.keys()
            assert all(torch.equal(loaded[name], whole[name]) for name in whole)


@settings(max_examples=examples(20), deadline=None)
@given(
    whole=st.dictionaries(
        names, tensors([each for each in dtypes if each != torch.complex128]), min_size=1, max_size=5
    )
)
def test_any_tensors_export(whole: Tensors) -> None:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        path = write(folder, 1, {f"model/{name}": tensor for name, tensor in whole.items()}, {})
        held = load_file(export_model(Path(folder) / "m.safetensors", path))
        assert held.keys() == whole.keys()
        assert all(torch.equal(raw(held[name]), raw(whole[name])) for name in whole)
