"""--lora: adapters that are added to the target."""

from __future__ import annotations

from specrun.cli.options.group import MODEL

lora_option = MODEL.option(
    "--lora FILE[:SCALE]",
    "A LoRA adapter (GGUF) added to the target; repeatable. The drafter stays: acceptance tells.",
    multiple=True,
)
