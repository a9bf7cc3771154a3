"""Adapters of peft on Hugging Face models in stages: what the peft model learns as a whole, to the last bit."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from hf_families import FAMILIES, batch_of, model_of, plain_step
from penstock.cli import main
from penstock.models.huggingface import Decoder, DecoderError, inputs_and_targets
from penstock.models.parallel import ParallelError
from penstock.runtime.checkpoint import CheckpointError, Reader
from penstock.runtime.checkpoint.save_load import find
from tiers import others_nightly
from train_runs import losses

peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[peft]'")

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def quiet_on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


def pipeline(decoder: Decoder, schedule: ps.Schedule, cut: list[int] | None = None, **more: Any) -> ps.Pipeline:
    stages = decoder.stages(schedule.num_stages, cut)
    more = {"parallel": ps.ParallelOptions(tied=decoder.tied), **more}
    return ps.Pipeline(stages, schedule, loss_fn=decoder.loss, **more)


PATTERNED = {
    "target_modules": ["q_proj"],
    "layers_to_transform": [0],
    "rank_pattern": {"layers.0.self_attn.q_proj": 3},
}
CASES: dict[str, tuple[str, dict[str, Any], list[int] | None]] = {
    "usual": ("llama", {}, None),
    "all linears": ("qwen2", {"target_modules": "all-linear", "r": 4}, None),
    "tied, no adapter in the first stage": ("gemma", {"target_modules": ["q_proj"]}, [1, 2, 2, 1]),
    "one block, so most stages learn nothing": ("llama", PATTERNED, [1, 2, 2, 1]),
    "a pattern of late blocks": ("llama", {"target_modules": r"model\.layers\.[2]\..*_proj"}, None),
    "dora": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "use_rslora": True}, None),
    "embedding and head": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, None),
    "head in full": ("gemma", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, None),
    "biases": ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}, None),
    "mixture": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}, None),
    "masked": ("bert", {"target_modules": ["query", "value"]}, None),
}


def other_base(model: Any, folder: Path) -> Path:
    """The same with one frozen weight changed."""
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "norm" in name.lower() or "ln_" in name).add_(1.0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", others_nightly(CASES, ["tied, no adapter in the first stage", "mixture"]))
def test_a_folder_learns_what_the_peft_model_does(case: str, tmp_path: Path) -> None:
    """Loss, gradients and weights after updates; and the adapter goes out, and in again, and over checkpoints."""
    name, lora, cut = CASES[case]
    base, batch = tmp_path / "base", batch_of(name)
    model_of(name).save_pretrained(base)
    decoder = Decoder(base, lora=lora)
    schedule = ps.build("zb-h1", 4, 3)
    pipe = pipeline(decoder, schedule, cut, optimizer=torch.optim.AdamW)
    pipe.save(tmp_path / "fresh")
    pipe.step(*inputs_and_targets(batch))
    path = pipe.save(tmp_path / "trained")
    decoder.export(tmp_path / "adapter", Reader(path))

    kind = type(model_of(name))
    decoder.export(tmp_path / "start", Reader(find(tmp_path / "fresh")))
    whole = peft.PeftModel.from_pretrained(kind.from_pretrained(base), tmp_path / "start", is_trainable=True).train()
    inner = whole.get_base_model()
    optimizer = torch.optim.AdamW(p for p in whole.parameters() if p.requires_grad)
    plain_step(inner, batch, 3, decoder.loss)
    optimizer.step()
    optimizer.zero_grad()
    loss, gradients = plain_step(inner, batch, 3, decoder.loss)
    learnt = {key for key, gradient in gradients.items() if gradient is not None}
    assert learnt
    assert all(key in learnt for key, p in inner.named_parameters() if p.requires_grad)

    assert torch.equal(torch.as_tensor(pipe.step(*inputs_and_targets(batch), update=False).loss), loss)
    found = dict(pipe.named_parameters())
    assert {key for key, p in found.items() if p.requires_grad} == learnt
    wanted = dict(inner.named_parameters(remove_duplicate=False))
    assert [key for key, p in found.items() if not torch.equal(p, wanted[key])] == []
    assert [key for key in learnt if not torch.equal(found[key].grad, gradients[key])] == []
    assert all(found[key].grad is None for key in set(found) - learnt)

    stored = [key.removeprefix("model/") for key in Reader(path).names() if key.startswith("model/")]
    assert {key for key in stored if key in found} == learnt, "a checkpoint holds what is trained alone"
    opened = peft.PeftModel.from_pretrained(kind.from_pretrained(base), tmp_path / "adapter").get_base_model()
    exported = dict(opened.named_parameters(remove_duplicate=False))
    assert all(torch.equal(exported[key], p) for key, p in found.items())
    again = dict(pipeline(Decoder(base, lora=tmp_path / "adapter"), ps.build("1f1b", 2, 3)).named_parameters())
    assert all(torch.equal(again[key], p) and again[key].requires_grad == p.requires_grad for key, p in found.items())

    resumed = pipeline(Decoder(base, lora=lora), ps.build("zb-v", 2, 3), optimizer=torch.optim.AdamW)
    resumed.load(path)
    assert torch.equal(torch.as_tensor(resumed.step(*inputs_and_targets(batch)).loss), loss)
    over = Decoder(other_base(model_of(name), tmp_path / "other"), lora=lora)
    with pytest.raises(CheckpointError, match="is not what it was when they were trained"):
        pipeline(over, schedule, cut, optimizer=torch.optim.AdamW).load(path)


def test_a_peft_model_that_is_there_trains_as_it_is(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["lm_head"])
    given = peft.get_peft_model(model_of("llama"), config)
    decoder, batch = Decoder(given), batch_of("llama")
    pipe = pipeline(decoder, ps.build("zb-v", 2, 3), optimizer=torch.optim.AdamW)
    loss = pipe.step(*inputs_and_targets(batch), update=False).loss
    found = {key: p.grad.clone() for key, p in pipe.named_parameters() if p.grad is not None}
    decoder.export(tmp_path / "adapter", Reader(pipe.save(tmp_path / "checkpoints")))
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "adapter").iterdir()}
    assert modes["adapter_model.safetensors"] == modes["adapter_config.json"], "whoever reads one reads the other"
    opened = peft.PeftModel.from_pretrained(model_of("llama"), tmp_path / "adapter", is_trainable=True).train()
    wanted, gradients = plain_step(opened.get_base_model(), batch, 3, decoder.loss)
    assert torch.equal(torch.as_tensor(loss), wanted)
    assert found.keys() == {key for key, gradient in gradients.items() if gradient is not None}
    assert all(torch.equal(found[key], gradients[key]) for key in found)
    with pytest.raises(DecoderError, match="one too many"):
        Decoder(given, lora={})
    with pytest.raises(DecoderError, match=r"Decoder\(get_peft_model"):
        Decoder(model_of("llama"), lora={})
    given.add_adapter("other", peft.LoraConfig(target_modules=["v_proj"]))
    with pytest.raises(DecoderError, match="2 adapters, default, other"):
        Decoder(given)


@pytest.mark.parametrize(
    ("schedule", "sharding"),
    [(("1f1b", 2), "none"), (("chimera", 2), "copies"), (("interleaved-1f1b", 2), "copies"), (("amdp", 2), "copies")],
)
def test_other_schedules(schedule: tuple[str, int], sharding: str) -> None:
    """Several pipelines hold copies of a stage; updates may be ops."""
    name, ranks = schedule
    built = ps.build(name, ranks, 4)
    config = transformers_config()
    batch = {"input_ids": torch.arange(64).reshape(8, 8) % 50, "labels": torch.arange(64).reshape(8, 8) % 50}
    more = {"optimizer": torch.optim.AdamW}
    decoder = Decoder(config, lora={"init_lora_weights": False})
    options = ps.ParallelOptions(tied=decoder.tied, sharding=sharding)
    pipe = pipeline(decoder, built, parallel=options, **more)
    before = {key: p.detach().clone() for key, p in pipe.named_parameters()}
    first, *_, last = [pipe.step(*inputs_and_targets(batch), rates=None).loss for _ in range(4)]
    assert last < first
    for key, p in pipe.named_parameters():
        assert torch.equal(before[key], p) != p.requires_grad, key


def transformers_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, vocab_size=50,
        max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip


REFUSED: dict[str, tuple[Any, str]] = {
    "no such module": ({"target_modules": ["nothing"]}, "peft refuses these adapters: Target modules .* not found"),
    "no such argument": ({"rank": 3}, "LoraConfig of peft has no 'rank'"),
    "rank 0": ({"r": 0}, "peft refuses these adapters: `r` should be a positive"),
    "changes the base": ({"init_lora_weights": "pissa"}, "'pissa' changes the weights of the base too"),
    "weights without a module": (
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        "target_parameters .* not known",
    ),
    "blocks twice": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication .* is not known to be right"),
    "not LoRA": (peft.IA3Config(), "IA3Config is not LoRA"),
    "no folder": ("there/is/none", "there/is/none holds no adapter_config.json"),
    "nothing of the kind": (3, "lora is a int"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(case: str) -> None:
    given, why = REFUSED[case]
    with pytest.raises(DecoderError, match=why):
        Decoder(transformers_config(), lora=given)


def test_our_own_calls_of_peft_warn_of_nothing(tmp_path: Path) -> None:
    """A model that peft itself has wrapped warns its user once, and neither cutting nor exporting it warns again."""
    model = model_of("llama")
    model.save_pretrained(tmp_path / "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    wrapped.save_pretrained(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for decoder in (Decoder(wrapped), Decoder(tmp_path / "base", lora=tmp_path / "adapter")):
            with pipeline(decoder, ps.build("1f1b", 2, 2), optimizer=None) as pipe:
                tokens = torch.randint(0, 16, (2, 6))
                pipe.step(*decoder.inputs_and_targets({"input_ids": tokens, "labels": tokens}))
                decoder.export(tmp_path / f"out{id(decoder)}", Reader(pipe.save(tmp_path / f"saved{id(decoder)}")))


def test_layers_with_adapters_are_not_sharded() -> None:
    stage = Decoder(transformers_config(), lora={}).stage(range(6))
    with pytest.raises(ParallelError, match="adapters are not shared out"):
        stage.shard_over(None)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw = random.Random(1)
    file = tmp_path / "text.txt"
    file.write_text(" ".join(draw.choice(["rank", "stage", "op", "plan"]) for _ in range(2000)))
    return file


@pytest.mark.slow
def test_at_the_prompt(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trains, goes on after a stop to the same losses, and writes an adapter that trains on."""
    base, out = tmp_path / "base", tmp_path / "adapter"
    model_of("llama").save_pretrained(base)
    options = f"--data {text} --context 16 --batch 8 --sample 0 --lr 0.1 --threads 1 --in-process"
    options += " --set lr_decay=constant --set lr_warmup=0"
    lora = """{"r":4,"target_modules":["q_proj","v_proj"]}"""
    train = f"train --model {base} {options} --lora {lora} --evaluate-every 0 --save-every 2"
    assert main(f"{train} --steps 6 --out {tmp_path / 'whole'} --export {out}".split()) == 0
    assert main(f"{train} --steps 3 --out {tmp_path / 'run'} --schedule zb-h1".split()) == 0
    resume = f"train --resume {tmp_path / 'run'} --steps 6 --ranks 2 --schedule 1f1b"
    assert main(resume.split()) == 0
    found = losses(tmp_path / "whole")
    assert losses(tmp_path / "run") == found
    assert found[-1] < found[0]
    opened = peft.PeftModel.from_pretrained(type(model_of("llama")).from_pretrained(base), out).get_base_model()
    stored = Reader(find(tmp_path / "whole/checkpoints"))
    kept = dict(opened.named_parameters())
    names = [name for name in stored.names() if name.startswith("model/")]
    assert len(names) == 2 * 2 * FAMILIES["llama"]["num_hidden_layers"]
    assert all(torch.equal(kept[name.removeprefix("model/")], stored.load([name])[name]) for name in names)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    again = f"train --model {base} {options} --lora {out} --steps 1 --evaluate-every 0 --out {tmp_path / 'again'}"
    assert main(again.split()) == 0
    assert losses(tmp_path / "again")[0] < found[0]
    capsys.readouterr()
    assert main([*resume.split()[:3], "--steps", "8", "--lora", '{"r":8}']) == 2
    assert "was started with lora" in capsys.readouterr().err


def test_an_adapter_has_the_tokenizer_that_it_was_trained_with(text: Path, tmp_path: Path) -> None:
    base, file = tmp_path / "base", tmp_path / "words.json"
    model_of("llama").save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    words = {word: number for number, word in enumerate(["rank", "stage", "op", "plan", "[UNK]"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    file.write_text(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}))
    options = f"--data {text} --context 16 --batch 8 --steps 1 --sample 0 --threads 1 --in-process --tokenizer {file}"
    lora = """--lora {"target_modules":["q_proj"]}"""
    line = f"train --model {base} {options} {lora} --out {tmp_path / 'run'} --export {tmp_path / 'out'}"
    assert main(line.split()) == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == file.read_text()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--model gpt --lora {}", "with --model gpt: peft adapts models of Hugging Face"),
        ("--model BASE --lora {} --tp 2", "with --tp 2: layers with adapters stay whole"),
        ("--model BASE --lora {r}", "is not JSON"),
        ("--model BASE --lora nowhere", "--lora nowhere is neither JSON nor a folder; give the arguments of peft's"),
        ("--model BASE --lora empty", "holds no adapter_config.json"),
        ("--model BASE --lora r=8", """as JSON, like '{"r": 8}', '{}' for peft's defaults, or a folder with a"""),
        ("--model BASE --lora {} --export out.safetensors", "adapters are written as a folder"),
    ],
)
def test_a_wrong_line_is_refused(
    options: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config.json"
    transformers_config().save_pretrained(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(f"train {options.replace('BASE', str(config))} --steps 1".split()) == 2
    assert why in " ".join(capsys.readouterr().err.split())
