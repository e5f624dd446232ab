"""The Python interface: open a target with a drafter, generate, stream and chat."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.bindings.errors import ClosedError, TemplateError
from specrun.bindings.machine.placement import placing
from specrun.bindings.machine.workers import require_workers
from specrun.bindings.models.trial import trusting_files
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.demo import demo_drafters, demo_target
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.engine.opening import (
    RuntimeOptions,
    draft_file_of,
    opening,
    parse_options,
    prompt_tokens,
)
from specrun.runtime.engine.session import GenerationStream, Session
from specrun.runtime.laws.sampling import SamplingParams, random_if_unset
from specrun.runtime.models.names import locate_model
from specrun.runtime.online import open_rejections
from specrun.runtime.round.backend_laws import is_wanted
from specrun.runtime.round.drafter import Drafter, Owned
from specrun.runtime.round.results import GenerationResult

if TYPE_CHECKING:  # jinja2 is only worth its import time when there is something to render
    from specrun.runtime.chat.template import ChatTemplate, Message


class Runtime:
    """A target, a drafter and their cache, ready to answer. Not for several threads at once.

    `target` is a path, an unambiguous name of a model that the hub, llama.cpp, ollama or LM Studio
    keep on this disk, or `hf:OWNER/REPO:QUANT`, which is fetched from the hub. `drafter` is an
    expression of the drafter language (`"none"`, `"prompt-lookup"`, `"draft(small.gguf, n=5)"`,
    ...). Further options are those of `RuntimeOptions`, of its `context` and its `placement`, such
    as `n_ctx=8192` or `devices=["CUDA0"]`; an unknown one raises `OptionError` naming the nearest.
    Close it, or use it as a context manager. `fitted` is the memory plan that layers and context
    were chosen by, None where nothing was to be chosen.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        drafter: str | None = "none",
        **options: Any,  # noqa: ANN401 - the fields of RuntimeOptions and its context
    ) -> None:
        parsed = parse_options(options)
        self._open(locate_model(target), drafter or "none", parsed, {})

    @classmethod
    def demo(cls, drafter: str = "draft", **options: Any) -> Runtime:  # noqa: ANN401 - see __init__
        """Open the embedded family; paths may be left out of `drafter`, as in "draft(n=3)"."""
        runtime = cls.__new__(cls)
        runtime._open(demo_target(), drafter, parse_options(options), demo_drafters())
        return runtime

    def _open(
        self, target: Path, drafter: str, options: RuntimeOptions, files: dict[str, Path]
    ) -> None:
        self._session: Session | None = None
        self.options = options
        with opening(target, drafter, options, files) as opened:
            self.model, self.fitted = opened.model, opened.fitted
            self._weights, self._environment = opened.weights, opened.environment
            self.rejections = open_rejections(options.learn, opened.model)
            owned: list[Owned] = [opened.weights, opened.model]
            if self.rejections is not None:
                owned.append(self.rejections)
            self._session = Session.open(
                opened.model,
                opened.weights.start(),
                opened.environment.context,
                opened.rule,
                owned,
                options.shape,
                opened.environment.wider,
            )
            self._session.backend_sampling = is_wanted(options.backend_sampling, opened.model)
            self._session.memory_note = opened.memory_note
            if self.rejections is not None:
                self._session.rejections = self.rejections.buffer.notes()
        self._template: ChatTemplate | None = None

    # -- answering ---------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        index: int = 0,
        logprobs: bool = True,
        top_logprobs: int = 0,
    ) -> GenerationStream:
        """Return a stream of token events that continue `prompt`, a text or token ids.

        The text of a prompt is never read as control tokens. `max_tokens` None goes on until the
        model ends or the context is full. The random draws depend on seed, prompt and `index`: with
        one seed, indices 0, 1, ... give independent answers to one prompt. Without `logprobs`
        events have no log-probability, which a GPU answers more quickly (`backend_sampling`); with
        `top_logprobs` they also tell those of so many most likely tokens.
        """
        params = params or SamplingParams()
        tokens = prompt_tokens(self.vocabulary, prompt)
        require_workers(self.options.placement.rpc)
        seed = random_if_unset(self.options.seed if params.seed is None else params.seed)
        return self.session.stream(
            tokens,
            params,
            seed=seed,
            index=index,
            max_tokens=max_tokens,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        index: int = 0,
    ) -> GenerationResult:
        """Return the finished continuation of `prompt`."""
        stream = self.stream(prompt, params, max_tokens=max_tokens, index=index, logprobs=False)
        return stream.drain()

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        index: int = 0,
        logprobs: bool = True,
        top_logprobs: int = 0,
    ) -> GenerationStream:
        """Return a stream of token events that answer {"role", "content"} messages."""
        tokens = self.chat_prompt(messages)
        return self.stream(
            tokens,
            params,
            max_tokens=max_tokens,
            index=index,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        index: int = 0,
    ) -> GenerationResult:
        """Return the finished answer; what it shares with the last one is not evaluated again."""
        tokens = self.chat_prompt(messages)
        return self.generate(tokens, params, max_tokens=max_tokens, index=index)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, rendered by the model's chat template."""
        from specrun.runtime.chat.template import chat_tokens

        return chat_tokens(self.chat_template, self.vocabulary, messages)

    # -- keeping a prompt's cache ------------------------------------------------------------------

    def save_session(self, path: str | os.PathLike[str]) -> int:
        """Keep the cache of the conversation so far in a file; return how many tokens it holds.

        `load_session` of another runtime with the same model and settings takes it up: what its
        prompts share with the conversation is then not evaluated again. Errors: `session_file`.
        """
        from specrun.runtime.engine.session_file import save_session

        return save_session(self.session, Path(path))

    def load_session(self, path: str | os.PathLike[str]) -> int:
        """Take up a kept cache; return how many tokens it holds, 0 where the drafter forbids it.

        That is one which reads the target's states: it would have to be shown those of the prompt.
        """
        from specrun.runtime.engine.session_file import load_session

        return load_session(self.session, Path(path))

    def require_idle(self) -> None:
        """Raise `BusyError` while an answer is being streamed."""
        self.session.require_idle()

    def swap_drafter(self, drafter: str, files: Mapping[str, Path] | None = None) -> None:
        """Draft with another expression from the next answer on, with caches of its own.

        `files` are taken where it names none, by the names of methods, in place of the demo's own.

        The target, its cache and the conversation stay, and so does the text: drafts only make it
        quicker. The new drafter is opened whole before the old one is closed. Raises `BusyError`
        while an answer is being streamed, `OptionError` for a drafter that needs a larger context
        or more states of the target than the one that the runtime was opened with, and as opening
        one does; the old drafter then goes on.
        """
        session = self.session
        session.require_idle()  # before anything is loaded
        environment = self._environment
        if files is not None:
            environment = dataclasses.replace(environment, default_files=files)
        trust = trusting_files() if self.options.trust else nullcontext()
        with ExitStack() as opened, trust, placing(self.options.placement):
            weights = build_drafter(drafter, environment)
            opened.callback(weights.close)
            new = weights.start()
            opened.callback(new.close)
            old = self._weights
            try:
                session.swap_drafter(new, weights, old)
            finally:
                if session.drafter is new:  # also where closing the old one failed
                    self._weights, self._environment = weights, environment
                    opened.pop_all()

    def start_drafter(self) -> Drafter:
        """Return another drafter of the same expression, which has learnt nothing yet.

        It shares all weights. `session.draft_with` takes it for the next answer. The runtime closes
        the one that is in use; close all others before.
        """
        self.session.require_open()
        return self._weights.start()

    # -- what is open ------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session; raises `ClosedError` after `close()`."""
        if self._session is None:
            raise ClosedError("the runtime is closed")
        return self._session

    @property
    def vocabulary(self) -> Vocabulary:
        """The target's vocabulary."""
        return self.session.vocabulary

    @property
    def n_ctx(self) -> int:
        """The context size in tokens (llama.cpp rounds it up to a multiple of 256)."""
        return self.session.target.context.n_ctx

    @property
    def memory_line(self) -> str:
        """What was chosen of layers and context for the memory that is here, and why; "" if nothing
        was.
        """
        return "" if self.fitted is None else self.fitted.line

    @property
    def accept(self) -> str:
        """The acceptance rule that was asked for."""
        return self.options.accept

    @property
    def drafter(self) -> str:
        """The expression of the drafter in use."""
        return self.session.drafter.name

    @property
    def environment(self) -> DraftEnvironment:
        """What the drafter was built with: other drafters for the same target are, too."""
        return self._environment

    @property
    def draft_file(self) -> Path:
        """The file of the draft model; raises `OptionError` where something else drafts."""
        return draft_file_of(self.drafter, self._environment)

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template; raises `TemplateError` if the model has none and none was given."""
        if self._template is None:
            from specrun.runtime.chat.template import template_of

            source = self.options.chat_template or self.model.chat_template
            if source is None:
                advice = "give one (--chat-template-file), or generate from text"
                raise TemplateError(f"{self.model.path} has no chat template: {advice}")
            self._template = template_of(source, self.vocabulary)
        return self._template

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._session is None

    def close(self) -> None:
        """Free the native memory of drafter, context, weights and target; again does nothing.

        In another thread or a signal's handler, while an answer is being made: that ends with
        `ClosedError`, and what it uses is freed then.
        """
        if self._session is not None:
            try:
                self._session.close()
            finally:
                self._session = None

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
