"""The paper's methods, and ours: rows of one table. A row is nothing but options for a ``Population``.

The three ``one-pass-*`` with letters behind follow the paper; ``one-pass`` alone is the library's own default.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onepass.starts import Uniform

# The paper keeps learning rates in this range, and lets the rest go where it likes.
PAPER_BOUNDS = {"lr": (1e-10, 1.0), "momentum": (0.0, 1.0), "weight_decay": (0.0, math.inf)}


@dataclass(frozen=True)
class Search:
    """What is searched around the training of one start.

    Attributes:
        name: as in ``onepass.experiments.search``.
        replicas: starts, or repetitions of the whole search, unless somebody wants others.
        trials: trainings of each repetition; ``None`` where every start is a trial.
    """

    name: str
    replicas: int
    trials: int | None = None


@dataclass(frozen=True)
class Method:
    """How the starts of one data set are trained.

    Attributes:
        title: as ``published.csv`` has it.
        about: one line for people.
        options: arguments of ``onepass.Population``.
        trains_on: "training", or "all": training and validation data together, where nothing is tuned by the latter.
        tunes_by: the data whose loss the hypergradients belong to.
        best_of: of so many starts in a row, keep the one with the lowest validation loss.
        search: what is put around it, if anything is.
        horizon: exact hypergradients through so many steps, once in so many; at most through all of a training.
        again: after each hyper step, begin anew from the first weights, as many times as the protocol says.
        short: on the shorter problem that the protocol knows, unless somebody wants another.
        replicas: starts, unless somebody wants others; ``None`` for the protocol's.
    """

    title: str
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    trains_on: str = "training"
    tunes_by: str = "validation"
    best_of: int = 1
    search: Search | None = None
    horizon: int | None = None
    again: bool = False
    short: bool = False
    replicas: int | None = None

    @property
    def label(self) -> str:
        """For tables and legends."""
        return self.title.replace("_", " ")

    def tunes(self, name: str) -> bool:
        """Without a list of its own, a method tunes everything."""
        return self.search is None and name in self.options.get("tune", (name,))


def adam(lr: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda raw: torch.optim.Adam(raw, lr=lr)


def sgd(lr: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda raw: torch.optim.SGD(raw, lr=lr)


def paper(*tune: str, **options: Any) -> dict[str, Any]:
    """The settings that all tuned methods of the paper share."""
    common = {"interval": 10, "lookback": 5, "through_state": False, "guard": None, "hyper_optimizer": adam(0.05)}
    return {"tune": tune, "bounds": {name: PAPER_BOUNDS[name] for name in tune}, **common, **options}


THE_PAPER_S = paper("weight_decay", "lr", "momentum")
ASHA = Search("asha", 114_286)  # as many weight steps as 200 trainings, if each of the seven budgets takes the same
PBT = Search("pbt", 200)
WHOLE = sys.maxsize  # a horizon that no training reaches

METHODS: dict[str, Method] = {
    "random": Method("Random", "fixed values, as in random search", {"tune": ()}, trains_on="all"),
    "random-x-lr": Method(
        "Random (x LR)",
        "fixed values, but lr is multiplied by a constant from U[0.95, 1.01] every 10 steps",
        {"tune": (), "scale": {"lr": Uniform(0.95, 1.01)}, "bounds": {"lr": PAPER_BOUNDS["lr"]}},
        trains_on="all",
    ),
    "random-3-batched": Method(
        "Random (3-batched)", "fixed values, the best of every three starts by validation loss", {"tune": ()}, best_of=3
    ),
    "lorraine": Method("Lorraine", "weight decay by the series (Lorraine et al. 2020)", paper("weight_decay")),
    "baydin": Method(
        "Baydin",
        "lr by the product of successive training gradients (Baydin et al. 2018)",
        paper("lr", estimator="product", interval=1, hyper_optimizer=sgd(0.001)),
        tunes_by="training",
    ),
    "one-pass-wd-lr": Method("Ours_WD+LR", "weight decay and lr by the series", paper("weight_decay", "lr")),
    "one-pass-wd-lr-m": Method("Ours_WD+LR+M", "weight decay, lr and momentum by the series", THE_PAPER_S),
    "one-pass-wd-hdlr-m": Method(
        "Ours_WD+HDLR+M",
        "weight decay, momentum and one lr for every weight by the series",
        paper("weight_decay", "lr", "momentum", per_element=("lr",)),
    ),
    "diff-through-opt": Method(
        "Diff-through-Opt",
        "weight decay, lr and momentum by exact derivatives through the last 5 steps",
        paper("weight_decay", "lr", "momentum", unroll=5),
    ),
    "medium-diff-through-opt": Method(
        "Medium Diff-through-Opt",
        "the same through the last 200 steps, every 200 steps",
        THE_PAPER_S,
        horizon=200,
    ),
    "long-diff-through-opt": Method(
        "Long Diff-through-Opt",
        "the same through all steps of a short training, which then begins anew: 30 times, or 50 on Fashion-MNIST",
        THE_PAPER_S,
        horizon=WHOLE,
        again=True,
        short=True,
    ),
    "full-diff-through-opt": Method(
        "Full Diff-through-Opt",
        "the same through all steps of a training of the usual length, 30 times; of 36 starts",
        THE_PAPER_S,
        horizon=WHOLE,
        again=True,
        replicas=36,
    ),
    "one-pass": Method("one-pass", "everything, with this library's defaults"),
    "one-pass-lookback-5": Method(
        "one-pass (i=5)", "the same by the series alone, without a look through the whole run", {"lookback": 5}
    ),
    "one-pass-lookback-1": Method("one-pass (i=1)", "the same without second derivatives", {"lookback": 1}),
    "bayesian-optimisation": Method(
        "Bayesian Optimisation",
        "fixed values, the best of 30 trainings, 5 of them random and the others guided by a Gaussian process",
        {"tune": ()},
        search=Search("bayesian-optimisation", 32, trials=30),
    ),
    "asha-random": Method(
        "ASHA + Random", "fixed values, the best quarter goes on after 1, 4, 16 ... steps", {"tune": ()}, search=ASHA
    ),
    "asha-one-pass-wd-lr-m": Method("ASHA + Ours_WD+LR+M", "the same, tuned as in the paper", THE_PAPER_S, search=ASHA),
    "asha-one-pass": Method("ASHA + one-pass", "the same, tuned with this library's defaults", search=ASHA),
    "pbt-random": Method(
        "PBT + Random", "40 times, the worst quarter becomes mutated copies of the best", {"tune": ()}, search=PBT
    ),
    "pbt-one-pass-wd-lr-m": Method("PBT + Ours_WD+LR+M", "the same, tuned as in the paper", THE_PAPER_S, search=PBT),
    "pbt-one-pass": Method("PBT + one-pass", "the same, tuned with this library's defaults", search=PBT),
}

SEARCHES = tuple(name for name, row in METHODS.items() if row.search is not None)
FAR_SIGHTED = tuple(name for name, row in METHODS.items() if row.horizon is not None)  # for the study of short horizons
ALONE = tuple(name for name in METHODS if name not in (*SEARCHES, *FAR_SIGHTED))  # every start for itself
