"""A text as batches, cut into sequences that are read side by side, and these into windows; and how it is predicted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.experiments.models import LanguageModel
from onepass.experiments.sources import DataError

Window = tuple[Tensor, Tensor, Tensor]


def windows(words: Tensor, sequences: int, length: int) -> list[Window]:
    """One pass over a text: ``(inputs, targets, first)``, each target the word after its input.

    Inputs and targets are ``(length, sequences)``; ``first`` is true of the first window, before which there is no
    state to go on from. What is left at the end of the text is dropped: all batches have one shape.
    """
    text = _side_by_side(words, sequences, length)
    starts = range(0, len(text) - length, length)
    return [(text[t : t + length], text[t + 1 : t + length + 1], torch.tensor(t == 0)) for t in starts]


def next_word(model: LanguageModel, window: Window) -> Tensor:
    """The cross-entropy of the words of a window."""
    inputs, targets, first = window
    return F.cross_entropy(model(inputs, first).flatten(0, 1), targets.flatten())


def perplexity(model: LanguageModel, words: Tensor, sequences: int, length: int) -> Tensor:
    """The exponential of the mean cross-entropy over a whole text, with the state carried from window to window."""
    text = _side_by_side(words, sequences, 1)
    state, total = torch.zeros_like(model.state), torch.zeros((), dtype=torch.float64, device=words.device)
    for inputs, targets in zip(text[:-1].split(length), text[1:].split(length), strict=True):
        scores, state = model.read(inputs, state)
        total = total + F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
    return (total / text[1:].numel()).exp()


def _side_by_side(words: Tensor, sequences: int, length: int) -> Tensor:
    """``(time, sequences)``: one after the other they are the text, but for a rest of fewer words than sequences."""
    fewest, steps = sequences * (length + 1), len(words) // sequences
    if len(words) < fewest:
        raise DataError(
            f"text must have at least {fewest} words for {sequences} sequences of windows of {length}, "
            f"but has {len(words)}"
        )
    return words[: steps * sequences].view(sequences, steps).t().contiguous()
