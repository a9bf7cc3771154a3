"""A language model of Hugging Face's as a flat list of layers that a pipeline can cut anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.extras import what_to_install
from penstock.models.huggingface.anatomy import Anatomy, DecoderError, examine
from penstock.models.huggingface.batch_rules import ModelStages
from penstock.models.huggingface.compare import (
    CopyError,
    own_loss,
    require_equal,
    small_model,
    untouched,
)
from penstock.models.huggingface.export import kept_files, write_folder
from penstock.models.huggingface.layers import TARGETS, ModelLayer, build_layers
from penstock.models.huggingface.lora import Adapters
from penstock.models.huggingface.loss import (
    NextTokenLoss,
    OwnLoss,
    Shift,
    WithRouterLoss,
    class_with_forward,
    default_loss,
    has_token_loss,
    label_names,
    split_batch,
)
from penstock.models.huggingface.packed import require_apart, require_usual, use_each_sequence
from penstock.models.huggingface.pictures import PictureForm, picture_form
from penstock.models.huggingface.routers import Routers, routers_of
from penstock.models.huggingface.shards import Shards, shards_of
from penstock.models.huggingface.weights import (
    AdaptedSource,
    FolderSource,
    ModelSource,
    RandomSource,
    WeightSource,
    folder_of,
    shapes_of,
    tied_groups,
)
from penstock.models.listed import cut_by_counts
from penstock.models.loss import CrossEntropy
from penstock.models.parallel import ParallelError
from penstock.runtime import Stage, partition
from penstock.runtime.checkpoint import Reader
from penstock.runtime.checkpoint.save_load import find
from penstock.runtime.tensor_parallel import Sharding
from penstock.runtime.tensors.digest import hash_of

__all__ = ["Decoder"]


class Decoder:
    """A decoder's embedding, blocks and head, `num_layers` layers in all, called by the model's own code.

    The layers of an encoder come before them if the model has one. A tower for images is a part of the first layer.

        decoder = Decoder("path/to/folder")                  # or a config, or a model
        pipe = ps.Pipeline(decoder.stages(4), ps.build("1f1b", 4, 8), loss_fn=decoder.loss, ...)
        pipe.step(*decoder.inputs_and_targets(batch))        # input_ids, attention_mask, labels

    The object that you give is the model that is trained, with its class, its forward and its loss. This holds for
    classifiers and for subclasses with a loss of their own. Parameters keep the names that they have in the model. A
    batch may have an attention mask, position ids and other inputs of the model's blocks. They travel from stage to
    stage.

    Args:
        source: a local folder as `save_pretrained` leaves it, a transformers config, or a model. From a folder or a
            config each stage is built where it runs, and nothing else of the model.
        blocks: the path of the list of blocks in the model, if it cannot be found.
        seed: for the weights of a config. Each module's weights follow from it and the module's name alone.
        dtype: of the weights of a config or a folder.
        lora: adapters of peft to train in place of the weights: a LoraConfig, its arguments, or a folder with a saved
            adapter. A PeftModel as `source` has its own.
        compare: whether to train a small copy for a step, as a whole and cut into stages, and to refuse an
            architecture whose loss or gradients differ in a bit. The loss of a given model is compared too.
        packed: whether a row of tokens holds several sequences, none of which sees another. `packed_inputs` makes
            the stages' inputs then, and padded samples are refused. A given model is changed in the same way. A small
            copy of the config is tried on such a row, whatever `compare` says, and an architecture is refused if a
            sequence's logits differ from those that it has alone.

    Attributes:
        loss: the model's own loss of its output and `labels`, for `ps.Pipeline(loss_fn=)`. It includes the loss of a
            mixture's routers if the config has `output_router_logits`. See `has_own_loss` for classifiers.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        DecoderError: a folder without a model, or an architecture that does not fit. It says what was looked for, and
            how to cut the model by hand.
    """

    def __init__(
        self,
        source: Any,
        *,
        blocks: str | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        lora: Any = None,
        compare: bool = True,
        packed: bool = False,
    ) -> None:
        _require_transformers()
        self._model, self._source, self.adapters = _opened(source, lora, seed, dtype)
        self.config = self._model.config
        labels = label_names(self._model)
        self.anatomy = examine(self._model, blocks)
        self._routers: Routers | None = None
        self._own_loss: OwnLoss | None = None
        if not has_token_loss(self._model):
            self._call_own_loss(labels)
        else:
            self._routers = routers_of(self._model, self.anatomy)
        if packed and (self.is_masked or self.has_encoder or self.anatomy.labels):
            raise DecoderError(
                f"{type(self._model).__name__} ({self.config.model_type}) is no decoder alone, trained on next "
                "tokens, and only decoders keep several sequences in a row apart; leave out packed=True"
            )
        if compare or packed:
            try:
                small = small_model(self._model, self.anatomy)
            except CopyError:
                if packed or not isinstance(self._source, ModelSource):
                    raise
                with untouched(self._model):
                    self._try(self._model, labels, blocks, compare)
            else:
                if self.adapters is not None:
                    self.adapters.on_small(small, self.anatomy)
                anatomy = self._try(small, labels, blocks, compare)
                if packed:
                    require_apart(small, anatomy, self._routers)
        if compare and isinstance(self._source, ModelSource):
            with untouched(self._model), torch.no_grad():
                require_equal(self._model, self.anatomy, self._routers, self.loss)
                if self._own_loss is not None:
                    own_loss(self._model, self.anatomy, self._own_loss)
        if packed:
            use_each_sequence(self._model)

    def _call_own_loss(self, labels: tuple[str, ...]) -> None:
        """Makes the last layer call the model's own forward with labels."""
        self.anatomy = replace(self.anatomy, labels=labels)
        self._own_loss = default_loss(self._model)

    def _try(self, small: Any, labels: tuple[str, ...], blocks: str | None, compare: bool) -> Anatomy:
        """Compares a small copy with its stages, and gives its anatomy.

        Raises:
            DecoderError: they differ.
        """
        anatomy = examine(small, blocks)
        if self.anatomy.labels:
            anatomy = replace(anatomy, labels=labels)
        return self._compared(small, anatomy, labels) if compare else anatomy

    def _compared(self, small: Any, anatomy: Anatomy, labels: tuple[str, ...]) -> Anatomy:
        """The anatomy with which a small copy learns the same, with its own loss if need be.

        Raises:
            DecoderError: there is no such anatomy.
        """
        try:
            require_equal(small, anatomy, self._routers, self.loss)
        except DecoderError as error:
            if anatomy.labels or self._routers is not None:
                raise
            self._call_own_loss(labels)
            anatomy = replace(anatomy, labels=labels)
            try:
                require_equal(small, anatomy, None, self.loss)
            except DecoderError:
                raise error from None
        if anatomy.labels:
            self._own_loss = own_loss(small, anatomy)
        return anatomy

    @property
    def loss(self) -> CrossEntropy | NextTokenLoss | WithRouterLoss | OwnLoss:
        if self._own_loss is not None:
            return self._own_loss
        loss = CrossEntropy() if self.is_masked or self.has_encoder else NextTokenLoss()
        return WithRouterLoss(loss) if self.has_router_loss else loss

    @property
    def model(self) -> Any:
        """The model that was given, or its shapes; with adapters the model in which they lie."""
        return self._model

    @property
    def is_masked(self) -> bool:
        """Whether labels are the tokens at their places, and not the ones that follow."""
        return class_with_forward(self._model).__name__.endswith("ForMaskedLM")

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss is the one that the model's own forward returns, as it is for a classifier. The last stage
        then returns a dict of that loss and whatever else the forward returns.
        """
        return self._own_loss is not None

    @property
    def has_encoder(self) -> bool:
        """Whether it reads one text and writes another."""
        return self.anatomy.encoder is not None

    def inputs_and_targets(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """A batch of `input_ids`, `attention_mask`, ... and `labels`, of tensors [B, T], as what `pipe.step` takes.

        For a model with an encoder `decoder_input_ids` are added, the labels shifted as the model itself does. If the
        loss is the model's own (`has_own_loss`), the labels stay among the inputs.

        Raises:
            DecoderError: there are no labels.
        """
        inputs, labels = split_batch(batch, self.anatomy.labels, self._model.main_input_name)
        if self.has_encoder and TARGETS not in inputs:
            inputs[TARGETS] = self._shift(labels)
        return inputs, labels

    @cached_property
    def pictures(self) -> PictureForm | None:
        """The form of its pictures; None if it takes none, or pictures of no one size."""
        return picture_form(self._model)

    @cached_property
    def _shift(self) -> Shift:
        return Shift(self._model, self.anatomy)

    @property
    def has_router_loss(self) -> bool:
        """Whether its output is a dict of logits and the loss of a mixture's routers."""
        return self._routers is not None

    @cached_property
    def shards(self) -> Shards:
        """The modules that tensor-parallel ranks can share."""
        return shards_of(self._model)

    @property
    def num_layers(self) -> int:
        """The blocks, the embedding and the head; with an encoder its own blocks and embedding too."""
        return self.anatomy.num_layers

    @property
    def tied(self) -> list[list[str]]:
        """Groups of names of parameters that are one, such as those of the embedding and the head.

        `stages` gives them to the pipeline. For a list of `stage(...)`, give them as `ps.ParallelOptions(tied=...)`.
        """
        anatomy = self.anatomy
        paths = {path for index in range(anatomy.num_layers) for path in anatomy.paths(index)}
        held = [[name for name in group if _is_in(name, paths)] for group in tied_groups(self._model)]
        return [group for group in held if len(group) > 1]

    def layers(self, indices: Iterable[int] | None = None) -> list[ModelLayer]:
        """The layers at `indices` (all, unless told otherwise), for an `nn.Sequential` or a stage.

        Raises:
            DecoderError: an index out of range, a folder that lacks a weight.
        """
        wanted = list(range(self.num_layers) if indices is None else indices)
        if out := [index for index in wanted if not 0 <= index < self.num_layers]:
            raise DecoderError(f"layer {out[0]} asked of a decoder of {self.num_layers} layers, counted from 0")
        modules: dict[str, nn.Module] = {
            path: self._source.module(path) for i in wanted for path in self.anatomy.paths(i)
        }
        layers = build_layers(self._model, self.anatomy, wanted, modules, self._routers, self.pictures)
        for layer in layers:
            layer.shards = self.shards
        for names in self.tied:
            _tie([name for name in names if _is_in(name, modules)], modules)
        return layers

    def stage(self, indices: Iterable[int]) -> Stage:
        """The stage that holds the layers at `indices`, its parameters under their names in the model."""
        wanted = list(indices)
        stage = _DecoderStage(self.layers(wanted), wanted, self._unshardable)
        if self.num_layers - 1 in wanted:
            self._source.fill(self.anatomy.buffers)
            for name in self.anatomy.buffers:
                holder, _, last = name.rpartition(".")
                place = stage.get_submodule(holder) if holder else stage
                place.register_buffer(last, self._model.get_buffer(name))
        if self.adapters is not None:
            stage.constants = {name: hash_of(p) for name, p in stage.named_parameters() if not p.requires_grad}
        return stage

    @property
    def _unshardable(self) -> str:
        if self.adapters is not None:
            return "with adapters"
        if self.has_encoder:
            return "of a model with an encoder"
        return "of a model with a head and a loss of its own" if self.anatomy.labels else ""

    def stages(self, num_stages: int, cut: Sequence[int] | None = None) -> list[Stage | Callable[[], Stage]]:
        """The stages of a given model, or for each stage a function that builds it, for `ps.Pipeline`.

        Args:
            cut: how many layers each stage holds. By default `costs` decide.

        Raises:
            PartitionError: more stages than layers, or a cut that does not fit.
        """
        costs = self.costs()
        parts = partition(costs, num_stages) if cut is None else cut_by_counts(len(costs), num_stages, cut)
        if isinstance(self._source, ModelSource):
            return ModelStages([self.stage(part) for part in parts], self.tied, self.pictures)
        return ModelStages([lambda part=part: self.stage(part) for part in parts], self.tied, self.pictures)

    def export(self, target: str | Path, checkpoint: str | Path | Reader, tokenizer: Path | None = None) -> Path:
        """Writes a checkpoint as a folder that `from_pretrained` opens, or that of `PeftModel` if there are adapters.

        Args:
            target: the new folder. It must not exist, or be empty.
            checkpoint: a checkpoint that `pipe.save` wrote, or a folder of them, of which the newest is taken.
            tokenizer: a folder whose tokenizer is copied; by default the folder of the model. Or a tokenizer.json,
                which is copied instead of the model's own tokenizer.

        Raises:
            CheckpointError: the checkpoint is of another model, or the disk refuses.
        """
        source = folder_of(self._source)
        kept = kept_files(source, tokenizer)
        reader = checkpoint if isinstance(checkpoint, Reader) else Reader(find(checkpoint))
        if self.adapters is not None:
            return self.adapters.write_folder(Path(target), reader, source, kept)
        return write_folder(Path(target), reader, self._model, self.anatomy.blocks, kept)

    def costs(self) -> list[float]:
        """Forward FLOPs per token of each layer: two for each weight that is not looked up."""
        return [
            max(1.0, sum(self._flops(path) for path in self.anatomy.paths(index))) for index in range(self.num_layers)
        ]

    def _flops(self, path: str) -> float:
        modules = self._model.get_submodule(path).modules()
        multiplied = [module for module in modules if not isinstance(module, nn.Embedding)]
        return 2.0 * sum(p.numel() for module in multiplied for p in module.parameters(recurse=False))


def _opened(source: Any, lora: Any, seed: int, dtype: torch.dtype) -> tuple[Any, WeightSource, Adapters | None]:
    """The model of a source, or its shapes; where its weights come from; its adapters. Raises DecoderError."""
    from transformers import PreTrainedConfig, PreTrainedModel

    adapters: Adapters | None = None
    if hasattr(source, "peft_config") and hasattr(source, "get_base_model"):
        if lora is not None:
            raise DecoderError("the model has an adapter already, so lora= is one too many; leave it out")
        adapters = Adapters.on(source)
        source = adapters.model
    if isinstance(source, PreTrainedModel):
        if lora is not None:
            raise DecoderError(
                "a model that is there gets its adapters by peft: give Decoder(get_peft_model(model, config))"
            )
        require_usual(source)
        return source, ModelSource(source), adapters
    if isinstance(source, PreTrainedConfig):
        shapes = shapes_of(source)
        weights: WeightSource = RandomSource(shapes, seed, dtype)
    elif isinstance(source, str | Path):
        shapes = shapes_of(_config_in(Path(source)))
        weights = FolderSource(shapes, Path(source), dtype)
    else:
        raise DecoderError(
            f"no decoder can be made of a {type(source).__name__}; give a folder, a config of transformers or a model"
        )
    if lora is None:
        return shapes, weights, None
    adapters = Adapters(shapes, lora, seed)
    return adapters.model, AdaptedSource(weights, adapters), adapters


class _DecoderStage(Stage):
    """A stage of some layers of a decoder. Each layer is called once, where the first of its modules stands.

    Args:
        unshardable: a reason why ranks cannot share these layers; empty if they can.
    """

    def __init__(self, layers: Sequence[ModelLayer], indices: Sequence[int], unshardable: str) -> None:
        modules: dict[str, nn.Module] = {}
        numbers: list[int] = []
        for index, layer in zip(indices, layers, strict=True):
            for path, module in layer.modules_at.items():
                if path not in modules:
                    modules[path] = module
                    numbers.append(index)
        super().__init__(modules, numbers, self._call)
        self.__dict__.update(_model_layers=list(layers), _unshardable=unshardable)

    def _call(self, module: nn.Module, value: Any) -> Any:
        layers: list[ModelLayer] = self.__dict__["_model_layers"]
        return next((layer(value) for layer in layers if layer.first is module), value)

    def shard_over(self, sharding: Sharding) -> None:
        """Shards its layers in place. Raises ParallelError if ranks cannot share them."""
        if reason := self.__dict__["_unshardable"]:
            raise ParallelError(f"layers {reason} are not shared out over tensor-parallel ranks; give tp 1")
        for layer in self.__dict__["_model_layers"]:
            layer.shard_over(sharding)


def _is_in(name: str, paths: Iterable[str]) -> bool:
    """Whether a parameter is of one of the modules at these paths."""
    return any(name.startswith(f"{path}.") for path in paths)


def _tie(names: Sequence[str], modules: dict[str, nn.Module]) -> None:
    """Makes one parameter of several that were built apart."""
    shared: nn.Parameter | None = None
    for name in names:
        path = next(path for path in modules if name.startswith(f"{path}."))
        *folders, last = name.removeprefix(f"{path}.").split(".")
        holder = modules[path].get_submodule(".".join(folders))
        shared = shared if shared is not None else holder._parameters[last]
        holder._parameters[last] = shared


def _config_in(folder: Path) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise DecoderError(
            f"{folder} is not a folder with a config.json; give one that save_pretrained left, nothing is downloaded"
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError) as error:
        raise DecoderError(f"{folder}: transformers knows no such model: {error}") from None


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(what_to_install(error) or str(error), name=error.name) from None
