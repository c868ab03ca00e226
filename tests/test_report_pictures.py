"""A panel as part of a page: real text and shapes in the page's colours, the same every time, and nothing hostile."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from scripted import ScriptedEngine, decode, small_plan
from served import serve, server_plan

from mxq.analysis import Summary, summarise
from mxq.analysis.intervals import Intervals, intervals
from mxq.evaluate import read_run, run
from mxq.report import gallery
from mxq.report.drawing import COLOURS, WIDTH, svg
from mxq.report.pictures import Panel, Picture, Point, Series

SVG = "{http://www.w3.org/2000/svg}"

LINES = Picture(
    key="lines",
    title="Lines",
    x_label="K",
    y_label="tokens",
    panels=(
        Panel(
            "sums",
            (
                Series("bf16", "bf16", (Point(3, 3.5, 3.25, 3.75), Point(7, 6.0, 5.5, 6.5)), "-", "o", band=True),
                Series("mxfp4", "mxfp4", (Point(3, 3.0, 2.75, 3.25), Point(7, 5.0, 4.5, 5.5)), "--", "s"),
                Series("ceiling", "guide", (Point(3, 4), Point(7, 8)), ":", ""),
            ),
        ),
    ),
)
BARS = replace(
    LINES,
    key="bars",
    categories=("MTP 3", "DFlash 15"),
    panels=(Panel("sums", (Series("bf16", "bf16", (Point(0, 2.0, 1.5, 2.5), Point(1, 4.0))),)),),
    references=(1.0,),
)


def element(drawn: str) -> ElementTree.Element:
    """An XML parser takes it, once it is told the namespace that HTML implies."""
    return ElementTree.fromstring(drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def texts(drawn: str) -> list[str]:
    return [text.text or "" for text in element(drawn).iter(f"{SVG}text")]


@pytest.mark.parametrize("picture", [LINES, BARS])
def test_the_same_panel_gives_the_same_characters_whatever_the_user_prefers(picture: Picture) -> None:
    first = svg(picture, picture.panels[0], "a")
    with matplotlib.rc_context({"font.size": 30, "axes.edgecolor": "red", "svg.hashsalt": None}):
        assert svg(picture, picture.panels[0], "a") == first
    assert matplotlib.rcParams["svg.fonttype"] == "path"  # as it was


@pytest.mark.parametrize("picture", [LINES, BARS])
def test_colours_are_the_pages_and_letters_are_letters(picture: Picture) -> None:
    drawn = svg(picture, picture.panels[0], "a")
    assert not re.search(r"#[0-9a-fA-F]{6}|font-family|<style|<script|http", drawn)
    assert {"var(--bf16)", "var(--ink)", "var(--grid)"} <= set(re.findall(r"var\(--\w+\)", drawn))
    assert {f"{size}px" for size in re.findall(r"font-size: ([0-9.]+)px", drawn)} == {"12px"}
    assert element(drawn).get("viewBox", "").split()[2] == str(WIDTH)
    assert "NaN" not in drawn
    wanted = {"3", "7", "K", "tokens"} if picture is LINES else {"MTP 3", "DFlash 15", "tokens"}
    assert wanted <= set(texts(drawn))


def test_a_panel_says_what_it_shows() -> None:
    root = element(svg(LINES, LINES.panels[0], "a"))
    title, described = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert described is not None
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == f"{title.get('id')} {described.get('id')}"
    assert title.text == "Lines: sums"
    assert "bf16: 3.500 (3.250 to 3.750) at 3, 6.000 (5.500 to 6.500) at 7." in (described.text or "")


def test_ids_of_panels_differ_and_all_uses_are_found() -> None:
    drawn = [svg(LINES, LINES.panels[0], name) for name in ("a", "b")]
    ids = [set(re.findall(r' id="([^"]+)"', one)) for one in drawn]
    assert not ids[0] & ids[1]
    for one, known in zip(drawn, ids, strict=True):
        used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', one))
        assert {name for pair in used for name in pair if name} <= known
        assert len(re.findall(r' id="', one)) == len(known)


def test_whiskers_and_bands_end_where_intervals_do() -> None:
    """In the drawing's own coordinates: a value of y is a straight line between two tick labels."""
    root = element(svg(LINES, LINES.panels[0], "a"))
    ticks = [text for text in root.iter(f"{SVG}text") if "text-anchor: end" in text.get("style", "")]
    labels = {float(text.text or ""): float(text.get("y", "")) for text in ticks}
    low, high = min(labels), max(labels)

    def y(value: float) -> float:
        return labels[low] + (value - low) / (high - low) * (labels[high] - labels[low]) - 4.56  # middle of a letter

    paths = [[float(n) for n in re.findall(r"-?[0-9.]+", p.get("d", ""))] for p in root.iter(f"{SVG}path")]
    whiskers = [path for path in paths if len(path) == 4 and path[0] == path[2]]
    for ends in ((2.75, 3.25), (4.5, 5.5)):
        assert any(w[1::2] == pytest.approx([y(end) for end in ends], abs=0.1) for w in whiskers)
    height = float(root.get("viewBox", "").split()[3])  # of areas, coordinates are from the lower edge
    heights = [h for path in paths for y in path[1::2] for h in (y, height + y)]
    for end in (3.25, 3.75, 5.5, 6.5):
        assert any(h == pytest.approx(y(end), abs=0.1) for h in heights)


def test_names_are_text_and_never_markup(recwarn: pytest.WarningsRecorder) -> None:
    """In a title, where names come from a run; dollar signs are no formulas, and a font may lack the letters."""
    evil = '</title><script>alert(1)</script> $\\frac{1}{ & "日本'
    picture = replace(LINES, title=evil, x_label="$x_$ 日本", panels=(replace(LINES.panels[0], title=evil),))
    drawn = svg(picture, picture.panels[0], "a")
    assert "<script" not in drawn
    title = element(drawn).find(f"{SVG}title")
    assert title is not None
    assert title.text == f"{evil}: {evil}"
    assert "$x_$ 日本" in texts(drawn)
    assert not recwarn


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, Intervals]:
    path = tmp_path_factory.mktemp("runs") / "run"
    run(small_plan(prompts=6, budgets=[3, 7]), path, ScriptedEngine(), decode)
    recorded = read_run(path)
    return summarise(recorded), intervals(recorded)


def test_pictures_have_the_runs_intervals(measured: tuple[Summary, Intervals]) -> None:
    summary, known = measured
    cell = summary.cell("mxfp4", "dflash-7", "talk")
    assert cell
    mine = known.of(cell)
    assert mine.pooled
    assert mine.survival
    assert mine.conditional
    assert mine.tokens_per_s
    assert mine.speedup

    def points(picture: Picture, name: str) -> dict[float, Point]:
        (panel,) = [panel for panel in picture.panels if panel.title == "talk"]
        (series,) = [one for one in panel.series if one.name == name]
        return {point.x: point for point in series.points}

    def ends(point: Point) -> tuple[float, float | None, float | None]:
        return point.y, point.lower, point.upper

    length = points(gallery.acceptance_vs_k(summary, known), "DFlash, mxfp4")[7]
    assert ends(length) == pytest.approx((mine.pooled.estimate, mine.pooled.lower, mine.pooled.upper))
    second = points(gallery.survival(summary, "dflash-7", known), "mxfp4")[2]
    assert ends(second) == (mine.survival.estimate[1], mine.survival.lower[1], mine.survival.upper[1])
    third, at = points(gallery.conditional(summary, "dflash-7", known), "mxfp4")[3], mine.conditional[2]
    assert at
    assert ends(third) == (at.estimate, at.lower, at.upper)
    faster = points(gallery.speedups(summary, 1, known), "mxfp4")[1]
    assert ends(faster) == (mine.speedup.estimate, mine.speedup.lower, mine.speedup.upper)
    rate = points(gallery.throughput_vs_k(summary, 1, known), "DFlash, mxfp4")
    assert sorted(rate) == [0, 3, 7]
    assert ends(rate[7]) == (mine.tokens_per_s.estimate, mine.tokens_per_s.lower, mine.tokens_per_s.upper)
    assert [one.colour for one in gallery.speedups(summary, 1, known).legend] == ["bf16", "mxfp4"]
    assert COLOURS["bf16"] != COLOURS["mxfp4"]


def test_what_was_not_measured_has_no_panel(measured: tuple[Summary, Intervals], tmp_path: Path) -> None:
    summary, _ = measured
    assert not gallery.throughput_vs_latency(summary, "bf16").panels  # in process nobody waits for pieces
    emulated = summarise(read_run(serve(tmp_path / "run", server_plan(), mxfp4="emulated")))
    drawn = [gallery.speedups(emulated, 4), gallery.throughput(emulated, 4)]
    drawn.append(gallery.throughput_vs_latency(emulated, "bf16"))
    assert all({one.colour for one in picture.legend} == {"bf16"} for picture in drawn)
    assert not gallery.throughput_vs_latency(emulated, "mxfp4").panels
