"""Hugging Face decoders as flat lists of layers: found in any causal language model, and called by its own code.

Needs the extra `hf` (transformers), which is imported only when a decoder is made.
"""

from penstock.models.huggingface.anatomy import Anatomy, DecoderError, examine
from penstock.models.huggingface.decoder import Decoder
from penstock.models.huggingface.lora import AdapterError
from penstock.models.huggingface.loss import NextTokenLoss, WithRouterLoss, inputs_and_targets
from penstock.models.huggingface.packed import packed_inputs

__all__ = [
    "AdapterError",
    "Anatomy",
    "Decoder",
    "DecoderError",
    "NextTokenLoss",
    "WithRouterLoss",
    "examine",
    "inputs_and_targets",
    "packed_inputs",
]
