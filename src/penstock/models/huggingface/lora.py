"""Adapters of peft (LoRA) on a model that lies in stages.

peft says on the shapes of the whole model, without a weight, where adapters go. Each module is then given its own,
by peft again, under its path and over its real weights:

    shapes of the model  --peft-->  which modules are targeted, names of a saved adapter
    a module of a stage  --peft-->  the same module: base weights frozen, adapters drawn from the seed and its path

So a rank makes the adapters of its own stages alone, and they are the same under any cut.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from penstock.extras import what_to_install
from penstock.models.huggingface.anatomy import Anatomy, DecoderError
from penstock.models.huggingface.export import folder_in_place
from penstock.models.listed import generator_of
from penstock.runtime.checkpoint import CheckpointError, Reader
from penstock.runtime.stage.stage import place_at

__all__ = ["AdapterError", "Adapters"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UNDERSTOOD = frozenset({
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "use_dora", "lora_bias", "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "init_lora_weights", "task_type", "peft_type", "auto_mapping", "peft_version",
    "base_model_name_or_path", "revision", "inference_mode",
})  # fmt: skip
"""Fields of a LoraConfig that stages keep to. What others ask for is refused."""
DRAWN = (True, False, "gaussian", "orthogonal")
"""Ways to begin that leave the weights of the base as they are."""
INSIDE = "base_model.model."
"""What names in a saved adapter begin with."""
SMALL = 4
"""Rank in a small copy."""


class AdapterError(DecoderError):
    """Adapters that a model does not take, or that are not known to be right in stages."""


class Adapters:
    """The adapters on a model.

    Args:
        shapes: the whole model, on the meta device; it stays as it is.
        given: a LoraConfig of peft, its arguments, or a folder with a saved adapter, which is trained on.
        seed: of fresh ones.

    Attributes:
        model: the whole model with adapters, on the meta device.
        config: of peft, as it was given.

    Raises:
        AdapterError: peft refuses, or what is asked for is not known to be right in stages.
    """

    def __init__(self, shapes: nn.Module, given: Any, seed: int) -> None:
        self._folder = Path(given) if isinstance(given, str | Path) else None
        self._seed = seed
        self.config = _config_of(given)
        _require_understood(self.config)
        with _explained():
            from peft import get_peft_model

            self._whole: Any = get_peft_model(
                copy.deepcopy(shapes), copy.deepcopy(self.config), low_cpu_mem_usage=True
            )
        self._look()

    @classmethod
    def on(cls, peft_model: Any) -> Adapters:
        """Those that a PeftModel has. Raises AdapterError."""
        if len(peft_model.peft_config) != 1:
            raise AdapterError(
                f"the model has {len(peft_model.peft_config)} adapters, {', '.join(peft_model.peft_config)}; stages "
                "train one: delete_adapter() the others"
            )
        self = cls.__new__(cls)
        self._folder, self._seed, self._whole = None, 0, peft_model
        self.config = next(iter(peft_model.peft_config.values()))
        _require_understood(self.config)
        self._look()
        if any(layer.merged for layer in self.model.modules() if hasattr(layer, "lora_A")):
            raise AdapterError("the adapter is merged into its base; call unmerge_adapter() first")
        return self

    def _look(self) -> None:
        from peft.tuners.lora import LoraLayer
        from peft.utils import AuxiliaryTrainingWrapper, get_peft_model_state_dict

        self.model: Any = self._whole.get_base_model()
        self._name = next(iter(self._whole.peft_config))
        named = list(self.model.named_modules())
        self._targets = [path for path, module in named if isinstance(module, LoraLayer)]
        self._trained = [path for path, module in named if isinstance(module, AuxiliaryTrainingWrapper)]
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        numbers = {INSIDE + name: torch.tensor(number) for number, name in enumerate(names)}
        kept = get_peft_model_state_dict(
            self._whole, state_dict=numbers, adapter_name=self._name, save_embedding_layers=False
        )
        self._kept = {names[int(number)]: key for key, number in kept.items()}
        """By the name of a parameter that is trained the one that it has in a saved adapter."""
        if left := set(names) - set(self._kept):
            raise AdapterError(f"{min(left)} is trained, and peft saves it with no adapter; freeze it")

    @property
    def sizes(self) -> dict[str, Any]:
        """What is asked for besides peft's defaults."""
        plain = type(self.config)(base_model_name_or_path=None)
        fields = (field.name for field in dataclasses.fields(self.config) if field.name in UNDERSTOOD)
        found = {name: getattr(self.config, name) for name in fields if name not in ("base_model_name_or_path",)}
        asked = {name: value for name, value in found.items() if value != getattr(plain, name, None)}
        return {name: sorted(value) if isinstance(value, set) else value for name, value in asked.items()}

    def module(self, path: str, module: nn.Module) -> nn.Module:
        """The module at a path of the model, with its weights, given its adapters. Raises AdapterError."""
        root = nn.Module()
        place_at(root, path, module)
        inside = [target for target in self._targets if target == path or target.startswith(f"{path}.")]
        whole = [each for each in self._trained if each == path or each.startswith(f"{path}.")]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_of(self._seed, f"lora.{path}").initial_seed())
            self._inject(root, inside, whole, self.config)
        if self._folder is not None:
            self._read(root, self._folder / WEIGHTS)
        return root.get_submodule(path)

    def on_small(self, small: nn.Module, anatomy: Anatomy) -> None:
        """Puts such adapters, none of them zero, into a small copy of the model, in place."""
        lists = [f"{path}." for path in anatomy.lists]
        inside = {_below_a_block(target, lists) for target in self._targets}
        config = copy.deepcopy(self.config)
        config.r, config.lora_dropout, config.rank_pattern, config.alpha_pattern = min(config.r, SMALL), 0.0, {}, {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self._inject(small, sorted(inside), self._trained, config)
            for name, parameter in small.named_parameters():
                if "lora_" in name:
                    nn.init.normal_(parameter, std=0.1)

    def _inject(self, root: nn.Module, targets: list[str], whole: list[str], config: Any) -> None:
        from peft import inject_adapter_in_model
        from peft.tuners.tuners_utils import cast_adapter_dtype
        from peft.utils.constants import DUMMY_TARGET_MODULES

        config = copy.deepcopy(config)
        config.target_modules = set(targets) or DUMMY_TARGET_MODULES
        config.modules_to_save = whole or None
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
        with _explained():
            inject_adapter_in_model(config, root, self._name)
            cast_adapter_dtype(root, self._name)

    def _read(self, root: nn.Module, file: Path) -> None:
        """Fills a module's adapters with those of a folder."""
        with torch.no_grad(), safe_open(file, framework="pt") as stored:
            there = set(stored.keys())
            for name, parameter in root.named_parameters():
                if not parameter.requires_grad:
                    continue
                key = self._kept[name]
                if key not in there:
                    raise AdapterError(f"{file} has no {key!r}, which its config asks for; save the adapter again")
                tensor = stored.get_tensor(key)
                if tensor.shape != parameter.shape:
                    raise AdapterError(
                        f"{key!r} has shape {list(tensor.shape)} in {file} and {list(parameter.shape)} by its config"
                    )
                parameter.copy_(tensor)

    def write_folder(self, target: Path, checkpoint: Reader, base: Path | None, kept: Mapping[str, Path]) -> Path:
        """Writes a checkpoint's adapters as a folder that `PeftModel.from_pretrained` opens.

        Args:
            base: the folder of the model that they are for.
            kept: files that go along, by name.

        Raises:
            CheckpointError: of other adapters, or the disk refuses. Nothing is there then.
        """
        from safetensors.torch import save_file

        prefix = "model/"
        there = set(checkpoint.names())
        if missing := [name for name in self._kept if prefix + name not in there]:
            raise CheckpointError(f"the checkpoint has no {missing[0]!r}; it is of other adapters")
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        if base is not None:
            config.base_model_name_or_path = str(base)
        with folder_in_place(target, kept) as folder:
            config.save_pretrained(folder)
            found: Mapping[str, Tensor] = checkpoint.load([prefix + name for name in self._kept])
            tensors = {key: found[prefix + name].contiguous() for name, key in self._kept.items()}
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return target


def _below_a_block(target: str, lists: list[str]) -> str:
    """The path of a module in its block; of a module in none the whole."""
    found = next((each for each in lists if target.startswith(each)), None)
    return target if found is None else target.removeprefix(found).partition(".")[2]


def _config_of(given: Any) -> Any:
    """A LoraConfig. Raises AdapterError."""
    try:
        from peft import LoraConfig, PeftConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(what_to_install(error) or str(error), name=error.name) from None
    if isinstance(given, str | Path):
        folder = Path(given)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise AdapterError(f"{folder} holds no {name}; give a folder that save_pretrained of peft left")
        with _explained():
            given = PeftConfig.from_pretrained(str(folder))
        given.inference_mode = False
    if isinstance(given, PeftConfig):
        if not isinstance(given, LoraConfig):
            raise AdapterError(f"{type(given).__name__} is not LoRA; give a LoraConfig")
        return copy.deepcopy(given)
    if not isinstance(given, Mapping):
        raise AdapterError(f"lora is a {type(given).__name__}; give a LoraConfig, its arguments or a folder")
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    if unknown := sorted(set(given) - known):
        raise AdapterError(f"LoraConfig of peft has no {unknown[0]!r}; it has r, lora_alpha, target_modules, ...")
    with _explained():
        return LoraConfig(**given)


def _require_understood(config: Any) -> None:
    """Raises AdapterError for what is not known to be right in stages."""
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        raise AdapterError(f"its adapters are of {type(config).__name__}; those of a LoraConfig train in stages")
    plain = LoraConfig()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in UNDERSTOOD and value and value != getattr(plain, field.name):
            raise AdapterError(
                f"lora: {field.name} {_shown(value)} is not known to be right in stages; leave it out, or train with "
                "peft on one device"
            )
    if config.init_lora_weights not in DRAWN:
        raise AdapterError(
            f"lora: init_lora_weights {config.init_lora_weights!r} changes the weights of the base too, which no "
            "saved adapter has; give true, false, 'gaussian' or 'orthogonal'"
        )


def _shown(value: Any) -> str:
    return f"{value!r:.60}"


@contextmanager
def _explained() -> Iterator[None]:
    """What peft refuses becomes a AdapterError; its warnings were said of the whole model already."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ValueError, TypeError, KeyError, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise AdapterError(f"peft refuses these adapters: {reason}") from None
