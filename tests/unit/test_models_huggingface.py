"""Hugging Face decoders in layers: logits, loss and gradients of the whole model, to the last bit."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.models.huggingface import Decoder, DecoderError, NextTokenLoss, inputs_and_targets
from penstock.runtime import PartitionError

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50, **SPECIAL}
USUAL = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 32}
NAMES = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 50, "n_positions": 32, **SPECIAL}
STILL = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {**NAMES, **STILL}),
    "llama": ("LlamaConfig", USUAL),
    "llama-tied": ("LlamaConfig", {**USUAL, "tie_word_embeddings": True, "attention_bias": True}),
    "llama-scaled": (
        "LlamaConfig",
        {**USUAL, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "qwen2": ("Qwen2Config", {**USUAL, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {**USUAL, "head_dim": 8}),
    "mistral": ("MistralConfig", {**USUAL, "sliding_window": 3}),
    "gpt_neox": ("GPTNeoXConfig", {**SIZES, "intermediate_size": 24, "max_position_embeddings": 32}),
    "opt": ("OPTConfig", {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "phi": ("PhiConfig", USUAL),
    "bloom": ("BloomConfig", {"hidden_size": 16, "n_layer": 3, "n_head": 4, "vocab_size": 50, **SPECIAL}),
    "gemma": ("GemmaConfig", {**USUAL, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**USUAL, "head_dim": 8, "sliding_window": 3}),
}


def config_of(name: str) -> Any:
    kind, sizes = CONFIGS[name]
    return getattr(transformers, kind)(**sizes)


def model_of(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return transformers.AutoModelForCausalLM.from_config(config_of(name))


def batch_of(num_samples: int = 6, num_tokens: int = 9) -> dict[str, Tensor]:
    """Some samples are padded on the left, some on the right, some not at all."""
    tokens = torch.randint(3, 50, (num_samples, num_tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    mask[3, 7:] = 0
    tokens = tokens.masked_fill(mask == 0, 0)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def cut(batch: dict[str, Tensor], num: int) -> list[dict[str, Tensor]]:
    parts = {name: value.tensor_split(num) for name, value in batch.items()}
    return [{name: parts[name][m] for name in batch} for m in range(num)]


def plain_step(model: Any, batch: dict[str, Tensor], num: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The model's own loss over microbatches, each weighed by its tokens, and the gradients."""
    weights = [int((part["labels"][:, 1:] != -100).sum()) for part in cut(batch, num)]
    total = torch.zeros(())
    for part, weight in zip(cut(batch, num), weights, strict=True):
        loss = model(**part, use_cache=False).loss * (weight / sum(weights))
        loss.backward()
        total = total + loss.detach()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_in_a_row_give_the_models_own_logits(name: str) -> None:
    model = model_of(name).eval()
    decoder = Decoder(model)
    batch = batch_of()
    del batch["labels"]
    tokens = batch["input_ids"]
    places = torch.arange(9).expand(6, 9) + 2
    given: list[dict[str, Tensor]] = [{"input_ids": tokens}, batch]
    if name not in ("bloom", "opt"):
        given.append({"input_ids": tokens, "position_ids": places})
    for inputs in given:
        value: Any = inputs
        for layer in decoder.layers():
            value = layer(value)
        assert torch.equal(value, model(**inputs).logits)
    assert len(decoder.layers()) == decoder.num_layers == 5


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bloom"])
def test_layers_in_a_row_give_the_models_own_logits_in_bfloat16(name: str) -> None:
    inputs, _ = inputs_and_targets(batch_of())
    whole, cast = model_of(name).to(torch.bfloat16).eval(), model_of(name).eval()
    for model, casting in ((whole, False), (cast, True)):
        value: Any = inputs
        with torch.autocast("cpu", torch.bfloat16, enabled=casting):
            for layer in Decoder(model).layers():
                value = layer(value)
            assert torch.equal(value, model(**inputs).logits)
        assert value.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-tied", "qwen2", "bloom"])
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("1f1b", 4), ("zb-v", 2)])
def test_a_pipeline_gives_the_models_own_loss_and_gradients(name: str, schedule: str, ranks: int) -> None:
    model, batch = model_of(name), batch_of()
    built = ps.build(schedule, ranks, 3)
    decoder = Decoder(copy.deepcopy(model))
    pipe = ps.Pipeline(
        decoder.stages(built.num_stages),
        built,
        loss_fn=NextTokenLoss(),
        parallel=ps.ParallelOptions(tied=decoder.tied),
    )
    result = pipe.step(*inputs_and_targets(batch), update=False)
    loss, gradients = plain_step(model, batch, 3)
    found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert torch.equal(torch.as_tensor(result.loss), loss)
    assert set(found) == set(gradients)
    differing = [n for n, g in gradients.items() if g is None or not torch.equal(found[n], g)]  # type: ignore[arg-type]
    assert differing == []


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_a_sequential_of_the_layers_is_cut_by_the_pipeline_itself(name: str) -> None:
    model, batch = model_of(name), batch_of()
    decoder = Decoder(copy.deepcopy(model))
    pipe = ps.Pipeline(nn.Sequential(*decoder.layers()), ps.build("1f1b", 3, 2), loss_fn=NextTokenLoss())
    result = pipe.step(*inputs_and_targets(batch), update=False)
    loss, gradients = plain_step(model, batch, 2)
    assert torch.equal(torch.as_tensor(result.loss), loss)
    found = {name.partition(".")[2]: parameter.grad for name, parameter in pipe.named_parameters()}
    assert set(found) == set(gradients)
    assert all(torch.equal(found[n], g) for n, g in gradients.items())  # type: ignore[arg-type]


def test_a_folder_gives_the_models_weights_stage_by_stage(tmp_path: Path) -> None:
    for name in ("gpt2", "llama", "qwen2"):
        model = model_of(name)
        folder = tmp_path / name
        model.save_pretrained(folder)
        decoder = Decoder(folder)
        assert all(parameter.device.type == "meta" for parameter in decoder._model.parameters())
        stages = [build() for build in decoder.stages(4, cut=[2, 1, 1, 1])]  # type: ignore[operator]
        found = {n: p for stage in stages for n, p in stage.named_parameters()}
        kept = dict(model.named_parameters(remove_duplicate=False))
        assert set(found) == set(kept)
        assert all(torch.equal(found[n], kept[n]) for n in kept)
        assert [len(list(stage.children())) > 0 for stage in stages] == [True] * 4


def test_a_folder_in_several_files_and_one_of_a_bare_base_model(tmp_path: Path) -> None:
    model = model_of("gpt2")
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    model.transformer.save_pretrained(tmp_path / "bare")
    for folder in ("many", "bare"):
        found = dict(Decoder(tmp_path / folder).stage(range(5)).named_parameters())
        assert all(torch.equal(found[n], p) for n, p in model.named_parameters())


def test_weights_of_a_config_follow_from_the_seed_whatever_the_cut() -> None:
    decoder = Decoder(config_of("gpt2"), seed=4)
    state = torch.random.get_rng_state()
    whole = dict(decoder.stage(range(5)).named_parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    for build in decoder.stages(3):
        for name, parameter in build().named_parameters():  # type: ignore[operator]
            if name != "lm_head.weight":
                assert torch.equal(parameter, whole[name])
    other = dict(Decoder(config_of("gpt2"), seed=5).stage(range(5)).named_parameters())
    block = "transformer.h.{}.attn.c_attn.weight"
    assert not torch.equal(other[block.format(0)], whole[block.format(0)])
    assert not torch.equal(whole[block.format(1)], whole[block.format(0)])
    assert whole["transformer.ln_f.weight"].eq(1).all()
    # By the architecture's own rules: GPT-2 draws smaller what adds to the residual stream.
    theirs = dict(model_of("gpt2").named_parameters())
    for name in (block.format(0), "transformer.h.0.mlp.c_proj.weight", "transformer.wpe.weight"):
        assert whole[name].detach().std().item() == pytest.approx(theirs[name].detach().std().item(), rel=0.15)


def test_a_model_built_stage_by_stage_trains() -> None:
    decoder = Decoder(config_of("llama-tied"))
    pipe = ps.Pipeline(
        decoder.stages(3),
        ps.build("1f1b", 3, 2),
        loss_fn=NextTokenLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        parallel=ps.ParallelOptions(tied=decoder.tied),
    )
    inputs, targets = inputs_and_targets(batch_of(4))
    losses = [float(pipe.step(inputs, targets).loss) for _ in range(25)]
    assert losses[0] == pytest.approx(3.9, abs=0.3), "about the logarithm of 50"
    assert losses[-1] < losses[0] - 1.0
    assert float(pipe.evaluate(inputs, targets).loss) == pytest.approx(losses[-1], abs=0.3)


def test_stages_of_a_folder_train_the_weight_that_they_share_as_one(tmp_path: Path) -> None:
    """Without `ParallelOptions(tied=...)` embedding and head became two weights, without a word."""
    model, batch = model_of("llama-tied"), batch_of(4)
    model.save_pretrained(tmp_path)
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    decoder = Decoder(tmp_path, compare=False)
    given = {"loss_fn": decoder.loss, "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)}
    with ps.Pipeline(decoder.stages(3), ps.build("1f1b", 3, 2), **given) as pipe:
        losses = [float(pipe.step(*inputs_and_targets(batch)).loss) for _ in range(3)]
    assert losses == pytest.approx(expected, rel=1e-4)


def test_dropout_is_the_same_whatever_the_cut() -> None:
    config = transformers.GPT2Config(**NAMES)
    assert config.embd_pdrop == config.resid_pdrop == 0.1
    inputs, targets = inputs_and_targets(batch_of())
    losses = []
    for ranks in (1, 2, 4):
        decoder = Decoder(config)
        pipe = ps.Pipeline(
            decoder.stages(ranks),
            ps.build("1f1b", ranks, 2),
            loss_fn=NextTokenLoss(),
            seed=9,
            parallel=ps.ParallelOptions(tied=decoder.tied),
        )
        losses.append(pipe.step(inputs, targets, update=False).loss)
        quiet = [float(pipe.evaluate(inputs, targets).loss) for _ in range(2)]
        assert quiet[0] == quiet[1] != float(losses[-1])
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


def test_the_loss_is_the_models_own() -> None:
    model, batch = model_of("llama"), batch_of()
    output = model(**batch)
    assert torch.equal(NextTokenLoss()(output.logits, batch["labels"]), output.loss)
    assert NextTokenLoss().weight(batch["labels"]) == 6 * 8 - 2 - 2
    nothing = torch.full_like(batch["labels"], -100)
    assert NextTokenLoss()(output.logits, nothing).item() == 0.0


def test_costs_count_the_head_and_not_what_is_looked_up() -> None:
    costs = Decoder(config_of("llama-tied")).costs()
    assert costs[0] == 1.0
    assert costs[1] == costs[2] == costs[3]
    assert costs[4] == 2 * (16 + 50 * 16)


class TwoLists(nn.Module):
    """Something like a model of transformers with two lists that could be the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.config = config_of("llama")
        self.one = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.other = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_an_unknown_architecture_says_what_was_looked_for_and_how_to_cut_by_hand() -> None:
    from penstock.models.huggingface import examine

    with pytest.raises(DecoderError, match=r"(?s)one list of 3 blocks .* found 2; .* one of 3, other of 3.*blocks="):
        examine(TwoLists())
    with pytest.raises(DecoderError, match=r"no list of blocks 'model\.h'; its lists are model\.layers"):
        Decoder(model_of("llama"), blocks="model.h")
    assert Decoder(model_of("llama"), blocks="model.layers").anatomy == Decoder(model_of("llama")).anatomy


def test_a_forward_that_does_more_than_call_its_layers_is_refused() -> None:
    model = model_of("llama")
    plain = type(model.model.layers[1])

    class Doubling(plain):  # type: ignore[misc, valid-type]
        """A block that needs to know what the embedding was."""

        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            return super().forward(hidden_states, **kwargs) * (20.0 if model.model.embed_tokens.was_called else 1.0)

    class Noting(nn.Embedding):
        was_called = False

        def forward(self, tokens: Tensor) -> Tensor:
            self.was_called = not self.was_called
            return super().forward(tokens)

    model.model.embed_tokens = Noting(50, 16)
    model.model.layers[1].__class__ = Doubling
    with pytest.raises(DecoderError, match="its forward does more than call its layers in order"):
        Decoder(model, compare=True)


def test_a_side_path_between_layers_is_found_on_a_small_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one block leaves in a list for the next one arrives in one process, and not in two."""
    kind = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    plain, left = kind.forward, []

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        out: Tensor = plain(self, hidden_states, **kwargs)
        if self.self_attn.layer_idx == 2:
            out = out + left[-1]
        left.append(out.detach() * 0.5)
        return out

    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(
        DecoderError, match=r"a small copy of LlamaForCausalLM \(llama\): cut into stages it has a loss of"
    ):
        Decoder(config_of("llama"))
    assert Decoder(config_of("llama"), compare=False).num_layers == 5


def test_a_gradient_that_does_not_pass_is_found_on_a_small_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.models.llama.modeling_llama.LlamaRMSNorm
    plain = kind.forward
    first: dict[int, Tensor] = {}

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """Each weight of a norm gets the gradient that the norm called before has too, and no number changes."""
        out = plain(self, hidden_states)
        borrowed = first.get(id(torch.is_grad_enabled()))
        first[id(torch.is_grad_enabled())] = self.weight
        return out if borrowed is None else out + (borrowed - borrowed.detach())

    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(DecoderError, match="the loss of the whole, but the gradient of"):
        Decoder(config_of("llama"))


def test_a_loss_with_more_in_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = transformers.loss.loss_utils.ForCausalLMLoss

    def smoothed(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        loss: Tensor = plain(logits, labels, **kwargs)
        return loss + 1e-3 * logits.logsumexp(-1).square().mean()

    monkeypatch.setitem(transformers.loss.loss_utils.LOSS_MAPPING, "ForCausalLM", smoothed)
    with pytest.raises(DecoderError, match=r"its own loss of two small batches is [\d.]+, and those of each"):
        Decoder(config_of("llama"))


def test_a_config_is_left_as_it_is() -> None:
    config = transformers.Qwen2Config(**USUAL, dtype="bfloat16", attention_dropout=0.3)
    before = config.to_dict()
    Decoder(config)
    assert config.to_dict() == before


def test_quantized_weights_are_refused() -> None:
    config = transformers.LlamaConfig(**USUAL, quantization_config={"quant_method": "fp8"})
    with pytest.raises(DecoderError, match=r"its weights are quantized .* dequantize"):
        Decoder(config)


@pytest.mark.slow
def test_wrong_sources_and_inputs_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DecoderError, match=r"not a folder with a config\.json"):
        Decoder(tmp_path)
    config_of("llama").save_pretrained(tmp_path)
    with pytest.raises(DecoderError, match=r"holds neither model\.safetensors nor"):
        Decoder(tmp_path)
    model_of("gpt2").save_pretrained(tmp_path / "other")
    config_of("llama").save_pretrained(tmp_path / "other")
    with pytest.raises(DecoderError, match=r"holds no weight 'model\.embed_tokens\.weight'"):
        Decoder(tmp_path / "other").layers([0])
    with pytest.raises(DecoderError, match="made of a int"):
        Decoder(7)
    with pytest.raises(DecoderError, match="no language model of a ViTConfig"):
        Decoder(transformers.ViTConfig())
    decoder = Decoder(model_of("llama"))
    with pytest.raises(DecoderError, match="layer 5 asked of a decoder of 5 layers"):
        decoder.layers([5])
    with pytest.raises(PartitionError, match="cut 2,2 is for 2 stages and 4 layers"):
        decoder.stages(2, cut=[2, 2])
    with pytest.raises(DecoderError, match="labels are among the inputs"):
        decoder.layers([0])[0](batch_of())
    with pytest.raises(DecoderError, match="input_ids must be among them"):
        decoder.layers([0])[0]({"tokens": torch.zeros(1, 2)})
    with pytest.raises(DecoderError, match="no labels"):
        inputs_and_targets({"input_ids": torch.zeros(1, 2)})


def test_a_mask_changed_in_place_is_another_mask() -> None:
    model = model_of("llama").eval()
    layers = Decoder(model).layers()
    inputs, _ = inputs_and_targets(batch_of())
    for _ in range(2):
        value: Any = inputs
        for layer in layers:
            value = layer(value)
        assert torch.equal(value, model(**inputs).logits)
        inputs["attention_mask"][1, :4] = 0


def test_a_deep_copy_of_a_stage_is_a_stage_of_its_own() -> None:
    decoder = Decoder(model_of("gpt2"))
    stage = decoder.stage(range(5)).eval()
    twin = copy.deepcopy(stage)
    inputs, _ = inputs_and_targets(batch_of())
    before = stage(inputs)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(stage(inputs), before)
    assert not twin(inputs).any()


def test_a_deep_copy_of_a_stage_copies_nothing_of_the_others() -> None:
    def num_weights() -> int:
        return sum(type(each) is nn.Parameter for each in gc.get_objects())

    stage = Decoder(model_of("gpt2")).stage([0, 1])
    before = num_weights()
    twin = copy.deepcopy(stage)
    assert num_weights() - before == len(list(twin.parameters())) == 2 + 12
