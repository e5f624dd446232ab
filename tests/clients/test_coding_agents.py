"""Agents that change files, from the npm and Python indexes: a fault is found and repaired.

Each reads a file by one tool and repairs it by another, and goes on with the session in a second
run. Nothing that was sent may be refused, and what an agent resends must be in the cache.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.client_desk import REPAIRED, Desk, cached_share, call, program

pytestmark = pytest.mark.clients
PROMPT, NEXT = "Fix add in calc.py", "Is that all?"
READS, REPAIRS, DONE, ALL = "I read it.\n", "Now I repair it.\n", "It adds now.", "Yes, all."


def check(desk: Desk, path: str, *, n_requests: int) -> None:
    """The file is repaired; all requests were answered, the later ones from the cache."""
    assert desk.file.read_text() == REPAIRED
    assert desk.server.failed == []
    asked = [one for one in desk.server.exchanges if path in one.path and "tools" in one.body]
    assert len(asked) == n_requests
    *within, resumed = [cached_share(one.reply) for one in asked[1:]]
    assert min(within) > 0.95
    assert resumed > 0.85  # a new run tells the state of the repository anew, in its system text


def test_codex_repairs_a_file_and_goes_on(desk: Desk) -> None:
    codex = program("npm", "node_modules", ".bin", "codex")
    patch = (
        "apply_patch <<'EOF'\n*** Begin Patch\n*** Update File: calc.py\n@@\n"
        "-    return a - b\n+    return a + b\n*** End Patch\nEOF"
    )
    turns = (
        READS + call("exec_command", cmd="cat calc.py"),
        REPAIRS + call("exec_command", cmd=patch),
    )
    with desk.scripted(*turns, DONE, ALL) as server:
        settings = desk.home / ".codex" / "config.toml"
        settings.parent.mkdir()
        settings.write_text(
            f'model = "local"\nmodel_provider = "specrun"\n[model_providers.specrun]\n'
            f'name = "specrun"\nbase_url = "{server.address}/v1"\nwire_api = "responses"\n'
        )
        options = "--json", "--dangerously-bypass-approvals-and-sandbox"
        first = desk.run(codex, "exec", *options, PROMPT)
        second = desk.run(codex, "exec", "resume", "--last", *options, NEXT)
    assert DONE in first
    assert ALL in second
    check(desk, "/v1/responses", n_requests=4)


def test_claude_code_repairs_a_file_and_goes_on(desk: Desk) -> None:
    claude = program("npm", "node_modules", ".bin", "claude")
    path = str(desk.file)
    edit = call("Edit", file_path=path, old_string="return a - b", new_string="return a + b")
    turns = READS + call("Read", file_path=path), REPAIRS + edit
    with desk.scripted(*turns, DONE, ALL, aside="A title") as server:
        options = "--model", "local", "--output-format", "json", "--permission-mode", "acceptEdits"
        environment = {
            "ANTHROPIC_BASE_URL": server.address,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        first = json.loads(desk.run(claude, "-p", PROMPT, *options, **environment))
        second = json.loads(desk.run(claude, "-p", NEXT, "--continue", *options, **environment))
    assert (first["result"], first["num_turns"], first["is_error"]) == (DONE, 3, False)
    assert second["result"] == ALL
    assert server.refused == []
    check(desk, "/v1/messages", n_requests=4)


def connect_opencode(desk: Desk) -> None:
    """Write the settings that name the server."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{desk.server.address}/v1"},
        "models": {"local": {}},
    }
    settings = {"provider": {"specrun": provider}, "autoupdate": False}
    (desk.folder / "opencode.json").write_text(json.dumps(settings))


def test_opencode_repairs_a_file_and_goes_on(desk: Desk) -> None:
    opencode = program("npm", "node_modules", ".bin", "opencode")
    path = str(desk.file)
    edit = call("edit", filePath=path, oldString="return a - b", newString="return a + b")
    turns = READS + call("read", filePath=path), REPAIRS + edit
    with desk.scripted(*turns, DONE, ALL, aside="A title") as server:
        connect_opencode(desk)
        options = "-m", "specrun/local", "--format", "json"
        first = desk.run(opencode, "run", *options, PROMPT)
        second = desk.run(opencode, "run", *options, "--continue", NEXT)
    assert DONE in first
    assert ALL in second
    check(desk, "/v1/chat/completions", n_requests=4)
    assert any("tools" not in body for body in server.sent("/v1/chat/completions"))  # the title


def test_opencode_ends_where_its_instructions_exceed_the_context(desk: Desk) -> None:
    """It would shorten the conversation and ask again for ever if it were told to."""
    opencode = program("npm", "node_modules", ".bin", "opencode")
    with desk.scripted(DONE, aside="A title", context=4096) as server:
        connect_opencode(desk)
        with pytest.raises(AssertionError, match="instructions and tools alone"):
            desk.run(opencode, "run", "-m", "specrun/local", "--format", "json", PROMPT)
    assert ["instructions_too_long" in one for one in server.failed] == [True]


def aider_options(desk: Desk) -> tuple[str, ...]:
    """The options that connect aider to the server, and keep it from asking others."""
    return (
        *("--model", "openai/local", "--openai-api-base", f"{desk.server.address}/v1"),
        *("--openai-api-key", "none", "--yes-always", "--no-check-update"),
        *("--analytics-disable", "--no-show-model-warnings"),
    )


def test_aider_repairs_a_file_and_commits_it(desk: Desk) -> None:
    aider = program("aider", "bin", "aider")
    block = "<<<<<<< SEARCH\n    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE"
    repair = f"{REPAIRS}\ncalc.py\n```python\n{block}\n```\n"
    short = "messages | length < 3"  # a request for a commit message
    with desk.scripted(repair, ALL, aside="fix: add adds", aside_if=short, before=5) as server:
        options = (*aider_options(desk), "--edit-format", "diff")
        said = desk.run(aider, *options, "--message", PROMPT, "calc.py")
    assert "Applied edit to calc.py" in said
    assert desk.file.read_text() == REPAIRED
    assert server.failed == []
    log = subprocess.run(["git", "log", "-1", "--format=%s"], cwd=desk.folder, capture_output=True)
    assert log.stdout.decode().strip() == "fix: add adds"


def test_aider_asks_a_published_model(desk: Desk, published: Path) -> None:
    aider = program("aider", "bin", "aider")
    with desk.served(published, "-c", 8192) as server:
        options = (*aider_options(desk), "--chat-mode", "ask")
        said = desk.run(aider, *options, "--message", "What does add do?", "calc.py")
    assert "received" in said
    assert server.failed == []
