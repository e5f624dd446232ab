"""The page in a real browser: Markdown, and conversations that tabs share and reloads keep."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.browser import CONTRAST, ask, ended
from support.page_replay import STORY, Replay, round_of, text_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

Visit = Any  # from conftest: opens an address

MARKDOWN = """# Title

A **bold** word, a [good](https://a.b/c) and a [bad](javascript:alert(1)) link, `code`.

1. one
   - two

| a long head of a table | another long head | a third long head |
|---|--:|---|
| 1 | `2` | ~~3~~ |

> quoted

```python
def f(x):  # comment
    return "text" + 1 + "a line that is far too long for a phone, and for most other screens, too"
```
"""
SAID = "".join(map(text_of, STORY))


def rounds_of(text: str) -> list[Any]:
    """Rounds that say a text, with three drafted tokens each."""
    tokens = re.findall(r"\s*\S+", text)
    rounds = []
    for number, place in enumerate(range(0, len(tokens), 4)):
        *drafts, own = tokens[place : place + 4]
        drafted = [(token, depth - 1) for depth, token in enumerate(drafts)]
        rounds.append(round_of(number, drafted, range(len(drafts)), own))
    return rounds


@pytest.fixture
def rich(replay: Replay) -> Replay:
    replay.answers = [rounds_of(MARKDOWN)]
    return replay


def answer(page: Page, text: str = "What happened?", count: int = 1) -> Page:
    """Ask, and wait for the end of the last of `count` answers."""
    ask(page, text)
    page.locator("#send", has_text="Send").wait_for()
    page.locator(".message.assistant").nth(count - 1).get_by_text("Answer again").wait_for()
    return page


def texts(page: Page) -> list[str]:
    return page.locator(".message .text").all_text_contents()


def press(page: Page, name: str, place: int) -> None:
    """Press a button of a message."""
    page.locator(".message").nth(place).get_by_role("button", name=name, exact=True).click()


def titles(page: Page) -> list[str]:
    return page.locator("#conversation option").all_text_contents()


def test_markdown_becomes_elements(visit: Visit, rich: Replay, address: str) -> None:
    rights = ["clipboard-read", "clipboard-write"]
    page = answer(visit(address, permissions=rights))
    text = page.locator(".message.assistant .text")
    names = ["h3", "strong", "ol > li", "ol ul > li", "table th", "td.right code", "blockquote p"]
    counts = {name: text.locator(name).count() for name in [*names, "td s", "pre code"]}
    assert counts == dict.fromkeys(counts, 1) | {"table th": 3}
    links = text.locator("a")
    assert links.count() == 1
    wanted = {"href": "https://a.b/c", "rel": "noopener noreferrer", "target": "_blank"}
    assert {name: links.get_attribute(name) for name in wanted} == wanted
    assert "[bad](javascript:alert(1))" in (text.locator("p").first.text_content() or "")
    assert text.locator(".code-keyword").first.text_content() == "def"
    face = "each => getComputedStyle(each).fontFamily.includes('monospace')"
    assert text.locator("pre code").evaluate(face)
    text.get_by_role("button", name="Copy code").click()
    text.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == MARKDOWN.partition("```python\n")[2].partition("\n```")[0]
    page.locator(".token", has_text="bold").click()
    chosen = page.locator(".token.chosen").all_text_contents()
    assert "bold" in chosen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_markdown_fits_and_stands_out(
    visit: Visit, rich: Replay, address: str, scheme: str, width: int
) -> None:
    rich.thoughts = "It is **hard**."
    page = visit(address, width=width, height=844, color_scheme=scheme)
    attach(page, "notes.txt", b"some text")
    answer(page)
    page.locator(".thoughts summary").click()
    page.locator(".file summary").click()
    page.locator(".thoughts strong").wait_for()
    for box in ("html", "#chat", "#scroll"):
        wide = page.locator(box).evaluate("each => [each.scrollWidth, each.clientWidth]")
        assert wide[0] <= wide[1], f"{box} at {width}"
    ratios = page.evaluate(CONTRAST)
    assert any("code-comment" in name for name in ratios)
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def test_thoughts_are_folded_and_kept(visit: Visit, replay: Replay, address: str) -> None:
    replay.thoughts = "First *this*, then that."
    page = answer(visit(address))
    for _ in range(2):
        thoughts = page.locator(".message.assistant .thoughts")
        assert thoughts.locator("summary").text_content() == "Thoughts (4 words)"
        assert thoughts.get_attribute("open") is None
        thoughts.locator("summary").click()
        thoughts.locator("em", has_text="this").wait_for()
        assert texts(page)[1] == SAID
        page.reload()
    answer(page, "And?", 2)
    assert replay.bodies[1]["messages"][1] == {"role": "assistant", "content": SAID}


def attach(page: Page, name: str, body: bytes) -> None:
    file = {"name": name, "mimeType": "text/plain", "buffer": body}
    page.locator("#files").set_input_files([file])


def test_files_go_with_a_message(visit: Visit, replay: Replay, address: str) -> None:
    page = visit(address)
    for name, body, problem in (
        ("big.txt", b"x" * 300_000, "big.txt has 293 KiB: a file may have 256 KiB."),
        ("picture.png", b"\x89PNG\x00\xff", "picture.png is not a text file in UTF-8."),
    ):
        attach(page, name, body)
        page.locator("#problem", has_text=problem).wait_for()
    attach(page, "a.py", b"x = 1\n")
    attach(page, "b.py", b"y = 2\n")
    page.get_by_role("button", name="Remove b.py").click()
    page.locator("#attached li").wait_for()
    answer(page, "Read it.")
    assert replay.bodies[0]["messages"][0]["content"] == "Read it.\n\nFile a.py:\n```\nx = 1\n```"
    page.reload()
    page.locator(".message .file summary", has_text="a.py").click()
    assert page.locator(".file pre").text_content() == "x = 1\n"
    assert page.locator("#attached li").count() == 0


def test_messages_are_edited_and_deleted(visit: Visit, replay: Replay, address: str) -> None:
    page = answer(answer(visit(address), "one"), "two", 2)
    press(page, "Edit", 0)
    page.get_by_label("Edited message").fill("three")
    page.get_by_role("button", name="Save").click()
    page.locator(".message").nth(2).wait_for(state="detached")
    ended(page)
    assert replay.bodies[2]["messages"] == [{"role": "user", "content": "three"}]
    assert texts(page) == ["three", SAID]
    press(page, "Edit", 1)
    page.get_by_label("Edited message").fill("It is **mine**.")
    page.get_by_role("button", name="Save").click()
    page.locator(".message.assistant strong", has_text="mine").wait_for()
    answer(page, "four", 2)
    contents = [each["content"] for each in replay.bodies[3]["messages"]]
    assert contents == ["three", "It is **mine**.", "four"]
    press(page, "Delete", 1)
    page.reload()
    assert texts(page) == ["three", "four", SAID]


def test_an_edit_that_gets_no_answer_loses_nothing(
    visit: Visit, replay: Replay, address: str
) -> None:
    page = answer(visit(address), "one")
    replay.answers, replay.error = [[]], "all slots are taken"
    press(page, "Edit", 0)
    page.get_by_label("Edited message").fill("two")
    page.get_by_role("button", name="Save").click()
    page.locator("#problem:visible").wait_for()
    assert texts(page) == ["one", SAID]
    press(page, "Answer again", 1)
    page.locator("#problem:visible").wait_for()
    page.locator("#send", has_text="Send").wait_for()
    page.reload()
    assert texts(page) == ["one", SAID]


def test_tabs_share_conversations(visit: Visit, address: str) -> None:
    first = answer(visit(address), "from one")
    second = first.context.new_page()
    second.goto(address)
    assert texts(second) == ["from one", SAID], "the last conversation is open in a new tab"
    second.get_by_role("button", name="New").click()
    answer(second, "from two")
    third = first.context.new_page()
    third.goto(address)
    third.get_by_role("button", name="New").click()
    answer(third, "from three")
    answer(first, "more", 2)
    for page in (first, second, third):
        page.reload()
        assert sorted(titles(page)) == ["from one", "from three", "from two"]
    assert texts(first) == ["from one", SAID, "more", SAID]
    assert texts(second) == ["from two", SAID]
    second.locator("#conversation").select_option(label="from one")
    answer(second, "from the other", 3)
    first.locator(".message").nth(5).wait_for()
    assert texts(first)[4:] == ["from the other", SAID]
    second.get_by_role("button", name="Clear").click()
    first.locator(".message").first.wait_for(state="detached")
    assert sorted(titles(third)) == ["from three", "from two"]


def test_a_reload_in_the_middle_loses_nothing(visit: Visit, replay: Replay, address: str) -> None:
    replay.hangs = True
    page = visit(address)
    ask(page, "Begin.")
    page.locator(".message.busy .token", has_text="Always").wait_for()
    other = page.context.new_page()
    other.goto(address)
    page.reload()
    page.get_by_text("broken off").wait_for()
    assert texts(page) == ["Begin.", SAID]
    replay.hangs = False
    press(page, "Answer again", 1)
    ended(page)
    assert texts(page) == ["Begin.", SAID]
    other.locator(".message.assistant").wait_for()
    other.get_by_text("broken off").wait_for(state="detached")
    assert texts(other) == ["Begin.", SAID]


def test_full_storage_is_a_sentence(visit: Visit, address: str) -> None:
    page = answer(visit(address), "kept")
    page.evaluate("localStorage.setItem('other', '')")
    page.evaluate("""() => {
      let size = 8_000_000;
      for (let text = ""; size > 20; size >> 1) {
        try { localStorage.setItem("other", text + "x".repeat(size)); text += "x".repeat(size); }
        catch { size >>= 1; }
      }
    }""")
    answer(page, "too much", 2)
    problem = page.locator("#storage")
    assert (problem.text_content() or "").startswith("This browser's storage is full: ")
    assert texts(page) == ["kept", SAID, "too much", SAID]
    page.evaluate("localStorage.removeItem('other')")
    answer(page, "again", 3)
    assert not problem.is_visible()
    page.reload()
    assert texts(page) == ["kept", SAID, "too much", SAID, "again", SAID]


def test_conversations_are_exported(visit: Visit, address: str) -> None:
    page = answer(visit(address))
    exported = {}
    for kind in ("Markdown", "JSON"):
        page.locator("#export summary").click()
        with page.expect_download() as begun:
            page.get_by_role("button", name=kind).click()
        path = begun.value.path()
        exported[begun.value.suggested_filename] = Path(path).read_text()
    text = f"# What happened?\n\n## You\n\nWhat happened?\n\n## replayed\n\n{SAID}\n"
    assert exported["what-happened.md"] == text
    messages = json.loads(exported["what-happened.json"])["messages"]
    assert [each["content"] for each in messages] == ["What happened?", SAID]


def test_where_nothing_is_drafted_the_page_says_why(
    visit: Visit, replay: Replay, address: str
) -> None:
    alone = round_of(0, [], [], "Alone.", drafter="none")
    replay.answers, replay.drafters = [[alone]], ("none",)
    page = visit(address)
    page.locator("#no-rounds", has_text="This server has no drafter").wait_for()
    answer(page)
    page.locator("#no-drafts", has_text="Start the server with a drafter").wait_for()
    page.reload()
    page.locator("#no-rounds", has_text="This server has no drafter").wait_for()
    replay.drafters = ("none", "prompt-lookup")
    page.reload()
    page.locator("#no-rounds", has_text="Choose another drafter above").wait_for()
    page.locator("#drafter").select_option("prompt-lookup")
    page.locator("#no-rounds", has_text="The rounds of an answer are not kept").wait_for()
    replay.answers = [[round_of(0, [], [], "Alone.", drafter="prompt-lookup")]]
    answer(page, "Again?", 2)
    page.locator("#no-drafts", has_text="prompt-lookup found no tokens to guess").wait_for()
    replay.answers = [STORY]
    answer(page, "Again?", 3)
    page.locator("#no-drafts").wait_for(state="hidden")
