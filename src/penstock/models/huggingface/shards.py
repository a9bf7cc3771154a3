"""Which weights of a decoder tensor-parallel ranks share, read from the plan that transformers has for the model.

A config names the weights that can be cut, such as `layers.*.self_attn.q_proj: colwise`. A module becomes a region if
the plan names all its weights, in styles that Penstock knows, from columns to rows. Every rank holds the rest of the
model whole. The embedding and the head are cut along the vocabulary. transformers has no plan for GPT-2 and OPT, so
ranks share only their embedding and head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.models.parallel import require_heads, require_vocabulary, require_width
from penstock.runtime.tensor_parallel import Sharding

__all__ = ["Shards", "shards_of"]

COLUMNS, ROWS, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class Shards:
    """The modules of a decoder that ranks share, by path in the model.

    Attributes:
        regions: the style of each child with weights, for each module that is a region.
        embedding, head: of tokens. None if every rank holds it whole.
    """

    regions: Mapping[str, Mapping[str, str]]
    embedding: str | None
    head: str | None

    def apply(self, modules: Mapping[str, nn.Module], sharding: Sharding) -> None:
        """Shards the modules at these paths and the modules below them, each once. Raises ParallelError."""
        num_ranks = sharding.mesh.size()
        for path, module in modules.items():
            for below, each in module.named_modules(prefix=path):
                if below in self.regions and sharding.takes(each):
                    _shard_region(below, each, self.regions[below], sharding)
                elif below == self.embedding and isinstance(each, nn.Embedding) and sharding.takes(each):
                    require_vocabulary(below, each.num_embeddings, num_ranks)
                    sharding.embedding(each)
                elif below == self.head and isinstance(each, nn.Linear) and sharding.takes(each):
                    require_vocabulary(below, each.out_features, num_ranks)
                    sharding.head(each)


def shards_of(model: Any) -> Shards:
    """What ranks can share of a causal language model, whose weights may lie on the meta device."""
    config = model.config.get_text_config(decoder=True)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    inner = f"{model.base_model_prefix}."

    def style(path: str) -> str:
        return str(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path.removeprefix(inner)), ""))

    regions: dict[str, Mapping[str, str]] = {}
    for path, module in model.named_modules():
        children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
        styles = {name: style(f"{path}.{name}") for name in children}
        if not module._parameters and _is_region(children, styles):
            regions[path] = styles
    names = {id(module): path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    divides = _embedding_divides(embedding), type(head) is nn.Linear
    if head is not None and head.weight is embedding.weight:
        divides = all(divides), all(divides)
    return Shards(
        regions, names.get(id(embedding)) if divides[0] else None, names.get(id(head)) if divides[1] else None
    )


def _embedding_divides(embedding: Any) -> bool:
    known = type(embedding) is nn.Embedding or type(embedding).__name__.endswith("TextScaledWordEmbedding")
    return known and not (embedding.sparse or embedding.max_norm or embedding.scale_grad_by_freq)


def _is_region(children: Mapping[str, nn.Module], styles: Mapping[str, str]) -> bool:
    found = list(styles.values())
    if COLUMNS not in found or found.count(ROWS) != 1 or not set(found) <= {COLUMNS, ROWS, WHOLE}:
        return False
    return all(type(child) is nn.Linear for name, child in children.items() if styles[name] != WHOLE)


def _shard_region(path: str, module: nn.Module, styles: Mapping[str, str], sharding: Sharding) -> None:
    num_ranks = sharding.mesh.size()
    children: dict[str, Any] = {name: module.get_submodule(name) for name in styles}
    last = next(children[name] for name, style in styles.items() if style == ROWS)
    sharding.region(module, last if _drops_out(module) else None)
    head = getattr(module, "head_dim", getattr(module, "head_size", 1))
    for name, child in children.items():
        where = f"{path}.{name}"
        if styles[name] == WHOLE:
            sharding.whole(child)
        elif styles[name] == ROWS:
            require_width(where, child.in_features, num_ranks)
            sharding.rows(child)
        else:
            if head > 1:
                require_heads(where, child.out_features // head, num_ranks)
            else:
                require_width(where, child.out_features, num_ranks)
            sharding.columns(child)


def _drops_out(module: nn.Module) -> bool:
    """Whether a module may draw random numbers between its columns and its rows."""
    given = [getattr(module, name, 0.0) for name in ("attention_dropout", "attn_dropout", "dropout")]
    return any((each.p if isinstance(each, nn.Dropout) else each) > 0 for each in given)
