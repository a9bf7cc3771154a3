"""Models of transformers that are no plain language models, with a batch for each, and plain loops over them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
LLAMA = {**BERT, "num_key_value_heads": 1}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 50, "n_positions": 32, "pad_token_id": 0}
DISTIL = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24, "vocab_size": 50, "max_position_embeddings": 32}
VIT = {**{key: BERT[key] for key in list(BERT)[:4]}, "image_size": 8, "patch_size": 4}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2, "vocab_size": 50}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
NUM_SAMPLES, LENGTH = 7, 9


class SmoothedLlama(transformers.LlamaForCausalLM):
    """Over the tokens as they stand, smoothed."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **rest):  # type: ignore[no-untyped-def]
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, **rest)
        if labels is not None:
            out.loss = cross_entropy(out.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return out


class BareGPT2(transformers.GPT2LMHeadModel):
    """With the next tokens, three times, in training; its forward takes nothing else and returns a plain dict."""

    def forward(self, input_ids, attention_mask=None, labels=None):  # type: ignore[no-untyped-def]
        out = {"logits": super().forward(input_ids, attention_mask=attention_mask).logits}
        if labels is not None:
            each = cross_entropy(out["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            out["loss"] = each * (3 if self.training else 1)
        return out


class MeanOfTextsLlama(transformers.LlamaForCausalLM):
    """The mean over texts of the mean over each one's tokens."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **rest):  # type: ignore[no-untyped-def]
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, **rest)
        if labels is not None:
            each = cross_entropy(out.logits[:, :-1].mT, labels[:, 1:], reduction="none").sum(1)
            out.loss = (each / (labels[:, 1:] != -100).sum(1)).mean()
        return out


class TimesForSequenceClassification(transformers.LlamaForSequenceClassification):
    """Made with more than a config, so that no small copy can be."""

    def __init__(self, config: Any, times: float) -> None:
        super().__init__(config)
        self.times = times

    def forward(self, *args: Any, **rest: Any) -> Any:
        out = super().forward(*args, **rest)
        if out.loss is not None:
            out.loss = self.times * out.loss
        return out


class EmbeddingBert(transformers.BertModel):
    """A base model, which has no loss, with one."""

    def forward(self, input_ids, attention_mask=None, labels=None):  # type: ignore[no-untyped-def]
        out = {"embedding": super().forward(input_ids, attention_mask=attention_mask).pooler_output}
        if labels is not None:
            out["loss"] = (out["embedding"].mean(1) - labels).square().mean()
        return out


class DeepLlama(transformers.LlamaForCausalLM):
    """Its loss looks at what its first block returns."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **rest):  # type: ignore[no-untyped-def]
        out = super().forward(input_ids, attention_mask, labels=labels, output_hidden_states=True, **rest)
        if labels is not None:
            out.loss = out.loss + out.hidden_states[1].square().mean()
        return out


class ContrastBert(transformers.BertModel):
    """Compares each sample with all others of a batch."""

    def forward(self, input_ids, attention_mask=None, labels=None):  # type: ignore[no-untyped-def]
        made = super().forward(input_ids, attention_mask=attention_mask).pooler_output
        return {"embedding": made, "loss": None if labels is None else cross_entropy(made @ made.T, labels)}


def of(kind: Any, *others: Any, **sizes: Any) -> Any:
    """A model of a class, or of a class of transformers by its name; without dropout, as a loop draws others."""
    kind = getattr(transformers, kind) if isinstance(kind, str) else kind
    config = kind.config_class(**sizes)
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = kind(config, *others)
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # some rates are in no config
            module.p = 0.0
    return model.train()


TRAINED: dict[str, Any] = {
    "bert of sequences": lambda: of("BertForSequenceClassification", **BERT, num_labels=3),
    "bert of a number": lambda: of("BertForSequenceClassification", **BERT, num_labels=1),
    "bert of several classes at once": lambda: of(
        "BertForSequenceClassification", **BERT, num_labels=3, problem_type="multi_label_classification"
    ),
    "bert of tokens": lambda: of("BertForTokenClassification", **BERT, num_labels=3),
    "bert of answers": lambda: of("BertForQuestionAnswering", **BERT),
    "bert of choices": lambda: of("BertForMultipleChoice", **BERT),
    "roberta": lambda: of("RobertaForSequenceClassification", **BERT, num_labels=3),
    "distilbert": lambda: of("DistilBertForSequenceClassification", **DISTIL, num_labels=3),
    "deberta": lambda: of("DebertaV2ForTokenClassification", **BERT, num_labels=3),
    "llama of sequences": lambda: of("LlamaForSequenceClassification", **LLAMA, num_labels=3),
    "llama of a number": lambda: of("LlamaForSequenceClassification", **LLAMA, num_labels=1),
    "llama of answers": lambda: of("LlamaForQuestionAnswering", **LLAMA),
    "qwen2 of tokens": lambda: of("Qwen2ForTokenClassification", **LLAMA, num_labels=3),
    "gpt2 of sequences": lambda: of("GPT2ForSequenceClassification", **GPT2, num_labels=3),
    "gpt2 of tokens": lambda: of("GPT2ForTokenClassification", **GPT2, num_labels=3),
    "mixtral": lambda: of("MixtralForSequenceClassification", **LLAMA, num_local_experts=2, num_labels=3),
    "vit": lambda: of("ViTForImageClassification", **VIT, num_labels=3),
    "t5 of tokens": lambda: of("T5ForTokenClassification", **T5, num_labels=3),
    "smoothed": lambda: of(SmoothedLlama, **LLAMA),
    "bare": lambda: of(BareGPT2, **GPT2),
    "mean of texts": lambda: of(MeanOfTextsLlama, **LLAMA),
    "more than a config": lambda: of(TimesForSequenceClassification, 2.0, **LLAMA, num_labels=3),
    "base with a loss": lambda: of(EmbeddingBert, **BERT),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "base": (lambda: of("LlamaModel", **LLAMA), r"has no loss.*AutoModelForCausalLM.*a subclass whose forward takes"),
    "several losses": (lambda: of("BertForPreTraining", **BERT), "no 'loss' by that name"),
    "no padding token": (
        lambda: of("LlamaForSequenceClassification", **{**LLAMA, "pad_token_id": None}),
        r"which are padding.*set model\.config\.pad_token_id",
    ),
    "shared blocks": (
        lambda: of("AlbertForSequenceClassification", **BERT, embedding_size=16),
        "one list of 3 blocks",
    ),
    "encoder and decoder": (
        lambda: of("T5ForSequenceClassification", **T5),
        "does not run apart.*one module per stage",
    ),
    "looks inside": (lambda: of(DeepLlama, **LLAMA), r"does more than call its layers in order"),
    "contrast": (lambda: of(ContrastBert, **BERT), "no mean over labels.*compare=False"),
}


def model_of(name: str) -> Any:
    """The model of a case."""
    return (TRAINED[name] if name in TRAINED else REFUSED[name][0])()


def batch_of(model: Any) -> dict[str, Tensor]:
    """Samples of uneven lengths, with labels as the model takes them."""
    name, num_labels = type(model).__name__, model.config.num_labels
    draw = torch.Generator().manual_seed(1)
    classes = torch.randint(0, num_labels, (NUM_SAMPLES,), generator=draw)
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(NUM_SAMPLES, 3, 8, 8, generator=draw), "labels": classes}
    lengths = torch.tensor([9, 2, 4, 9, 7, 3, 9])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    tokens = torch.randint(3, 50, (NUM_SAMPLES, LENGTH), generator=draw) * mask
    batch = {"input_ids": tokens, "attention_mask": mask}
    if "QuestionAnswering" in name:  # the fourth is behind its text
        ends = torch.tensor([5, 1, 3, 12, 6, 2, 8])
        return {**batch, "start_positions": torch.tensor([2, 0, 3, 11, 1, 2, 7]), "end_positions": ends}
    if "MultipleChoice" in name:
        return {key: torch.stack([each, each.roll(1, 0)], 1) for key, each in batch.items()} | {"labels": classes}
    if "TokenClassification" in name:
        return {**batch, "labels": torch.randint(0, 3, tokens.shape, generator=draw).masked_fill(mask == 0, -100)}
    if num_labels == 1 or isinstance(model, EmbeddingBert):
        return {**batch, "labels": torch.rand(NUM_SAMPLES, generator=draw)}
    if model.config.problem_type == "multi_label_classification":
        return {**batch, "labels": torch.randint(0, 2, (NUM_SAMPLES, num_labels), generator=draw).float()}
    if "SequenceClassification" in name:
        return {**batch, "labels": classes}
    return {**batch, "labels": tokens.masked_fill(mask == 0, -100)}


def whole_step(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss of the batch as a whole, and all gradients."""
    loss = model(**batch)["loss"]
    loss.backward()
    return loss.detach(), gradients_of(model)


def loop_step(model: Any, batch: dict[str, Tensor], num: int, weights: list[int]) -> tuple[Tensor, dict[str, Any]]:
    """The same microbatch by microbatch, each with its weight."""
    total = torch.zeros(())
    for m in range(num):
        loss = model(**{key: each.tensor_split(num)[m] for key, each in batch.items()})["loss"]
        loss = loss * (weights[m] / sum(weights))
        loss.backward()
        total = total + loss.detach()
    return total, gradients_of(model)


def gradients_of(model: Any) -> dict[str, Tensor | None]:
    """All gradients, which are then cleared."""
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def are_equal(one: dict[str, Any], other: dict[str, Any], exactly: bool) -> list[str]:
    """The names of gradients that differ; none and zeros are the same."""
    differing = []
    for name in one:
        first, second = one[name], other[name]
        if first is None or second is None:
            same = not any(each.any() for each in (first, second) if each is not None)
        else:
            same = torch.equal(first, second) if exactly else torch.allclose(first, second, rtol=1e-4, atol=1e-6)
        differing += [] if same else [name]
    return differing
