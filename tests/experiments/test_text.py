"""Texts as windows, and how well they are predicted."""

from __future__ import annotations

import math
import re

import pytest
import torch

from onepass.experiments.models import LanguageModel
from onepass.experiments.sources import DataError
from onepass.experiments.text import next_word, perplexity, windows
from tests.experiments.language import predicted, words


def test_windows_are_the_text() -> None:
    """Each sequence in its column, read on from window to window, and each target one word further."""
    text = torch.arange(100)
    found = windows(text, 3, 7)
    assert len(found) == 4  # 33 words a sequence, the last of them a target alone
    assert all(inputs.shape == targets.shape == (7, 3) for inputs, targets, _ in found)
    columns = torch.cat([inputs for inputs, _, _ in found]).t()
    assert columns.tolist() == [list(range(start, start + 28)) for start in (0, 33, 66)]
    assert all(torch.equal(targets, inputs + 1) for inputs, targets, _ in found)
    assert [bool(first) for _, _, first in found] == [True, False, False, False]


@pytest.mark.parametrize(("length", "count"), [(16, 1), (27, 1), (28, 2), (39, 2), (40, 3)])
def test_a_window_has_its_last_target_or_is_dropped(length: int, count: int) -> None:
    """Four sequences in windows of three: 4 (3 k + 1) words for k of them; a rest of the text counts for nothing."""
    found = windows(torch.arange(length), 4, 3)
    assert len(found) == (length // 4 - 1) // 3 == count


def test_a_short_text_is_told() -> None:
    assert len(windows(torch.arange(16), 4, 3)) == 1
    message = "text must have at least 16 words for 4 sequences of windows of 3, but has 15"
    with pytest.raises(DataError, match=re.escape(message)):
        windows(torch.arange(15), 4, 3)
    with pytest.raises(DataError, match="at least 80 words for 40 sequences of windows of 1, but has 79"):
        perplexity(LanguageModel(5, 3, sequences=40), torch.zeros(79, dtype=torch.int64), 40, 70)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("length", [1, 7, 10, 1000])
def test_perplexity_is_of_the_whole_text(length: int) -> None:
    """However it is cut, with a shorter window at its end, and nothing of it changes the model."""
    model, text = LanguageModel(11, 5, sequences=3), words(62)
    model.state.normal_()
    before = model.state.clone()
    columns = text[:60].view(3, 20).t()
    found = perplexity(model.eval(), text, 3, length).detach()
    log = predicted(model, columns).log_softmax(-1)[:-1].gather(-1, columns[1:].unsqueeze(-1))
    assert float(found) == pytest.approx(float((-log.mean()).exp().detach()), rel=1e-12)
    assert torch.equal(model.state, before)


@pytest.mark.usefixtures("float64")
def test_a_model_that_knows_nothing() -> None:
    """All words alike: the perplexity is the size of the vocabulary."""
    model = LanguageModel(11, 5, sequences=3)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        assert float(perplexity(model, words(90), 3, 4)) == pytest.approx(11)
        assert float(next_word(model, windows(words(90), 3, 4)[0])) == pytest.approx(math.log(11))
