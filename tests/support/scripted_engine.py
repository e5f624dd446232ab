"""An engine that says what a script says, token by token, and keeps what it was asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.chat import ChatTemplate
from specrun.runtime.engine import GenerationStream
from specrun.runtime.engine.answer import Answer, Request
from specrun.runtime.engine.choices import AnswerOptions
from specrun.runtime.engine.core import EngineStatistics
from specrun.runtime.engine.schedule import Load
from specrun.runtime.laws import SamplingParams
from specrun.runtime.round import FinishReason, GenerationResult, SpecStats, TokenEvent
from specrun.runtime.round.results import Usage
from specrun.runtime.round.text import TextAssembler

STATS = SpecStats(
    drafter="none",
    rule="exact",
    exact=True,
    rounds=1,
    drafted=4,
    accepted=3,
    acceptance_rate=0.75,
    mean_accepted_length=2.0,
    acceptance_by_position=(),
    tokens_per_second=1.0,
    prompt_tokens_per_second=1.0,
    time_to_first_token_s=0.0,
    target_s=0.0,
    drafter_s=0.0,
    overhead_s=0.0,
    wall_s=0.0,
)


@dataclass
class ScriptedEngine:
    """Answers each request with the next text of `script`, or its last one again.

    Texts of control tokens in a script become those tokens. `max_tokens` cuts an answer; `fails`
    ends it behind its first round.
    """

    vocabulary: Vocabulary
    template: str
    script: Sequence[str] = ("Hello.",)
    round_size: int = 3
    asked: list[SimpleNamespace] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    n_ctx: int = 4096
    fails: Exception | None = None

    def __post_init__(self) -> None:
        self.chat_template = ChatTemplate(self.template, bos="<s>", eos="</s>")
        self.tool_template = self.chat_template
        self.drafter = "none"
        self.model = SimpleNamespace(n_ctx_train=1024, n_params=1, path="scripted")
        self.options = SimpleNamespace(chat_template=self.template)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(2, 0, 0, self.n_ctx, 0, Load())

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, **options: Any
    ) -> GenerationStream:
        text = self.script[min(len(self.asked), len(self.script) - 1)]
        self.asked.append(SimpleNamespace(prompt=list(prompt), params=params, **options))
        request = Request(list(prompt), params, params.seed or 0, AnswerOptions())
        answer = Answer(request, self.vocabulary)
        stream = GenerationStream(answer)
        most = options.get("max_tokens")
        tokens = self.vocabulary.tokenize(text, add_special=False, parse_special=True)
        finish: FinishReason = "stop"
        if most is not None and most < len(tokens):
            tokens, finish = tokens[:most], "length"
        work = (answer, list(prompt), tokens, params, finish)
        threading.Thread(target=self._say, args=work, daemon=True).start()
        return stream

    def _say(
        self,
        line: Answer,
        prompt: list[int],
        tokens: list[int],
        params: SamplingParams,
        finish: FinishReason,
    ) -> None:
        line.n_cached = 2
        assembler, said, text = TextAssembler(params.stop), [], ""
        for token in tokens:
            piece = assembler.push(self.vocabulary.piece(token))
            said.append(TokenEvent(piece, token, "target", len(said), None))
            text += piece
            if assembler.stopped_by is not None:
                break
        text += assembler.finish()
        n_said = 0
        for start in range(0, len(said), self.round_size):
            if line.is_unwanted:
                finish = "cancelled"
                self.cancelled.set()
                break
            events = said[start : start + self.round_size]
            line.put(events)
            n_said += len(events)
            if self.fails is not None:
                line.end(self.fails)
                return
            while line.has_tokens and not line.is_unwanted:  # a reader as fast as the model
                time.sleep(0.0002)
        if finish == "cancelled":
            text = "".join(event.text for event in said[:n_said])
        usage = Usage(len(prompt), n_said, line.n_cached)
        ids = [event.token_id for event in said[:n_said]]
        line.end(GenerationResult(text, ids, finish, usage, replace(STATS), params.seed or 0))
