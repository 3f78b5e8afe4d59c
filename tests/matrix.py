"""What works with what: features of a training run, by optimizer and curvature. ``python -m tests.matrix`` prints it.

``tests/test_matrix.py`` tries every cell, and that ``docs/compatibility.md`` says the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.curvature import CURVATURES
from onepass.rules import OPTIMIZERS, RULES
from tests.problems import Batch, mse, regression

CLASSES = {name: next(cls for cls, rule in OPTIMIZERS.items() if rule is RULES[name]) for name in RULES}
OWN = {"sgd": onepass.optim.SGD, "adam": onepass.optim.Adam, "adamw": onepass.optim.AdamW}


class Waves(nn.Module):
    """Fixed features: what follows is linear in its weights, where all curvatures must agree to rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.sin(), x.cos()], 1)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


@dataclass
class Run:
    """One training run, to be changed by a feature before it is made."""

    optimizer: Any
    values: dict[str, Any]
    model: nn.Module = field(default_factory=lambda: nn.Sequential(Waves(), nn.Linear(6, 1)))
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters()
    loss: Callable[[Any, Batch], Tensor] = mse
    settings: dict[str, Any] = field(default_factory=lambda: {"lookback": 3})
    micro_batches: int = 1
    clip_norm: float | None = None
    with_closure: bool = False
    decay_lr: bool = False
    resume_at: int | None = None

    def hypergradients(self, curvature: str) -> dict[str, list[Any]]:
        """Of the last of two hyper steps, each after two weight steps."""
        self._make(curvature)
        for i in range(4):
            if i == self.resume_at:
                self._resume(curvature)
            batch = regression(seed=i)
            if self.with_closure:
                self._optimizer.step(lambda batch=batch: self._gradient(batch))
            else:
                self._gradient(batch)
                self._optimizer.step()
            record = self._tuner.step(batch)
            if self._scheduler:
                self._scheduler.step()
        assert record is not None
        assert record.skipped is None
        return record.hypergradients

    def _make(self, curvature: str) -> None:
        self._optimizer = self.optimizer(self.groups(self.model), **self.values)
        self._scheduler = ExponentialLR(self._optimizer, 0.9) if self.decay_lr else None
        settings = {"interval": 2, "curvature": curvature, "guard": None, **self.settings}
        self._tuner = onepass.Tuner(self.model, self._optimizer, self.loss, [regression(seed=9)], **settings)

    def _resume(self, curvature: str) -> None:
        old = self.model, self._optimizer, self._tuner
        states = [copy.deepcopy(part.state_dict()) for part in old]
        self.model = copy.deepcopy(self.model)
        self._make(curvature)
        for part, state in zip((self.model, self._optimizer, self._tuner), states, strict=True):
            part.load_state_dict(state)

    def _gradient(self, batch: Batch) -> Tensor:
        self._optimizer.zero_grad()
        parts = zip(*(tensor.chunk(self.micro_batches) for tensor in batch), strict=True)
        losses = [self.loss(self.model, part) / self.micro_batches for part in parts]
        for loss in losses:
            loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        return torch.stack(losses).sum().detach()


# --- features: what each changes of a run ---


def param_groups(run: Run) -> None:
    run.groups = lambda model: [{"params": [p], "weight_decay": 0.01 * p.dim()} for p in model.parameters()]


def tied(run: Run) -> None:
    run.groups = lambda model: onepass.per_tensor(model.parameters())
    run.settings["tied"] = ("lr", "weight_decay")


def per_tensor(run: Run) -> None:
    run.groups = lambda model: onepass.per_tensor(model.parameters())


def per_element(run: Run) -> None:
    own = {CLASSES[name]: cls for name, cls in OWN.items()}
    run.optimizer = own.get(run.optimizer, run.optimizer)
    run.groups = lambda model: onepass.per_element(model.parameters(), lr=run.values["lr"])


def whole_run(run: Run) -> None:
    run.settings = {"estimator": "whole-run"}


def inside_the_loss(run: Run) -> None:
    penalty = onepass.Hyperparameter(torch.tensor(0.1))
    run.loss = lambda model, batch: mse(model, batch) + penalty.value * model[1].weight.square().sum()
    run.settings |= {"extra": {"penalty": penalty}, "valid_loss": mse}


def clipped(run: Run) -> None:
    run.clip_norm = 0.05


def accumulated(run: Run) -> None:
    run.micro_batches = 2


def closure(run: Run) -> None:
    run.with_closure = True


def autocast(run: Run) -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(batch[0].float())
        return mse(lambda inputs: outputs.float(), batch)

    run.model, run.loss = run.model.float(), loss


def half_weights(run: Run) -> None:
    run.model = run.model.bfloat16()
    run.loss = lambda model, batch: (model(batch[0].bfloat16()).float() - batch[1]).square().mean()


def checkpointed(run: Run) -> None:
    run.model = Checkpointed(*run.model.children())


def dropout(run: Run) -> None:
    run.model = nn.Sequential(Waves(), nn.Dropout(0.2), nn.Linear(6, 1))


def batch_norm(run: Run) -> None:
    run.model = nn.Sequential(Waves(), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 1))


def frozen(run: Run) -> None:
    run.model = nn.Sequential(Waves(), nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 1))


def scheduled(run: Run) -> None:
    run.decay_lr = True


def resumed(run: Run) -> None:
    run.resume_at = 2


def foreach(run: Run) -> None:
    run.values["foreach"] = True


FEATURES: dict[str, Callable[[Run], None]] = {
    "nothing else": lambda run: None,
    "through the whole run": whole_run,
    "several param groups": param_groups,
    "tied values": tied,
    "one value a tensor": per_tensor,
    "one value a weight": per_element,
    "a value inside the loss": inside_the_loss,
    "gradients clipped to a norm": clipped,
    "gradient accumulation": accumulated,
    "a closure": closure,
    "`foreach=True`": foreach,
    "an LR scheduler": scheduled,
    "saved and resumed": resumed,
    "dropout": dropout,
    "batch norm": batch_norm,
    "frozen weights": frozen,
    "activation checkpointing": checkpointed,
    "bf16 autocast": autocast,
    "bf16 weights": half_weights,
}
# These leave every number as it is without them.
HARMLESS = ("gradient accumulation", "a closure", "`foreach=True`", "saved and resumed", "activation checkpointing")

# How closely two ways must agree, if not to 1e-6: bf16 has three digits.
TOLERANCES = {"bf16 weights": 5e-3, "bf16 autocast": 1e-4}


class Refused(NamedTuple):
    """``error``: what is raised says this."""

    why: str
    error: str


# (feature, optimizer, curvature) that do not work; "*" stands for every curvature.
EXCEPTIONS: dict[tuple[str, str, str], Refused] = {
    ("one value a weight", name, "*"): Refused(
        "`onepass.optim` has `SGD`, `Adam` and `AdamW`; torch's RAdam takes them as it is, its others want a number",
        "must be Number",
    )
    for name in ("nadam", "rmsprop", "adagrad", "adamax")
}

FRAMEWORKS = {"Lightning": "lightning", "the `Trainer` of Transformers": "transformers", "Accelerate": "accelerate"}

# What has tests of its own: row -> (what works with every optimizer, the test). A new feature is one line here.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "LSTM, attention, weight norm": (
        "`exact`, `gauss-newton`, `finite-difference`",
        "tests/test_compatibility.py::test_kind_of_model",
    ),
    "a kernel without second derivative": (
        "`finite-difference`; `auto` goes there and says so",
        "tests/test_compatibility.py::test_auto_falls_back_with_one_warning",
    ),
    "every scheduler of torch": (
        "one value a group",
        "tests/test_scheduler.py::test_scheduler_multiplies_and_tuner_owns_the_base",
    ),
    "resumed in a new process": ("bit for bit", "tests/test_resume.py::test_resumed_in_a_new_process"),
    "sparse gradients": ("no: one clear error", "tests/test_compatibility.py::test_sparse_gradients_get_a_clear_error"),
    "DistributedDataParallel, with `no_sync`, compiled inside or outside": (
        "SGD, AdamW: `exact`, `forward`, `gauss-newton`, `lookback=1`, through the whole run",
        "tests/test_distributed.py::test_half_the_batch_on_each_of_two_ranks",
    ),
    "`fully_shard` (FSDP2)": (
        "SGD, AdamW: `finite-difference`, `lookback=1`, through the whole run; one error for the others",
        "tests/test_sharded.py::test_half_the_batch_and_half_the_model_on_each_of_two_ranks",
    ),
    "fp16 with `GradScaler`, bf16, fused optimizers": (
        "SGD, AdamW: `exact`, `finite-difference`, `lookback=1`, through the whole run; no tuning on steps left out",
        "tests/test_amp.py::test_near_float32",
    ),
    "compiled models, parts and losses": (
        "SGD: `exact`, `finite-difference`, `lookback=1`, through the whole run",
        "tests/test_compile.py::test_compiled_equals_as_written",
    ),
    "a compiled `optimizer.step`": ("SGD, Adam: `exact`", "tests/test_compile.py::test_compiled_optimizer_step"),
    **{
        name: (
            "SGD: `lookback=5`, through the whole run, accumulation, clipping, a scheduler, bf16",
            f"tests/integrations/test_{module}.py::test_same_values_as_a_plain_loop",
        )
        for name, module in FRAMEWORKS.items()
    },
    **{
        f"{name} on several ranks, by DDP": (
            "SGD: `lookback=5`, through the whole run, accumulation, a scheduler, resumed",
            f"tests/integrations/test_{module}.py::test_same_values_on_two_ranks",
        )
        for name, module in FRAMEWORKS.items()
    },
}


def hypergradients(feature: str, optimizer: str, curvature: str) -> dict[str, list[Any]]:
    torch.manual_seed(0)
    momentum = {"momentum": 0.8} if optimizer in ("sgd", "rmsprop") else {}
    run = Run(CLASSES[optimizer], {"lr": 0.01, "weight_decay": 0.01, **momentum})
    FEATURES[feature](run)
    return run.hypergradients(curvature)


def tolerance(feature: str, curvature: str) -> tuple[float, float]:
    """Relative and absolute. Differences of what has three digits have two, of small slopes beside large ones fewer."""
    rough = feature in TOLERANCES and curvature == "finite-difference"
    return (2e-2, 1e-4) if rough else (TOLERANCES.get(feature, 1e-6), 1e-14)


def refused(feature: str, optimizer: str, curvature: str) -> Refused | None:
    found = (EXCEPTIONS.get((feature, optimizer, which)) for which in ("*", curvature))
    return next((one for one in found if one), None)


def cell(feature: str, optimizer: str) -> str:
    working = [curvature for curvature in CURVATURES if not refused(feature, optimizer, curvature)]
    if not working:
        return "no"
    missing = [f"`{curvature}`" for curvature in CURVATURES if curvature not in working]
    return f"not {', '.join(missing)}" if missing else "yes"


def table() -> str:
    """As Markdown: a row a feature, a column an optimizer; then what does not work, and why."""
    lines = [row("", *(CLASSES[name].__name__ for name in RULES)), row(*["---"] * (len(RULES) + 1))]
    lines += [row(feature, *(cell(feature, optimizer) for optimizer in RULES)) for feature in FEATURES]
    reasons = {(feature, one.why): None for (feature, _, _), one in EXCEPTIONS.items()}
    lines += ["", *(f"* **{feature}**: {why}." for feature, why in reasons)]
    lines += ["", row("", "works with", "tested by"), row("---", "---", "---")]
    return "\n".join([*lines, *(row(name, works, f"`{test}`") for name, (works, test) in ELSEWHERE.items())])


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


if __name__ == "__main__":
    print(table())
