"""The page's files: what is served, under which headers, and that they need nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from support.loopback_server import client_of

from specrun.cli.serve.page.routes import CONTENT_TYPES, HEADERS, read_page
from specrun.runtime.engine import Engine

PAGE = Path(__file__).resolve().parents[4] / "cli" / "serve" / "page" / "static"
FILES = sorted(path.name for path in PAGE.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]
URLS = [f"/page/{name}" for name in FILES if name != "index.html"]


@pytest.fixture
def locked(demo_engine: Engine) -> Iterator[TestClient]:
    """A client without a key, of a server that asks for one."""
    with client_of(demo_engine, model="demo", api_keys=("secret",)) as client:
        yield client


@pytest.mark.parametrize("url", ["/", *URLS])
def test_everyone_gets_the_page_and_what_it_loads(locked: TestClient, url: str) -> None:
    name = url.rpartition("/")[2] or "index.html"
    reply = locked.get(url)
    assert reply.status_code == 200
    assert reply.content == (PAGE / name).read_bytes()
    assert reply.headers["content-type"] == CONTENT_TYPES[Path(name).suffix]
    for header, value in HEADERS.items():
        assert reply.headers[header] == value
    again = locked.get(url, headers={"If-None-Match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert locked.head(url).status_code == 200


def test_nothing_else_is_open_without_the_key(locked: TestClient) -> None:
    assert locked.get("/props").status_code == 401
    assert locked.get("/page").status_code == 401
    assert locked.post("/v1/chat/completions", json={"messages": []}).status_code == 401


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/nothing.js", "/page/../routes.py", "/page/%2e%2e/routes.py", "/page//"],
)
def test_only_files_of_the_page_are_served(locked: TestClient, path: str) -> None:
    assert locked.get(path).status_code in (401, 404)
    headers = {"Authorization": "Bearer secret"}
    assert locked.get(path, headers=headers).status_code == 404


def test_the_policy_allows_no_inline_code_and_no_other_host() -> None:
    rules = [rule.partition(" ") for rule in HEADERS["Content-Security-Policy"].split("; ")]
    policy = {name: value for name, _, value in rules}
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert "unsafe" not in str(policy)
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"


class Elements(HTMLParser):
    """Tags and attributes of a document."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements() -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed((PAGE / "index.html").read_text())
    return parser.found


def test_the_document_loads_its_own_files_only_and_has_nothing_inline() -> None:
    loaded = [
        attributes.get("src") or attributes.get("href")
        for tag, attributes in elements()
        if tag in ("script", "link")
    ]
    assert loaded == ["page/icon.svg", "page/style.css", "page/main.js"]
    for _, attributes in elements():
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
    assert not re.search(r"<script(?![^>]*src=)", (PAGE / "index.html").read_text())
    assert "<style" not in (PAGE / "index.html").read_text()


def test_every_control_has_a_name() -> None:
    found = elements()
    labelled = {attributes.get("for") for tag, attributes in found if tag == "label"}
    text = (PAGE / "index.html").read_text()
    for tag, attributes in found:
        if tag not in ("input", "select", "textarea"):
            continue
        own = attributes.get("id")
        within = re.search(rf'<label[^>]*>(?:(?!</label>).)*id="{own}"', text, re.DOTALL)
        assert own in labelled or within, f"{tag} {own} has no label"
    ids = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in found:
        for name in ("aria-labelledby", "aria-controls", "for"):
            assert attributes.get(name) in (None, *ids)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_no_markup_and_name_no_other_host(name: str) -> None:
    text = (PAGE / name).read_text()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    assert not re.search(forbidden, text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|//cdn", text)
    for module in re.findall(r'from "\./([\w.]+)"', text):
        assert (PAGE / module).exists(), f"{name} imports {module}"
    assert max(map(len, text.splitlines())) <= 100


def test_styles_and_pictures_load_nothing() -> None:
    assert not re.search(r"url\(|@import", (PAGE / "style.css").read_text())
    assert "script" not in (PAGE / "icon.svg").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_modules_that_an_engine_reads(name: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node that could read scripts: install nodejs")
    text = (PAGE / name).read_text()
    command = [node, "--input-type=module", "--check"]
    read = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    broken = subprocess.run(command, input=text + "(", capture_output=True, text=True, check=False)
    assert broken.returncode != 0


def test_every_file_is_served_and_packaged() -> None:
    assert sorted(read_page()) == FILES
    project = tomllib.loads((PAGE.parents[3] / "pyproject.toml").read_text())
    packaged = project["tool"]["setuptools"]["package-data"]["specrun.cli.serve.page"]
    assert packaged == ["static/*"]
