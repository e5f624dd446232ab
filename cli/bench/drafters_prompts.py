"""Prompts of `specrun bench drafters` and `replay`, and the datastores of their `rest`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from specrun.bindings.errors import OptionError
from specrun.cli.bench.drafters_options import DrafterChoice, PromptChoice
from specrun.cli.options.prompt import read_prompt_file
from specrun.runtime.language import Expression, parse_expression

if TYPE_CHECKING:
    from specrun.bench.drafters.corpus import DocumentationKind
    from specrun.bench.drafters.prompts import Conversation, Prompt, Workload
    from specrun.bindings.contexts.context_options import RopeScaling

LONGEST_MESSAGES = 256
"""Tokens by which the last messages of a workload may exceed the context that was asked for."""

_ROOM_FOR_ANSWERS = 128


def chosen_prompts(
    source: PromptChoice, target: Path, rope: RopeScaling, *, demo: bool
) -> tuple[tuple[Prompt, ...], str]:
    """Return the prompts and what they are; without any choice, the demo's questions.

    `rope` says whether positions are stretched, so that a workload may be longer than the target
    was trained for.
    """
    from specrun.bench.drafters.prompts import read_prompts

    prompts: list[Prompt] = [*source.prompt]
    if source.file is not None:
        prompts.append(read_prompt_file(source.file))
    if source.prompts is not None:
        prompts += read_prompts(source.prompts)
    if prompts and (source.workload or source.context):
        raise click.UsageError(
            "--workload and --context make their own prompts: leave out -p, -f and --prompts"
        )
    if prompts:
        return tuple(prompts), ""
    if not demo and source.workload is None:
        raise click.UsageError(
            "no prompt is given: use -p TEXT, -f FILE, --prompts FILE or --workload"
        )
    if source.workload is None and not source.context:
        from specrun.bench.drafters.prompts import demo_prompts

        return demo_prompts(source.questions), ""
    return _workload(source, target, rope)


def with_documentation(
    chosen: DrafterChoice,
    target: Path,
    kind: DocumentationKind,
    stack: ExitStack,
    say: Callable[[str], None],
) -> tuple[DrafterChoice, str]:
    """Return the drafters, each `rest` without a store with ours, and what that store holds."""
    if not any(_lacks_store(parse_expression(text)) for text in chosen.drafter):
        return chosen, ""
    from specrun.bench.drafters.comparison import with_files
    from specrun.bench.drafters.corpus import documentation_store, store_description

    store = stack.enter_context(documentation_store(target, kind, progress=say))
    drafters = tuple(with_files(text, {"rest": store}) for text in chosen.drafter)
    return dataclasses.replace(chosen, drafter=drafters), store_description(kind)


def _lacks_store(expression: Expression) -> bool:
    if expression.atom == "rest":
        return not expression.arguments
    return any(map(_lacks_store, expression.arguments))


def _workload(
    source: PromptChoice, target: Path, rope: RopeScaling
) -> tuple[tuple[Prompt, ...], str]:
    from specrun.bench.drafters.prompts import as_text, demo_workload
    from specrun.bindings.models.model import Model

    workload = cast("Workload", source.workload or "questions")
    with Model(target, vocab_only=True) as model:
        # llama.cpp reports no context length where only the vocabulary was loaded.
        trained = model.header.metadata.get(f"{model.architecture}.context_length", 0)
        trained = trained if isinstance(trained, int) else 0
        most = trained - _ROOM_FOR_ANSWERS
        if source.context > most and not rope.stretches:
            raise OptionError(
                f"a context of {source.context:,} tokens does not fit: the target was trained for "
                f"{trained:,}, which leaves {most:,} beside the answer. For longer ones stretch "
                "its positions (--rope-scaling yarn --rope-scale 2), or take another target"
            )

        def count_tokens(conversation: Conversation) -> int:
            tokens = model.vocabulary.tokenize(as_text(conversation), add_special=False)
            # Two control tokens around every message, as most templates have.
            return len(tokens) + 2 * len(conversation)

        prompts = demo_workload(workload, source.questions, source.context, count_tokens)
    about = f"workload {workload}"
    if source.context > most:
        about += (
            f", beyond the {trained:,} tokens of context that the target was trained for ({rope})"
        )
    return prompts, about
