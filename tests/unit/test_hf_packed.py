"""Whole documents in one row of a Hugging Face decoder: none sees another, and pipelines train on them to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from hf_families import FAMILIES, config_of, model_of
from penstock.cli import main
from penstock.models import CrossEntropy
from penstock.train.inputs import gather_inputs
from penstock.train.settings import Settings
from tiers import others_nightly
from train_runs import losses

transformers = pytest.importorskip("transformers")

from penstock.models.huggingface import Decoder, DecoderError, packed_inputs  # noqa: E402
from penstock.models.huggingface.packed import attend_each, use_each_sequence  # noqa: E402

pytestmark = pytest.mark.unit

TOGETHER = {
    "opt": "does not take several sequences in one row",
    "falcon": "does not take several sequences in one row",
    "bloom": "works out attention by 'eager'",
    "gemma2": "works out attention by 'eager'",
    "gpt_oss": "works out attention by 'eager'",
    "mamba": "works out attention by 'eager'",
    "jamba": "does not keep sequences in one row apart",
    **dict.fromkeys(("bert", "t5", "mt5", "bart", "marian", "led"), "is no decoder alone"),
}
"""Families that are refused, with a part of the reason: their attention is their own, has sinks or caps or numbers
added by place, a state goes on from token to token, or they are no decoders."""
APART = [name for name in FAMILIES if name not in TOGETHER]
LENGTHS = torch.tensor([7, 1, 11, 4])
BY_DAY = ("llama", "mistral", "mixtral", "jamba", "falcon", "gpt_oss", "t5")


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a row, and their targets."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 290, (2, int(LENGTHS.sum())), generator=draw)
    return tokens[:1], tokens[1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(FAMILIES, BY_DAY))
def test_a_family_keeps_documents_apart_or_is_refused(name: str) -> None:
    if name in TOGETHER:
        with pytest.raises(DecoderError, match=TOGETHER[name]):
            Decoder(config_of(name), packed=True, compare=False)
        return
    assert Decoder(config_of(name), packed=True, compare=False).num_layers > 2


@pytest.mark.parametrize("name", others_nightly(["llama", "gpt2", "gemma3_text", "qwen3"], ["llama", "gemma3_text"]))
def test_a_pipeline_learns_what_the_whole_model_does(name: str) -> None:
    """To the bit; and as when each document is given alone, by transformers' own attention, but for rounding."""
    model = model_of(name)
    usual = model.config._attn_implementation
    batches = [rows(seed) for seed in range(4)]
    loss_fn = CrossEntropy()
    alone = torch.zeros(())
    for tokens, targets in batches:
        for own, wanted in zip(tokens.split(LENGTHS.tolist(), 1), targets.split(LENGTHS.tolist(), 1), strict=True):
            loss = loss_fn(model(input_ids=own, use_cache=False).logits, wanted)
            alone = alone + loss.detach() * wanted.numel() / sum(each.numel() for _, each in batches)
    assert model.config._attn_implementation == usual
    decoder = Decoder(model, packed=True)
    pipe = ps.Pipeline(
        decoder.stages(3),
        ps.build("zb-h1", 3, 4),
        loss_fn=loss_fn,
        parallel=ps.ParallelOptions(tied=decoder.tied),
    )
    inputs = [packed_inputs(tokens, LENGTHS) for tokens, _ in batches]
    found = pipe.step(inputs, [targets for _, targets in batches]).loss
    gradients = {key: parameter.grad for key, parameter in pipe.named_parameters()}
    model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    sums: dict[str, torch.Tensor] = {}
    for given, (_, targets) in zip(inputs, batches, strict=True):
        loss = loss_fn(model(**given, use_cache=False).logits, targets) * 0.25
        loss.backward()
        total = total + loss.detach()
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[key] = sums[key] + parameter.grad if key in sums else parameter.grad
        model.zero_grad(set_to_none=True)
    assert torch.equal(found, total)
    assert found.item() == pytest.approx(alone.item(), rel=1e-5)
    assert set(gradients) == set(sums)
    assert all(torch.equal(each, sums[key]) for key, each in gradients.items() if each is not None)


def test_a_window_shorter_than_a_document_is_kept() -> None:
    """Mistral's, of 4 tokens, beside the logits that transformers gives each document by its own mask."""
    model = model_of("mistral", sliding_window=4).double().eval()
    tokens, _ = rows(0)
    with torch.no_grad():
        alone = [model(input_ids=each, use_cache=False).logits for each in tokens.split(LENGTHS.tolist(), 1)]
        use_each_sequence(model)
        together = model(**packed_inputs(tokens, LENGTHS), use_cache=False).logits
    for wanted, found in zip(alone, together.split(LENGTHS.tolist(), 1), strict=True):
        assert torch.allclose(wanted, found, rtol=1e-10, atol=1e-12)


def test_padding_is_refused_and_never_passed_over() -> None:
    """A mask of two dimensions would be lost on the way: it never reaches the attention."""
    model = model_of("llama")
    decoder = Decoder(model, packed=True)
    tokens, mask = torch.ones(2, 5, dtype=torch.int64), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with pytest.raises(DecoderError, match="sample 1 of 5 tokens has 2 that are padding"):
        model(input_ids=tokens, attention_mask=mask)
    pipe = ps.Pipeline(decoder.stages(2), ps.build("1f1b", 2, 1), loss_fn=CrossEntropy())
    with pytest.raises(DecoderError, match="has 2 that are padding"):
        pipe.step([{"input_ids": tokens, "attention_mask": mask}], [tokens])
    whole = model(input_ids=tokens, attention_mask=torch.ones_like(mask)).logits
    assert torch.equal(whole, model(input_ids=tokens).logits)


def test_a_model_that_keeps_documents_apart_already_is_refused_with_the_way_back() -> None:
    """It was refused for padding that nobody had given."""
    model = model_of("llama")
    Decoder(model, packed=True)
    for packed in (False, True):
        with pytest.raises(DecoderError, match=r'call model\.set_attn_implementation\("sdpa"\) first'):
            Decoder(model, packed=packed)
    model.set_attn_implementation("sdpa")
    assert Decoder(model, packed=True).num_layers == Decoder(model_of("llama")).num_layers


def test_masks_that_are_no_lengths_are_refused() -> None:
    query = torch.zeros(1, 2, 6, 4)
    for mask in (torch.ones(1, 6, dtype=torch.int64), torch.tensor([[[[2, 3]]]]), torch.ones(1, 1, 6, 6)):
        with pytest.raises(DecoderError, match="packed_inputs"):
            attend_each(None, query, query, query, mask)
    with pytest.raises(DecoderError, match=r"7 tokens in all were given with tokens\[1, 6\]"):
        packed_inputs(torch.zeros(1, 6, dtype=torch.int64), torch.tensor([3, 4]))


SMALL = (
    "--context 64 --batch 16 --microbatches 4 --ranks 2 --threads 1 --evaluate-every 0 --sample 4 --steps 4 "
    "--in-process --clip 0 --set lr_decay=constant --set lr_warmup=0"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and documents of very different lengths."""
    top = tmp_path_factory.mktemp("packed")
    (top / "texts").mkdir()
    for number in range(60):
        (top / "texts" / f"{number:02}.txt").write_text(f"the document {number}. " * (1 + number * number // 60))
    model_of("llama", max_position_embeddings=64).save_pretrained(top / "model")
    return top


def train(folder: Path, out: Path, options: str, capfd: Any, code: int = 0) -> Any:
    line = f"train --model {folder / 'model'} --data {folder / 'texts'} --out {out} {SMALL} {options} --json"
    assert main(line.split()) == code
    said = capfd.readouterr()
    return json.loads(said.out) if code == 0 else said.out + said.err


@pytest.mark.slow
def test_at_the_prompt_losses_are_those_of_the_plain_loop_over_planned_microbatches(
    folder: Path, tmp_path: Path, capfd: Any
) -> None:
    train(folder, tmp_path / "run", "--packing planned --dispatch auto --schedule zb-v", capfd)
    settings = Settings.from_mapping(json.loads((tmp_path / "run" / "settings.json").read_text()))
    documents = gather_inputs(settings).data.documents
    assert documents is not None
    model = model_of("llama", max_position_embeddings=64)
    use_each_sequence(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1)
    loss_fn, found = CrossEntropy(), []
    for step, line in enumerate((tmp_path / "run" / "batches.jsonl").read_text().splitlines()):
        (microbatches,) = json.loads(line)["microbatches"]
        assert sorted(k for each in microbatches for k in each) == sorted(documents.of_step(step))
        inputs, targets = documents.example(microbatches)
        tokens = sum(each.numel() for each in targets)
        total = torch.zeros(())
        for given, wanted in zip(inputs, targets, strict=True):
            loss = loss_fn(model(**given, use_cache=False).logits, wanted) * (wanted.numel() / tokens)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total.item())
    assert losses(tmp_path / "run") == found
    train(folder, tmp_path / "again", f"--packing {tmp_path / 'run' / 'batches.jsonl'} --recompute", capfd)
    assert losses(tmp_path / "again") == found


def test_what_sees_other_documents_is_refused_at_the_prompt(folder: Path, tmp_path: Path, capfd: Any) -> None:
    config_of("jamba", max_position_embeddings=64).save_pretrained(tmp_path / "jamba")
    said = train(
        folder, tmp_path / "run", f"--model {tmp_path / 'jamba' / 'config.json'} --packing planned", capfd, 2
    )
    assert "does not keep sequences in one row apart" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
