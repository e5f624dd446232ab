"""A real headless Chromium where there is one, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
)
HOW = (
    "`apt-get install chromium-headless-shell` or `playwright install chromium-headless-shell` "
    "brings one, SPECRUN_CHROMIUM names another"
)


class NoBrowserError(Exception):
    """There is no browser, or nothing to drive it with; says how to have one."""


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start the browser; raises `NoBrowserError` where there is none."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        raise NoBrowserError("playwright is not installed (extra dev)") from None
    found = os.environ.get("SPECRUN_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        try:
            # As root, in a container, Chromium has no sandbox; it sees our own page alone.
            browser = playwright.chromium.launch(executable_path=found, chromium_sandbox=False)
        except Error as problem:
            why = f"{found} did not start" if found else "there is no Chromium"
            raise NoBrowserError(f"{why}: {HOW} ({str(problem).splitlines()[0]})") from None
        try:
            yield browser
        finally:
            browser.close()
