"""Every row of the table of methods, and the protocol that trains by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import onepass
from onepass.experiments.datasets import Data, load
from onepass.experiments.methods import ALONE, METHODS, Method
from onepass.experiments.protocol import PROTOCOLS, STARTS, data_of, language, squared_error
from onepass.experiments.published import published
from onepass.experiments.sources import DataError
from onepass.experiments.text import next_word, windows
from onepass.experiments.training import Outcome, train
from tests.experiments import language as words

DATA = load("diabetes")
PROTOCOL = PROTOCOLS["diabetes"]
WITH_NUMBERS = ("uci-energy", "kin8nm", "uci-power", "fashion-mnist", "fashion-mnist-batchnorm", "penn-treebank")
IN_THE_PAPER = [name for name in ALONE if METHODS[name].title != METHODS[name].label or name[:8] != "one-pass"]


def trained(method: str | Method, **settings: object) -> Outcome:
    row = METHODS[method] if isinstance(method, str) else method
    every = {"replicas": 3, "steps": 20, **settings}
    return train(PROTOCOL, row, DATA, **every)  # type: ignore[arg-type]


def by_hand(name: str, **options: Any) -> onepass.Population:
    everything = tuple(torch.cat(both) for both in zip(DATA.train, DATA.valid, strict=True))
    population = onepass.Population(
        lambda: PROTOCOL.make_model(DATA), squared_error, replicas=3, start=STARTS, **options
    )
    population.run([everything if METHODS[name].trains_on == "all" else DATA.train], [DATA.valid], steps=20)
    return population


@pytest.mark.parametrize("name", ALONE)
def test_every_method_trains(name: str) -> None:
    found = trained(name, steps=60)  # values may have to wait for their turn
    assert found.test.isfinite().all() and found.valid.isfinite().all()
    tuned = METHODS[name].options.get("tune", ("lr", "momentum", "weight_decay"))
    for value, start in found.start.items():
        moved = bool((found.end[value] - start).abs().max() > 1e-9 * start.abs().max())
        assert moved == (value in tuned or value in METHODS[name].options.get("scale", {})), value
    assert found.curve_test.shape == (len(found.curve_steps), 3)
    assert found.curve_test[-1].tolist() == pytest.approx(found.test.tolist())


@pytest.mark.parametrize("name", ["random", "one-pass", "random-3-batched"])
def test_a_row_is_a_population_and_nothing_more(name: str) -> None:
    population = by_hand(name, **METHODS[name].options)
    expected = population.evaluate(squared_error, DATA.test).double() * DATA.target_scale**2
    assert torch.equal(trained(name).test, expected)


def test_all_methods_begin_from_the_same_starts() -> None:
    first, second = trained("random", steps=1), trained("one-pass-wd-lr-m", steps=1)
    for name, value in first.start.items():
        assert value.tolist() == pytest.approx(second.start[name].tolist(), rel=1e-12)


def test_random_trains_on_validation_data_too_and_three_batched_does_not() -> None:
    assert not torch.equal(trained("random").test, trained("random-3-batched").test)


def test_baydin_never_sees_validation_data() -> None:
    other = Data(DATA.train, (DATA.valid[0] + 1, DATA.valid[1] * 2), DATA.test, DATA.target_scale)
    seen = [train(PROTOCOL, METHODS["baydin"], data, replicas=3, steps=20).test for data in (DATA, other)]
    assert torch.equal(*seen)


def test_baydin_looks_at_the_batch_that_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch just stepped on would praise every step."""
    fed: list[Any] = []
    monkeypatch.setattr(onepass.Population, "run", lambda self, train, valid, **options: fed.extend((train, valid)))
    for protocol, data in ((PROTOCOLS["digits"], load("digits")), (TINY, words.data())):
        fed.clear()
        with pytest.raises(KeyError):  # there was no run to report
            train(protocol, METHODS["baydin"], data, replicas=2, steps=5)
        training, tuning = ([feed.at(t, 2) for t in range(50)] if protocol is not TINY else feed for feed in fed)
        for now, new in zip(training[1:], tuning, strict=False):
            assert all(torch.equal(a, b) for a, b in zip(now, new, strict=True))


@pytest.mark.parametrize("name", IN_THE_PAPER)
def test_the_paper_has_numbers_for_its_methods(name: str) -> None:
    for dataset in ("uci-energy", "kin8nm", "uci-power"):
        assert published("AverageResults_UCI", dataset, METHODS[name].title) is not None


def test_nine_methods_are_in_the_paper() -> None:
    assert len(IN_THE_PAPER) == 9
    assert published("AverageResults_UCI", "uci-energy", "one-pass") is None


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_fits_its_data(name: str, request: pytest.FixtureRequest) -> None:
    folder = None if name in ("digits", "diabetes") else request.getfixturevalue("real_data")
    protocol = PROTOCOLS[name]
    data = load(protocol.data or name, data_dir=folder)
    if data_of(name).kind == "text":  # a small network on the beginning of it: the whole takes minutes
        protocol = language(width=8, sequences=4, length=6)
        data = Data(data.train, (data.valid[0][:200],), (data.test[0][:200],))
    found = train(protocol, METHODS["one-pass"], data, replicas=2, steps=2)
    assert found.test.isfinite().all()
    assert set(found.others) == ({"test error"} if data_of(name).kind == "classification" else set())
    assert all(((values >= 0) & (values <= 1)).all() for values in found.others.values())
    for metric, table in protocol.published.items():
        assert metric in (protocol.metric, *protocol.others)
        in_paper = published(table, name, "Random") is not None
        assert in_paper == (name in WITH_NUMBERS)


# --- text ---

TINY = language(width=5, sequences=3, length=6)


@pytest.mark.parametrize("name", ALONE)
def test_every_method_trains_on_text(name: str) -> None:
    text = words.data()
    found = train(TINY, METHODS[name], text, replicas=3, steps=20)
    for perplexities in (found.test, found.valid):
        assert ((perplexities > 1) & (perplexities < 30)).all()
    assert found.curve_test[-1].tolist() == found.test.tolist() and not found.others


def test_clipping_and_curvature_belong_to_the_data() -> None:
    """Every method gets them; by hand, one of them gives the same."""
    text, parts = words.data(), []
    for kind in ("train", "valid"):
        parts.append(windows(getattr(text, kind)[0], 3, 6))
    population = onepass.Population(
        lambda: TINY.make_model(text),
        next_word,
        replicas=3,
        start=STARTS,
        clip_norm=0.25,
        curvature="finite-difference",
        **METHODS["diff-through-opt"].options,
    )
    population.run(*parts, steps=20)
    found = train(TINY, METHODS["diff-through-opt"], text, replicas=3, steps=20)
    assert {name: value.tolist() for name, value in population.values().items()} == {
        name: value.tolist() for name, value in found.end.items()
    }


def test_random_reads_training_and_validation_text_one_after_the_other() -> None:
    text = words.data()
    joined = Data((torch.cat([text.train[0], text.valid[0]]),), text.valid, text.test)
    row = METHODS["random"]
    found = train(TINY, row, text, replicas=2, steps=20)
    expected = train(TINY, replace(row, trains_on="training"), joined, replicas=2, steps=20)
    assert torch.equal(found.test, expected.test)


def test_a_text_that_is_too_short_is_told() -> None:
    text = words.data()._replace(valid=(torch.arange(20),))
    with pytest.raises(DataError, match="at least 21 words for 3 sequences of windows of 6, but has 20"):
        train(TINY, METHODS["one-pass"], text, replicas=2, steps=2)


def test_the_paper_s_language_model() -> None:
    protocol = PROTOCOLS["penn-treebank"]
    model: Any = protocol.make_model(Data((torch.tensor([0, 9_999]),), (), ()))
    assert model.embedding.weight.shape == model.decoder.weight.shape == (10_000, 650)
    assert model.lstm.num_layers == 2 and model.state.shape == (2, 2, 40, 650)
    batches = protocol.batches((torch.zeros(929_589, dtype=torch.int64),))
    assert batches[0][0].shape == (70, 40) and protocol.steps // len(batches) == 72


def test_a_loss_beyond_reason_counts_as_diverged() -> None:
    limit = float(trained("random").test.median())
    protocol = replace(PROTOCOL, lost_above=limit)
    found = train(protocol, METHODS["random"], DATA, replicas=3, steps=20)
    assert found.test.isnan().sum() == 1


def test_uci_networks_have_fifty_hidden_units() -> None:
    model = PROTOCOL.make_model(DATA)
    assert isinstance(model, nn.Sequential)
    assert [layer.out_features for layer in model if isinstance(layer, nn.Linear)] == [50, 1]


def test_test_losses_are_in_the_target_s_own_units() -> None:
    """A network that says 0 has the variance of the target around the mean of training and validation."""
    zero = Method("zero", "", {"tune": (), "bounds": {}})
    protocol = PROTOCOLS["diabetes"]
    still = train(
        type(protocol)(lambda data: Zero(), squared_error, "test MSE", 10, 2, start={"lr": 1e-30}),
        zero,
        DATA,
        replicas=2,
        steps=10,
    )
    own_units = DATA.test[1].double() * DATA.target_scale
    assert still.test.tolist() == pytest.approx([float((own_units**2).mean())] * 2, rel=1e-5)


class Zero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight
