"""Text out of a model, token by token, from any function that gives logits: a module, or a whole pipeline."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["sample"]


def sample(
    logits: Callable[[Tensor], Tensor],
    prompt: Tensor,
    num_tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Continues prompts: int64[B, T] to int64[B, T + num_tokens]. The same seed draws the same tokens on all ranks.

    Args:
        logits: maps tokens[B, T] to [B, T, V].
        prompt: int64[B, T].
        num_tokens: tokens to add to each prompt.
        context: the model sees the last so many tokens.
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_k: keeps only the likeliest so many candidates; all where not given.
        seed: decides alone what is drawn.

    Raises:
        ValueError: a prompt without tokens, a temperature below 0, or a `top_k` below 1.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> def counting(tokens):
        ...     return torch.nn.functional.one_hot((tokens + 1) % 10, 10).float()
        >>> ps.models.sample(counting, torch.tensor([[3]]), num_tokens=4, context=8, temperature=0)
        tensor([[3, 4, 5, 6, 7]])
    """
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"a prompt of shape {list(prompt.shape)}; it must be [B, T] with at least one token")
    if temperature < 0:
        raise ValueError(f"a temperature of {temperature}; it must be at least 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k {top_k}; it must keep at least 1 token")
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    with torch.no_grad():
        for _ in range(num_tokens):
            last = logits(tokens[:, -context:])[:, -1].float().cpu()  # B, V
            tokens = torch.cat([tokens, _draw(last, temperature, top_k, generator).to(tokens.device)], dim=1)
    return tokens


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Logits[B, V] to tokens[B, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        best, places = logits.topk(top_k, dim=-1)
        chosen = torch.multinomial((best / temperature).softmax(dim=-1), 1, generator=generator)
        return places.gather(-1, chosen)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
