"""Where a decoder's weights come from: drawn by seed, read from a folder, or those of a model that is there.

From a config or a folder the whole model exists only as shapes, on the meta device; the modules that a stage needs
are copied off it and filled.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from penstock.models.huggingface.anatomy import DecoderError
from penstock.models.seeded import generator_of


class Source(Protocol):
    """Gives modules with their weights."""

    def module(self, path: str) -> nn.Module: ...


class Given:
    """The modules of a model that is there."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def module(self, path: str) -> nn.Module:
        return self._model.get_submodule(path)


class Drawn:
    """Modules drawn as the architecture draws them, from the seed and the module's path alone."""

    def __init__(self, shapes: Any, seed: int, dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._seed = seed
        self._dtype = dtype

    def module(self, path: str) -> nn.Module:
        module = _with_storage(self._shapes.get_submodule(path), torch.float32)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(generator_of(self._seed, path).initial_seed())
            for each in _deepest_first(module):
                self._shapes._init_weights(each)
        return module.to(self._dtype)


class Stored:
    """Modules with the weights of a folder, of which only those asked for are read."""

    def __init__(self, shapes: Any, folder: Path, dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._folder = folder
        self._dtype = dtype
        self._files = _files(folder)

    def module(self, path: str) -> nn.Module:
        module = _with_storage(self._shapes.get_submodule(path), self._dtype)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self._read(f"{path}.{name}", parameter))
        return module

    def _read(self, name: str, parameter: Tensor) -> Tensor:
        # A base model saved by itself has its names without the prefix; a tied weight is kept under one of its names.
        prefix = f"{self._shapes.base_model_prefix}."
        names = [name, *_tied_names(self._shapes, name)]
        names += [each.removeprefix(prefix) for each in names]
        found = next((each for each in names if each in self._files), None)
        if found is None:
            raise DecoderError(
                f"{self._folder} holds no weight {name!r} (its names are like {next(iter(self._files), 'none')!r}); "
                "save the model with save_pretrained of the transformers installed here"
            )
        with safe_open(self._files[found], framework="pt") as file:
            tensor: Tensor = file.get_tensor(found)
        if tensor.shape != parameter.shape:
            raise DecoderError(
                f"weight {name!r} has shape {list(tensor.shape)} in {self._folder} and "
                f"{list(parameter.shape)} by its config"
            )
        return tensor


def shapes_of(config: Any) -> Any:
    """The model of a config with weights on the meta device, and buffers, which are small, filled."""
    from transformers import AutoModelForCausalLM

    with _weights_without_storage():
        try:
            return AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            kind = type(config).__name__
            raise DecoderError(f"transformers makes no causal language model of a {kind}: {error}") from None


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Groups of names that are one parameter."""
    seen: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        seen.setdefault(id(parameter), []).append(name)
    return [names for names in seen.values() if len(names) > 1]


def _tied_names(model: nn.Module, name: str) -> list[str]:
    return [other for group in tied_groups(model) if name in group for other in group if other != name]


def _files(folder: Path) -> dict[str, Path]:
    """Weight -> file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise DecoderError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json; save the model there with "
            "save_pretrained"
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _with_storage(shape: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy on the CPU whose weights are not filled yet."""
    module = copy.deepcopy(shape)
    filled: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                if id(parameter) not in filled:
                    wanted = dtype if parameter.is_floating_point() else parameter.dtype
                    empty = torch.empty(parameter.shape, dtype=wanted)
                    filled[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                each._parameters[name] = filled[id(parameter)]
    return module


def _deepest_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _deepest_first(child)
    yield module


@contextmanager
def _weights_without_storage() -> Iterator[None]:
    """Parameters made inside go to the meta device, buffers not."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter)
        own = self._parameters[name]
        if own is not None and own.device.type != "meta":
            self._parameters[name] = nn.Parameter(own.detach().to("meta"), own.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
