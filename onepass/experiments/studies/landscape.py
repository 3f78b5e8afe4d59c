"""Where tuned values go, over what comes of values that stay: the paper's proof of concept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onepass.experiments.errors import UsageError
from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import title_of
from onepass.experiments.runs import Cell
from onepass.experiments.statistics import Array
from onepass.experiments.studies.plans import UNTUNED
from onepass.experiments.tables import note

WORST = 150.0  # what a lost start counts as; and one that ends above it
GRID = 80  # points along each axis


class Trail(NamedTuple):
    """Tuned starts of one method: ``(points, starts)``, and their final losses."""

    title: str
    lr: Array
    weight_decay: Array
    losses: Array


class Landscape(NamedTuple):
    """``losses[k, l]`` is expected at ``weight_decay[k]`` and ``lr[l]`` if they stay; ``trails`` move over it."""

    title: str
    note: str
    lr: Array
    weight_decay: Array
    losses: Array
    trails: list[Trail]


def landscapes(cells: Sequence[Cell]) -> list[Landscape]:
    found = []
    for dataset in dict.fromkeys(cell.request.dataset for cell in cells):
        own = [cell for cell in cells if cell.request.dataset == dataset]
        still = next((cell for cell in own if cell.request.method == UNTUNED), None)
        trails = [trail(cell) for cell in own if cell.request.method != UNTUNED]
        if still is not None and trails:
            about = f"landscape of {note(still.request, still.device)}"
            found.append(Landscape(title_of(dataset), about, *interpolated(still), trails))
    if not found:
        raise UsageError(f"trajectories need finished runs of {UNTUNED} and of a method that tunes; not both are there")
    return found


def trail(cell: Cell) -> Trail:
    curves = cell.curves()
    lr, decay = (np.concatenate([np.array(cell.start[n])[None], curves[n]]) for n in ("lr", "weight_decay"))
    return Trail(METHODS[cell.request.method].label, lr, decay, np.array(cell.test))


def interpolated(cell: Cell) -> tuple[Array, Array, Array]:
    """Learning rates, weight decays, and the mean of a Gaussian process in logarithms of everything.

    Its kernel is a radial basis function and white noise, fitted as scikit-learn does by default.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, WhiteKernel

    where = np.log10(np.stack([cell.start["lr"], cell.start["weight_decay"]], 1))
    losses = np.array(cell.test)
    losses = np.log10(np.clip(np.where(np.isfinite(losses), losses, WORST), 1e-12, WORST))
    process = GaussianProcessRegressor(RBF() + WhiteKernel(), random_state=0).fit(where, losses)
    axes = [np.linspace(low, high, GRID) for low, high in zip(where.min(0), where.max(0), strict=True)]
    lr, decay = np.meshgrid(*axes)
    expected = process.predict(np.stack([lr.ravel(), decay.ravel()], 1)).reshape(lr.shape)
    return 10 ** axes[0], 10 ** axes[1], np.asarray(10**expected)
