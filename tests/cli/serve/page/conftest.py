"""A real browser on the page, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from support.browser import NoBrowserError, open_browser
from support.page_replay import Replay, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Visit = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with ExitStack() as opened:
        try:
            found = opened.enter_context(open_browser())
        except NoBrowserError as problem:
            pytest.skip(f"the page is not tried in a browser: {problem}")
        yield found


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens an address in a fresh profile; no script may fail, and nothing be asked elsewhere."""
    complaints: list[str] = []
    with ExitStack() as opened:

        def go(address: str, *, width: int = 1280, height: int = 840, **options: Any) -> Page:
            size = {"width": width, "height": height}
            profile = browser.new_context(viewport=size, **options)
            opened.callback(profile.close)
            page = profile.new_page()
            page.set_default_timeout(10_000)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
            page.on(
                "request",
                lambda asked: (
                    asked.url.startswith(address) or complaints.append(f"asked {asked.url}")
                ),
            )
            page.goto(address)
            return page

        yield go
    assert [each for each in complaints if "401 (Unauthorized)" not in each] == []


@pytest.fixture
def replay() -> Replay:
    return Replay()


@pytest.fixture
def address(replay: Replay) -> Iterator[str]:
    with serving(replay.app()) as found:
        yield found
