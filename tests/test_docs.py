"""The API reference builds and lists all that is public; pages link to what is there, and the index to all of them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onepass

pytest.importorskip("pdoc")
ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, "-W", "error::UserWarning", str(ROOT / "docs" / "reference.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.mark.parametrize("name", onepass.__all__)
def test_the_reference_has_every_public_name(reference: Path, name: str) -> None:
    if inspect.ismodule(getattr(onepass, name)):
        assert (reference / "onepass" / f"{name}.html").exists()
    elif name != "__version__":
        assert f'id="{name}"' in (reference / "onepass.html").read_text()


def test_the_reference_needs_no_network_and_shows_no_source_of_equations(reference: Path) -> None:
    pages = {path.name: path.read_text() for path in reference.glob("onepass/*.html")}
    assert 'alt="' in pages["hypergradient.html"] and 'alt="' in pages["sensitivity.html"]
    for name, page in pages.items():
        assert not re.search(r'<(script|link|img)[^>]+"https?://', page), name
        assert "math:" not in page, name


@pytest.mark.parametrize("name", [name for name in onepass.__all__ if name != "__version__"])
def test_what_is_public_has_a_docstring_of_its_own(name: str) -> None:
    thing = getattr(onepass, name)
    text = inspect.getdoc(thing) or ""
    assert text and not text.startswith(f"{name}(")
    for method, inside in vars(thing).items() if inspect.isclass(thing) else ():
        assert method.startswith("_") or not callable(inside) or inside.__doc__, f"{name}.{method}"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in PAGES:
        if page.name != "README.md":
            assert f"({page.relative_to(ROOT / 'docs')})" in index, page.name
