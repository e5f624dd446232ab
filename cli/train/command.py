"""`specrun train`: the table of its commands."""

from __future__ import annotations

import click

from specrun.cli.options.group import LazyCommand, LazyGroup

_COMMANDS = (
    LazyCommand("specrun.cli.train.heads", "medusa", "Heads that guess the next tokens at once."),
    LazyCommand("specrun.cli.train.heads", "hydra", "Medusa's heads that see each other's tokens."),
    LazyCommand("specrun.cli.train.heads", "eagle", "A layer that predicts hidden states."),
    LazyCommand("specrun.cli.train.heads", "eagle3", "A layer that reads three of the target's."),
    LazyCommand("specrun.cli.train.heads", "dflash", "A few layers that draft a block at once."),
    LazyCommand("specrun.cli.train.heads", "pass", "Look-ahead embeddings.", "pass_"),
    LazyCommand("specrun.cli.train.heads", "space", "A new target that reads mask tokens."),
    LazyCommand("specrun.cli.train.models", "drafter", "A small model, taught by the target."),
    LazyCommand("specrun.cli.train.models", "consistency", "A new target, for Jacobi decoding."),
)

_EPILOG = """\b
Examples:
  specrun train medusa --target Llama-3.2-1B --data chats.jsonl -o heads --gguf heads.gguf
  specrun train eagle --target Llama-3.2-1B --data chats.jsonl -o head --epochs 4
  specrun train eagle --target model-Q4_K_M.gguf -o head --gguf head.gguf
  specrun train eagle --target Llama-2-7b --teacher llama-2-7b-q4_k_m.gguf --data chats.jsonl -o head
  specrun train medusa --target Llama-3.2-1B --data chats.jsonl -o heads --resume

\b
Data are a text, or JSON Lines: {"text"}, {"prompt", "answer"} or {"messages": [{"role", "content"}]}. Of
prompts and chats only the answers are used. Without --data a target of dflash, eagle, eagle3, medusa or
hydra answers built-in prompts, or those of --prompts, and its answers are used. Ctrl-C keeps a checkpoint,
and --resume continues from it.
"""  # noqa: E501 - as it is shown


@click.group(cls=LazyGroup, lazy=_COMMANDS, epilog=_EPILOG)
def train() -> None:
    """Train a drafter for a model: heads that read its states, a small model, or the model anew."""
