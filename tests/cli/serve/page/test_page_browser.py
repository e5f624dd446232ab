"""The page in a real browser: answers, draft trees and laws as a reader meets them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from support.browser import CONTRAST, ask, ended
from support.page_replay import STORY, Replay, round_of, serving, text_of

from specrun.cli.serve.app import create_app
from specrun.cli.serve.models import Models, ServedModel
from specrun.cli.serve.service import AnswerService
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.demo import demo_target
from specrun.runtime.engine import Engine

if TYPE_CHECKING:
    from playwright.sync_api import Page

Visit = Any  # from conftest: opens an address


def chosen_round(page: Page) -> int:
    return int(page.locator("#tape").get_attribute("aria-valuenow") or 0)


def wait_for_round(page: Page, number: int) -> None:
    page.locator(f"#tape[aria-valuenow='{number}']").wait_for(state="attached")


def told(page: Page) -> Page:
    """A page that has answered a question with STORY."""
    ask(page)
    ended(page)
    wait_for_round(page, len(STORY))
    return page


def test_tokens_are_coloured_by_their_origin(visit: Visit, address: str) -> None:
    page = told(visit(address))
    tokens = page.locator(".message.assistant .token")
    kinds = [(each.get_attribute("class"), each.text_content()) for each in tokens.all()]
    assert kinds == [
        ("token drafted", "The"),
        ("token drafted", " old"),
        ("token corrected", " lamp"),
        ("token drafted", " was"),
        ("token drafted", " lit"),
        ("token drafted", " at"),
        ("token bonus", " dusk"),
        ("token corrected", "."),
        ("token bonus", " Always"),
    ]
    looks = [
        page.locator(f".message .token.{kind}").first.evaluate(
            "each => { const s = getComputedStyle(each); return s.background + s.borderBottom }"
        )
        for kind in ("drafted", "corrected", "bonus")
    ]
    assert len(set(looks)) == 3
    lines = [look.split("solid")[0] for look in looks]
    assert len(set(lines)) == 3, "origins differ without their colours, too"


def test_the_tree_shows_what_was_kept_and_what_not(visit: Visit, address: str) -> None:
    page = told(visit(address))
    page.locator("#tape").focus()
    page.keyboard.press("Home")
    items = page.get_by_role("treeitem")
    names = [each.get_attribute("aria-label") or "" for each in items.all()]
    assert names[0].startswith("Root")
    assert [name.split(",")[0] for name in names[1:]] == [
        "The: drafted and kept",
        "·old: drafted and kept",
        "·lamp: the model's own",
        "·man: drafted and rejected",
        "·sun: drafted and rejected",
    ]
    assert "model 50 %, drafter 75 %" in names[1]
    assert (
        page.locator("#round-note").text_content()
        == "Round 1 of 4 · 2 of 4 drafts kept · draft(n=3)"
    )
    levels = [each.get_attribute("aria-level") for each in items.all()]
    assert levels == ["1", "2", "3", "4", "4", "4"]


def test_laws_stand_side_by_side_for_the_token_that_is_pointed_at(
    visit: Visit, address: str
) -> None:
    page = told(visit(address))
    page.locator("#tape").focus()
    page.keyboard.press("Home")
    rows = page.locator("#law tbody tr")
    texts = [each.inner_text().split("\t") for each in rows.all()]
    assert [(text[0], text[-1]) for text in texts] == [
        ("·lamp", "the model's"),
        ("·man", "rejected"),
        ("·sun", "rejected"),
    ]
    page.get_by_role("treeitem", name="The: drafted and kept").hover()
    assert page.locator("#law-note").text_content() == "after “(prompt)”"
    (row,) = [each.inner_text().split("\t") for each in rows.all()]
    assert (row[0], row[2], row[3]) == ("The", "50 % / 75 %", "kept")
    bars = page.locator("#law .bar")
    shares = [each.evaluate("each => each.style.width") for each in bars.all()]
    assert shares == ["50%", "75%"]
    page.locator("#tape").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    wait_for_round(page, 3)
    page.get_by_text("These drafts were proposed without a distribution.").wait_for()


def test_rounds_are_walked_by_keyboard(visit: Visit, address: str) -> None:
    page = told(visit(address))
    follow = page.get_by_role("button", name="Live")
    assert follow.get_attribute("aria-pressed") == "true"
    tape = page.get_by_role("slider", name="Round")
    tape.focus()
    seen = []
    for key in ("ArrowLeft", "ArrowLeft", "Home", "ArrowLeft", "ArrowRight", "End", "PageDown"):
        page.keyboard.press(key)
        seen.append(chosen_round(page))
    assert seen == [3, 2, 1, 1, 2, 4, 1]
    assert follow.get_attribute("aria-pressed") == "false"
    assert "2 of 4 drafts kept" in (tape.get_attribute("aria-valuetext") or "")
    assert page.locator(".token.chosen").all_text_contents() == ["The", " old", " lamp"]
    page.get_by_role("button", name="Next round").click()
    assert chosen_round(page) == 2
    follow.click()
    wait_for_round(page, 4)


def test_the_tree_is_walked_by_keyboard(visit: Visit, address: str) -> None:
    page = told(visit(address))
    page.locator("#tape").focus()
    page.keyboard.press("Home")
    page.locator("[role=treeitem][tabindex='0']").focus()
    labels = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
        labels.append((page.locator(":focus").get_attribute("aria-label") or "").split(":")[0])
    assert labels[:3] == ["The", "·old", "·lamp"]
    assert labels[3] in ("·man", "·sun")
    assert labels[4:] == ["·lamp", "·old"]
    assert page.locator("#law-note").text_content() == "after “The”"
    assert page.locator("[role=treeitem][tabindex='0']").count() == 1


def test_a_click_on_a_token_shows_its_round(visit: Visit, address: str) -> None:
    page = told(visit(address))
    page.locator(".token", has_text="lamp").click()
    assert chosen_round(page) == 1
    narrow = told(visit(address, width=390, height=844))
    narrow.locator(".token", has_text="lamp").click()
    assert chosen_round(narrow) == 1
    assert narrow.locator("#tree").is_visible()
    assert not narrow.locator("#messages").is_visible()


def test_figures_of_the_answer_are_the_traces(visit: Visit, address: str) -> None:
    page = told(visit(address))
    figures = page.locator("#figures dd").all_text_contents()
    # 5 of 9 drafts were kept; 12 tokens took 4 times 15 ms; 1 token at once costs T(1).
    assert figures == ["2.50", "56 %", "200", "1.50 × one"]
    heights = [
        each.evaluate("each => each.style.height") for each in page.locator("#depths i").all()
    ]
    assert heights == ["75%", "50%", "25%"]
    label = page.locator("#times .stack").nth(1).get_attribute("aria-label")
    assert label == "rounds 1 to 4: model 40 ms, drafter 16 ms, Python 4.00 ms"


EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


def test_nothing_that_a_model_or_server_says_is_markup(
    visit: Visit, replay: Replay, address: str
) -> None:
    drafts = [(EVIL, -1), (EVIL, 0)]
    replay.answers = [[round_of(0, drafts, [0], EVIL, recovered=True, drafter=EVIL)]]
    replay.model, replay.drafters, replay.error = EVIL, (EVIL, f"{EVIL}2"), EVIL
    page = visit(address)
    ask(page, EVIL)
    page.locator("#problem:visible").wait_for()
    wait_for_round(page, 1)
    page.get_by_role("treeitem").nth(1).hover()
    assert page.locator("#problem").text_content() == EVIL
    assert page.locator(".message.assistant .text").text_content() == EVIL * 2
    assert page.locator("main img, main script, header img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_an_answer_is_stopped(visit: Visit, replay: Replay, address: str) -> None:
    replay.hangs = True
    page = visit(address)
    for stop in (lambda: page.get_by_role("button", name="Stop").click(), None):
        replay.left.clear()
        ask(page)
        page.locator(".message.busy .token", has_text="Always").wait_for()
        if stop is None:
            page.keyboard.press("Escape")
        else:
            stop()
        ended(page)
        assert replay.left.wait(5.0), "the server was not told"
        assert page.get_by_text("stopped").last.is_visible()


def test_answers_are_made_again_and_conversations_kept(
    visit: Visit, replay: Replay, address: str
) -> None:
    page = told(visit(address))
    ask(page, "And then?")
    page.locator(".message.assistant").nth(1).get_by_text("Answer again").wait_for()
    page.get_by_role("button", name="Answer again").last.click()
    page.locator(".message.assistant").nth(1).get_by_text("Answer again").wait_for()
    first, second, third = replay.bodies
    text = "".join(map(text_of, STORY))
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == text
    assert third["messages"] == second["messages"]
    assert first["messages"] == second["messages"][:1]
    page.get_by_role("button", name="New").click()
    assert page.locator(".message").count() == 0
    page.reload()
    page.locator("#conversation").select_option(label="What happened?")
    texts = page.locator(".message .text").all_text_contents()
    assert texts == ["What happened?", text, "And then?", text]
    page.get_by_role("button", name="Clear").click()
    page.reload()
    assert page.locator("#conversation").inner_text() == "New conversation"


def test_drafter_rule_and_settings_go_with_requests(
    visit: Visit, replay: Replay, address: str
) -> None:
    page = told(visit(address))
    assert replay.bodies[0]["speculative"] == {"trace": True}
    assert "accept" not in replay.bodies[0]
    page.locator("#drafter").select_option("prompt-lookup")
    page.locator("#rule").select_option("token")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System message").fill("Be brief.")
    for name, value in (("Temperature", "0"), ("Seed", "7"), ("Longest draft", "2")):
        page.get_by_label(name).fill(value)
    page.get_by_role("button", name="Done").click()
    ask(page, "Again?")
    page.locator(".message.assistant").nth(1).get_by_text("Answer again").wait_for()
    body = replay.bodies[1]
    wanted = {"trace": True, "drafter": "prompt-lookup", "n_max": 2}
    assert body["speculative"] == wanted
    assert (body["accept"], body["temperature"], body["seed"]) == ("token", 0, 7)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "top_p" not in body


def test_a_key_is_asked_for_and_stays_in_its_tab(
    visit: Visit, replay: Replay, address: str
) -> None:
    replay.key = "secret"
    page = visit(address)
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Done").click()
    page.locator("#model", has_text="replayed").wait_for()
    told(page)
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    page.locator("#model", has_text="replayed").wait_for()
    assert not page.locator("#settings").is_visible()


def test_what_ends_an_answer_is_said(visit: Visit, replay: Replay, address: str) -> None:
    replay.error = "the engine was closed"
    page = visit(address)
    ask(page)
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.text_content() == "the engine was closed"
    assert page.locator(".message.assistant .text").text_content() == "".join(map(text_of, STORY))
    replay.error = ""
    ask(page, "Once more?")
    page.locator(".message.assistant").nth(1).get_by_text("Answer again").wait_for()
    assert not alert.is_visible()


def test_a_long_answer_comes_whole_and_in_order(visit: Visit, replay: Replay, address: str) -> None:
    drafts = [(" was", -1), (" lit", 0)]
    rounds = [round_of(number, drafts, [0, 1], f" {number}") for number in range(400)]
    replay.answers = [rounds]
    page = visit(address)
    ask(page)
    ended(page)
    wait_for_round(page, 400)
    said = page.locator(".message.assistant .text").text_content()
    assert said == "".join(map(text_of, rounds))
    assert page.locator(".token[data-round]").count() == 3 * 400
    page.locator("#tape").focus()
    page.keyboard.press("PageDown")
    assert chosen_round(page) == 390
    assert page.locator(".token.chosen").last.text_content() == " 389"
    assert page.locator(".token.chosen").last.is_visible()


def test_a_question_that_got_no_answer_comes_back(
    visit: Visit, replay: Replay, address: str
) -> None:
    replay.answers, replay.error = [[]], "all slots are taken"
    page = visit(address)
    ask(page, "Is anyone there?")
    page.get_by_role("alert").wait_for()
    assert page.locator("#message").input_value() == "Is anyone there?"
    assert page.locator(".message").count() == 0
    replay.error, replay.answers = "", [STORY]
    page.keyboard.press("Enter")
    ended(page)
    assert replay.bodies[1]["messages"] == [{"role": "user", "content": "Is anyone there?"}]


@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1600])
def test_nothing_is_wider_than_the_screen(visit: Visit, address: str, width: int) -> None:
    page = told(visit(address, width=width, height=844))
    views = ("Chat", "Rounds") if width <= 900 else ("",)
    for view in views:
        if view:
            page.get_by_role("tab", name=view).click()
        for box in ("html", "#chat", "#rounds"):
            wide = page.locator(box).evaluate("each => [each.scrollWidth, each.clientWidth]")
            assert wide[0] <= wide[1], f"{box} of {view} at {width}"
    if width <= 900:
        shown = page.locator("#rounds button, header button, .tabs button")
        low = [each.bounding_box() for each in shown.all() if each.is_visible()]
        assert min(box["height"] for box in low if box is not None) >= 36


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_in_both_themes(visit: Visit, address: str, scheme: str) -> None:
    page = visit(address, color_scheme=scheme)
    welcome = page.evaluate(CONTRAST)
    told(page)
    page.locator("#tape").focus()
    page.keyboard.press("Home")
    page.locator("[role=treeitem].rejected").first.wait_for()
    ratios = {**welcome, **page.evaluate(CONTRAST)}
    assert {"text.node.kept", "text.node.rejected", "text.node.corrected"} <= set(ratios)
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def test_the_theme_follows_the_system_until_it_is_chosen(visit: Visit, address: str) -> None:
    def paper(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light, dark = visit(address), visit(address, color_scheme="dark")
    assert paper(light) != paper(dark)
    light.locator("#theme").click()
    light.locator("#theme").click()
    assert light.locator("#theme").get_attribute("aria-label") == "Theme: dark"
    assert paper(light) == paper(dark)
    light.reload()
    assert paper(light) == paper(dark)


def test_nothing_moves_for_who_wants_no_motion(visit: Visit, address: str) -> None:
    moving = "each => getComputedStyle(each).animationName"
    for motion, wanted in (("reduce", "none"), ("no-preference", "arrive")):
        page = told(visit(address, reduced_motion=motion))
        page.wait_for_timeout(400)  # rounds that follow each other faster do not move
        page.locator("#tape").focus()
        page.keyboard.press("Home")
        assert page.locator(".node.kept").first.evaluate(moving) == wanted
        assert page.locator(".node.root").evaluate(moving) == "none"


def test_tab_comes_to_everything(visit: Visit, address: str) -> None:
    page = told(visit(address))
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    wanted = {"drafter", "rule", "open-settings", "theme", "conversation", "message", "send"}
    assert wanted | {"tape", "previous", "follow", "scroll", "g"} <= reached


def test_the_page_of_a_real_server(visit: Visit, demo_engine: Engine) -> None:
    question = [{"role": "user", "content": "What does os.tcgetpgrp do?"}]
    with serving(create_app(demo_engine, ServeSettings(model="demo"))) as address:
        page = visit(address)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("button", name="Done").click()
        for drafter in ("", "prompt-lookup", "none"):
            page.locator(f"#drafter option[value='{drafter}']").wait_for(state="attached")
            page.locator("#drafter").select_option(drafter)
            page.get_by_role("button", name="New").click()
            ask(page, str(question[0]["content"]))
            ended(page)
            said = page.locator(".message.assistant .text").text_content()
            assert said == "Return the process group associated with the terminal specified by fd."
            note = page.locator("#round-note", has_text=f"· {drafter or 'draft'}")
            note.wait_for()
            assert page.locator(".token[data-round]").count() > 5


@contextmanager
def opened(engine: Engine, name: str, _is_busy: bool) -> Iterator[AnswerService]:
    yield AnswerService(engine, ServeSettings(model=name))


@pytest.mark.parametrize("width", [1280, 320])
def test_one_of_several_models_is_chosen(visit: Visit, demo_engine: Engine, width: int) -> None:
    listed = [
        ServedModel(name, demo_target(), open=partial(opened, demo_engine, name))
        for name in ("one", "two")
    ]
    models = Models(lambda: listed, ServeSettings(model=""))
    with serving(create_app(models, models.settings)) as address:
        page = visit(address, width=width)
        page.locator("#which option[value='two']").wait_for(state="attached")
        assert page.locator("#which").input_value() == "one"
        page.locator("#which").select_option("two")
        page.locator("#model", has_text="loads with the first question").wait_for()
        ask(page, "What does os.tcgetpgrp do?")
        ended(page)
        page.locator("#drafter option[value='prompt-lookup']").wait_for(state="attached")
        assert page.locator("#model").text_content() == ""
        assert [(model.id, model.state) for model in models.models] == [
            ("one", "unloaded"),
            ("two", "loaded"),
        ]
        page.reload()
        page.locator("#drafter option[value='prompt-lookup']").wait_for(state="attached")
        assert page.locator("#which").input_value() == "two"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    models.unload_all()
