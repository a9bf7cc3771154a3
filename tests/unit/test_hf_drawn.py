"""Weights drawn from a configuration are drawn as transformers draws them, every one of them."""

from __future__ import annotations

import pytest
import torch
import transformers

from hf_families import FAMILIES, config_of
from penstock.models.huggingface import Decoder
from tiers import others_nightly

pytestmark = pytest.mark.unit


def drawn(name: str) -> dict[str, torch.Tensor]:
    decoder = Decoder(config_of(name), compare=False)
    return {key: p.detach() for layer in decoder.layers() for key, p in layer.named_parameters()}


def spread(value: torch.Tensor) -> float:
    return float(value.detach().std(correction=0))


@pytest.mark.parametrize("name", others_nightly(FAMILIES, list(FAMILIES)[1::2]))
def test_each_weight_is_drawn_as_the_whole_model_has_it(name: str) -> None:
    """A tower's class embedding was memory as it was found: the rules of the model around it know none."""
    found, again = drawn(name), drawn(name)
    config = config_of(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        whole = dict(getattr(transformers, config.architectures[0])(config).named_parameters())
    assert found
    for key, value in found.items():
        assert torch.equal(value, again[key]), key
        if key in whole and spread(whole[key]) == 0:
            assert torch.equal(value, whole[key]), key
        elif key in whole and value.numel() >= 16:
            within = 1.4 if value.numel() >= 256 else 4.0  # what draws of so few can differ by
            assert 1 / within < spread(value) / spread(whole[key]) < within, key
