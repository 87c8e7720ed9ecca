"""The steps in PyTorch, as they are and under `torch.compile`."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from examples.bench.case import Program, forever
from examples.bench.networks import CLASSES, HEADS, HIDDEN, LAYERS, LENGTH, WIDTHS, WORDS, images, tokens

Compile = Callable[[Callable], Callable]


def training(model: nn.Module, objective: Callable, x: np.ndarray, y: np.ndarray, compiled: Compile) -> Program:
    """A step of this model on a batch that stays the same."""
    optimizer = torch.optim.Adam(model.parameters())
    inputs, wanted = torch.from_numpy(x), torch.from_numpy(y)

    @compiled
    def loss_of(inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return objective(model(inputs), wanted)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(inputs, wanted)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Program(step, forever())


def entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all but the last axis."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), wanted.flatten().long())


def mlp(compiled: Compile) -> Program:
    numbers = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = numbers.normal(size=(32, 20)).astype(np.float32), numbers.integers(10, size=32)
    return training(model, entropy, x, y, compiled)


class Unrolled(nn.Module):
    """An LSTM cell in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(16, 64), torch.zeros(16, 64)
        for time in range(20):
            state = self.cell(x[:, time], state)
        return self.head(state[0])


def lstm(compiled: Compile) -> Program:
    numbers = np.random.default_rng(0)
    x, y = (numbers.normal(size=size).astype(np.float32) for size in ((16, 20, 8), (16, 1)))
    return training(Unrolled(), nn.functional.mse_loss, x, y, compiled)


class GPT(nn.Module):
    """Pre-norm blocks, attention to earlier tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        block = nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(HIDDEN), enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, WORDS)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text) + self.places(torch.arange(LENGTH))
        return self.head(self.blocks(x, self.mask, is_causal=True))


def gpt(compiled: Compile) -> Program:
    return training(GPT(), entropy, *tokens(), compiled)


def normed(before: int, width: int, kernel: int, strides: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(before, width, kernel, strides, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, before: int, width: int, strides: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(normed(before, width, 3, strides), nn.ReLU(), normed(width, width, 3))
        self.shortcut = normed(before, width, 1, strides) if strides == 2 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x) + self.shortcut(x))


def resnet(compiled: Compile) -> Program:
    parts: list[nn.Module] = [normed(3, WIDTHS[0], 3), nn.ReLU()]
    before = WIDTHS[0]
    for stage, width in enumerate(WIDTHS):
        parts += [Block(before, width, 2 if stage else 1), Block(width, width, 1)]
        before = width
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))
    x, y = images()
    return training(model, entropy, np.ascontiguousarray(x.transpose(0, 3, 1, 2)), y, compiled)


def while_loop(compiled: Compile) -> Program:
    @compiled
    def step(x: torch.Tensor) -> torch.Tensor:
        while x.sum() < 100.0:
            x = x + 0.25
        return x

    return Program(step, forever(torch.full((4,), 0.1)))


BUILDERS = {"keras-mlp": mlp, "lstm": lstm, "gpt": gpt, "resnet": resnet, "while-loop": while_loop}


def variants(case: str) -> dict[str, Callable[[], Program]]:
    """PyTorch's variants of a case."""
    build = BUILDERS[case]

    def built(compiled: Compile) -> Callable[[], Program]:
        def make() -> Program:
            torch.manual_seed(0)
            return build(compiled)

        return make

    return {"torch": built(lambda function: function), "torch.compile": built(torch.compile)}
