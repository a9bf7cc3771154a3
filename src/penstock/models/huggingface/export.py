"""A trained model as a folder that `from_pretrained` opens: its config, its tokenizer's files, its weights in files.

The weights are read from a checkpoint a block at a time, and written in files of bounded size, so that the whole
model is never in memory. They have the names that `save_pretrained` of transformers gives them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.models.huggingface.weights import tied_groups
from penstock.runtime.checkpoint import CheckpointError, Reader

__all__ = ["folder_in_place", "kept_files", "write_folder"]

MODEL = "model/"
"""What the names of a model's tensors begin with in a checkpoint."""
KEPT = (
    "chat_template*", "*.jinja", "generation_config.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files that go along as they are, whatever the tokenizer."""
TOKENIZERS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken",
)  # fmt: skip
"""The files of a folder's own tokenizer, in any form."""
BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
"""The files beside a tokenizer.json that say what its special tokens are for."""
LARGEST, SMALLEST, PARTS = 5 << 30, 16 << 20, 8
"""Bytes of a file of weights: an eighth of the model, but within these."""


def write_folder(target: Path, checkpoint: Reader, shapes: Any, blocks: str, kept: Mapping[str, Path]) -> Path:
    """Writes the folder beside and renames it; one that is there must be empty.

    Args:
        shapes: the model; its weights may lie on the meta device. blocks: path of its list of blocks.
        kept: files that go along, as `kept_files` finds them.

    Raises:
        CheckpointError: a checkpoint of another model, or the disk refuses. Nothing is there then.
    """
    with folder_in_place(target, kept) as folder:
        config = shapes.config
        config.architectures = [type(shapes).__name__]
        config.dtype = torch.float32  # which the weights are trained in
        config.save_pretrained(folder)
        _write_weights(folder, checkpoint, shapes, blocks)
    return target


@contextmanager
def folder_in_place(target: Path, kept: Mapping[str, Path]) -> Iterator[Path]:
    """A folder beside `target` to write into, which takes its name when all is there. It has copies of the files in
    `kept`. Raises CheckpointError.
    """
    beside = target.with_name(f".{target.name}.writing")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        for name, file in kept.items():
            shutil.copyfile(file, beside / name)
        if "tokenizer.json" in kept and BESIDE[0] not in kept:  # or it is opened as that of the model's kind
            (beside / BESIDE[0]).write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n', encoding="utf-8")
        readable = beside.stat().st_mode & 0o666  # of a new file here; safetensors makes its own for the owner alone
        for file in beside.iterdir():
            file.chmod(readable)
        if target.is_dir():
            target.rmdir()
        os.replace(beside, target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def kept_files(source: Path | None, tokenizer: Path | None) -> dict[str, Path]:
    """By name the files that go along with weights as they are: those of a tokenizer, settings of generation.

    Args:
        source: the folder of the model; None if it has none.
        tokenizer: another folder whose files go along; or a tokenizer.json, which goes along with the files beside it
            instead of the tokenizer in `source`.
    """
    places: list[tuple[Path | None, tuple[str, ...]]] = [(tokenizer or source, (*KEPT, *TOKENIZERS))]
    given: dict[str, Path] = {}
    if tokenizer is not None and not tokenizer.is_dir():
        places, given = [(source, KEPT), (tokenizer.parent, BESIDE)], {"tokenizer.json": tokenizer}
    files = [file for place, patterns in places if place for pattern in patterns for file in place.glob(pattern)]
    return {file.name: file for file in files if file.is_file()} | given


def _write_weights(folder: Path, checkpoint: Reader, shapes: Any, blocks: str) -> None:
    stored = {name.removeprefix(MODEL): name for name in checkpoint.names() if name.startswith(MODEL)}
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in checkpoint.kinds(MODEL).values()]
    limit = min(LARGEST, max(SMALLEST, sum(sizes) // PARTS))
    files: list[list[str]] = []
    waiting: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        if waiting:
            save_file(waiting, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
            files.append(list(waiting))
            waiting.clear()

    for name, tensor in _renamed(checkpoint, stored, shapes, blocks):
        size = tensor.numel() * tensor.itemsize
        if waiting and sum(each.numel() * each.itemsize for each in waiting.values()) + size > limit:
            flush()
        waiting[name] = tensor.contiguous()
        total += size
    flush()
    if len(files) == 1:
        os.replace(folder / "0.safetensors", folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(files):
        called = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        os.replace(folder / f"{number}.safetensors", folder / called)
        places |= dict.fromkeys(names, called)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _renamed(checkpoint: Reader, stored: dict[str, str], shapes: Any, blocks: str) -> Iterator[tuple[str, Tensor]]:
    """Names in a file and tensors, of a block at a time."""
    from transformers.core_model_loading import revert_weight_conversion

    groups: dict[str, dict[str, str]] = {}
    for name, of in _names(shapes, stored).items():
        if name.startswith(f"{blocks}."):
            group = name.removeprefix(f"{blocks}.").partition(".")[0]
        else:
            group = name.rpartition(".")[0].partition(".layers")[0]
        groups.setdefault(group, {})[name] = of
    for names in groups.values():
        found = checkpoint.load(names.values())
        made = revert_weight_conversion(shapes, {name: found[of] for name, of in names.items()})
        found.clear()
        yield from made.items()


def _names(shapes: Any, stored: dict[str, str]) -> dict[str, str]:
    """By the model's name of each of its weights, tied ones once, that in the checkpoint. Raises CheckpointError."""
    ties = {name: group for group in tied_groups(shapes) for name in group}
    chosen: dict[str, str] = {}
    for name in shapes.state_dict():
        group = ties.get(name, [name])
        if name != group[0]:
            continue
        found = next((stored[each] for each in group if each in stored), None)
        if found is None:
            raise CheckpointError(
                f"the checkpoint has no weight {name!r} of {type(shapes).__name__}; it is of another model"
            )
        chosen[name] = found
    return chosen
