"""Every example, run as a user runs it, with fewer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# What to look for in the output; the first group of the first must exceed that of the second.
CLAIMS: dict[str, tuple[str, str]] = {
    "augmentation.py": (
        r"tuned\D+\d+ degrees, test accuracy (\d+\.\d+)",
        r"plain\D+\d+ degrees, test accuracy (\d+\.\d+)",
    ),
    "ddp.py": (r"start: validation loss (\d+\.\d+)", r"found: validation loss (\d+\.\d+)"),
    "digits.py": (r"test loss\D+(\d+\.\d+)", r"test loss\D+[\d.]+\D+(\d+\.\d+)"),  # plain, tuned
    "label_smoothing.py": (r"found: smoothing (\d+\.\d+)", r"start: smoothing (\d+\.\d+)"),
    "lightning_digits.py": (r"plain: test loss (\d+\.\d+)", r"tuned: test loss (\d+\.\d+)"),
    "lion.py": (r"start: validation loss (\d+\.\d+)", r"found: validation loss (\d+\.\d+)"),
    "lora.py": (r"plain: test loss (\d+\.\d+)", r"tuned: test loss (\d+\.\d+)"),
    "many_starts.py": (r"tuned: test accuracy worst (\d+\.\d+)", r"plain: test accuracy worst (\d+\.\d+)"),
    "per_element.py": (r"one for all: +validation loss (\d+\.\d+)", r"one for each: +validation loss (\d+\.\d+)"),
    "per_layer.py": (r"one for all: +validation loss (\d+\.\d+)", r"one a layer: +validation loss (\d+\.\d+)"),
    "pinn.py": (r"plain: off by (\d+\.\d+)", r"tuned: off by (\d+\.\d+)"),
    "sample_weights.py": (r"right labels: median weight (\d+\.\d+)", r"wrong labels: median weight (\d+\.\d+)"),
    # the worst of eight starts: plain, tuned
    "search_digits.py": (r"(\d\.\d+) *\n\s*\nvalid", r"(?ms)^valid .*^ \d+ [^\n]* (\d\.\d+) *$"),
    "transformers_trainer.py": (r"plain: validation loss (\d+\.\d+)", r"tuned: validation loss (\d+\.\d+)"),
    "two_tasks.py": (r"plain.*off by (\d+\.\d+)", r"tuned.*off by (\d+\.\d+)"),
}

# Claims that show earlier or later than others.
STEPS = {"lightning_digits.py": 300, "lora.py": 400, "transformers_trainer.py": 300}

# Started by something else than Python alone.
LAUNCHERS = {"ddp.py": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]}

ABORTED = "terminate called without an active exception"  # gloo, now and then, when all is done and it is taken apart


def run(name: str, *options: str) -> str:
    steps = str(STEPS.get(name, 600))
    command = [sys.executable, *LAUNCHERS.get(name, []), str(EXAMPLES / name), "--steps", steps, *options]
    # One thread each: tests run side by side, and threads that wait for each other's cores are slow beyond belief.
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=alone)
    assert done.returncode == 0 or (name in LAUNCHERS and ABORTED in done.stderr), done.stderr
    return done.stdout


def claimed(name: str, output: str) -> tuple[float, float]:
    found = [re.search(pattern, output) for pattern in CLAIMS[name]]
    assert all(found), output
    larger, smaller = (float(match[1]) for match in found if match)
    return larger, smaller


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_shows_what_it_claims(name: str, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "picture.png"
    options = ("--out", str(picture)) if name == "digits.py" else ()
    larger, smaller = claimed(name, run(name, *options))
    assert larger > smaller
    if options:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_what_it_shows(path: Path) -> None:
    text = path.read_text()
    assert text.startswith('"""')
    assert len(text.splitlines()) < (100 if path.name == "digits.py" else 60)
