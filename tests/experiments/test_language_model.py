"""The LSTM that is written out equals torch's own, alone and stacked, and carries its state along a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap

import onepass
from onepass.experiments.models import LanguageModel
from onepass.experiments.text import Window, next_word, perplexity, windows
from onepass.operations import recorded, simplify
from tests.experiments.language import WORDS, predicted, words
from tests.populations import assert_close, flat

pytestmark = pytest.mark.usefixtures("float64")

SEQUENCES, LENGTH = 3, 6
TRAIN, VALID = windows(words(70), SEQUENCES, LENGTH), windows(words(50, 1), SEQUENCES, LENGTH)


def tiny() -> LanguageModel:
    return LanguageModel(WORDS, 5, sequences=SEQUENCES)


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.decoder = nn.Embedding(WORDS, 5), nn.LSTM(5, 5, 2), nn.Linear(5, WORDS)


def test_weights_are_those_of_torch() -> None:
    """By name, shape and initialisation."""
    torch.manual_seed(3)
    mine = dict(tiny().named_parameters())
    torch.manual_seed(3)
    theirs = dict(Torchs().named_parameters())
    assert list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert sum(p.numel() for p in LanguageModel(10_000, 650, sequences=1).parameters()) == 19_780_400


def derivatives(model: LanguageModel, scores: Tensor, along: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    parameters = list(model.parameters())
    value = scores.sin().sum() + scores[-1].square().sum()
    first = torch.autograd.grad(value, parameters, create_graph=True)
    second = torch.autograd.grad(first, parameters, along)
    return [each.detach() for each in first], list(second)


def test_outputs_and_derivatives_are_those_of_torch() -> None:
    """From a state that is not zero; the second derivatives as products with a random direction."""
    model, text, state = tiny(), words(24).view(8, 3), torch.randn(2, 2, 3, 5)
    along = [torch.randn_like(p) for p in model.parameters()]
    found, expected = model.read(text, state)[0], predicted(model, text, state)
    assert_close(found.detach(), expected.detach(), 1e-13)
    for mine, theirs in zip(derivatives(model, found, along), derivatives(model, expected, along), strict=True):
        for one, other, name in zip(mine, theirs, dict(model.named_parameters()), strict=True):
            assert_close(one, other, 1e-11, name)
            assert other.abs().max() > 1e-3


def test_derivatives_by_the_state() -> None:
    """First and second, from all that ``read`` gives; training needs neither."""
    model, text = tiny(), words(24).view(8, 3)
    leaf = torch.randn(2, 2, 3, 5, requires_grad=True)

    def value(leaf: Tensor) -> Tensor:
        scores, after = model.read(text, leaf)
        found: Tensor = scores.sin().sum() + (after * torch.arange(5)).square().sum()
        return found

    assert torch.autograd.gradcheck(value, leaf)
    assert torch.autograd.gradgradcheck(value, leaf)


# --- the state ---


def test_a_text_in_parts_is_the_whole_text() -> None:
    model, (a, b, c) = tiny(), (window[0] for window in TRAIN[:3])
    parts = [model(a, torch.tensor(True)), model(b, torch.tensor(False)), model(c, torch.tensor(False))]
    assert_close(torch.cat(parts).detach(), predicted(model, torch.cat([a, b, c])).detach(), 1e-13)
    assert not model.state.requires_grad


def test_a_new_pass_forgets_even_what_is_not_a_number() -> None:
    model, text = tiny(), TRAIN[0][0]
    model.state.fill_(torch.nan)
    assert_close(model(text, torch.tensor(True)).detach(), predicted(model, text).detach(), 1e-13)
    assert model.state.isfinite().all()


def test_evaluation_begins_from_zeros_and_leaves_the_state() -> None:
    model, text = tiny(), TRAIN[0][0]
    model(text, torch.tensor(True))
    before = model.state.clone()
    assert_close(model.eval()(text, torch.tensor(False)).detach(), predicted(model, text).detach(), 1e-13)
    assert before.any() and torch.equal(model.state, before)


# --- in a population ---

RATES = [0.5, 2.0]


def population(**settings: Any) -> onepass.Population:
    every: dict[str, Any] = {"replicas": 2, "start": {"lr": RATES}, "guard": None, "clip_norm": 0.25, **settings}
    return onepass.Population(tiny, next_word, **every)


def step_alone(model: nn.Module, window: Window, lr: float) -> None:
    model.zero_grad()
    next_word(model, window).backward()  # type: ignore[arg-type]
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    torch.optim.SGD(model.parameters(), lr=lr).step()


@pytest.mark.parametrize("backend", ["eager", "traced"])
def test_a_replica_is_the_model_trained_alone(backend: str) -> None:
    """Three passes over a text of three windows."""
    before, found = population(tune=()), population(tune=(), backend=backend)
    found.run(TRAIN, steps=9)
    assert len(TRAIN) == 3
    for r, lr in enumerate(RATES):
        model = before.model(r)
        for step in range(9):
            step_alone(model, TRAIN[step % 3], lr)
        for name, tensor in model.state_dict().items():
            assert_close(found.model(r).state_dict()[name], tensor, 1e-12, name)


def series_of_two(model: Any, window: Window, lr: float) -> float:
    """By hand: -v (g + (I - lr J) g), where g is the clipped gradient at the state before the step, and J its slope."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    lent = {**weights, "state": model.state.clone()}
    scores = functional_call(model, lent, (window[0], window[2]))
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), window[1].flatten())
    rows = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    whole = torch.cat([row.flatten() for row in rows])
    clipped = whole * (0.25 / (whole.norm() + 1e-6)).clamp(max=1)
    step_alone(model, window, lr)
    model.eval()
    valid = torch.autograd.grad(next_word(model, VALID[1]), list(model.parameters()))
    model.train()
    v = torch.cat([part.flatten() for part in valid])
    sloped = torch.autograd.grad(clipped, list(weights.values()), v)
    back = v - lr * torch.cat([part.flatten() for part in sloped])
    return -float((v + back) @ clipped.detach()) * lr * math.log(10)


@pytest.mark.parametrize("backend", ["eager", "traced"])
@pytest.mark.parametrize(("curvature", "accuracy"), [("exact", 1e-9), ("finite-difference", 1e-5)])
def test_the_step_that_is_differentiated_begins_where_it_really_did(
    curvature: str, accuracy: float, backend: str
) -> None:
    """The second hyper step, which comes in the middle of a pass."""
    settings: dict[str, Any] = {"lookback": 2, "interval": 4, "curvature": curvature, "backend": backend}
    settings["hyper_optimizer"] = lambda raw: torch.optim.SGD(raw, lr=0.1)
    before, found = population(**settings), population(**settings)
    found.run(TRAIN, VALID, steps=8)
    for r, lr in enumerate(RATES):
        model = before.model(r)
        for step in range(7):
            step_alone(model, TRAIN[step % 3], lr if step < 4 else float(found.history.values["lr"][0, r]))
        expected = series_of_two(model, TRAIN[7 % 3], float(found.history.values["lr"][0, r]))
        seen = float(found.history.hypergradients["lr"][1, r])
        assert abs(expected) > 1e-4 and seen == pytest.approx(expected, rel=accuracy)
        assert_close(found.model(r).state_dict()["state"], model.state, accuracy)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"unroll": 3}, {"tune": ("lr",), "estimator": "product", "interval": 1}], ids=str)
def test_finite_differences_are_enough_for_every_method(settings: dict[str, Any]) -> None:
    exact, finite = (population(curvature=name, **settings) for name in ("exact", "finite-difference"))
    for each in (exact, finite):
        each.run(TRAIN, VALID, steps=20)
    assert_close(flat(finite.model(0)), flat(exact.model(0)), 1e-6)
    assert (exact.values()["lr"] != torch.tensor(RATES)).all()


def test_perplexity_of_every_replica() -> None:
    found, text = population(), words(64, 4)
    found.run(TRAIN, VALID, steps=4)

    def metric(model: Any, text: Tensor) -> Tensor:
        return perplexity(model, text, SEQUENCES, LENGTH)

    together = found.evaluate(metric, text)
    for r in range(2):
        alone: Any = found.model(r)
        assert float(together[r]) == pytest.approx(
            float(perplexity(alone, text, SEQUENCES, LENGTH).detach()), rel=1e-12
        )


def test_taken_up_in_the_middle_of_a_text(tmp_path: Path) -> None:
    path, (whole, first, second) = tmp_path / "population.pt", (population(interval=4) for _ in range(3))
    whole.run(TRAIN, VALID, steps=17)
    first.run(TRAIN, VALID, steps=8, checkpoint=path)
    second.run(TRAIN, VALID, steps=17, checkpoint=path)
    for name, tensor in whole.model(1).state_dict().items():
        assert torch.equal(second.model(1).state_dict()[name], tensor), name


# --- what it costs ---

FREE = (
    "view",
    "getitem",
    "unsqueeze",
    "select",
    "split",
    "transpose",
    "permute",
    "expand",
    "squeeze",
    "unbind",
    "slice",
)


def operations(steps: int) -> int:
    """What stacked models do for the gradients of a loss, views apart."""
    model, text = LanguageModel(WORDS, 4, layers=1, sequences=2).eval(), words(2 * steps).view(steps, 2)
    names, given = list(dict(model.named_parameters())), [torch.stack([p.detach()] * 2) for p in model.parameters()]

    def loss(weights: list[Tensor]) -> Tensor:
        scores: Tensor = functional_call(model, dict(zip(names, weights, strict=True)), (text, torch.tensor(True)))
        return scores.square().mean()

    def slopes(*weights: Tensor) -> list[Tensor]:
        leaves = [w.detach().requires_grad_() for w in weights]
        return list(torch.autograd.grad(vmap(loss)(leaves).sum(), leaves))

    graph: fx.Graph = recorded(slopes, given)[1]
    simplify(graph)
    graph.eliminate_dead_code()
    calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return sum(not any(free in call for free in FREE) for call in calls)


def test_a_time_step_takes_few_operations() -> None:
    """Seven forward, five on the way back: on a GPU it is their number that counts."""
    assert operations(6) - operations(5) == 12
