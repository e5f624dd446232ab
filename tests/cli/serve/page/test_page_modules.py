"""The page's modules that make no elements, in node: Markdown, storage, what is sent."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[3] / "cli" / "serve" / "page" / "static"
TESTS = sorted(path.name for path in (HERE / "modules").glob("*.test.mjs"))


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the page's modules and of their tests."""
    folder = tmp_path_factory.mktemp("modules")
    for path in (*PAGE.glob("*.js"), *(HERE / "modules").glob("*.mjs")):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def node(folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    found = shutil.which("node")
    if found is None:
        pytest.skip("no node that could run the page's modules: install nodejs")
    command = [found, *arguments]
    return subprocess.run(
        command, cwd=folder, input=text, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", TESTS)
def test_modules(modules: Path, name: str) -> None:
    done = node(modules, "--test", "--test-reporter=tap", name)
    assert done.returncode == 0, done.stdout
    assert "# fail 0" in done.stdout
    assert "# tests 0" not in done.stdout


TAGS = r"</?(?:p|h\d|li|ul|ol|blockquote|table|thead|tbody|tr|th|td|hr)(?: [^>]*)?/?>"


def plain(html: str) -> str:
    """Return HTML without spaces around blocks, and around lines outside code."""
    html = re.sub(r' title="[^"]*"|<br />', "", html)
    parts = re.split(r"(<pre>.*?</pre>)", html, flags=re.DOTALL)
    for place, part in enumerate(parts):
        if part.startswith("<pre>"):
            parts[place] = re.sub(r"\s*</code>", "</code>", part)
        else:
            part = re.sub(r"[ \t]*\n[ \t]*", "\n", part)
            parts[place] = re.sub(rf"\s*({TAGS})\s*", r"\1", part)
            parts[place] = parts[place].strip("\n")
    return "".join(parts).strip()


CASES = (
    "# A\n\nB *c* **d** ***e*** _f_ __g__ ~~h~~ `i` ``j ` k``\n",
    "Title\n===\n\nOther\n---\n\n***\n\n#no\n\n## closed ##\n",
    "- a\n- b\n  - c\n    1. d\n\n- e\n",
    "3. a\n4. b\n\n   c\n\n5) d\n",
    "- a\n\n  ```py\n  x = 1\n\n  y\n  ```\n- b",
    "> a\nlazy\n> - b\nlazy too\n\n> > c\n",
    "| a | b\\|c | d |\n|:-|:-:|-:|\n| 1 | `2` |\n**x** | y | z\n\nafter\n",
    "text\n| a | b |\n|---|---|\n| 1 | 2 |\n> quote\n",
    "~~~ js extra\n`` ` ``\n~~\n~~~~\nafter\n",
    "    code\n\n    more\n\nnot\n    lazy\n",
    "[a](http://b.c/d_(e) 'title') <https://f.g> [h][i] [j] ![k](http://l.m)\n\n[i]: http://n.o\n"
    "[J]: <http://p.q> 'r'\n",
    "[a](javascript:b) [c](data:d) <b>e</b> &amp; &lt; &#65; &nosuch; \\* \\q \\\\\n",
    "snake_case_word 2*3*4 **a*b** *a**b* ** no ** 5 * 3 * 2\n",
    "line\nbreak  \nhard\\\nbreak\n",
    "**bold [link *text*](http://a.b)** *a [b*](http://c.d)\n",
)
WORDS = (
    *("a", "b", "é", "1", " ", " ", "\n", "\n", "\n\n", "  ", "    "),
    *("*", "**", "***", "_", "__", "~~", "`", "``", "[x](http://e.com)", "[", "]", "(", ")"),
    *("\\", "<", "&amp;", "- ", "* ", "+ ", "1. ", "2) ", "> ", "# ", "## ", "!", "-"),
    *("```\n", "```py\n", "~~~\n", "---\n", "===\n", "\n\n| a | b |\n|---|:-:|\n| c | d |\n\n"),
)


def test_markdown_is_what_the_terminal_has(modules: Path) -> None:
    parser = MarkdownIt("commonmark", {"html": False}).disable("image")
    parser.enable(["strikethrough", "table"])
    chance = random.Random(5)
    made = ["".join(chance.choices(WORDS, k=chance.randint(1, 14))) for _ in range(1500)]
    texts = [*(case for case in CASES if "javascript" not in case), *made]
    done = node(modules, "render.mjs", text=json.dumps(texts))
    assert done.returncode == 0, done.stderr
    other = {}
    for text, mine in zip(texts, json.loads(done.stdout), strict=True):
        wanted = plain(parser.render(text))
        if plain(mine) != wanted:
            other[text] = (plain(mine), wanted)
    assert other == {}
