"""Small texts, and what torch's own layers make of them."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.experiments.datasets import Data
from onepass.experiments.models import LanguageModel

WORDS = 11


def words(count: int, seed: int = 0) -> Tensor:
    return torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(seed))


def data() -> Data:
    """Every word in the training text."""
    return Data((torch.cat([torch.arange(WORDS), words(200, 1)]),), (words(90, 2),), (words(70, 3),))


def predicted(model: LanguageModel, text: Tensor, state: Tensor | None = None) -> Tensor:
    """Scores by ``nn.LSTM``, of a text in columns and in one go."""
    given = None if state is None else (state[:, 0].contiguous(), state[:, 1].contiguous())
    scores: Tensor = model.decoder(model.lstm(model.embedding(text), given)[0])
    return scores
