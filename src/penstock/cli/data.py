"""`penstock data`: text tokenised once, and how long its documents are.

penstock data prepare my-texts/ corpus --tokenizer tokenizer.json
penstock data lengths corpus.bin --context 4096
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.options import Json
from penstock.cli.output import plural, print_json

Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", help="A tokenizer.json, or a folder with one. [bytes as tokens]")
]

data = typer.Typer(
    help="Prepare text for training, and show how long documents are.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data, name="data")


@data.command(short_help="Tokenise text into a .bin/.idx pair.")
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="A text file, a folder of them, or JSONL with a field 'text'; stdlib is Python's own library.",
        ),
    ],
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="What is written is PREFIX.bin and PREFIX.idx.")],
    tokenizer: Tokenizer = None,
    json: Json = False,
) -> None:
    """Tokenise text into a Megatron .bin/.idx pair, which training maps into memory."""
    from penstock.data import ByteTokenizer, load_tokenizer
    from penstock.data import prepare as write
    from penstock.data.corpus import words_of_passed_over

    chosen = ByteTokenizer() if tokenizer is None else load_tokenizer(tokenizer)
    made = write(None if source == "stdlib" else source, prefix, chosen)
    if json:
        print_json({**asdict(made), "prefix": str(made.prefix)})
    else:
        print(
            f"wrote {made.prefix}.bin and .idx: {plural(made.num_documents, 'document')}, "
            f"{plural(made.num_tokens, 'token')} as {made.dtype}, in {made.seconds:.1f} s"
            f"{words_of_passed_over(made.passed_over)}"
        )


@data.command(short_help="Show how long the documents of a text are.")
def lengths(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A text file, a folder of them, JSONL or a .bin/.idx pair; stdlib is Python's own library.",
        ),
    ],
    tokenizer: Tokenizer = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Tokens per sample, into which longer documents are cut. [no cut]"),
    ] = None,
    json: Json = False,
) -> None:
    """Show for each length how many documents have it, and which share of all tokens and of all attention that is.

    Attention costs the square of a document's length. The twentieth that training keeps for validation counts too.
    """
    import numpy as np

    from penstock.data import ByteTokenizer, Sequences, document_lengths, load_tokenizer, open_corpus

    chosen = ByteTokenizer() if tokenizer is None else load_tokenizer(tokenizer)
    corpus = open_corpus(None if source == "stdlib" else source, chosen)
    sides = (corpus.train, corpus.train_starts), (corpus.validation, corpus.validation_starts)
    if context is None:
        found = np.concatenate([document_lengths(tokens.size, starts) for tokens, starts in sides])
    else:
        used = [(tokens, starts) for tokens, starts in sides if (document_lengths(tokens.size, starts) > 1).any()]
        found = np.concatenate([Sequences(tokens, starts, context, context).lengths for tokens, starts in used])
    _show_lengths(found.tolist(), "sequences" if context else "documents", json)


BAR = 40


def _histogram(found: Sequence[int], what: str) -> dict[str, Any]:
    """The lengths in numbers, and their histogram by powers of two."""
    import numpy as np

    sizes = np.asarray(found, np.int64)
    tokens, squares = int(sizes.sum()), float(np.square(sizes.astype(np.float64)).sum())
    power = np.frexp(sizes)[1] - (np.frexp(sizes)[0] == 0.5)  # the least power of two that is no shorter
    rows = []
    for each in range(int(power.min()), int(power.max()) + 1):
        own = sizes[power == each].astype(np.float64)
        rows.append((2**each, len(own), float(own.sum() / tokens), float(np.square(own).sum() / squares)))
    names = ("up_to", "count", "share_of_tokens", "share_of_squares")
    return {
        "what": what,
        "count": len(sizes),
        "num_tokens": tokens,
        "mean": tokens / len(sizes),
        "longest": int(sizes.max()),
        **dict(zip(("p5", "p50", "p95"), np.percentile(sizes, (5, 50, 95)).tolist(), strict=True)),
        "histogram": [dict(zip(names, row, strict=True)) for row in rows],
    }


def _show_lengths(found: Sequence[int], what: str, json: bool) -> None:
    histogram = _histogram(found, what)
    if json:
        print_json(histogram)
        return
    print(
        f"{histogram['count']:,} {what}, {histogram['num_tokens']:,} tokens: {histogram['mean']:,.0f} in the mean, "
        f"{histogram['longest']:,} at most"
    )
    print(f"p5 {histogram['p5']:,.0f}, p50 {histogram['p50']:,.0f}, p95 {histogram['p95']:,.0f}\n")
    rows = [tuple(row.values()) for row in histogram["histogram"]]
    most = max(count for _, count, _, _ in rows)
    print(f"{'up to':>12} {'count':>9} {'tokens':>7} {'squares':>8}")
    for up_to, count, share, square in rows:
        bar = "#" * -(-count * BAR // most)
        print(f"{up_to:>12,} {count:>9,} {share:>7.1%} {square:>8.1%}  {bar}")
