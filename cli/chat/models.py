"""The models of a chat: opened by its options, and switched while the conversation stays."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path

from specrun.bindings.errors import ClosedError
from specrun.cli.chat.learning import ChatLearning, open_learning
from specrun.cli.options.learning import NO_LEARNING, LearnSettings
from specrun.cli.options.model import DraftSettings, LoadSettings, TemplateSettings
from specrun.cli.options.model_files import located
from specrun.cli.options.opening import check_sampling, open_runtime
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.language import METHODS, parse_expression


class ChatModels:
    """The runtime of a chat; `switch_*` replace it, or leave it as it was and raise.

    Only one runtime is open at a time: two would need the memory of both. What comes after a switch
    is evaluated again, as the cache belongs to model and drafter.
    """

    def __init__(
        self,
        load: LoadSettings,
        draft: DraftSettings,
        template: TemplateSettings,
        terminal: Terminal,
        lora: tuple[str, ...] = (),
        learn: LearnSettings = NO_LEARNING,
    ) -> None:
        self._load, self._draft = load, draft
        self._template, self._terminal, self._lora = template, terminal, lora
        self._learn = learn
        self.learning: ChatLearning | None = None
        self._opened = ExitStack()
        self._runtime: Runtime | None = None

    @property
    def runtime(self) -> Runtime:
        """What is open; raises ClosedError where a switch failed, and so did the way back."""
        if self._runtime is None:
            raise ClosedError("no model is open: /model NAME opens one")
        return self._runtime

    def open(self, params: SamplingParams) -> Runtime:
        """Open what the options name; `params` choose among tuned plans. Close it in the end."""
        with ExitStack() as opened:
            closed_last = opened.enter_context(ExitStack())
            runtime = opened.enter_context(
                open_runtime(
                    self._load,
                    self._draft,
                    self._template,
                    params,
                    self._terminal,
                    lora=self._lora,
                    learn=self._learn.place,
                )
            )
            check_sampling(params, runtime)
            _ = runtime.chat_template  # a model without one is refused before the first message
            self.learning = open_learning(closed_last, runtime, self._learn, self._terminal)
            self._opened, self._runtime = opened.pop_all(), runtime
        return runtime

    def close(self) -> None:
        """Close what is open; again does nothing."""
        self._runtime = self.learning = None
        self._opened.close()

    def switch_model(self, name: str, params: SamplingParams) -> None:
        """Open another target, with the drafter that was asked for before."""
        load = dataclasses.replace(self._load, model=located(name), demo=False)
        self._switch(load, self._draft, params, lora=())

    def switch_drafter(self, text: str, params: SamplingParams) -> None:
        """Draft by an expression, or with a file or a model of a store, as -md does."""
        expression = parse_expression(text)
        is_method = expression.is_call or expression.atom in METHODS
        file = None if is_method or not _is_model(expression.atom) else located(expression.atom)
        drafter = None if file else text
        draft = dataclasses.replace(
            self._draft,
            drafter=drafter,
            model_draft=file,
            spec_type=None,
            spec_draft_n_max=None,
            spec_draft_p_min=None,
        )
        self._switch(self._load, draft, params, lora=self._lora)

    def switch_rule(self, rule: str, params: SamplingParams) -> None:
        """Accept by another rule."""
        draft = dataclasses.replace(self._draft, accept=rule)
        self._switch(self._load, draft, params, lora=self._lora)

    def _switch(
        self,
        load: LoadSettings,
        draft: DraftSettings,
        params: SamplingParams,
        *,
        lora: tuple[str, ...],
    ) -> None:
        before = self._load, self._draft, self._lora
        self.close()
        self._load, self._draft, self._lora = load, draft, lora
        try:
            self.open(params)
        except BaseException:
            self._load, self._draft, self._lora = before
            self.open(params)
            raise


def _is_model(name: str) -> bool:
    """Whether a name without arguments is a model's rather than a misspelt drafter."""
    if name.startswith("hf:") or "/" in name or name.endswith(".gguf") or Path(name).exists():
        return True
    from specrun.runtime.models import matching, stored_models

    return bool(matching(name, stored_models().models))
