"""Which weights of a decoder are sharded over tensor-parallel ranks: read off the plan that transformers has for it.

A config names what may be cut, `layers.*.self_attn.q_proj: colwise`. A module all of whose weights it names, in
styles that we know, from columns to rows, becomes a region; the rest of a model stays whole on every rank. GPT-2 and
OPT, for which transformers has no plan, have one here. Embedding and head are sharded over the vocabulary.

GPT-2's linear layers are Conv1D of transformers, whose weight is [in, out], the other way round. Its attention has
query, key and value side by side, [in, 3 D]. Consecutive columns of that are no whole heads, so this weight stays
whole on every rank, under its shape; each rank computes with the columns of its heads alone:

    weight   q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3
    rank 1         q2 q3         k2 k3         v2 v3
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from penstock.models.dividing import require_heads, require_vocabulary, require_width
from penstock.runtime.tensor_parallel import ShardedModule, Sharding, entered, summed
from penstock.runtime.tensors.dtensor import local

__all__ = ["Shards", "require_parallel_decoder", "shards_of"]

COLUMNS, ROWS, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"
FUSED = "query, key and value side by side"
FIRST, LAST = "columns, and the region begins here", "rows, and the region ends here"

PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "h.*.attn.c_attn": FUSED,
        "h.*.attn.c_proj": ROWS,
        "h.*.mlp.c_fc": COLUMNS,
        "h.*.mlp.c_proj": ROWS,
    },
    "opt": {
        **{f"decoder.layers.*.self_attn.{name}_proj": COLUMNS for name in ("q", "k", "v")},
        "decoder.layers.*.self_attn.out_proj": ROWS,
        "decoder.layers.*.fc1": FIRST,
        "decoder.layers.*.fc2": LAST,
    },
}
"""By kind of model, where transformers has none."""


@dataclass(frozen=True)
class Shards:
    """What of a decoder is sharded, by path in the model.

    Attributes:
        regions: of each module that is one, the styles of its children with weights; itself is the child "".
        embedding, head: those of tokens; None where they stay whole.
    """

    regions: Mapping[str, Mapping[str, str]]
    embedding: str | None
    head: str | None

    def apply(self, modules: Mapping[str, nn.Module], sharding: Sharding) -> None:
        """Shards modules at their paths and what is below them, each once. Raises ParallelError."""
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
    """What can be sharded of a causal language model; its weights may lie on the meta device."""
    config = model.config.get_text_config(decoder=True)
    plan = PLANS.get(config.model_type) or getattr(config, "base_model_tp_plan", None) or {}
    inner = f"{model.base_model_prefix}."

    def style(path: str) -> str:
        return str(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path.removeprefix(inner)), ""))

    regions: dict[str, Mapping[str, str]] = {}
    for path, module in model.named_modules():
        if style(path) in (FIRST, LAST):
            regions[path] = {"": style(path)}
            continue
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


def require_parallel_decoder(config: Any, num_ranks: int) -> None:
    """Raises ParallelError where a config's heads or vocabulary do not divide into tensor-parallel ranks."""
    if num_ranks == 1:
        return
    config = config.get_text_config(decoder=True)
    what = f"a {config.model_type}"
    if (heads := getattr(config, "num_attention_heads", None)) is not None:  # Mamba's blocks stay whole
        require_heads(what, heads, num_ranks)
    keys = getattr(config, "num_key_value_heads", None)
    if keys is not None:
        require_heads(what, keys, num_ranks, "key and value heads")
    require_vocabulary(what, config.vocab_size, num_ranks)


def _embedding_divides(embedding: Any) -> bool:
    known = type(embedding) is nn.Embedding or type(embedding).__name__.endswith("TextScaledWordEmbedding")
    return known and not (embedding.sparse or embedding.max_norm or embedding.scale_grad_by_freq)


def _is_region(children: Mapping[str, nn.Module], styles: Mapping[str, str]) -> bool:
    found = list(styles.values())
    begins = COLUMNS in found or FUSED in found
    if not begins or found.count(ROWS) != 1 or not set(found) <= {COLUMNS, ROWS, WHOLE, FUSED}:
        return False
    kinds = {name: type(child) for name, child in children.items() if styles[name] != WHOLE}
    return all(kind is nn.Linear or _is_conv1d(kind) for kind in kinds.values())


def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _shard_region(path: str, module: nn.Module, styles: Mapping[str, str], sharding: Sharding) -> None:
    num_ranks = sharding.mesh.size()
    children = {name: module.get_submodule(name) for name in styles}
    last = next((children[name] for name, style in styles.items() if style == ROWS), None)
    if set(styles.values()) != {LAST}:
        sharding.region(module, last if _drops_out(module) else None)
    head = getattr(module, "head_dim", getattr(module, "head_size", 1))
    for name, child in children.items():
        style, where = styles[name], f"{path}.{name}".removesuffix(".")
        if style == WHOLE:
            sharding.whole(child)
        elif style in (ROWS, LAST):
            _shard_rows(where, child, sharding)
        else:
            _shard_columns(where, child, head, style == FUSED, sharding)
    for name in ("num_heads", "split_size"):  # what GPT-2's and OPT's code asks for; others go by their tensors
        if name in vars(module):
            setattr(module, name, getattr(module, name) // num_ranks)


def _shard_columns(path: str, module: nn.Module, head: int, fused: bool, sharding: Sharding) -> None:
    width = module.out_features if isinstance(module, nn.Linear) else int(module.nf)  # type: ignore[arg-type]
    parts = 3 * head if fused else head
    if head > 1:
        require_heads(path, width // parts, sharding.mesh.size())
    else:
        require_width(path, width, sharding.mesh.size())
    if isinstance(module, nn.Linear):
        sharding.columns(module)
    elif fused:
        sharding.become(module, FusedConv1D)
    else:
        sharding.parameter(module, "weight", 1)
        sharding.parameter(module, "bias", 0)
        sharding.become(module, ColumnConv1D)


def _shard_rows(path: str, module: nn.Module, sharding: Sharding) -> None:
    if isinstance(module, nn.Linear):
        require_width(path, module.in_features, sharding.mesh.size())
        sharding.rows(module)
    else:
        sharding.parameter(module, "weight", 0)
        sharding.become(module, RowConv1D)


def _drops_out(module: nn.Module) -> bool:
    """Whether a module may draw random numbers between its columns and its rows."""
    given = [getattr(module, name, 0.0) for name in ("attention_dropout", "attn_dropout", "dropout")]
    return any((each.p if isinstance(each, nn.Dropout) else each) > 0 for each in given)


class ColumnConv1D(ShardedModule):
    """In a region: some of the output features."""

    weight: Tensor
    bias: Tensor

    def on_shard(self, x: Tensor) -> Tensor:
        return linear(x, local(self.weight).T, local(self.bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.on_shard(x)


class RowConv1D(ShardedModule):
    """The end of a region: some of the input features."""

    weight: Tensor
    bias: Tensor

    def on_shard(self, x: Tensor) -> Tensor:
        return linear(x, local(self.weight).T)

    def forward(self, x: Tensor) -> Tensor:
        y = summed(self.on_shard(x), self.mesh)
        return y + self.bias.to(y.dtype)


class FusedConv1D(ShardedModule):
    """In a region: query, key and value of some of the heads, of a weight that every rank holds in full."""

    weight: Tensor
    bias: Tensor

    def on_shard(self, x: Tensor) -> Tensor:
        return linear(x, self._columns(self.weight).T, self._columns(self.bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.on_shard(x)

    def _columns(self, whole: Tensor) -> Tensor:
        """[..., 3 D] to [..., 3 D/n]; the gradients of all ranks' columns make that of the whole."""
        apart = entered(whole, self.mesh).unflatten(-1, (3, self.mesh.size(), -1))
        return apart.select(-2, self.mesh.get_local_rank()).flatten(-2)
