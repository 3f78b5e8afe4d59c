"""onepass tunes learning rate, momentum, weight decay and more while a model trains: one run, no restarts."""

from onepass import curvature, hypergradient, optim, rules, sensitivity
from onepass.batches import Minibatches
from onepass.guard import Guard
from onepass.history import History, Schedule, TunerStep
from onepass.hyperparameters import Hyperparameter
from onepass.optim import per_element, per_tensor
from onepass.population import Population
from onepass.rules import Rule, register
from onepass.starts import LogUniform, Uniform
from onepass.tuner import Tuner
from onepass.version import __version__

__all__ = [
    "Guard",
    "History",
    "Hyperparameter",
    "LogUniform",
    "Minibatches",
    "Population",
    "Rule",
    "Schedule",
    "Tuner",
    "TunerStep",
    "Uniform",
    "__version__",
    "curvature",
    "hypergradient",
    "optim",
    "per_element",
    "per_tensor",
    "register",
    "rules",
    "sensitivity",
]
