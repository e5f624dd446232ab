"""The Python interface: open a target with a drafter, generate, stream and chat."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from specrun.bindings.context import Context, ContextOptions
from specrun.bindings.errors import ClosedError, OptionError, TemplateError
from specrun.bindings.model import Model
from specrun.bindings.rope_scaling import AS_TRAINED, RopeScaling
from specrun.bindings.vocabulary import Vocabulary
from specrun.runtime.acceptance.build import build_rule
from specrun.runtime.demo import demo_drafters, demo_target
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.build_mtp import reads_own_blocks
from specrun.runtime.drafters.build_retrieval import with_reference
from specrun.runtime.drafters.drafter import DrafterWeights, close_all
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.expression import parse_expression
from specrun.runtime.planning.offload import LayerCount, resolve_gpu_layers
from specrun.runtime.results import GenerationResult
from specrun.runtime.sampling import SamplingParams, unknown_option
from specrun.runtime.session import GenerationStream, Session
from specrun.runtime.target import TargetModel, target_context_options

if TYPE_CHECKING:  # jinja2 is only worth its import time when there is something to render
    from specrun.runtime.chat_template import ChatTemplate, Message

__all__ = ["DEFAULT_N_CTX", "Runtime", "RuntimeOptions"]

DEFAULT_N_CTX = 4096


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """How models are loaded and evaluated.

    `n_ctx` 0 takes the length the target was trained with; larger values than that are cut to it, unless `rope`
    stretches positions, which is then asked of the draft model too.
    `n_gpu_layers` is a count, "all" or "auto" (as many as fit). `n_threads` 0 is one per core. `seed` None
    picks one at random for every answer. `accept` names the acceptance rule:
    exact ones, or "typical(eps=0.09, delta=0.3)", which is not. `reference` is a text file that
    prompt lookup reads too: short for `prompt-lookup(reference=FILE)` wherever the drafter has a prompt lookup.
    """

    n_ctx: int = DEFAULT_N_CTX
    n_batch: int = 512
    n_ubatch: int = 512
    n_gpu_layers: LayerCount = "auto"
    n_gpu_layers_draft: LayerCount = "auto"
    n_threads: int = 0
    n_threads_batch: int = 0
    flash_attention: Literal["auto", "on", "off"] = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    rope: RopeScaling = AS_TRAINED
    use_mmap: bool = True
    use_mlock: bool = False
    accept: str = "exact"
    chat_template: str | None = None
    seed: int | None = 0
    reference: str | os.PathLike[str] | None = None


class Runtime:
    """A target, a drafter and their cache, ready to answer. Not for use from several threads at once.

    `drafter` is an expression of the drafter language (`"none"`, `"prompt-lookup"`,
    `"draft(small.gguf, n=5)"`, ...). Further options are those of `RuntimeOptions`; an unknown one raises
    `OptionError` naming the nearest. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        drafter: str | None = "none",
        **options: Any,  # noqa: ANN401 - the fields of RuntimeOptions
    ) -> None:
        self._open(Path(target), drafter or "none", _parse_options(options), {})

    @classmethod
    def demo(cls, drafter: str = "draft", **options: Any) -> Runtime:  # noqa: ANN401 - see __init__
        """Open the embedded family; paths may be left out of `drafter`, as in "draft(n=3)"."""
        runtime = cls.__new__(cls)
        runtime._open(demo_target(), drafter, _parse_options(options), demo_drafters())
        return runtime

    def _open(self, target: Path, drafter: str, options: RuntimeOptions, files: dict[str, Path]) -> None:
        self._session: Session | None = None
        self.options = options
        rule = build_rule(options.accept)
        if options.reference is not None:
            drafter = with_reference(drafter, Path(options.reference))
        self.model = Model(
            target,
            n_gpu_layers=resolve_gpu_layers(options.n_gpu_layers, target),
            use_mmap=options.use_mmap,
            use_mlock=options.use_mlock,
            load_nextn=reads_own_blocks(parse_expression(drafter)),
        )
        with contextlib.ExitStack() as opened:  # closed again if anything below fails
            opened.callback(self.model.close)
            context_options = _context_options(options, self.model)
            environment = DraftEnvironment(
                target=self.model,
                context=context_options,
                n_gpu_layers=options.n_gpu_layers_draft,
                use_mmap=options.use_mmap,
                default_files=files,
            )
            self._weights: DrafterWeights = build_drafter(drafter, environment)
            opened.callback(self._weights.close)
            started = self._weights.start()
            opened.callback(started.close)
            context = Context(self.model, target_context_options(context_options, started))
            opened.pop_all()
        self._template: ChatTemplate | None = None
        self._session = Session(TargetModel(context), started, rule, self.model.vocabulary)

    # -- answering ---------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
    ) -> GenerationStream:
        """Return a stream of token events that continue `prompt`, a text or token ids.

        The text of a prompt is never read as control tokens. `max_tokens` None goes on until the model
        ends or the context is full.
        """
        params = params or SamplingParams()
        tokens = self.vocabulary.tokenize(prompt) if isinstance(prompt, str) else self._checked(prompt)
        return self.session.stream(tokens, params, seed=self._seed(params), max_tokens=max_tokens)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
    ) -> GenerationResult:
        """Return the finished continuation of `prompt`."""
        return self.stream(prompt, params, max_tokens=max_tokens).drain()

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
    ) -> GenerationStream:
        """Return a stream of token events that answer a conversation of {"role", "content"} messages."""
        return self.stream(self.chat_prompt(messages), params, max_tokens=max_tokens)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
    ) -> GenerationResult:
        """Return the finished answer to a conversation; what it shares with the last one is not evaluated again."""
        return self.stream_chat(messages, params, max_tokens=max_tokens).drain()

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, rendered by the model's chat template."""
        from specrun.runtime.chat_template import chat_tokens

        return chat_tokens(self.chat_template, self.vocabulary, messages)

    # -- what is open ------------------------------------------------------------------------------------

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
            from specrun.runtime.chat_template import ChatTemplate

            source = self.options.chat_template or self.model.chat_template
            if source is None:
                raise TemplateError(
                    f"{self.model.path} has no chat template: give one (--chat-template-file), or generate from text"
                )
            words = self.vocabulary
            bos = words.text(words.bos) if words.bos is not None else ""
            eos = words.text(words.eos) if words.eos is not None else ""
            self._template = ChatTemplate(source, bos=bos, eos=eos)
        return self._template

    def close(self) -> None:
        """Free all native memory, the conversation first; calling it again does nothing."""
        session, self._session = self._session, None
        if session is not None:
            close_all((session, self._weights, self.model))

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        size = self.vocabulary.size
        for token in prompt:
            if not 0 <= token < size:
                raise OptionError(f"prompt token {token} is outside the vocabulary of {size} words")
        return list(prompt)

    def _seed(self, params: SamplingParams) -> int:
        seed = params.seed if params.seed is not None else self.options.seed
        return secrets.randbits(32) if seed is None else seed


def _parse_options(values: dict[str, Any]) -> RuntimeOptions:
    known = [one.name for one in dataclasses.fields(RuntimeOptions)]
    for name in values:
        if name not in known:
            raise unknown_option(name, known, "Runtime")
    if not isinstance(values.get("rope", AS_TRAINED), RopeScaling):
        raise OptionError(f"rope is {values['rope']!r}: give a RopeScaling, such as RopeScaling('yarn', scale=2)")
    return RuntimeOptions(**values)


def _context_options(options: RuntimeOptions, model: Model) -> ContextOptions:
    if options.n_ctx < 0:
        raise OptionError(f"n_ctx is {options.n_ctx}: give 0 (the model's own) or a positive number")
    return ContextOptions(
        n_ctx=options.rope.context_size(options.n_ctx, model.n_ctx_train, model.rope_factor),
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        n_threads=options.n_threads,
        n_threads_batch=options.n_threads_batch,
        flash_attention=options.flash_attention,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        rope=options.rope,
    )
