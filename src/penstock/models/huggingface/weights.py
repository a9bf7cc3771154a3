"""Where a decoder's weights come from: drawn by seed, read from a folder, or those of a given model.

From a config or a folder the whole model exists only as shapes, on the meta device. The modules of a stage are copied
from it and filled.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.models.huggingface.anatomy import DecoderError, has_encoder
from penstock.models.listed import generator_of

if TYPE_CHECKING:
    from penstock.models.huggingface.lora import Adapters

LARGEST_BUFFER = 1 << 25
"""The most numbers of a buffer that is made with storage."""


class WeightSource:
    """Gives modules with their weights."""

    def module(self, path: str) -> nn.Module:
        """The module at a path of the model."""
        raise NotImplementedError

    def fill(self, buffers: Sequence[str]) -> None:
        """Fills the model's own buffers of these names, unless they are as the architecture makes them."""


class ModelSource(WeightSource):
    """The modules of a given model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def module(self, path: str) -> nn.Module:
        return self._model.get_submodule(path)


class RandomSource(WeightSource):
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
            _draw(self._shapes, path, module, {name for name, _ in module.named_parameters()})
        return module.to(self._dtype)


class FolderSource(WeightSource):
    """Modules with the weights of a folder. Only the weights of these modules are read.

    A file may have other names than the model, and one weight per expert of a mixture where the model has one for all
    experts. transformers says how to convert them.
    """

    def __init__(self, shapes: Any, folder: Path, dtype: torch.dtype) -> None:
        self._shapes = shapes
        self.folder = folder
        self._dtype = dtype
        self._files = _files(folder)
        self._kept: dict[str, _StoredWeight] = {}

    def module(self, path: str) -> nn.Module:
        module = _with_storage(self._shapes.get_submodule(path), self._dtype)
        stored = module.state_dict(keep_vars=True)  # which has no buffer that is worked out anew
        made = {name for name in stored if self._is_never_saved(f"{path}.{name}")}
        with torch.no_grad():
            if made:
                _draw(self._shapes, path, module, made)
            for name, tensor in stored.items():
                if name not in made:
                    read = self._read(f"{path}.{name}", tensor)
                    if read.is_fresh and read.tensor.dtype == tensor.dtype:
                        tensor.data = read.tensor
                    else:
                        tensor.copy_(read.tensor)
        return module

    def _is_never_saved(self, name: str) -> bool:
        """Whether the architecture itself makes a weight, such as a table of sines, and the folder has none."""
        patterns = self._shapes._keys_to_ignore_on_save or ()
        return name not in self._origins and any(re.search(pattern, name) for pattern in patterns)

    def fill(self, buffers: Sequence[str]) -> None:
        for name in buffers:
            buffer = self._shapes.get_buffer(name)
            if name in self._origins:  # else it is as the architecture makes it, as from_pretrained has it
                buffer.copy_(self._read(name, buffer).tensor)

    def _read(self, name: str, wanted: Tensor) -> _StoredWeight:
        names = [name, *_tied_names(self._shapes, name)]  # a tied weight is kept under one of its names
        found = next((each for each in names if each in self._origins), None)
        if found is None:
            raise DecoderError(
                f"{self.folder} holds no weight {name!r} (its names are like {next(iter(self._files), 'none')!r}); "
                "save the model with save_pretrained of the transformers installed here"
            )
        made = self._made(found)
        if made.tensor.shape != wanted.shape:
            raise DecoderError(
                f"weight {name!r} has shape {list(made.tensor.shape)} in {self.folder} and "
                f"{list(wanted.shape)} by its config"
            )
        return made

    @cached_property
    def _origins(self) -> dict[str, _WeightOrigin]:
        """The origin of each weight, by the model's name for it."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        entries = get_model_conversion_mapping(self._shapes)
        renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
        known, prefix = self._shapes.state_dict(), self._shapes.base_model_prefix
        origins: dict[str, _WeightOrigin] = {}
        for source in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(source, renamings, converters, prefix, known)
            if name not in known and source in known:
                name, pattern = rename_source_key(source, [], [], prefix, known)
            converter = next((each for each in converters if pattern in each.source_patterns), None)
            origin = origins.setdefault(name, _WeightOrigin(name, converter, []))
            origin.sources.append((source, pattern or source))
            targets = [] if converter is None else converter.target_patterns
            for other in targets[1:]:  # made of the same sources
                origins[name.replace(targets[0], other)] = origin
        return origins

    def _made(self, name: str) -> _StoredWeight:
        if name in self._kept:
            return self._kept.pop(name)
        origin = self._origins[name]
        tensors = [(pattern, source, self._tensor(source)) for source, pattern in origin.sources]
        if origin.converter is None:
            return _StoredWeight(tensors[-1][2], False)
        mapped = {tensor.untyped_storage().data_ptr() for _, _, tensor in tensors}
        converter = copy.deepcopy(origin.converter)
        for pattern, source, tensor in tensors:
            converter.add_tensor(origin.first, source, pattern, tensor)
        tensors.clear()
        try:
            made = converter.convert(origin.first, model=self._shapes, config=self._shapes.config)
        except (RuntimeError, ValueError) as error:
            counts = Counter(pattern for _, pattern in origin.sources)
            parts = ", ".join(f"{count} like {pattern}" for pattern, count in counts.items())
            raise DecoderError(
                f"{name} cannot be made of what {self.folder} holds, {parts}: {error}; save the model with "
                "save_pretrained of the transformers installed here"
            ) from None
        for key, value in made.items():
            tensor = value[0] if isinstance(value, list) else value
            storage = tensor.untyped_storage()
            is_whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
            self._kept[key] = _StoredWeight(tensor, is_whole and storage.data_ptr() not in mapped)
        if name not in self._kept:
            raise DecoderError(f"{self.folder}: {name} could not be made from {origin.sources[0][0]} and the others")
        return self._kept.pop(name)

    def _tensor(self, source: str) -> Tensor:
        with safe_open(self._files[source], framework="pt") as file:
            tensor: Tensor = file.get_tensor(source)
        return tensor


class AdaptedSource(WeightSource):
    """Modules of another source, given adapters."""

    def __init__(self, source: WeightSource, adapters: Adapters) -> None:
        self.base = source
        self._adapters = adapters

    def module(self, path: str) -> nn.Module:
        return self._adapters.module(path, self.base.module(path))

    def fill(self, buffers: Sequence[str]) -> None:
        self.base.fill(buffers)


def folder_of(source: WeightSource) -> Path | None:
    """The folder that weights are read from."""
    base = source.base if isinstance(source, AdaptedSource) else source
    return base.folder if isinstance(base, FolderSource) else None


class _StoredWeight(NamedTuple):
    """A weight of a folder.

    Attributes:
        is_fresh: whether it has memory of its own, as experts that became one weight have. A module may hold it as it
            is then, because it is no part of a mapped file.
    """

    tensor: Tensor
    is_fresh: bool


class _WeightOrigin(NamedTuple):
    """The tensors of a file that a weight is made of.

    Attributes:
        first: the first weight that is made of them.
        converter: of transformers; None if only the name differs.
        sources: the names in the file, each with the pattern of the converter that it fits.
    """

    first: str
    converter: Any
    sources: list[tuple[str, str]]


def shapes_of(config: Any, kind: Callable[[Any], Any] | None = None) -> Any:
    """The model of a config, of its class or of `kind`, with weights on the meta device.

    Buffers, which are small, have their values.
    """
    with _weights_without_storage():
        return (kind or model_of)(config)


def model_of(config: Any) -> Any:
    """The model of a config with fresh weights in float32: of the class that the config names, if that has a loss,
    else a causal language model, or one with an encoder where the config is of such a model.

    Raises DecoderError where transformers has none.
    """
    import transformers

    require_unquantized(config)
    config = copy.deepcopy(config)  # which a model changes
    named = next(iter(getattr(config, "architectures", None) or ()), "")
    kind = getattr(transformers, named, None) if named else None
    if named and kind is None:
        raise DecoderError(
            f"the config names {named}, which transformers does not have, and another class would be another model; "
            f"give the model itself, Decoder({named}.from_pretrained(FOLDER))"
        )
    try:
        if kind is not None and {"labels", "start_positions"} & inspect.signature(kind.forward).parameters.keys():
            return kind(config)
        auto = transformers.AutoModelForSeq2SeqLM if has_encoder(config) else transformers.AutoModelForCausalLM
        return auto.from_config(config, dtype=torch.float32)
    except ValueError as error:
        kind = type(config).__name__
        raise DecoderError(f"transformers makes no language model of a {kind}: {error}") from None


def require_unquantized(config: Any) -> None:
    """Raises DecoderError for a config of quantized weights."""
    if getattr(config, "quantization_config", None) is not None:
        raise DecoderError(
            "its weights are quantized (quantization_config), and training needs them as they were; load the model "
            "with from_pretrained, dequantize it and save it"
        )


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Groups of names of one parameter each."""
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


def _draw(shapes: Any, path: str, module: nn.Module, names: Collection[str]) -> None:
    """Draws the weights of a copy of the module at `path`.

    The innermost model around a weight says how to draw it, because a tower has its own rules.

    Raises:
        DecoderError: transformers does not draw a parameter of one of these names.
    """
    from transformers import PreTrainedModel

    owner = around = shapes
    for name in path.split("."):
        around = getattr(around, name)
        owner = around if isinstance(around, PreTrainedModel) else owner
    known = {name: p for name, p in module.named_parameters() if name in names and p.is_floating_point()}
    for parameter in known.values():
        parameter.fill_(math.nan)

    def fill(module: nn.Module, owner: Any) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child in module.children():
            fill(child, owner)
        owner._init_weights(module)

    fill(module, owner)
    if left := next((name for name, p in known.items() if p.isnan().any()), None):
        raise DecoderError(
            f"the transformers installed here draws no weight {path}.{left}, so the model can't be made from its "
            "configuration alone; save it with save_pretrained and give the folder, or give the model itself"
        )


class _LargeOnMeta(TorchFunctionMode):
    """Makes tensors that are too large for a buffer on the meta device, as memory may be too small for them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand) and not kwargs.get("device"):
            sizes = args[0] if args and not isinstance(args[0], int) else args
            if math.prod(sizes or kwargs.get("size", ())) > LARGEST_BUFFER:
                kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


@contextmanager
def _weights_without_storage() -> Iterator[None]:
    """Parameters that are made inside go to the meta device, and buffers do not."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter)
        own = self._parameters[name]
        if own is not None and own.device.type != "meta":
            self._parameters[name] = nn.Parameter(own.detach().to("meta"), own.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
