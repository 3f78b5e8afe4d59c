"""Sensitivities against autograd through the steps, and what they are for: not being short-sighted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.curvature import CURVATURES
from onepass.entries import Used
from onepass.estimator import how_far
from onepass.hypergradient import look_back
from onepass.hyperparameters import Hyperparameter
from onepass.linearise import Piece
from onepass.rules import RULES
from onepass.sensitivity import FAR, Sensitivity, agreed, carried_on, ramp
from onepass.whole_run import WholeRun
from tests.populations import TRAIN, VALID, assert_like_the_tuner, batches, population, trained, weights
from tests.problems import mse, train_step
from tests.test_hypergradient import CASES, Case, Quadratic, every_case, record, tensors

pytestmark = pytest.mark.usefixtures("float64")

WHOLE_RUN: dict[str, Any] = {"estimator": "whole-run", "lookback": 1}


def carried(case: Case, problem: Quadratic, steps: int, name: str, *, ramped: bool) -> Sensitivity:
    pieces, _ = record(case, problem, steps)
    found: Sensitivity = {"weights": torch.zeros_like(problem.start)}
    for age, step in enumerate(pieces):
        before = {key: (ramp(age) if ramped else 1.0) * tensor for key, tensor in found.items()}
        (found,) = carried_on(step, [before], [{name: torch.tensor(1.0)}], problem.product)
    return found


def final_weights(case: Case, problem: Quadratic, steps: int, name: str, change: Tensor, *, ramped: bool) -> Tensor:
    """With the value changed at every step, by as much or by a share that grows linearly from step to step."""
    w, state = problem.start, dict[str, Any]()
    for k in range(1, steps + 1):
        values = {**case.switches, **tensors(case)}
        values[name] = values[name] + change * (k / steps if ramped else 1.0)
        update, state = RULES[case.rule].update(values, w, problem.gradient(w), state)
        w = w - update
    return w


@every_case
@pytest.mark.parametrize("ramped", [False, True])
def test_equal_to_autograd_through_all_steps(case: Case, ramped: bool) -> None:
    problem = Quadratic()
    for name in case.tuned:

        def end(change: Tensor, name: str = name) -> Tensor:
            return final_weights(case, problem, 7, name, change, ramped=ramped)

        expected = torch.autograd.functional.jacobian(end, torch.tensor(0.0))
        found = carried(case, problem, 7, name, ramped=ramped)["weights"]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=name)


@every_case
def test_with_nothing_kept_it_is_the_series_with_one_term(case: Case) -> None:
    problem = Quadratic()
    pieces, end = record(case, problem, 4)
    slope = problem.valid_gradient(end)
    expected = look_back(pieces[-1], [slope], lookback=1)[0][0]
    for name in case.tuned:
        nothing = {"weights": torch.zeros_like(end)}
        (found,) = carried_on(pieces[-1], [nothing], [{name: torch.tensor(1.0)}], problem.product)
        torch.testing.assert_close((slope * found["weights"]).sum(), expected[name], rtol=1e-12, atol=1e-14)


def test_kept_for_ever_it_tends_to_the_implicit_derivative() -> None:
    """At a stationary point, of weight decay: ``-H'^-1 w``."""
    case, problem = CASES["sgd"], Quadratic()
    values = tensors(case)
    end = problem.stationary(values["weight_decay"])
    state = {"momentum_buffer": torch.zeros_like(end)}
    piece = Piece(
        RULES["sgd"].update, {**case.switches, **values}, end, problem.gradient(end), state, ("weight_decay",)
    )
    found: Sensitivity = {"weights": torch.zeros_like(end)}
    for _ in range(400):
        (found,) = carried_on([piece], [found], [{"weight_decay": torch.tensor(1.0)}], problem.product)
    matrix = problem.hessian + values["weight_decay"] * torch.eye(len(end))
    torch.testing.assert_close(found["weights"], -torch.linalg.solve(matrix, end), rtol=1e-8, atol=1e-10)


def test_values_take_turns() -> None:
    """Each from where its last turn left it, and by as much as if it had had no others beside it."""
    case, problem = CASES["sgd"], Quadratic()
    pieces, _ = record(case, problem, 7)
    groups, names = [0], ["lr", "momentum", "weight_decay"]
    used = [Used(0, name, Hyperparameter(0.1, "identity", name=name), torch.tensor(0.1), 1.0) for name in names]
    run = WholeRun(through_state=True)
    for step in pieces:
        run.carry_on(step, groups, used, problem.product(run.weights(step, used)))
    for place, name in enumerate(name for name in FAR if name in names):
        found: Sensitivity = {"weights": torch.zeros_like(problem.start)}
        for age, step in enumerate(pieces[place :: len(names)]):
            before = {key: ramp(age) * tensor for key, tensor in found.items()}
            (found,) = carried_on(step, [before], [{name: torch.tensor(1.0)}], problem.product)
        for key, expected in found.items():
            torch.testing.assert_close(run.state_dict()["kept"][name][0][key], expected, rtol=1e-12, atol=1e-14)


def test_a_saved_state_stays_as_it_was() -> None:
    """New sensitivities take the places of the old, but not in what has been saved."""
    case, problem = CASES["sgd"], Quadratic()
    pieces, _ = record(case, problem, 2)
    used = [Used(0, "lr", Hyperparameter(0.1, name="lr"), torch.tensor(0.1), 1.0)]
    run, nowhere = WholeRun(through_state=True), [torch.zeros_like(problem.start)]
    run.carry_on(pieces[0], [0], used, nowhere)
    saved = run.state_dict()["kept"]["lr"]
    before = saved[0]["weights"].clone()
    run.carry_on(pieces[1], [0], used, nowhere)
    assert torch.equal(saved[0]["weights"], before)
    assert not torch.equal(run.weights(pieces[1], used)[0], before)


def test_without_a_value_nothing_is_asked_for() -> None:
    pieces, _ = record(CASES["sgd"], Quadratic(), 1)
    run = WholeRun(through_state=True)
    assert run.weights(pieces[0], []) == []
    run.carry_on(pieces[0], [0], [], [])
    assert run.state_dict()["turns"] == 1


def test_less_is_left_of_the_past_where_the_learning_rate_has_come_down() -> None:
    """As much less; a rise brings nothing back. Between the turns of a value too."""
    case, problem = CASES["sgd"], Quadratic()
    pieces, end = record(case, problem, 5)
    rates = [0.1, 0.05, 0.2, 0.1, 0.02]
    used = [Used(0, n, Hyperparameter(0.1, "identity", name=n), torch.tensor(0.1), 1.0) for n in ("lr", "momentum")]
    run, found = WholeRun(through_state=True), {"weights": torch.zeros_like(end)}
    for k, (step, rate) in enumerate(zip(pieces, rates, strict=True)):
        at = [step[0]._replace(values={**step[0].values, "lr": torch.tensor(rate)})]
        run.carry_on(at, [0], used, problem.product(run.weights(at, used)))
        if k % 2 == 0:  # the turn of lr; 0.1, 0.2 and 0.02 by way of 0.05 and 0.1
            left = {0: 1.0, 2: 0.5, 4: 0.5 * 0.2}[k]
            before = {key: ramp(k // 2) * left * tensor for key, tensor in found.items()}
            (found,) = carried_on(at, [before], [{"lr": torch.tensor(1.0)}], problem.product)
    torch.testing.assert_close(run.state_dict()["kept"]["lr"][0], found, rtol=1e-12, atol=1e-14)


def two_groups(values: dict[str, Any], **settings: Any) -> onepass.TunerStep:
    """The sixth hyper step of a small network, with a param group for each layer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD([{"params": model[i].parameters()} for i in (0, 2)], **values)
    still: Any = {"interval": 1, "hyper_optimizer": lambda raw: torch.optim.SGD(raw, lr=0.0)}
    tuner = onepass.Tuner(model, optimizer, mse, [VALID], **still, **settings)
    for _ in range(6):
        train_step(model, optimizer, TRAIN, mse)
        found = tuner.step(TRAIN)
    assert found is not None
    return found


@pytest.mark.parametrize("rule", ["SGD", "Adam", "NAdam"])
def test_a_part_at_a_time_is_the_same(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five weights, where a piece has 21; NAdam's state has a number that changes with the values too."""

    def slopes() -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizer = getattr(torch.optim, rule)(model.parameters(), lr=0.05, weight_decay=1e-3)
        tuner = onepass.Tuner(model, optimizer, mse, [VALID], interval=1)
        for _ in range(8):
            train_step(model, optimizer, TRAIN, mse)
            tuner.step(TRAIN)
        return [record.hypergradients for record in tuner.history]

    whole = slopes()
    for module in ("whole_run", "linearise"):
        monkeypatch.setattr(f"onepass.{module}.at_once", lambda tensor: 5)
    for found, expected in zip(slopes(), whole, strict=True):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-9, abs=1e-14), name


def test_groups_share_the_work_of_their_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has what came of it in its own weights; together, what a value for both has."""
    monkeypatch.setattr("onepass.whole_run.agreed", lambda far, near: far)
    values = {"lr": 0.05, "momentum": 0.8, "weight_decay": 1e-3}
    apart, together = two_groups(values), two_groups(values, tied=tuple(values))
    for name in values:
        first, second = apart.hypergradients[name]
        assert first + second == pytest.approx(together.hypergradients[name][0], rel=1e-9)
        assert abs(first - second) > 1e-3 * abs(first)


def test_beside_a_learning_rate_for_every_weight() -> None:
    """Momentum and weight decay are looked at through the whole run, the learning rates, of which one is alone, not."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    values: dict[str, Any] = {"momentum": 0.5, "weight_decay": 1e-3}
    optimizer = onepass.optim.SGD(onepass.per_element(model.parameters(), lr=0.05), **values)
    tuner = onepass.Tuner(model, optimizer, mse, [VALID], interval=1, estimator="whole-run")
    for _ in range(6):
        train_step(model, optimizer, TRAIN, mse)
        tuner.step(TRAIN)
    assert tuner.state_dict()["past"]["kept"].keys() == values.keys()
    assert any(record.hypergradients["momentum"][0] for record in tuner.history)


@pytest.mark.parametrize("curvature", sorted(CURVATURES))
def test_any_curvature(curvature: str) -> None:
    """Products are taken where gradients are switched off: one that minds would be nothing, or far too large."""
    values = {"lr": 0.05, "momentum": 0.8, "weight_decay": 1e-3}
    exact = two_groups(values, curvature="exact").hypergradients
    if curvature == "gauss-newton":  # another matrix: only to be of the same size
        found = two_groups(values, curvature=curvature).hypergradients
        assert all(abs(f) < 3 * abs(e) + 1e-2 for n in exact for f, e in zip(found[n], exact[n], strict=True))
        return
    found = two_groups(values, curvature=curvature).hypergradients
    for name, expected in exact.items():
        assert found[name] == pytest.approx(expected, rel=1e-5, abs=1e-9), name


def test_only_what_both_want() -> None:
    far, near = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0]), torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0])
    assert agreed(far, near).tolist() == [2, 0, -2, 0, 0]


def test_arguments_stay_as_they_are() -> None:
    pieces, _ = record(CASES["adam"], Quadratic(), 3)
    before = {"weights": torch.randn(4), "exp_avg": torch.randn(4), "exp_avg_sq": torch.randn(4)}
    copies = {key: tensor.clone() for key, tensor in before.items()}
    carried_on(pieces[-1], [before], [{"lr": torch.tensor(1.0)}], Quadratic().product)
    assert all(torch.equal(before[key], copies[key]) for key in copies)


# --- in a population, and in a tuner ---

SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"start": {"lr": [1e-3, 0.2], "momentum": 0.8, "weight_decay": 1e-3}},
    "sgd, far too fast": {"start": {"lr": [0.5, 10.0], "momentum": [0.9, 0.7], "weight_decay": 1e-3}},
    "adamw": {"rule": "adamw", "start": {"lr": [1e-3, 10.0]}},
    "without momentum's past": {"start": {"lr": 0.05, "momentum": [0.5, 0.9]}, "through_state": False},
    "looking back too": {"start": {"lr": 0.05, "momentum": [0.5, 0.9]}, "lookback": 3},
    "some values": {"start": {"lr": 0.05, "momentum": [0.5, 0.9]}, "tune": ("lr",)},
    "finite differences": {"start": {"lr": 0.05, "momentum": [0.5, 0.9]}, "curvature": "finite-difference"},
    "recorded": {"start": {"lr": [0.05, 0.1], "momentum": 0.9}, "backend": "traced"},
    "another optimizer": {"start": {"lr": [1e-3, 0.2]}, "hyper_optimizer": lambda raw: torch.optim.Adam(raw, lr=0.1)},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_replica_is_what_the_tuner_makes(settings: dict[str, Any]) -> None:
    # A finite difference takes its step by the length of a replica's whole row, and of the tuner's pieces: the same.
    tolerance = 1e-6 if settings.get("curvature") else 1e-9
    every: dict[str, Any] = {"replicas": 2, "tolerance": tolerance, **WHOLE_RUN, **settings}
    found = assert_like_the_tuner(60, batches(5), batches(3), **every)
    assert bool(found.history.returns.any()) == (10.0 in torch.tensor(settings["start"]["lr"]))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule: str) -> None:
    assert_like_the_tuner(14, rule=rule, replicas=2, start={"lr": [3e-2, 2.0]}, interval=4, **WHOLE_RUN)


def test_a_resumed_population_remembers(tmp_path: Path) -> None:
    """Saved in the middle, with a replica that has been sent back and so remembers less than the other."""
    settings: dict[str, Any] = {"start": {"lr": [0.05, 10.0], "momentum": 0.9}, "replicas": 2, **WHOLE_RUN}
    whole = trained(60, **settings)
    assert whole.history.returns[1] > 0
    with pytest.raises(KeyboardInterrupt):
        population(**settings).run(interrupted(35), [VALID], steps=60, checkpoint=tmp_path / "run.pt", every=10)
    resumed = population(**settings)
    resumed.run([TRAIN], [VALID], steps=60, checkpoint=tmp_path / "run.pt")
    assert torch.equal(weights(resumed), weights(whole))
    assert torch.equal(resumed.history.hypergradients["lr"], whole.history.hypergradients["lr"])


def interrupted(after: int) -> Iterator[Any]:
    yield from [TRAIN] * after
    raise KeyboardInterrupt


@pytest.mark.parametrize("clip_norm", [0.3, 1e3])
def test_clipped_gradients(clip_norm: float) -> None:
    start = {"lr": [1e-3, 0.05], "momentum": 0.8}
    tolerance = 1e-6 if clip_norm < 1 else 1e-9  # torch's epsilon, as in the test of the series
    assert_like_the_tuner(60, start=start, replicas=2, clip_norm=clip_norm, tolerance=tolerance, **WHOLE_RUN)


def test_a_population_takes_the_derivative_through_all_hyper_steps() -> None:
    """With an interval of one and nothing in the way, the hypergradient is autograd's through the ramped run."""
    settings: dict[str, Any] = {"start": {"lr": 0.05, "momentum": 0.6}, "replicas": 1, "guard": None, "tune": ("lr",)}
    still = {"hyper_optimizer": lambda raw: torch.optim.SGD(raw, lr=0.0)}
    found = trained(6, interval=1, **WHOLE_RUN, **settings, **still)
    change = torch.tensor(0.0, requires_grad=True)
    model = found.model(0)
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)
    w = weights(trained(1, **{**settings, "start": {"lr": 0.0, "momentum": 0.0}, "tune": ()}))[0].requires_grad_()
    velocity = torch.zeros_like(w)

    def loss(w: Tensor, batch: Any) -> Tensor:
        parts = w.split([shape.numel() for shape in shapes])
        views = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        found: Tensor = (torch.func.functional_call(model, views, (batch[0],)) - batch[1]).square().mean()
        return found

    for k in range(1, 7):
        velocity = 0.6 * velocity + torch.autograd.grad(loss(w, TRAIN), w, create_graph=True)[0]
        w = w - 0.05 * 10 ** (change * k / 6) * velocity
    expected = torch.autograd.grad(loss(w, VALID), change)[0]
    torch.testing.assert_close(found.history.hypergradients["lr"][-1, 0], expected, rtol=1e-9, atol=1e-12)


def test_noise_does_not_drive_the_learning_rate_down() -> None:
    """A narrow valley, noisy gradients: the series gives its slow directions up for less noise now, and ends higher."""
    generator, curvature = torch.Generator().manual_seed(0), torch.logspace(-3, 0, 20)
    noise = [torch.randn(20, generator=generator) for _ in range(2000)]

    class Point(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(1 / curvature.sqrt())

    def height(model: Point, batch: Tensor) -> Tensor:
        return (curvature * model.w**2).sum() / 2

    def noisy(model: Point, batch: Tensor) -> Tensor:
        return height(model, batch) + (batch * model.w).sum()

    def ends(**settings: Any) -> tuple[Tensor, Tensor]:
        start = {"lr": [0.1, 0.3, 1.0]}
        found = onepass.Population(Point, noisy, replicas=3, start=start, valid_loss=height, guard=None, **settings)
        found.run(noise, [noise[0]], steps=2000)
        return found.evaluate(height, noise[0]), found.history.values["lr"][100]  # half-way

    near, far = ends(lookback=5), ends()
    assert far[0].max() < 0.9 * near[0].min()
    assert far[1].min() > near[1].max(), "the series has lowered the learning rate far too early"


BAD = [{"unroll": 3, "guard": None}, {"restart": True, "guard": None}, {"per_element": ("lr",)}]


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_what_it_is_not_for(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'whole-run' is for one value a replica"):
        trained(1, estimator="whole-run", **settings)


def test_an_unknown_estimator() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"estimator must be one of \['series', 'whole-run'\], but got 'far'"):
        onepass.Tuner(model, optimizer, lambda m, b: m(b[0]).sum(), [TRAIN], estimator="far")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((None, None, True), ("whole-run", 1)),
        ((None, None, False), ("series", 5)),
        ((None, 3, True), ("series", 3)),
        (("series", None, True), ("series", 5)),
        (("whole-run", 2, True), ("whole-run", 2)),
    ],
    ids=str,
)
def test_what_is_taken_by_default(asked: tuple[Any, Any, bool], expected: tuple[str, int]) -> None:
    assert how_far(*asked[:2], far=asked[2]) == expected
