"""The Python interface: open a target with a drafter, generate, stream and chat."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.bindings.context_options import ContextOptions
from specrun.bindings.errors import ClosedError, OptionError, TemplateError
from specrun.bindings.model import Model
from specrun.bindings.placement import Placement, placing
from specrun.bindings.rope_scaling import RopeScaling
from specrun.bindings.trial import remember_written, trusting_files
from specrun.bindings.vocabulary import Vocabulary
from specrun.bindings.workers import require_workers
from specrun.runtime.acceptance import PairRule, Rule, SequentialCascade, build_rule
from specrun.runtime.backend_laws import BackendSampling, is_wanted
from specrun.runtime.demo import demo_drafters, demo_target
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.mtp import reads_own_blocks
from specrun.runtime.drafters.retrieval import with_reference
from specrun.runtime.fixed_shape import Shape
from specrun.runtime.language import parse_expression
from specrun.runtime.memory import Loading, fit_here, noting_plan, plan_in_use
from specrun.runtime.offload import LayerCount, resolve_gpu_layers
from specrun.runtime.results import GenerationResult
from specrun.runtime.sampling import SamplingParams, random_if_unset, unknown_option, whole_number
from specrun.runtime.session import GenerationStream, Session

if TYPE_CHECKING:  # jinja2 is only worth its import time when there is something to render
    from specrun.runtime.chat_template import ChatTemplate, Message

DEFAULT_N_CTX = 4096


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """How models are loaded and evaluated.

    `context` says how contexts are made, the target's and the draft model's; what drafting needs of
    them (rows, sequences, states) is added to it. Its `n_ctx` 0 takes as much of the length the
    target was trained with as there is memory for; larger values than that are cut to it, unless
    `rope` stretches positions, which is then asked of the draft model too. `placement` says on
    which devices models lie, of this machine and of others; without one, on every GPU of this
    machine. `n_gpu_layers` is a count, "all" or "auto" (as many as fit, with the context, the
    drafter and a margin: `Runtime.memory_line`). `seed` None or -1 picks one at random for every
    answer, which its result names. `accept` names the acceptance rule: exact ones, or
    "typical(eps=0.09, delta=0.3)", which is not. `reference` is a text file that prompt lookup
    reads too: short for `prompt-lookup(reference=FILE)` wherever the drafter has a prompt lookup.
    `trust` opens files that were not seen before without trying them in another process. `shape`
    "fixed", or a width in tokens, evaluates as many tokens whatever is drafted, so that a text is
    the same to the bit with any drafter of point masses of that width. `backend_sampling` "on", or
    "auto" where a GPU has the whole target, sends only the best logits of each row to the host, in
    answers without log- probabilities that keep a top k; no GPU has yet been tried.
    """

    context: ContextOptions = field(default_factory=lambda: ContextOptions(n_ctx=DEFAULT_N_CTX))
    placement: Placement = field(default_factory=Placement)
    n_gpu_layers: LayerCount = "auto"
    n_gpu_layers_draft: LayerCount = "auto"
    use_mmap: bool = True
    use_mlock: bool = False
    accept: str = "exact"
    chat_template: str | None = None
    seed: int | None = None
    reference: str | os.PathLike[str] | None = None
    trust: bool = False
    shape: Shape = "free"
    backend_sampling: BackendSampling = "off"


class Runtime:
    """A target, a drafter and their cache, ready to answer. Not for several threads at once.

    `drafter` is an expression of the drafter language (`"none"`, `"prompt-lookup"`,
    `"draft(small.gguf, n=5)"`, ...). Further options are those of `RuntimeOptions`, of its
    `context` and its `placement`, such as `n_ctx=8192` or `devices=["CUDA0"]`; an unknown one
    raises `OptionError` naming the nearest. Close it, or use it as a context manager. `fitted` is
    the memory plan that layers and context were chosen by, None where nothing was to be chosen.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        drafter: str | None = "none",
        **options: Any,  # noqa: ANN401 - the fields of RuntimeOptions and its context
    ) -> None:
        self._open(Path(target), drafter or "none", _parse_options(options), {})

    @classmethod
    def demo(cls, drafter: str = "draft", **options: Any) -> Runtime:  # noqa: ANN401 - see __init__
        """Open the embedded family; paths may be left out of `drafter`, as in "draft(n=3)"."""
        for path in (demo_target(), *demo_drafters().values()):
            if path.is_file():
                remember_written(path)
        runtime = cls.__new__(cls)
        runtime._open(demo_target(), drafter, _parse_options(options), demo_drafters())
        return runtime

    def _open(
        self, target: Path, drafter: str, options: RuntimeOptions, files: dict[str, Path]
    ) -> None:
        self._session: Session | None = None
        self.options = options
        rule = build_rule(options.accept)
        if options.reference is not None:
            drafter = with_reference(drafter, Path(options.reference))
        # Closes the last opened first, if anything fails.
        trust = trusting_files() if options.trust else nullcontext()
        with trust, placing(options.placement):
            loading = Loading(
                target,
                drafter,
                options.context,
                options.n_gpu_layers,
                options.n_gpu_layers_draft,
                files,
            )
            self.fitted = fit_here(loading)
            if self.fitted is not None:
                loading = self.fitted.applied_to(loading)
            with noting_plan(loading):
                self._load(loading, options, rule)
        self._template: ChatTemplate | None = None

    def _load(
        self, loading: Loading, options: RuntimeOptions, rule: Rule | SequentialCascade
    ) -> None:
        with ExitStack() as opened:
            self.model = Model(
                loading.target,
                n_gpu_layers=resolve_gpu_layers(loading.n_gpu_layers, loading.target),
                use_mmap=options.use_mmap,
                use_mlock=options.use_mlock,
                load_nextn=reads_own_blocks(parse_expression(loading.drafter)),
            )
            opened.callback(self.model.close)
            samples = is_wanted(options.backend_sampling, self.model)
            context = loading.context
            sized = dataclasses.replace(context, n_ctx=context.size_for(self.model))
            environment = DraftEnvironment(
                target=self.model,
                context=sized,
                n_gpu_layers=loading.n_gpu_layers_draft,
                use_mmap=options.use_mmap,
                default_files=loading.files,
                by_clock=rule.exact,
                keeps_rows=isinstance(rule, PairRule),
                shape=options.shape,
            )
            weights = build_drafter(loading.drafter, environment)
            opened.callback(weights.close)
            owned = (weights, self.model)
            self._session = Session.open(
                self.model, weights.start(), sized, rule, owned, options.shape, environment.wider
            )
            self._session.backend_sampling = samples
            self._session.memory_note = partial(_memory_note, loading, options.placement)
            opened.pop_all()  # the session's from here on

    # -- answering ---------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        index: int = 0,
        logprobs: bool = True,
    ) -> GenerationStream:
        """Return a stream of token events that continue `prompt`, a text or token ids.

        The text of a prompt is never read as control tokens. `max_tokens` None goes on until the
        model ends or the context is full. The random draws depend on seed, prompt and `index`: with
        one seed, indices 0, 1, ... give independent answers to one prompt. Without `logprobs`
        events have no log-probability, which a GPU answers more quickly (`backend_sampling`).
        """
        params = params or SamplingParams()
        tokens = self._tokens_of(prompt)
        require_workers(self.options.placement.rpc)
        seed = random_if_unset(self.options.seed if params.seed is None else params.seed)
        return self.session.stream(
            tokens, params, seed=seed, index=index, max_tokens=max_tokens, logprobs=logprobs
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
    ) -> GenerationStream:
        """Return a stream of token events that answer {"role", "content"} messages."""
        tokens = self.chat_prompt(messages)
        return self.stream(tokens, params, max_tokens=max_tokens, index=index, logprobs=logprobs)

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
        from specrun.runtime.chat_template import chat_tokens

        return chat_tokens(self.chat_template, self.vocabulary, messages)

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
    def chat_template(self) -> ChatTemplate:
        """The chat template; raises `TemplateError` if the model has none and none was given."""
        if self._template is None:
            from specrun.runtime.chat_template import template_of

            source = self.options.chat_template or self.model.chat_template
            if source is None:
                advice = "give one (--chat-template-file), or generate from text"
                raise TemplateError(f"{self.model.path} has no chat template: {advice}")
            self._template = template_of(source, self.vocabulary)
        return self._template

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

    def _tokens_of(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.vocabulary.tokenize(prompt)
        try:
            given = list(prompt)
        except TypeError:
            raise OptionError(f"the prompt is {prompt!r}: give a text or token ids") from None
        size, tokens = self.vocabulary.size, []
        for place, value in enumerate(given):
            token = whole_number(value)
            if token is None:
                advice = "a prompt is a text, or token ids, which are whole numbers"
                raise OptionError(f"prompt token {place} is {value!r}: {advice}")
            if not 0 <= token < size:
                there = f"the vocabulary of {size} tokens"
                raise OptionError(f"prompt token {place} is {token}, outside {there}")
            tokens.append(token)
        return tokens


def _memory_note(loading: Loading, placement: Placement) -> str:
    with placing(placement):
        return plan_in_use(loading)


def _parse_options(values: dict[str, Any]) -> RuntimeOptions:
    """Return the options; those of context and placement may be given one by one beside them."""
    own = [field.name for field in dataclasses.fields(RuntimeOptions)]
    of_context = ContextOptions.chosen_names()
    of_placement = [field.name for field in dataclasses.fields(Placement)]
    for name in values:
        if name not in own and name not in of_context and name not in of_placement:
            raise unknown_option(name, [*of_context, *of_placement, *own], "Runtime")
    for name, kind, example in (
        ("rope", RopeScaling, "RopeScaling('yarn', scale=2)"),
        ("context", ContextOptions, "ContextOptions(n_ctx=8192)"),
        ("placement", Placement, "Placement(devices=['CUDA0'])"),
    ):
        if name in values and not isinstance(values[name], kind):
            advice = f"give a {kind.__name__}, such as {example}"
            raise OptionError(f"{name} is {values[name]!r}: {advice}")
    options = RuntimeOptions(**{name: value for name, value in values.items() if name in own})
    random_if_unset(options.seed)  # raises for what is no seed, before a model is opened
    chosen = {name: value for name, value in values.items() if name in of_context}
    placed = {name: value for name, value in values.items() if name in of_placement}
    return dataclasses.replace(
        options,
        context=dataclasses.replace(options.context, **chosen),
        placement=dataclasses.replace(options.placement, **placed),
    )
