"""A server that replays answers with made-up traces to the page, and notes what it is asked."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from specrun.cli.serve.page import page_routes
from specrun.runtime.engine import RoundTrace
from specrun.runtime.engine.trace import (
    EvaluationCost,
    NamedToken,
    RoundSeconds,
    TracedLaws,
    TracedNode,
)

ROOT = -1


def round_of(
    number: int,
    drafted: Sequence[tuple[str, int]],
    path: Sequence[int],
    own: str | None,
    *,
    recovered: bool = False,
    points: bool = False,
    drafter: str = "draft(n=3)",
) -> RoundTrace:
    """A round: `drafted` are tokens and their parents, `own` is the target's own token.

    The target's probabilities are 0.5, 0.25, ... down the tree, the drafter's 0.75 everywhere,
    unless drafts are `points`. Tokens are numbered by their texts' order.
    """
    draft = None if points else 0.75
    nodes, depths = [], {ROOT: 0}
    for place, (text, parent) in enumerate(drafted):
        depth = depths[place] = depths[parent] + 1
        nodes.append(TracedNode(100 + place, text, parent, depth, True, 0.5**depth, 0.4, draft))
    end = path[-1] if path else ROOT
    laws = []
    for place in sorted({end, *(parent for _, parent in drafted)}):
        children = [
            NamedToken(100 + child, text, 0.5 ** depths[child])
            for child, (text, parent) in enumerate(drafted)
            if parent == place
        ]
        said = [NamedToken(each.token, each.text, 0.75) for each in children]
        mine = [NamedToken(99, own, 0.3)] if own is not None and place == end else []
        target = sorted([*children, *mine], key=lambda each: -each.probability)
        laws.append(TracedLaws(place, (*target,), (*target,), () if points else (*said,)))
    return RoundTrace(
        number=number,
        position=10 + number,
        drafter=drafter,
        rule="exact",
        greedy=False,
        nodes=(*nodes,),
        laws=(*laws,),
        path=(*path,),
        next_token=None if own is None else NamedToken(99, own, 0.3),
        recovered=recovered,
        seconds=RoundSeconds(0.010, 0.004, 0.001, 0.0),
        evaluation=EvaluationCost(1 + len(nodes), 1 + len(nodes), 1, 0.015, 0.010),
        tokens=3 * (number + 1),
        tokens_per_round=2.5,
        acceptance_by_depth=(0.75, 0.5, 0.25),
    )


def text_of(trace: RoundTrace) -> str:
    """The text of the tokens that a round kept."""
    own = trace.next_token
    return "".join(trace.nodes[node].text for node in trace.path) + (own.text if own else "")


STORY = (
    round_of(
        0, [("The", -1), (" old", 0), (" man", 1), (" sun", 1)], [0, 1], " lamp", recovered=True
    ),
    round_of(1, [(" was", -1), (" lit", 0), (" at", 1)], [0, 1, 2], " dusk"),
    round_of(2, [("!", -1), ("?", -1)], [], ".", recovered=True, points=True),
    round_of(3, [], [], " Always"),
)
"""Rounds whose text is "The old lamp was lit at dusk. Always"."""


@dataclass
class Replay:
    """What is answered, one list of rounds an answer (the last for all that follow), and asked.

    `hangs`: an answer does not end after its rounds. `error` ends answers. `refusal` is sent in
    place of answers with `status`, `key` asked for where it is not "". `thoughts` come first.
    """

    answers: list[Sequence[RoundTrace]] = field(default_factory=lambda: [STORY])
    hangs: bool = False
    error: str = ""
    thoughts: str = ""
    key: str = ""
    model: str = "replayed"
    drafters: Sequence[str] = ("draft(n=3)", "none", "prompt-lookup")
    rules: Sequence[str] = ("exact", "token")
    bodies: list[dict[str, Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                *page_routes(),
                Route("/props", self._props),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    def _refused(self, request: Request) -> Response | None:
        if not self.key or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "the API key is wrong"}}, 401)

    async def _props(self, request: Request) -> Response:
        speculative = {
            "drafter": self.drafters[0],
            "drafters": [*self.drafters],
            "accept": self.rules[0],
            "rules": [*self.rules],
        }
        told = {"model_alias": self.model, "speculative": speculative}
        return self._refused(request) or JSONResponse(told)

    async def _chat(self, request: Request) -> Response:
        refused = self._refused(request)
        if refused is not None:
            return refused
        self.bodies.append(json.loads(await request.body()))
        number = min(len(self.bodies), len(self.answers)) - 1
        events = self._events(self.answers[number])
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(self, rounds: Sequence[RoundTrace]) -> AsyncIterator[str]:
        try:
            if self.thoughts:
                thought = {"index": 0, "delta": {"reasoning_content": self.thoughts}}
                yield _event({"choices": [thought]})
            for trace in rounds:
                choice = {"index": 0, "delta": {"content": text_of(trace)}, "finish_reason": None}
                yield _event({"choices": [choice], "specrun": {"rounds": [trace.to_dict()]}})
            while self.hangs:
                await asyncio.sleep(0.02)
                yield ": nothing yet\n\n"
            if self.error:
                yield _event({"error": {"message": self.error}})
                return
            yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            summary = {"usage": {"completion_tokens": 12}, "specrun": {"rounds": len(rounds)}}
            yield _event({"choices": [], **summary})
            yield "data: [DONE]\n\n"
        finally:
            self.left.set()


def _event(payload: object) -> str:
    return f"data: {json.dumps(payload)}\n\n"


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Serve an application in a thread; gives its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", ws="none", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
