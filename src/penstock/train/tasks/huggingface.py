"""A model of Hugging Face's on text or on the user's own batches, with the weights of a folder or fresh ones."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock.cost import CostsByLength
from penstock.data import Corpus
from penstock.extras import what_to_install
from penstock.models import CrossEntropy, decoder_costs_by_length
from penstock.models.huggingface import AdapterError, Decoder, DecoderError, WithRouterLoss, packed_inputs
from penstock.models.huggingface.pictures import sees
from penstock.runtime import Pipeline
from penstock.schedule import Schedule
from penstock.train.checks import SettingsError
from penstock.train.folder import is_folder
from penstock.train.kinds import lora_of, place_of
from penstock.train.own_file import is_own
from penstock.train.settings import Settings
from penstock.train.tasks.documents import packed_documents
from penstock.train.tasks.layers import chain_bytes, of_first, recomputed, refuse_shared, require_shards, stage_layers
from penstock.train.tasks.own_data import OPTION, own_data, require_samples, tensors_of
from penstock.train.tasks.task import BYTES, Example, Task, TaskData
from penstock.train.tasks.text import mask_token, masked, next_tokens, tokenizer_of, write

BY_HAND = (
    "looked for a language model of transformers with one list of blocks between an embedding and a head, or one in "
    "its encoder and one in its decoder; to cut another one by hand, write one module per stage and give ps.Pipeline "
    "the list of them"
)
MOST = 300
"""Most letters of a reason that are shown."""
UNREAD = ("pytorch_model*.bin", "*.pt", "*.pth", "*.gguf", "tf_model*.h5", "*.msgpack")
"""Files that hold weights in other forms than safetensors."""
TOKENS, LABELS = "input_ids", "labels"
USUAL_CONTEXT = 128
"""Default tokens of a sample, if the model takes as many."""
UNREAD_TOKENIZERS = (
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "vocab.json", "vocab.txt",
    "source.spm", "tokenizer_config.json",
)  # fmt: skip
"""Files that say a folder has a tokenizer, in other forms than tokenizer.json."""


class DecoderTask(Task):
    """See `Task`.

    Raises:
        SettingsError: no such folder, transformers is missing, an architecture that can't be cut, sizes that do not
            go together.
        PartitionError, DataError: more stages than layers; a tokenizer that can't be read.
    """

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        self._settings, self._tokenizer = settings, tokenizer_of(settings)
        folder, has_weights = find(settings.model)
        self.decoder = decoder = decoder_of(folder, has_weights, settings)
        if decoder.has_own_loss:
            raise SettingsError(
                f"--model {settings.model} is a {type(decoder.model).__name__}, which learns from labels of its own, "
                "and penstock train makes those of language models alone; train it in Python, with "
                "penstock.integrations.transformers.PipelineTrainer, or with a Decoder and ps.Pipeline"
            )
        self.config = config = decoder.config.get_text_config(decoder=True)
        self.sizes = sizes_in(folder) | ({} if decoder.adapters is None else {"lora": decoder.adapters.sizes})
        self.loss: Callable[..., Tensor] = decoder.loss
        self._mask: int | None = None
        if decoder.has_encoder:
            self._check_encoder(schedule)
        elif sees(decoder.model):
            refuse_shared(schedule, f"the first layer of {settings.model} sees pictures too")
        if not is_own(settings.data):
            self._take_text(folder)
        self.tied = decoder.tied
        self.layer_costs = decoder.costs()
        if decoder.has_encoder:
            first, (read, written) = decoder.anatomy.first_block - 1, self._lengths
            self.layer_costs = [
                each * (read if index < first else written) for index, each in enumerate(self.layer_costs)
            ]
        self._parts = stage_layers(self.layer_costs, schedule, settings.cut)
        require_shards(settings, schedule, config, config.vocab_size)

    def _check_encoder(self, schedule: Schedule) -> None:
        """Raises SettingsError for what a model with an encoder does not train with."""
        settings = self._settings
        refuse_shared(schedule, f"{settings.model} has an encoder")
        if settings.tp > 1:
            raise SettingsError(
                f"--tp {settings.tp} divides layers, which Penstock knows for decoders, not for encoders and "
                f"cross-attention, and {settings.model} has an encoder; leave it out"
            )
        if not is_own(settings.data):
            raise SettingsError(
                f"--model {settings.model} reads one text and writes another, and a text alone does not say which is "
                "which; give batches with labels by --data FILE.py:NAME"
            )

    def _take_text(self, folder: Path) -> None:
        """Decides how text becomes samples for the model."""
        settings, decoder, config, tokenizer = self._settings, self.decoder, self.config, self._tokenizer
        # Of a decoder the targets of text are the tokens that follow already.
        self.loss = WithRouterLoss(CrossEntropy()) if decoder.has_router_loss else CrossEntropy()
        most = getattr(config, "max_position_embeddings", None)  # Mamba takes any number
        self.num_tokens = settings.context or min(USUAL_CONTEXT, int(most or USUAL_CONTEXT))
        if most and self.num_tokens > most:
            raise SettingsError(
                f"--context {self.num_tokens}: {settings.model} takes {most} tokens at most; give that"
            )
        require_readable_tokenizer(folder, settings)
        if tokenizer.vocab_size > config.vocab_size:
            raise SettingsError(
                f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, and {settings.model} "
                f"a vocabulary of {config.vocab_size}; give the --tokenizer the model was made for"
            )
        self.sizes = {**self.sizes, "context": self.num_tokens}
        self.writes = not decoder.is_masked
        if decoder.is_masked:
            self._mask = mask_token(tokenizer, config.vocab_size, settings.model)

    @cached_property
    def _own(self) -> tuple[TaskData, tuple[int, int]]:
        """The user's own batches, and the tokens of a sample that are read and written in the first one."""
        data = own_data(self._settings, TokenBatchReader(self.decoder, self._settings.model))
        inputs, labels = data.batches[0]
        lengths = inputs[TOKENS].shape[1], labels.shape[1]
        return replace(data, unit=f"nats a token, {data.unit}"), lengths

    @property
    def _lengths(self) -> tuple[int, int]:
        """Tokens of a sample that are read, and that are written."""
        return self._own[1] if self.num_tokens is None else (self.num_tokens, self.num_tokens)

    def stages(self) -> list[Callable[[], nn.Module]]:
        self._parts = of_first(self._parts, self._settings)
        return [lambda part=part: self._built(part) for part in self._parts]  # type: ignore[misc]

    def export(self, path: Path, checkpoints: Path) -> None:
        if is_folder(path):
            folder = place_of(self._settings.model)[0]
            given = Path(self._settings.tokenizer or folder)
            self.decoder.export(path, checkpoints, folder if given == folder / "tokenizer.json" else given)
        else:
            super().export(path, checkpoints)

    def _built(self, part: range) -> nn.Module:
        stage = self.decoder.stage(part)
        if self._settings.recompute:
            block = re.compile(rf"({'|'.join(map(re.escape, self.decoder.anatomy.lists))})\.\d+")
            for name, module in list(stage.named_modules()):
                if block.fullmatch(name):
                    recomputed(module)
        return stage

    def message_bytes(self, schedule: Schedule) -> list[float]:
        read, written = self._lengths
        if self.decoder.has_encoder:
            return self._bytes_of_both(read, written)
        return chain_bytes(self._settings, schedule.num_stages, read * self.config.hidden_size)

    def _bytes_of_both(self, read: int, written: int) -> list[float]:
        """Bytes of a message. Behind the encoder, these are the hidden states of both parts. Up to the bridge, they
        include the decoder's tokens, which count as two numbers each, and the position biases that a T5 passes on.
        """
        anatomy, heads = self.decoder.anatomy, getattr(self.config, "num_attention_heads", 0)
        width = self.config.hidden_size
        samples = chain_bytes(self._settings, 2, 1)[0]
        sent = []
        for part in self._parts[:-1]:
            if anatomy.encoder is not None and part.stop < anatomy.first_block:
                passed = len(anatomy.encoder.carried) * (1 < part.stop < anatomy.first_block - 1)
                numbers, pairs = read * width + 2 * written, passed * read * read
            else:
                passed = len(anatomy.carried) * (part.stop not in (anatomy.first_block, anatomy.num_layers - 1))
                numbers = (written + read * (part.stop < anatomy.num_layers - 1)) * width
                pairs = sum((written, read)[number] * written for number in range(passed))
            sent.append(samples * numbers + BYTES * heads * pairs)
        return [*sent, 0.0]

    def read(self, corpus: Corpus | None) -> TaskData:
        if is_own(self._settings.data):
            return self._own[0]
        assert self.num_tokens is not None
        if self._settings.is_packed:
            return packed_documents(
                self._settings, self._tokenizer, self.num_tokens, corpus, self._by_length(), packed_inputs
            )
        data = next_tokens(self._settings, self._tokenizer, self.num_tokens, corpus)
        return (
            data if self._mask is None else masked(data, self._mask, self._tokenizer.vocab_size, self._settings.seed)
        )

    def _by_length(self) -> CostsByLength:
        config = self.config
        width, heads = config.hidden_size, config.num_attention_heads
        return decoder_costs_by_length(
            self.layer_costs,
            self._parts,
            width=width,
            attended=heads * (getattr(config, "head_dim", None) or width // heads),
            vocab_size=config.vocab_size,
        )

    def write(self, pipe: Pipeline) -> str | None:
        return write(self._settings, self._tokenizer, self.num_tokens or 0, pipe) if self.writes else None


class TokenBatchReader:
    """Turns a batch of the user's data, as the collators of transformers make it, into inputs and labels.

    A batch is a dict of tensors: `input_ids` [B, T], `labels`, and whatever else the model's forward takes. Labels
    are as the model's own loss takes them. For a decoder they are the tokens themselves, not shifted, and -100 for a
    token that does not count. A model with an encoder has labels of their own length.

    Args:
        model: as it was given, for errors.
    """

    def __init__(self, decoder: Decoder, model: str) -> None:
        self._decoder, self._model = decoder, model
        self._names = inspect.signature(type(decoder.model).forward).parameters.keys() - {"self"}
        self._num_tokens = int(decoder.model.get_input_embeddings().num_embeddings)
        # T5 and Mamba take any number of tokens.
        self._most = getattr(decoder.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def __call__(self, batch: Any, what: str) -> Example:
        """The batch as inputs and labels.

        Args:
            what: the name of the batch in errors.

        Raises:
            SettingsError: a batch that no stage could run, or that the model would take without an error although its
                user means something else: unknown names, samples beyond the model's length, labels that do not count.
        """
        given = tensors_of(batch) if isinstance(batch, Mapping) else {}
        if missing := [name for name in (TOKENS, LABELS) if not isinstance(given.get(name), Tensor)]:
            has = f"has {', '.join(map(str, given))}" if given else f"is a {type(batch).__name__}"
            raise SettingsError(
                f"{OPTION}: {what} {has}, and {self._model} takes dicts of tensors [samples, tokens]; give "
                f"{' and '.join(missing)} as the collators of transformers do. {LABELS} are the {TOKENS} themselves "
                "where the model writes on, with -100 where a token does not count"
            )
        if unknown := given.keys() - self._names:  # a forward with **kwargs would pass over them
            raise SettingsError(
                f"{OPTION}: {what} has {', '.join(sorted(unknown))}, which the forward of {self._model} does not "
                f"take; leave it out, or name it as the forward does: {', '.join(sorted(self._names))}"
            )
        require_samples(given, None, what)
        # Rotary positions would go on without a word.
        if self._most is not None and (length := given[TOKENS].shape[-1]) > self._most:
            raise SettingsError(
                f"{OPTION}: {what} has samples of {length} tokens, and {self._model} takes {self._most}; cut them"
            )
        if wrong := [each for each in map(int, given[TOKENS].aminmax()) if not 0 <= each < self._num_tokens]:
            raise SettingsError(
                f"{OPTION}: {what} has token {wrong[0]} of {self._num_tokens} from 0 on; use the model's tokenizer"
            )
        if not self._decoder.loss.weight(given[LABELS]):
            raise SettingsError(
                f"{OPTION}: no label in {what} counts, so nothing would be learnt from it; give {LABELS} other than "
                "-100, behind the first token where the model writes on"
            )
        try:
            return Example(*self._decoder.inputs_and_targets(given))
        except DecoderError as error:
            raise SettingsError(f"{OPTION}: {what}: {error}") from None


def require_readable_tokenizer(folder: Path, settings: Settings) -> None:
    """Raises SettingsError if a folder has a tokenizer that can't be read, so that text would be read as bytes."""
    if settings.tokenizer is not None or (folder / "tokenizer.json").is_file():
        return
    found = next((name for name in UNREAD_TOKENIZERS if (folder / name).is_file()), None)
    if found is not None:
        raise SettingsError(
            f"--model {settings.model} has a tokenizer in {found}, and no tokenizer.json, which alone is read; "
            f"AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER) of transformers writes "
            "one, or give another with --tokenizer"
        )


def find(model: str) -> tuple[Path, bool]:
    """The folder that a path means, and whether its weights are read. Raises SettingsError."""
    folder, has_weights = place_of(model)
    if not (folder / "config.json").is_file():
        raise SettingsError(
            f"--model {model}: there is no config.json; give gpt, bert, clip, a folder that save_pretrained left, or "
            "the config.json of a Hugging Face model. Nothing is downloaded: transformers saves one of the hub into "
            "a folder by AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER), the tokenizer alike"
        )
    if not has_weights and folder == Path(model):
        others = [file.name for pattern in UNREAD for file in sorted(folder.glob(pattern))]
        if others:
            raise SettingsError(
                f"--model {model} holds weights in {others[0]} alone, which are not read, as only safetensors are; "
                "save it by transformers, AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(ANOTHER), or "
                f"give {model}/config.json to begin with fresh weights"
            )
    return folder, has_weights


def sizes_in(folder: Path) -> dict[str, Any]:
    """The sizes in the config, without entries that say nothing about the model's shape. Raises SettingsError."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} can't be read: {error}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{path} is no JSON object; give the config.json of a Hugging Face model")
    return {name: value for name, value in values.items() if not (name.startswith("_") or "drop" in name)}


def decoder_of(folder: Path, has_weights: bool, settings: Settings) -> Decoder:
    """The decoder, with nothing built. Raises SettingsError; for an unknown architecture, it says what
    was looked for.
    """
    sizes_in(folder)
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise SettingsError(f"--model {settings.model}: {what_to_install(error) or error}") from None
    if settings.lora is not None and importlib.util.find_spec("peft") is None:
        raise SettingsError(f"--lora: {what_to_install(ModuleNotFoundError(name='peft'))}")
    try:
        if has_weights:
            return Decoder(folder, lora=lora_of(settings), seed=settings.seed, packed=settings.is_packed)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except DecoderError as error:
        raise _refused(settings, error) from None
    except (ValueError, KeyError) as error:
        reason = str(error).split(". ")[0].splitlines()[0]
        raise SettingsError(
            f"{folder / 'config.json'}: transformers knows no such model: {reason}\n{BY_HAND}"
        ) from None
    try:
        return Decoder(config, lora=lora_of(settings), seed=settings.seed, packed=settings.is_packed)
    except DecoderError as error:
        raise _refused(settings, error) from None


def _refused(settings: Settings, error: DecoderError) -> SettingsError:
    """The error in a line or two, since transformers would list everything that it knows."""
    reason = " ".join(str(error).split())
    if len(reason) > MOST:
        reason = reason[:MOST].rsplit(" ", 1)[0] + " ..."
    if isinstance(error, AdapterError):
        targets = '; "target_modules": "all-linear" takes all linear layers' if "target" in reason.lower() else ""
        return SettingsError(f"--model {settings.model}: {reason}{targets}")
    by_hand = "" if "ps.Pipeline" in reason else "\n" + BY_HAND
    return SettingsError(f"--model {settings.model}: {reason}{by_hand}")
