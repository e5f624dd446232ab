"""`specrun why`: why drafting pays for a pair and a prompt, or does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from specrun.cli.accelerate.report import print_diagnosis
from specrun.cli.options.drafting import measured_drafters
from specrun.cli.options.group import Section, SectionedCommand, by_option, option_group
from specrun.cli.options.model import DraftSettings, LoadSettings, draft_options, load_options
from specrun.cli.options.opening import chosen_drafter
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.prompt import (
    measured_prompts,
    named_target,
    no_template_option,
    prompt_file_option,
    prompts_option,
)
from specrun.cli.options.quiet_machine import measures_time
from specrun.cli.options.sampling import AnswerSettings, answer_options
from specrun.cli.terminal.screen import progress_bar
from specrun.cli.terminal.terminal import Terminal

_MEASURING = Section("Measuring")
_TOKENS = 128
_QUESTIONS = 4

_EPILOG = """\b
Examples:
  specrun why -m target.gguf -md small.gguf -p "Write a story." --temp 0
  specrun why -m target.gguf                                 the drafter that chat would use
  specrun why -m target.gguf --drafter prompt-lookup -f prompt.txt --json

\b
Answers the prompts with and without the drafter, in turn, and compares the measured speed with the one
expected from the target's cost curve. Shows the reasons and possible improvements; -v adds the time of a round's
parts, and the best speed with these drafts and with perfect ones. Do not use the machine meanwhile.
"""  # noqa: E501 - as it is shown


@dataclass(frozen=True, slots=True)
class WhyText:
    """The prompts, and how often they are answered."""

    prompt: tuple[str, ...] = by_option(
        prompts_option(_MEASURING, "A prompt; repeatable. Without one, built-in prompts are used.")
    )
    file: Path | None = by_option(prompt_file_option(_MEASURING))
    no_chat_template: bool = by_option(no_template_option(_MEASURING))
    repetitions: int = _MEASURING.setting(
        "--repetitions N",
        "Answer each prompt at most N times.",
        click.IntRange(1, 1000),
        default=100,
    )
    seconds: float = _MEASURING.setting(
        "--seconds",
        "Take about this long in all.",
        click.FloatRange(0, min_open=True),
        default=60.0,
    )


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@draft_options
@option_group("text", WhyText)
@answer_options
@json_option()
@terminal_options
@measures_time
def why(
    load: LoadSettings,
    draft: DraftSettings,
    text: WhyText,
    answer: AnswerSettings,
    terminal: Terminal,
) -> None:
    """Find why drafting pays for a pair and a prompt, or does not, and possible improvements."""
    from specrun.bench.diagnosis.pair import PairOptions, diagnose_pair

    target = named_target(load)
    drafter, shape = chosen_drafter(load, draft, answer.params, terminal)
    if drafter == "none" and not draft.is_named:
        terminal.note("the profile has plain decoding: auto is measured instead")
        drafter = "auto"
    options = PairOptions(
        target=target,
        drafter=measured_drafters([drafter], demo=True)[0] if load.demo else drafter,
        prompts=measured_prompts(text.prompt, text.file, n_demo=_QUESTIONS if load.demo else 0),
        params=answer.params,
        max_tokens=answer.max_tokens or _TOKENS,
        repetitions=text.repetitions,
        as_chat=False if text.no_chat_template else None,
        seconds=text.seconds,
        options={
            **load.runtime_options(),
            "accept": draft.accept,
            "reference": draft.reference,
            "shape": shape,
        },
    )
    with progress_bar(terminal, "loading the models") as progress:
        diagnosis = diagnose_pair(options, progress)
    if terminal.as_json:
        terminal.answer_json({"target": str(target), **diagnosis.to_dict()}, indent=2)
    else:
        print_diagnosis(diagnosis, terminal)
