"""The report as a reader has it: in a real browser."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from onepass.experiments import report
from onepass.experiments.contents import contents
from onepass.experiments.live import Server
from onepass.experiments.methods import METHODS
from onepass.version import __version__
from tests.experiments.browser import PHONE, Reader, browser
from tests.experiments.test_figures import made, made_many

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RANGE = "document.getElementById('chart-curves-0').layout.xaxis.range"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a page with everything on it, but for the pictures."""
    out = tmp_path_factory.mktemp("out")
    made_many(out)
    target = out / "report.html"
    target.write_text(report.page(contents(out), out, {}), encoding="utf-8")
    return target.as_uri()


def test_charts_are_drawn_and_nothing_is_asked_for(chromium: Browser, address: str) -> None:
    reader = Reader(chromium, address)
    names = reader.charts()
    assert reader.page.locator(f"#{names[-1]}[data-drawn]").count() == 0  # it waits until it is seen
    assert len(names) == 14  # two data sets; of the demo, two planes each; no learning rates of what tunes none
    for name in names:
        assert reader.drawn(name) > 2, name
    assert reader.asked == [address]
    assert reader.said == []


def test_methods_are_switched_off_and_on(chromium: Browser, address: str) -> None:
    reader = Reader(chromium, address)
    every = reader.drawn("chart-curves-0")
    chip = reader.page.locator("#chips [data-method=one-pass]")
    chip.click()
    has_lines(reader, every - 2)  # its line and its band
    assert chip.get_attribute("aria-pressed") == "false"
    reader.page.locator("#chips [data-every=off]").click()
    has_lines(reader, 1)  # which is empty, and keeps the axes
    chip.click()
    has_lines(reader, 2)
    reader.page.locator("#chips [data-every=on]").click()
    has_lines(reader, every)
    chip.dblclick()
    has_lines(reader, 2)
    assert chip.get_attribute("aria-pressed") == "true"
    assert reader.said == []


def test_a_chart_is_zoomed_and_stays_so(chromium: Browser, address: str) -> None:
    reader = Reader(chromium, address)
    every = reader.drawn("chart-curves-0")
    before = reader.page.evaluate(RANGE)
    zoom(reader)
    reader.wait_for(f"{RANGE}[0] > {before[0]} && {RANGE}[1] < {before[1]}")
    zoomed = reader.page.evaluate(RANGE)
    reader.page.locator("#chips [data-method=random]").click()
    has_lines(reader, every - 2)
    assert reader.page.evaluate(RANGE) == zoomed


def has_lines(reader: Reader, count: int) -> None:
    """The first chart of curves, once it is in view again: to click somewhere scrolls."""
    reader.page.locator("#chart-curves-0").scroll_into_view_if_needed()
    reader.wait_for(f"document.querySelectorAll('#chart-curves-0 .scatterlayer > .trace').length == {count}")


def zoom(reader: Reader) -> None:
    """By dragging over the middle half of the first chart of curves."""
    box = reader.page.locator("#chart-curves-0 .nsewdrag").bounding_box()
    assert box is not None
    mouse, height = reader.page.mouse, box["y"] + box["height"] / 2
    mouse.move(box["x"] + box["width"] / 4, height)
    mouse.down()
    mouse.move(box["x"] + box["width"] * 3 / 4, height, steps=5)
    mouse.up()


def test_hovering_tells_the_numbers(chromium: Browser, address: str) -> None:
    reader = Reader(chromium, address)
    reader.drawn("chart-cdfs-0")
    reader.page.locator("#chips [data-method=one-pass]").dblclick()
    reader.page.locator("#chart-cdfs-0").scroll_into_view_if_needed()
    reader.wait_for("document.querySelectorAll('#chart-cdfs-0 .scatterlayer > .trace').length == 1")
    box = reader.page.locator("#chart-cdfs-0 .nsewdrag").bounding_box()
    assert box is not None
    told = reader.page.locator("#chart-cdfs-0 .hovertext")
    for part in np.linspace(0.05, 0.95, 40):  # somewhere on the diagonal is the line
        reader.page.mouse.move(box["x"] + part * box["width"], box["y"] + (1 - part) * box["height"])
        reader.page.wait_for_timeout(60)
        if told.count():
            break
    assert "of starts end at" in (told.text_content() or "")


def test_a_method_is_chosen_for_its_learning_rates(chromium: Browser, address: str) -> None:
    reader = Reader(chromium, address)
    reader.drawn("chart-learning-rates-0")
    name = "document.getElementById('chart-learning-rates-0').data[0].name"
    assert reader.page.evaluate(name) == "one-pass"
    reader.page.locator("#learning-rates select").select_option("baydin")
    reader.wait_for(f"{name} == 'Baydin'")


def test_a_chart_is_made_larger(chromium: Browser, address: str) -> None:
    reader = Reader(chromium, address)
    reader.drawn("chart-curves-0")
    width = "document.querySelector('#chart-curves-0 .main-svg').clientWidth"
    before = reader.page.evaluate(width)
    reader.page.locator("#curves .grow").first.click()
    reader.wait_for(f"{width} > 1.5 * {before}")


def test_dark_and_light(chromium: Browser, address: str) -> None:
    reader = Reader(chromium, address, color_scheme="dark")
    reader.drawn("chart-curves-0")
    back = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('#chart-curves-0 .xtick text')).fill"
    line = (
        "document.getElementById('chart-curves-0').data.find(({ meta, fill }) => meta == 'diff-through-opt' && !fill)"
        ".line.color"
    )
    assert brightness(reader.page.evaluate(back)) < 40
    assert brightness(reader.page.evaluate(ink)) > 200
    assert reader.page.evaluate(line) == "#FFFFFF"
    reader.page.emulate_media(color_scheme="light")  # while it is open
    reader.wait_for(f"{line} == '#000000'")
    assert brightness(reader.page.evaluate(back)) > 200
    assert brightness(reader.page.evaluate(ink)) < 60


def brightness(colour: str) -> float:
    """
    >>> brightness("rgb(20, 24, 28)")
    24.0
    """
    return sum(float(part) for part in colour.strip("rgba()").split(",")[:3]) / 3


def test_readable_on_a_phone(chromium: Browser, address: str) -> None:
    reader = Reader(chromium, address, size=PHONE, is_mobile=True, has_touch=True)
    for name in reader.charts():
        reader.drawn(name)
    assert reader.page.evaluate("document.documentElement.scrollWidth") <= 390
    widest = "Math.max(...[...document.querySelectorAll('.chart')].map((one) => one.getBoundingClientRect().right))"
    assert reader.page.evaluate(widest) <= 390
    small = "[...document.querySelectorAll('main :is(p, td, dd, figcaption, button)')].filter((one) => "
    assert reader.page.evaluate(f"{small} parseFloat(getComputedStyle(one).fontSize) < 12).length") == 0
    assert reader.said == []


@pytest.mark.parametrize("old", ["no scripts", "no DecompressionStream"])
def test_browsers_that_cannot_draw_show_pictures(chromium: Browser, tmp_path: Path, old: str) -> None:
    made(tmp_path)
    target = report.write(tmp_path)
    before, scripts = "delete window.DecompressionStream", old != "no scripts"
    reader = Reader(chromium, target.as_uri(), before=before, java_script_enabled=scripts)
    for name in ("curves", "cdfs"):
        image = reader.page.locator(f"#{name} img")
        reader.page.locator(f"#{name}").scroll_into_view_if_needed()
        image.wait_for()
        assert image.is_visible()
        assert not reader.page.locator(f"#{name} .panels").is_visible()


# --- a report that grows ---


@contextmanager
def serving(out: Path) -> Iterator[str]:
    with Server(out) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def two_cells(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    for method in ("random", "one-pass"):
        made(tmp_path, method)
    with serving(tmp_path) as address:
        yield tmp_path, address


def test_a_new_result_appears_and_the_view_stays(chromium: Browser, two_cells: tuple[Path, str]) -> None:
    out, address = two_cells
    reader = Reader(chromium, address)
    assert reader.drawn("chart-curves-0") == 4
    reader.wait_for("document.getElementById('live').textContent.startsWith('Live')")
    reader.page.evaluate("window.here = true")  # gone if the page were loaded again
    zoom(reader)
    reader.page.locator("#chips [data-method=random]").click()
    has_lines(reader, 2)
    zoomed = reader.page.evaluate(RANGE)

    made(out / "elsewhere", "baydin")
    os.replace(out / "elsewhere" / "uci-energy" / "baydin", out / "uci-energy" / "baydin")
    has_lines(reader, 4)
    assert "Baydin" in reader.page.locator("#results").inner_text()
    assert reader.page.locator("#chips [data-method=baydin]").get_attribute("aria-pressed") == "true"
    assert reader.page.locator("#chips [data-method=random]").get_attribute("aria-pressed") == "false"
    assert reader.page.evaluate(RANGE) == zoomed
    assert reader.page.evaluate("window.here") is True
    assert all(asked.startswith(address) for asked in reader.asked)
    assert reader.said == []


def test_a_folder_that_fills(chromium: Browser, tmp_path: Path) -> None:
    with serving(tmp_path) as address:
        reader = Reader(chromium, address)
        assert "no finished runs so far" in reader.page.locator("main").inner_text()
        lock = tmp_path / "uci-energy" / ".random.lock"
        lock.parent.mkdir()
        lock.touch()
        reader.page.wait_for_selector("#unfinished")
        assert METHODS["random"].label in reader.page.locator("#unfinished").inner_text()
        lock.unlink()
        made(tmp_path, "random", versions={"onepass": __version__})
        reader.page.wait_for_selector("#unfinished", state="detached")
        assert reader.drawn("chart-curves-0") == 2
        order = reader.page.evaluate("[...document.querySelectorAll('[data-part]')].map((part) => part.id)")
        assert order == ["contents", "settings", "results", "curves", "cdfs", "runtimes", "methods", "runs"]
    reader.wait_for("document.getElementById('live').textContent.startsWith('Not live')")
    assert reader.traces("chart-curves-0") == 2
