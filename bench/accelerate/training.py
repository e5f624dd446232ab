"""A head for a GGUF file, trained from the file alone on answers that the model itself gives."""

from __future__ import annotations

from pathlib import Path

from specrun.bindings.errors import OptionError


def train_head(target: Path, hours: float, prompts: Path | None, memory: int | None) -> Path:
    """Return the GGUF file of an EAGLE head for a target; raises as the training does."""
    raise OptionError(
        f"--hours {hours:g} would train a head from {target.name} alone, which this version of "
        "specrun cannot do yet: leave it out, or train one from the Hugging Face folder with "
        "specrun train eagle and put it beside the file"
    )
