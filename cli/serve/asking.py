"""A server of this process with its own program as a client, over a usual connection."""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from specrun.cli.serve.app import create_app
from specrun.cli.serve.server import serving_here
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.round import GenerationResult

if TYPE_CHECKING:
    from specrun.bench.prove.tools import Post, Reply
    from specrun.cli.serve.service import AnswerService, ServedAnswer
    from specrun.runtime.engine import Engine


@contextmanager
def asking(engine: Engine) -> Iterator[Post]:
    """Serve an engine on a free port until the block ends; yield a client of it.

    Nobody else can: the key is random.
    """
    from specrun.bench.prove.tools import Reply

    key = secrets.token_hex()
    settings = ServeSettings(model="model", api_keys=(key,), drain_seconds=0.0)
    app = create_app(engine, settings)
    ((_, service),) = app.state.models.loaded
    ended = _EndedAnswers(service)

    def post(path: str, body: dict[str, Any]) -> Reply:
        with closing(http.client.HTTPConnection(address)) as connection:
            head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), head)
            response = connection.getresponse()
            content, status = response.read(), response.status
        answer = ended.take(content)
        if answer is None:
            return Reply(status, content)
        (result,) = answer.results.values()
        (prompt,), stats = answer.prompts.tokens, result.stats
        is_cut = result.finish_reason == "cancelled"
        drafts = (stats.drafted, stats.accepted)
        return Reply(status, content, prompt, result.token_ids, is_cut, *drafts)

    with serving_here(app, settings) as url:
        address = url.removeprefix("http://")
        yield post


class _EndedAnswers:
    """The answers of a service that have ended, until they are taken."""

    def __init__(self, service: AnswerService) -> None:
        self._service = service
        self._kept: dict[str, ServedAnswer] = {}
        service.observers.append(self._note)

    def _note(self, result: GenerationResult) -> None:
        for answer in self._service.answers:
            if any(each is result for each in answer.results.values()):
                self._kept[answer.id] = answer

    def take(self, content: bytes) -> ServedAnswer | None:
        """Return the answer whose id is in the bytes of a reply, and keep it no longer."""
        found = next((each for each in self._kept if each.encode() in content), None)
        return None if found is None else self._kept.pop(found)
