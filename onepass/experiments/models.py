"""The networks of the paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onepass.recurrence import recurrence


def mlp(inputs: int, hidden: int, outputs: int, *, batch_norm: bool = False) -> nn.Module:
    """One hidden layer of ReLUs, with torch's own initialisation; normalised before the ReLU on request."""
    between = [nn.BatchNorm1d(hidden), nn.ReLU()] if batch_norm else [nn.ReLU()]
    return nn.Sequential(nn.Linear(inputs, hidden), *between, nn.Linear(hidden, outputs))


class ResNet18(nn.Module):
    """The residual network of 18 layers of He et al. (*Deep Residual Learning for Image Recognition*, CVPR 2016).

    As for ImageNet: a convolution of 7 x 7 with stride 2 and a pooling come first, whatever the size of the pictures.
    11 181 642 weights with 10 classes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        blocks = [block for i, o, stride in widths for block in (Residual(i, o, stride), Residual(o, o, 1))]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.blocks(self.stem(images))
        scores: Tensor = self.head(features.mean((-2, -1)))
        return scores


class Residual(nn.Module):
    """Two convolutions beside a way around them, which is a convolution of 1 x 1 where the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            _convolution(inputs, outputs, 3, stride), nn.ReLU(), _convolution(outputs, outputs, 3, 1)
        )
        same = inputs == outputs and stride == 1
        self.around = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inside(x) + self.around(x))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Module:
    """A convolution and its batch norm, with He's initialisation for ReLUs."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class LanguageModel(nn.Module):
    """Scores of each next word: an embedding, an LSTM, and a linear decoder, with torch's own initialisation.

    Without dropout, the medium one of Zaremba et al. (*Recurrent Neural Network Regularization*, 2014) with a width
    of 650. Texts lie side by side: words are ``(time, sequences)``.

    In training, the state at the end of a batch is where the next begins, and no gradient goes from one to the other.
    In evaluation every batch begins from zeros: ``read`` carries the state on by hand.

    *Departs from* ``nn.LSTM`` in nothing but how it is computed: the time steps are written out, for ``torch.vmap``.
    """

    state: Tensor

    def __init__(self, words: int, width: int, *, layers: int = 2, sequences: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers)  # for its weights, their names and their initialisation
        self.decoder = nn.Linear(width, words)
        self.register_buffer("state", torch.zeros(layers, 2, sequences, width))

    def forward(self, words: Tensor, first: Tensor) -> Tensor:
        """``first``: whether the batch is the first of a text, as a tensor, so that none is like the other."""
        nothing = torch.zeros_like(self.state)
        scores, after = self.read(words, torch.where(first, nothing, self.state) if self.training else nothing)
        if self.training:
            self.state.copy_(after.detach())
        return scores

    def read(self, words: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """``(time, sequences, words)`` scores, and the state after the last word."""
        width = state.shape[-1]
        x, state, after = aligned(self.embedding(words)), aligned(state), []
        for weights, (hidden, cell) in zip(self.lstm.all_weights, state, strict=True):
            x, hidden, cell = lstm_layer(x, hidden, cell, *weights)
            after.append(torch.stack([hidden, cell]))
        scores = F.linear(x, aligned(self.decoder.weight), self.decoder.bias)
        return scores, torch.stack(after)[..., :width]


def lstm_layer(
    x: Tensor, hidden: Tensor, cell: Tensor, by_input: Tensor, by_hidden: Tensor, bias: Tensor, other_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer of ``nn.LSTM``, with its inputs at all time steps multiplied at once; all but the weights ``aligned``.

    The units that fill up the width stay at zero: their gates are open by half, but what goes in is tanh(0).
    """
    spare = hidden.shape[-1] - by_hidden.shape[-1]  # rows to add to each gate
    by_input, by_hidden = (
        F.pad(aligned(by_all).unflatten(0, (4, -1)), (0, 0, 0, spare)).flatten(0, 1) for by_all in (by_input, by_hidden)
    )
    p = F.linear(x, by_input, F.pad((bias + other_bias).unflatten(0, (4, -1)), (0, spare)).flatten())
    h, c, *_ = recurrence(*(tensor.unsqueeze(0) for tensor in (p, by_hidden, hidden, cell)))
    return h[0], h[0, -1], c[0, -1]


def aligned(x: Tensor) -> Tensor:
    """With zeros at the end of each row, up to a multiple of 8: rows that a GPU's matrix units can load whole.

    A width of 650, on an H200 in TF32, takes kernels for any alignment, which are half as fast.
    """
    return F.pad(x, (0, -x.shape[-1] % 8))
