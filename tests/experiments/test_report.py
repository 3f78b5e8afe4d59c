"""The page of results: whole, self-contained, and safe with whatever stands in the files."""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Sequence
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from onepass.experiments import artefacts, charts, figures, report, statistics
from onepass.experiments.artefacts import Artefact
from onepass.experiments.contents import Contents, contents
from onepass.experiments.methods import ALONE, METHODS
from onepass.experiments.panels import style_of
from onepass.experiments.runs import Cell, UsageError
from onepass.experiments.writing import Grid, Text, to_html, to_markdown
from tests.experiments.test_figures import made, made_many

VOID = {"meta", "img", "br", "hr", "link", "input"}
LOADING = {"src", "srcset", "poster", "action", "background"}


class Outline(HTMLParser):
    """What is open, what the page would load, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in LOADING]
        self.links += [value or "" for name, value in attrs if name == "href"]
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data


def shown(out: Path) -> str:
    """Without pictures, which take their time."""
    return report.page(contents(out), out, {})


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
    assert found.loads and all(address.startswith("data:image/png") for address in found.loads)
    assert not {"link", "iframe", "object"} & set(found.tags)
    assert not re.search(r"https?://|@import|url\(", page)
    assert "default-src 'none'" in page and "connect-src 'none'" in page


def test_its_pictures_are_files_beside_it(tmp_path: Path) -> None:
    made(tmp_path)
    found = Outline(report.write(tmp_path).read_text())
    wanted = {f"figures/{name}.{kind}" for name in ("curves", "cdfs", "learning-rates", "runtimes") for kind in KINDS}
    assert {link for link in found.links if not link.startswith("#")} == wanted
    assert {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "figures").iterdir()} == wanted


KINDS = ("png", "pdf")


def test_every_link_inside_leads_somewhere(page: str) -> None:
    found = Outline(page)
    inside = [link[1:] for link in found.links if link.startswith("#")]
    assert inside and all(f'id="{name}"' in page for name in inside)


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
        assert base64.b64decode(address.split("base64,")[1], validate=True).startswith(b"\x89PNG")


def test_a_figure_without_a_chart_is_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    monkeypatch.setattr(report, "CAPTIONS", {})
    monkeypatch.delitem(charts.CHARTS, "cdfs")
    text = report.write(tmp_path).read_text()
    assert Outline(text).images[0]["alt"] and 'id="chart-curves-0"' in text and 'id="chart-cdfs-0"' not in text
    before = text[: text.index('id="cdfs"')]
    assert before.count("<noscript>") == before.count("</noscript>")
    assert "<noscript>" not in text[text.index('id="cdfs"') :].split("</section>")[0]


def test_what_other_artefacts_left_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(cells: Sequence[Cell], path: Path) -> list[Path]:
        return []

    monkeypatch.setitem(artefacts.ARTEFACTS, "mine", Artefact("a study of mine", nothing, (), ()))
    cell = made(tmp_path / "cells")
    figures.save(figures.figure_of("cdfs", [cell]), tmp_path / "mine")
    grid = Grid("Mine", "of <two>", ["method", "mean"], [[Text("A & B"), Text("0.5", bold=True)]])
    (tmp_path / "mine.md").write_text(f"before\n\n{to_markdown(grid)}\nafter\n")
    text = report.write(tmp_path).read_text()
    found = Outline(text)
    assert "A study of mine" in found.text and len(found.images) == 1
    assert to_html(grid) in text
    assert {"mine.png", "mine.pdf"} <= set(found.links)


def test_the_same_results_give_the_same_page(tmp_path: Path) -> None:
    made(tmp_path)
    assert report.write(tmp_path).read_text() == report.write(tmp_path).read_text()


def test_methods_have_the_same_colours_in_charts_tables_and_pictures(tmp_path: Path) -> None:
    made_many(tmp_path, ["uci-energy"])
    text = shown(tmp_path)
    for method in METHODS:
        colour = style_of(method)["color"]
        assert re.search(rf"\.key-{method} {{ --stroke: [^}}]*{colour}", text)
        assert f'<th class="key-{method}">' in text
        dark = charts.ON_DARK.get(colour, colour)
        assert re.search(rf"\.key-{method} {{ --stroke: [^}}]*{dark}", text)
    looks = {(charts.ON_DARK.get(s["color"], s["color"]), s.get("linestyle")) for s in map(style_of, METHODS)}
    assert len(looks) == len(METHODS)


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    bad = "<script>alert('&\"')</script>"
    made(tmp_path / "<img src=x>", device=bad, versions={bad: bad})
    text = shown(tmp_path / "<img src=x>")
    assert bad not in text and escape(bad) in text
    assert str(tmp_path / "<img src=x>") not in text
    outline = Outline(text)
    assert not outline.open and not outline.images
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


def test_what_is_wrong_is_told_and_the_rest_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path)
    (made(tmp_path, "random").folder / "cell.json").write_text('{"request": {"dat')
    text = Outline(report.write(tmp_path).read_text()).text
    told = [line for line in capsys.readouterr().err.splitlines() if "random" in line]
    assert len(told) == 1 and told[0].startswith("onepass: Left out: ") and "holds no readable result" in told[0]
    assert "holds no readable result" in text and "one-pass" in text
    shutil.rmtree(tmp_path / "uci-energy" / "one-pass")
    with pytest.raises(UsageError, match=r"holds no finished runs; .*\(Left out: .*holds no readable result"):
        report.write(tmp_path)


def test_a_page_of_everything_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is bounded by panels and lines, not by starts and steps."""
    monkeypatch.setattr(statistics, "BOOTSTRAPS", 5)
    noise = np.random.default_rng(0).lognormal(size=(100, 200))
    cells = [made(tmp_path, method, noise.tolist(), dataset=d) for d in artefacts.UCI for method in ALONE]
    assert len(cells) == 96
    found = Contents(cells, cells, [], [])
    size = len(report.page(found, tmp_path, {}))
    print(size)
    assert size < 6e6  # with up to 2 MB of pictures, 8
