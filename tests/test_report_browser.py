"""A report as people see it: on a desktop and on phones, by day and by night, and on paper."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Seen, started
from explained import explanation, losing
from reported import FEW, analysed, full_plan, record

from mxq.explain import why
from mxq.report.page.build import build
from mxq.report.page.html import write_html

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DESKTOP, TABLET, PHONE, SMALL_PHONE = 1280, 820, 375, 320
LEGIBLE = 11
"""Pixels."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five workloads, one with a name that fits nowhere."""
    names = ["arithmetic", "maths", "functions", "mt-bench", "a-workload-of-" + "x" * 90]
    path = tmp_path_factory.mktemp("runs")
    plan = full_plan(names=names, prompts=14)
    evil = {role: replace(model, spec=f"{model.spec}-{'long' * 40}") for role, model in plan.targets.items()}
    run = record(path / "run", replace(plan, targets=evil))
    seen = [explanation(losing(1, 2), workload=name, k=15) for name in names]
    explained = replace(analysed(run), why=why(seen, FEW))
    (path / "report.html").write_text(write_html(build([explained])))
    return path / "report.html"


WIDER = """[...document.querySelectorAll('body *')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && getComputedStyle(e).position !== 'absolute' && (box.right > innerWidth + 1 || box.left < -1);
}).map(e => e.outerHTML.slice(0, 80))"""

LABELS = """[...document.querySelectorAll('figure svg')].flatMap(svg => {
    const outer = svg.getBoundingClientRect(), scale = outer.width / svg.viewBox.baseVal.width;
    return [...svg.querySelectorAll('text')].map(text => {
        const box = text.getBoundingClientRect();
        return {text: text.textContent, pixels: parseFloat(getComputedStyle(text).fontSize) * scale,
                inside: box.left >= outer.left - 1 && box.right <= outer.right + 1
                        && box.top >= outer.top - 1 && box.bottom <= outer.bottom + 1,
                svg: svg.getAttribute('aria-labelledby'), box: [box.left, box.top, box.right, box.bottom]};
    });
})"""

WORDS = """[...document.querySelectorAll('body *')].filter(e =>
    !e.closest('svg') && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())
).map(e => {
    let ground = e;
    while (ground && getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
    return {text: e.textContent.trim().slice(0, 40), pixels: parseFloat(getComputedStyle(e).fontSize),
            ink: getComputedStyle(e).color, ground: ground ? getComputedStyle(ground).backgroundColor : null};
})"""

UNFOLD = "document.querySelectorAll('details').forEach(d => d.open = true)"


def light(colour: str) -> float:
    """Relative luminance, as WCAG 2.2 defines it."""
    red, green, blue = (int(value) / 255 for value in re.findall(r"\d+", colour)[:3])
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((light(one), light(other)))
    return (lighter + 0.05) / (darker + 0.05)


def small(seen: Seen) -> list[dict[str, Any]]:
    return [label for label in (*seen.tell(LABELS), *seen.tell(WORDS)) if label["pixels"] < LEGIBLE]


def overlapping(labels: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Labels of one picture that are drawn over each other."""
    found = []
    for index, one in enumerate(labels):
        for other in labels[index + 1 :]:
            if one["svg"] != other["svg"]:
                break
            (l1, t1, r1, b1), (l2, t2, r2, b2) = one["box"], other["box"]
            if min(r1, r2) - max(l1, l2) > 0.5 and min(b1, b2) - max(t1, t2) > 3:  # lines touch by a pixel or two
                found.append((one["text"], other["text"]))
    return found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [DESKTOP, TABLET, PHONE, SMALL_PHONE])
def test_it_fits_and_can_be_read(browser: Browser, report: Path, width: int, dark: bool) -> None:
    with browser.looking_at(report, width, dark=dark) as seen:
        for unfolded in (False, True):
            if unfolded:
                seen.tell(UNFOLD)
            assert seen.tell("document.documentElement.scrollWidth") <= width
            assert seen.tell(WIDER) == []
        labels = seen.tell(LABELS)
        assert len(labels) > 500
        assert small(seen) == []
        assert [label["text"] for label in labels if not label["inside"]] == []
        assert overlapping(labels) == []
        assert (seen.said, seen.asked) == ([], [])


@pytest.mark.parametrize("dark", [False, True])
def test_letters_and_curves_stand_out_from_the_ground(browser: Browser, report: Path, dark: bool) -> None:
    """By 4.5 to 1 for text and 3 to 1 for what is drawn: level AA of WCAG 2.2."""
    with browser.looking_at(report, DESKTOP, dark=dark) as seen:
        ground = seen.tell("getComputedStyle(document.body).backgroundColor")
        assert (light(ground) < 0.2) == dark
        faint = [word for word in seen.tell(WORDS) if contrast(word["ink"], word["ground"]) < 4.5]
        assert faint == []
        inks = seen.tell(
            "[...document.querySelectorAll('figure svg text')].map(t => getComputedStyle(t).fill)"
            ".filter((c, i, all) => all.indexOf(c) === i)"
        )
        assert inks
        assert all(contrast(ink, ground) >= 4.5 for ink in inks)
        drawn = seen.tell(
            "['bf16', 'mxfp4', 'guide'].map(name => { const e = document.createElement('i');"
            "e.style.color = `var(--${name})`; document.body.append(e); return getComputedStyle(e).color; })"
        )
        assert len(set(drawn)) == 3
        assert all(contrast(colour, ground) >= 3 for colour in drawn)


def test_on_paper_it_is_light_and_nothing_is_folded(browser: Browser, report: Path) -> None:
    with browser.looking_at(report, 700, dark=True, media="print") as seen:
        assert light(seen.tell("getComputedStyle(document.body).backgroundColor")) > 0.9
        folded = "[...document.querySelectorAll('details table')].filter(table => !table.getClientRects().length)"
        assert seen.tell(f"{folded}.length") == 0
        assert seen.tell("document.documentElement.scrollWidth") <= 700


def test_links_lead_to_their_sections(browser: Browser, report: Path) -> None:
    with browser.looking_at(report, PHONE) as seen:
        targets = seen.tell("[...document.querySelectorAll('a')].map(a => a.getAttribute('href').slice(1))")
        assert targets
        assert seen.tell(f"{targets!r}.every(id => document.getElementById(id))")
        seen.page.click("nav a >> text=Provenance")
        assert -1 <= seen.tell("document.querySelector('[id$=provenance]').getBoundingClientRect().top") < 800


def test_what_is_too_small_or_too_wide_would_be_found(browser: Browser, report: Path) -> None:
    """The planted defects."""
    spoilt = report.with_name("spoilt.html")
    text = report.read_text()
    spoilt.write_text(
        text.replace("font-size: 12px", "font-size: 8px").replace("overflow-wrap: anywhere", "white-space: nowrap")
    )
    with browser.looking_at(spoilt, PHONE) as seen:
        assert small(seen)
        assert seen.tell(WIDER)
    spoilt.write_text(text.replace("</main>", "<script>alert(1)</script><img src='https://evil.example/a.png'></main>"))
    with browser.looking_at(spoilt, PHONE) as seen:
        assert any("Content Security Policy" in said for said in seen.said)
        assert not [asked for asked in seen.asked if seen.page.url != asked and "evil" not in asked]
