"""Text and tokens: where they come from, how they are kept, and which batch belongs to which step.

Only numpy is needed here; torch comes in with `to_tensors`.
"""

from penstock.data.batches import Batch, Batches, to_tensors, validation_batches
from penstock.data.corpus import Corpus, Summary, open_corpus, prepare
from penstock.data.masked import MaskedSamples, MaskedText
from penstock.data.megatron import IndexedTokens, IndexedWriter
from penstock.data.paired import PairedSamples, TokenForm, VectorForm
from penstock.data.sequences import PackedRow, Sequences, document_lengths
from penstock.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from penstock.data.tokens import DataError

__all__ = [
    "Batch",
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "DataError",
    "IndexedTokens",
    "IndexedWriter",
    "MaskedSamples",
    "MaskedText",
    "PackedRow",
    "PairedSamples",
    "Sequences",
    "Summary",
    "TokenForm",
    "Tokenizer",
    "VectorForm",
    "document_lengths",
    "load_tokenizer",
    "open_corpus",
    "prepare",
    "to_tensors",
    "validation_batches",
]
