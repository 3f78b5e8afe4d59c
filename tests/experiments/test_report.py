"""The page of results: whole, self-contained, and safe with whatever stands in the files."""

from __future__ import annotations

import base64
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from onepass.experiments import figures, report
from onepass.experiments.methods import METHODS
from onepass.experiments.runs import UsageError
from tests.experiments.test_figures import made, made_many

VOID = {"meta", "img", "br", "hr", "link", "input"}
LOADING = {"src", "href", "srcset", "poster", "action", "background"}


class Outline(HTMLParser):
    """What is open, what the page would load, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in LOADING]
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("out")
    made_many(out)
    target = report.write(out)
    assert target == out / "report.html"
    assert not list(out.glob(".*"))
    return target.read_text(encoding="utf-8")


def test_well_formed(page: str) -> None:
    found = Outline(page)
    assert page.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert not found.open
    assert {found.tags.count(tag) for tag in ("html", "head", "title", "body", "header", "main", "h1", "footer")} == {1}
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page


def test_needs_nothing_else(page: str) -> None:
    found = Outline(page)
    assert found.loads and all(address.startswith("data:image/") for address in found.loads)
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert not re.search(r"https?://|@import|url\(", page)


def test_has_every_method_and_data_set(page: str) -> None:
    text = Outline(page).text
    for row in METHODS.values():
        assert row.label in text and row.about in text
    assert "UCI Energy" in text and "Kin8nm" in text
    assert "onepass run uci-energy one-pass --replicas 6 --steps 80 --seed 0" in text


def test_has_every_figure_with_its_explanation(page: str) -> None:
    found = Outline(page)
    assert set(report.CAPTIONS) == set(figures.FIGURES)
    assert len(found.images) == len(figures.FIGURES)
    assert all(image["alt"] for image in found.images)
    for heading, about in report.CAPTIONS.values():
        assert heading in found.text and about in found.text
    for address in found.loads:
        content = base64.b64decode(address.split("base64,")[1], validate=True)
        assert b"<svg" in content or content.startswith(b"\x89PNG")


def test_a_figure_too_large_for_svg_is_a_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = made(tmp_path)
    assert "data:image/svg+xml;" in report.page([cell], tmp_path)
    monkeypatch.setattr(report, "LARGEST_SVG", 1000)
    small = report.page([cell], tmp_path)
    assert "data:image/png;" in small and "data:image/svg" not in small


def test_the_same_results_give_the_same_page(tmp_path: Path) -> None:
    cell = made(tmp_path)
    assert report.page([cell], tmp_path) == report.page([cell], tmp_path)


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    bad = "<script>alert('&\"')</script>"
    cell = made(tmp_path, device=bad, versions={bad: bad})
    folder = tmp_path / "<img src=x>"
    found = report.page([cell], folder)
    assert bad not in found and escape(bad) in found
    assert str(folder) not in found
    outline = Outline(found)
    assert not outline.open and "script" not in outline.tags
    assert bad in outline.text


def test_figures_that_cannot_be_drawn_are_left_out(tmp_path: Path) -> None:
    made(tmp_path, "lorraine")
    found = Outline(report.write(tmp_path).read_text())
    assert len(found.images) == 3


def test_what_differs_between_runs_is_listed(tmp_path: Path) -> None:
    made(tmp_path, "random", [[1.0] * 4])
    made(tmp_path, "one-pass", [[1.0] * 3], resumed=True, seconds=200.0)
    text = Outline(report.write(tmp_path, tmp_path / "elsewhere.html").read_text()).text
    assert "4, 3" in text
    assert "3 min 22 s for 2 runs; 1 of them (* below) went on after an interruption" in text
    assert not (tmp_path / "report.html").exists()


def test_a_folder_without_results(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="holds no finished runs") as error:
            report.write(folder)
        assert "\n" not in str(error.value)
