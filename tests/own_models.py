"""Twenty models as people write them, small: none of them knows penstock, and each has a forward of its own.

`MODELS` says of each how it is made and what a batch is; what refuses to be cut says the line that stands in the way.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N = 8
"""Samples of a batch."""


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.layer3 = nn.Sequential(BasicBlock(16, 16), BasicBlock(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


class DenseLayer(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, 4, 3, padding=1, bias=False)

    def forward(self, inputs: Any) -> Tensor:
        features = [inputs] if isinstance(inputs, Tensor) else inputs
        return F.dropout(self.conv(F.relu(self.norm(torch.cat(features, 1)))), p=0.2, training=self.training)


class DenseBlock(nn.ModuleDict):
    def __init__(self, num: int, inputs: int) -> None:
        super().__init__()
        for i in range(num):
            self.add_module(f"denselayer{i + 1}", DenseLayer(inputs + 4 * i))

    def forward(self, init: Tensor) -> Tensor:
        features = [init]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, 8, 3, padding=1))
        self.features.add_module("denseblock1", DenseBlock(3, 8))
        self.features.add_module("transition1", nn.Sequential(nn.Conv2d(20, 8, 1), nn.AvgPool2d(2)))
        self.features.add_module("denseblock2", DenseBlock(3, 8))
        self.features.add_module("norm5", nn.BatchNorm2d(20))
        self.classifier = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.features(x), inplace=True)
        out = torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1)
        return self.classifier(out)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(drop)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 16))
        self.pos_drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(16, 0.1) for _ in range(5))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        B = x.shape[0]
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(B, -1, -1), x), dim=1)
        x = self.pos_drop(x + self.pos_embed)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class WindowBlock(nn.Module):
    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp, self.shift = (
            nn.LayerNorm(width),
            Attention(width),
            nn.Linear(width, width),
            shift,
        )

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        H, W = size
        B, L, C = x.shape
        assert L == H * W
        y = self.norm(x).view(B, H, W, C)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = y.view(B, H // 2, 2, W // 2, 2, C).transpose(2, 3).reshape(-1, 4, C)
        y = self.attn(y).view(B, H // 2, W // 2, 2, 2, C).transpose(2, 3).reshape(B, H, W, C)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y.view(B, L, C)
        return x + self.mlp(x)


class SwinStage(nn.Module):
    def __init__(self, width: int, depth: int, merge: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WindowBlock(width, i % 2) for i in range(depth))
        self.merge = nn.Linear(4 * width, 2 * width) if merge else None

    def forward(self, x: Tensor, size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        for block in self.blocks:
            x = block(x, size)
        if self.merge is None:
            return x, size
        H, W = size
        x = x.view(x.size(0), H, W, -1)
        x = torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)
        return self.merge(x.flatten(1, 2)), (H // 2, W // 2)


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, 2)
        self.stages = nn.ModuleList([SwinStage(8, 2, True), SwinStage(16, 4, False)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        size = x.shape[-2], x.shape[-1]
        x = x.flatten(2).transpose(1, 2)
        for stage in self.stages:
            x, size = stage(x, size)
        return self.head(x.mean(1))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = nn.Linear(tokens, tokens), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + F.gelu(self.channels(self.norm2(x)))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.Sequential(*[MixerBlock(16, 8) for _ in range(6)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.stem(x).flatten(2).transpose(1, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x).mean(dim=1))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, drop_path: float) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.5))
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        y = self.gamma * self.down(F.gelu(self.up(self.norm(self.dwconv(x).permute(0, 2, 3, 1)))))
        y = y.permute(0, 3, 1, 2)
        if self.training and self.drop_path > 0:
            keep = torch.rand(x.shape[0], 1, 1, 1) < 1 - self.drop_path
            y = y * keep / (1 - self.drop_path)
        return x + y


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downsample_layers = nn.ModuleList([nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 12, 2, 2)])
        self.stages = nn.ModuleList([nn.Sequential(*[ConvNeXtBlock(w, 0.2) for _ in range(2)]) for w in (8, 12)])
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = self.downsample_layers[i](x)
            x = self.stages[i](x)
        return self.head(self.norm(x.mean([-2, -1])))


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc = DoubleConv(3, 4)
        self.down = nn.ModuleList(DoubleConv(4 * 2**i, 8 * 2**i) for i in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(8 * 2**i, 4 * 2**i, 2, 2) for i in reversed(range(3)))
        self.conv = nn.ModuleList(DoubleConv(8 * 2**i, 4 * 2**i) for i in reversed(range(3)))
        self.outc = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inc(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, conv in zip(self.up, self.conv, strict=True):
            x = up(x)
            skip = skips.pop()
            if x.shape[-1] != skip.shape[-1]:
                x = F.interpolate(x, size=skip.shape[-2:])
            x = conv(torch.cat([skip, x], dim=1))
        return self.outc(x)


class Encoder(nn.Module):
    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, 0.1) for _ in range(num))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.norm(x)


class DecoderLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width)
        self.cross = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor, causal: Tensor, padding: Tensor | None) -> Tensor:
        x = self.block(x, causal)
        return x + self.cross(x, memory, memory, key_padding_mask=padding, need_weights=False)[0]


class Decoder(nn.Module):
    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(width) for _ in range(num))

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor | None) -> Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(x, memory, causal, padding)
        return x


class EncoderDecoder(nn.Module):
    """Called by keywords, with an optional mask; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(20, 16)
        self.encoder, self.decoder = Encoder(16, 3), Decoder(16, 3)
        self.lm_head = nn.Linear(16, 20, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None) -> dict[str, Any]:
        padding = attend = None
        if src_mask is not None:
            padding = src_mask == 0
            attend = src_mask[:, None, None, :].bool()
        memory = self.encoder(self.shared(src) * math.sqrt(16), mask=attend)
        hidden = self.decoder(self.shared(tgt), memory, padding)
        return {"logits": self.lm_head(hidden), "memory": memory}


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(20, 16), "wpe": nn.Embedding(12, 16), "drop": nn.Dropout(0.1)}
        )
        self.transformer["h"] = nn.ModuleList(Block(16, 0.1) for _ in range(5))
        self.transformer["ln_f"] = nn.LayerNorm(16)
        self.register_buffer("mask", torch.ones(12, 12, dtype=torch.bool).tril(), persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x, self.mask[:t, :t])
        return F.linear(self.transformer.ln_f(x), self.transformer.wte.weight)


class MoEBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        weights = self.gate(y).softmax(-1)
        top = weights.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = top == i
            if chosen.any():
                out[chosen] = expert(y[chosen]) * weights[chosen][:, i : i + 1]
        return x + out, weights.mean((0, 1)).square().sum()


class MoE(nn.Module):
    """Sums an auxiliary loss over its blocks, and returns it with the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList(MoEBlock(12) for _ in range(4))
        self.head = nn.Linear(12, 20)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.embed(ids), 0.0
        for block in self.blocks:
            x, aux = block(x)
            total = total + aux
        return self.head(x), total


class RNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.rnns = nn.ModuleList(
            [nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)]
        )
        self.dropout, self.out = nn.Dropout(0.2), nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for rnn in self.rnns:
            y, _ = rnn(x)
            x = x + self.dropout(y)
        return self.out(x)


class Siamese(nn.Module):
    """One encoder, called for each of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(12, 12), nn.Tanh())])
        self.head = nn.Linear(24, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        u, v = self.encoder(a), self.encoder(b)
        return self.head(torch.cat([(u - v).abs(), u * v], dim=-1))


class Mixed(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch1, self.branch3 = nn.Conv2d(inputs, 4, 1), nn.Conv2d(inputs, 4, 3, padding=1)
        self.pool = nn.Conv2d(inputs, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch3(x), self.pool(F.avg_pool2d(x, 3, 1, 1))], 1).relu()


class Inception(nn.Module):
    """Has a second head in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a, self.Mixed_5b, self.Mixed_5c = nn.Conv2d(3, 6, 3), Mixed(6), Mixed(12)
        self.aux, self.Mixed_6a, self.Mixed_6b = nn.Linear(12, 5), Mixed(12), Mixed(12)
        self.dropout, self.fc = nn.Dropout(0.3), nn.Linear(12, 5)
        self.transform_input = True

    def forward(self, x: Tensor) -> Tensor:
        if self.transform_input:
            x = torch.cat([torch.unsqueeze(x[:, c], 1) * (0.2 + c) for c in range(3)], 1)
        x = self.Mixed_5c(self.Mixed_5b(self.Conv2d_1a(x)))
        aux = self.aux(x.mean((2, 3))) if self.training else None
        x = self.Mixed_6b(self.Mixed_6a(x)).mean((2, 3))
        x = self.fc(self.dropout(x))
        if self.training:
            return x + 0.3 * aux
        return x


class SEBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.fc1, self.fc2 = nn.Linear(width, 2), nn.Linear(2, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        scale = torch.sigmoid(self.fc2(F.relu(self.fc1(y.mean((2, 3))))))
        return F.relu(x + y * scale[:, :, None, None])


class SENet(nn.Module):
    """Its blocks are attributes that getattr finds; it normalizes by buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1))
        self.stem = nn.Conv2d(3, 6, 3, 2, 1)
        for i in range(4):
            setattr(self, f"block{i}", SEBlock(6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x - self.mean)
        for i in range(4):
            x = getattr(self, f"block{i}")(x)
        return self.head(x.mean((2, 3)))


class Albert(nn.Module):
    """One block, over and over."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(20, 16), Block(16, 0.1), nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(5):
            x = self.block(x)
        return self.head(x)


class FPN(nn.Module):
    """A pyramid: each level goes down the side, is added to the next, and all are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({f"c{i}": nn.Conv2d(3 if i == 0 else 8, 8, 3, 2, 1) for i in range(3)})
        self.inner = nn.ModuleList(nn.Conv2d(8, 6, 1) for _ in range(3))
        self.outer = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        levels = []
        for layer in self.body.values():
            x = F.relu(layer(x))
            levels.append(x)
        last = self.inner[2](levels[2])
        found = {"p2": self.outer[2](last)}
        for i in (1, 0):
            last = self.inner[i](levels[i]) + F.interpolate(last, size=levels[i].shape[-2:], mode="nearest")
            found[f"p{i}"] = self.outer[i](last)
        return found


class VAE(nn.Module):
    """Draws in its own forward, changes what it drew in place, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.mu, self.logvar = nn.Linear(12, 4), nn.Linear(12, 4)
        self.dec = nn.ModuleList([nn.Linear(4, 12), nn.Linear(12, 12)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x
        for layer in self.enc:
            h = torch.tanh(layer(h))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu
        if self.training:
            z = torch.randn_like(mu)
            z *= torch.exp(0.5 * logvar)
            z += mu
        for layer in self.dec:
            z = layer(F.relu(z))
        return z, mu, logvar


class InvertedResidual(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.use_res_connect = stride == 1
        self.conv = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1), nn.BatchNorm2d(2 * width), nn.ReLU6(inplace=True),
            nn.Conv2d(2 * width, width, 3, stride, 1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU6(inplace=True))
        ]
        features += [InvertedResidual(6, 1 + (i == 1)) for i in range(4)]
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(p=0.2), nn.Linear(6, 5))

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = F.adaptive_avg_pool2d(x, (1, 1)).reshape(x.shape[0], -1)
        return self.classifier(x)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


class LayerDrop(nn.Module):
    """Leaves layers out as Python's random numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(12, 12) for _ in range(4)), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and random.random() < 0.25:
                continue
            x = torch.tanh(layer(x))
        return self.head(x)


class EarlyExit(nn.Module):
    """Stops when it is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(12, 12) for _ in range(4)), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.abs().mean() > 0.9:
                break
        return self.head(x)


@dataclass(frozen=True)
class Own:
    """A model, a batch for it and a loss.

    Attributes:
        example: whether it asks for one. refused: what the refusal says, where there is no other way.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    loss: Callable[[Any, Any], Tensor]
    targets: Callable[[], Any]
    example: bool = False
    refused: str = ""


def _images() -> Tensor:
    return torch.randn(N, 3, 8, 8)


def _ids() -> Tensor:
    return torch.randint(20, (N, 6))


def _vectors() -> Tensor:
    return torch.randn(N, 12)


def _classes() -> Tensor:
    return torch.randint(5, (N,))


def _numbers() -> Tensor:
    return torch.randn(N, 1)


def _tokens_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _dict_loss(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return _tokens_loss(output["logits"], targets) + 0.01 * output["memory"].square().mean()


def _pyramid_loss(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return sum((level.mean() - targets.mean()).square() for level in output.values())  # type: ignore[return-value]


_pyramid_loss.by_microbatch = True  # type: ignore[attr-defined] # it compares means over a microbatch


def _vae_loss(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    x, mu, logvar = output
    return F.mse_loss(x, targets) - 0.5 * (1 + logvar - mu.square() - logvar.exp()).mean()


def _moe_loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return _tokens_loss(output[0], targets) + 0.01 * output[1]


def _masks() -> Tensor:
    mask = torch.ones(N, 6, dtype=torch.long)
    mask[::2, 4:] = 0
    return mask


def _pairs() -> dict[str, Tensor]:
    return {"src": _ids(), "tgt": _ids(), "src_mask": _masks()}


MODELS: dict[str, Own] = {
    "resnet": Own(ResNet, _images, F.cross_entropy, _classes),
    "densenet": Own(DenseNet, _images, F.cross_entropy, _classes),
    "vit": Own(ViT, _images, F.cross_entropy, _classes),
    "swin": Own(Swin, _images, F.cross_entropy, _classes),
    "mixer": Own(Mixer, _images, F.cross_entropy, _classes),
    "convnext": Own(ConvNeXt, _images, F.cross_entropy, _classes),
    "unet": Own(UNet, _images, F.mse_loss, lambda: torch.randn(N, 2, 8, 8), example=True),
    "encoder-decoder": Own(EncoderDecoder, _pairs, _dict_loss, _ids, example=True),
    "gpt": Own(GPT, _ids, _tokens_loss, _ids),
    "moe": Own(MoE, _ids, _moe_loss, _ids),
    "rnn": Own(RNN, _ids, _tokens_loss, _ids),
    "siamese": Own(Siamese, lambda: (_vectors(), _vectors()), F.mse_loss, _numbers),
    "inception": Own(Inception, _images, F.cross_entropy, _classes),
    "senet": Own(SENet, _images, F.cross_entropy, _classes),
    "albert": Own(Albert, _ids, _tokens_loss, _ids),
    "fpn": Own(FPN, _images, _pyramid_loss, _numbers),
    "vae": Own(VAE, _vectors, _vae_loss, _vectors),
    "mobilenet": Own(MobileNet, _images, F.cross_entropy, _classes),
    "layerdrop": Own(LayerDrop, _vectors, F.mse_loss, _numbers, refused="random.random() < 0.25"),
    "early exit": Own(EarlyExit, _vectors, F.mse_loss, _numbers, refused="if x.abs().mean() > 0.9"),
}
