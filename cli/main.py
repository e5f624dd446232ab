"""The `specrun` program: the table of its commands."""

from __future__ import annotations

import io
import os
import sys

import click

from specrun.cli.options.group import ENVIRONMENT_PREFIX, LazyCommand, LazyGroup

_COMMANDS = (
    LazyCommand("specrun.cli.chat.command", "chat", "Talk to a model."),
    LazyCommand("specrun.cli.generate", "generate", "Continue or answer one prompt."),
    LazyCommand("specrun.cli.serve.command", "serve", "Serve models over HTTP, with OpenAI's API."),
    LazyCommand("specrun.cli.demo", "demo", "Chat with a published model, fetched once."),
    LazyCommand(
        "specrun.cli.accelerate.command", "accelerate", "Find the fastest drafter for a model here."
    ),
    LazyCommand(
        "specrun.cli.why", "why", "Find why drafting pays or not, and possible improvements."
    ),
    LazyCommand("specrun.cli.worker", "worker", "Lend this machine's devices to another one."),
    LazyCommand("specrun.cli.models", "models", "List the models on this disk."),
    LazyCommand(
        "specrun.cli.inspect.command",
        "inspect",
        "Show the contents of a GGUF file, and fitting drafters.",
    ),
    LazyCommand("specrun.cli.cut", "cut", "Make a drafter of a model's own layers."),
    LazyCommand("specrun.cli.datastore", "datastore", "Texts to draft from: REST's datastores."),
    LazyCommand("specrun.cli.convert", "convert", "Turn a Hugging Face checkpoint into GGUF."),
    LazyCommand("specrun.cli.quantize", "quantize", "Write a GGUF file with smaller numbers."),
    LazyCommand("specrun.cli.imatrix", "imatrix", "Measure an importance matrix for quantizing."),
    LazyCommand("specrun.cli.train.command", "train", "Train a drafter for a model."),
    LazyCommand(
        "specrun.cli.tune.command", "tune", "Measure a pair of models and plan its drafts."
    ),
    LazyCommand(
        "specrun.cli.tune.theory", "theory", "Show the theory of drafting for given figures."
    ),
    LazyCommand("specrun.cli.learn", "learn", "Show or delete the data kept for learning."),
    LazyCommand("specrun.cli.calibrate", "calibrate", "Measure how often heads guess right."),
    LazyCommand("specrun.cli.bench.command", "bench", "Measure the gain and the cost of drafting."),
    LazyCommand("specrun.cli.prove", "prove", "Check that a pair's text is the target's own."),
    LazyCommand("specrun.cli.manual", "config", "Show the config file, and the settings."),
    LazyCommand("specrun.cli.manual", "completion", "Print a shell's completion script."),
    LazyCommand("specrun.cli.manual", "man", "Print the manual page."),
    LazyCommand("specrun.cli.clean", "clean", "List or remove the files that specrun keeps."),
    LazyCommand("specrun.cli.doctor", "doctor", "Check this installation and this machine."),
)

_EPILOG = """\b
Examples:
  specrun chat --demo                             the embedded models, offline
  specrun chat -m target.gguf -md small.gguf      a target and a draft model
  specrun chat -hf ggml-org/gemma-3-1b-it-GGUF    a model of the Hugging Face hub
  specrun accelerate target.gguf                  find the fastest drafter for it, and use it
  specrun models                                  those that are on this disk
  specrun generate -m target.gguf -p "Once upon a time" --json
  specrun inspect target.gguf -md small.gguf      whether they fit
  specrun convert folder -o model.gguf            from Hugging Face's form
  specrun doctor                                  when something is wrong

\b
Every option may come from the environment: SPECRUN_MODEL=target.gguf, or for one command
SPECRUN_CHAT_MODEL; or from a config file (specrun config). Completion: specrun completion.
Exit codes: 0 ok, 1 failure, 2 usage, 3 bad model or file, 4 pair that does not fit,
5 out of memory or a prompt larger than the context, 130 interrupted.
"""


def _print_version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from specrun.cli.doctor import version_lines

    click.echo("\n".join(version_lines()))
    context.exit()


@click.group(
    cls=LazyGroup,
    lazy=_COMMANDS,
    epilog=_EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": ENVIRONMENT_PREFIX,
        "max_content_width": 110,
    },
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the versions of specrun, llama-cpp-python and llama.cpp, and the backends.",
)
def cli() -> None:
    """Run GGUF models faster with speculative decoding; exact rules keep their distribution."""


def main() -> None:
    """Run the program: the entry point of the installed script."""
    with open(os.devnull) as nothing, open(os.devnull, "w") as nowhere:
        # A stream that was closed before the start (`>&-`) is None.
        sys.stdin = sys.stdin or nothing
        sys.stdout = sys.stdout or nowhere
        sys.stderr = sys.stderr or nowhere
        # Characters that an encoding lacks, and bytes that are no text, must not end an answer.
        for stream, errors in (
            (sys.stdin, "replace"),
            *((stream, "backslashreplace") for stream in (sys.stdout, sys.stderr)),
        ):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=errors)
        cli(prog_name="specrun")
