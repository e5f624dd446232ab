"""A real headless Chromium where there is one, driven by playwright, and what is done in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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


def ask(page: Page, text: str = "What happened?") -> None:
    """Send a message."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def ended(page: Page) -> None:
    """Wait for the end of the answer."""
    page.locator("#send", has_text="Send").wait_for()
    page.locator(".message .foot button").first.wait_for()


CONTRAST = """
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (...layers) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of layers) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((each) => each / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (each) => {
    const layers = [];
    for (let at = each; at; at = at.parentElement) {
      layers.push(getComputedStyle(at).backgroundColor);
    }
    return layers.reverse();
  };
  const found = {};
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const each = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !each.checkVisibility()) continue;
    if (each.closest("option, :disabled, noscript")) continue;
    const box = each.closest(".node")?.querySelector(".box");
    const ink = box ? getComputedStyle(each).fill : getComputedStyle(each).color;
    const [a, b] = [light(ink), light(...(box ? [getComputedStyle(box).fill] : behind(each)))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = [each.tagName, ...each.classList, ...each.parentElement.classList].join(".");
    found[name] = Math.min(found[name] ?? 99, ratio);
  }
  return found;
}
"""
"""The contrast of each text that is seen with what lies behind it, by the names of elements."""
