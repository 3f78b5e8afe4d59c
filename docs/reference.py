"""Builds the API reference from the docstrings: ``python docs/reference.py out/docs``, or ``make docs``.

The pages need no network: equations, which pdoc would leave to a script from elsewhere, are drawn here by matplotlib.
"""

from __future__ import annotations

import base64
import inspect
import io
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pdoc
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image

import onepass

BLOCK = re.compile(r"^\.\. math::\n((?:(?:    .*)?\n)+)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
# What matplotlib's mathematics does not know, or knows by another name.
OTHER_NAMES = {r"\lVert": r"\|", r"\rVert": r"\|", r"\mathrm{d}": "d", r"\text": r"\mathrm"}


def drawn(equation: str) -> str:
    """An equation as a picture inside the page, with its source for those who cannot see it."""
    source = " ".join(equation.split())
    for name, other in OTHER_NAMES.items():
        source = source.replace(name, other)
    file = io.BytesIO()
    math_to_image(f"${source}$", file, prop=FontProperties(size=13), format="svg", dpi=72)
    code = base64.b64encode(file.getvalue()).decode()
    return f'<img class="math" style="vertical-align: middle" alt="{source}" src="data:image/svg+xml;base64,{code}">'


def with_equations(text: str) -> str:
    text = BLOCK.sub(lambda found: drawn(found[1]) + "\n\n", text)
    return INLINE.sub(lambda found: drawn(found[1]), text)


def documented(thing: Any) -> Iterator[Any]:
    """A module of ours, and whatever is defined in it."""
    yield thing
    for inside in vars(thing).values():
        if inspect.isfunction(inside) or (inspect.isclass(inside) and inside.__module__.startswith("onepass")):
            yield inside
            if inspect.isclass(inside):
                yield from (method for method in vars(inside).values() if inspect.isfunction(method))


def build(folder: Path) -> None:
    modules = [
        onepass,
        *(getattr(onepass, name) for name in onepass.__all__ if inspect.ismodule(getattr(onepass, name))),
    ]
    for module in modules:
        for thing in documented(module):
            if thing.__doc__ and "math:" in thing.__doc__:
                thing.__doc__ = with_equations(inspect.cleandoc(thing.__doc__))
    # It looks for the names in the annotations of a NamedTuple where `collections` has made it.
    warnings.filterwarnings("ignore", "Error parsing type annotation.*onepass.curvature.Products")
    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"onepass {onepass.__version__}")
    pdoc.pdoc("onepass", output_directory=folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
