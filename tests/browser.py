"""A real browser that looks at a page as a person would: on a desktop or a phone, in a light or a dark room."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")

# Nothing but the page: no services, no updates, no first run.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


def chromium() -> str | None:
    """Return the program, None where it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Seen:
    """A page that is open. ``said`` is what its console printed; ``asked`` are requests for anything but itself."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def tell(self, script: str) -> Any:
        """Return what JavaScript says of the page; the page itself may run none."""
        return self.page.evaluate(script)


@dataclass
class Browser:
    """One process of it, for several pages."""

    program: Any

    @contextlib.contextmanager
    def looking_at(self, file: Path, width: int, *, dark: bool = False, media: str = "screen") -> Iterator[Seen]:
        """Open a file in a window of ``width`` pixels."""
        context = self.program.new_context(
            viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
        )
        try:
            seen = Seen(context.new_page())
            seen.page.on("console", lambda message: seen.said.append(message.text))
            seen.page.on("pageerror", lambda error: seen.said.append(str(error)))
            url = file.as_uri()
            seen.page.on("request", lambda request: seen.asked.append(request.url) if request.url != url else None)
            seen.page.emulate_media(media=media)
            seen.page.goto(url)
            yield seen
        finally:
            context.close()


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    """Start the browser, with a profile of its own that is thrown away."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        program = playwright.chromium.launch(executable_path=chromium(), headless=True, args=list(FLAGS))
        try:
            yield Browser(program)
        finally:
            program.close()
