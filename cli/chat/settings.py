"""Settings of a running chat by name: /set changes them and /show lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specrun.bindings.errors import OptionError
from specrun.cli.chat.conversation import Conversation
from specrun.cli.options.group import long_names
from specrun.cli.options.sampling import (
    FURTHER,
    LENGTH_FLAGS,
    USUAL,
    read_breakers,
    read_grammar,
)
from specrun.cli.options.types import format_logit_bias, parse_logit_bias
from specrun.runtime.laws import (
    DEFAULT_ORDER,
    SETTINGS,
    SamplingParams,
    read_sampler_letters,
    read_samplers,
    unknown_name,
)

MAX_TOKENS = "max_tokens"
SETTING_NAMES = (*USUAL, *FURTHER, "grammar", "seed", "stop", MAX_TOKENS)
_ALIASES = {
    alias: name
    for name, setting in SETTINGS.items()
    for alias in (*long_names(setting.flags), *setting.names)
}
_ALIASES |= dict.fromkeys((*long_names(LENGTH_FLAGS), "n"), MAX_TOKENS)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{text!r} is not a whole number") from None


def _optional(name: str, unset: str, text: str) -> int | None:
    """Read a whole number; -1 leaves the setting unset."""
    value = _whole(text)
    if value < -1:
        raise OptionError(f"{name} is {value}: give -1 ({unset}) or 0 and more")
    return None if value == -1 else value


def _samplers(text: str) -> tuple[str, ...]:
    """Read names (`;` between them), letters (edskypmxt), or "default"."""
    if text == "default":
        return DEFAULT_ORDER
    try:
        return read_samplers(text)
    except OptionError:
        if ";" in text or not text.isalpha():
            raise
        try:
            return read_sampler_letters(text)
        except OptionError:
            pass
        raise


_READERS: dict[str, Callable[[str], Any]] = {
    "logit_bias": lambda text: (
        {} if text == "none" else dict(map(parse_logit_bias, text.split(",")))
    ),
    "dry_sequence_breakers": lambda text: read_breakers(tuple(text.split())),
    "samplers": _samplers,
    "grammar": read_grammar,
    "seed": lambda text: _optional("seed", "random", "-1" if text == "random" else text),
    "stop": lambda text: (
        () if text == "none" else (text.replace("\\n", "\n").replace("\\t", "\t"),)
    ),
    MAX_TOKENS: lambda text: _optional(MAX_TOKENS, "no limit", text),
}
"""Readers of settings that are not plain numbers."""


def change_setting(conversation: Conversation, name: str, text: str, *, vocab_size: int) -> str:
    """Change a setting to the value that `text` means; return the setting's name.

    llama.cpp's names are understood too (temp, top-k, predict). Raises OptionError and changes
    nothing if the name or the value makes no sense.
    """
    name = name.lstrip("-").replace("-", "_").lower()
    name = _ALIASES.get(name, name)
    if name not in SETTING_NAMES:
        raise unknown_name(name, list(SETTING_NAMES), "setting")
    if name in _READERS:
        value = _READERS[name](text)
    elif SETTINGS[name].kind == "count":
        value = _whole(text)
    else:
        try:
            value = float(text)
        except ValueError:
            raise OptionError(f"{text!r} is not a number") from None
    if name == "logit_bias" and (beyond := [token for token in value if token >= vocab_size]):
        raise OptionError(
            f"token {beyond[0]} does not exist: the model has {vocab_size} tokens, numbered from 0"
        )
    if name == MAX_TOKENS:
        conversation.max_tokens = value
    else:
        conversation.params = conversation.params.replace(**{name: value})
    return name


def setting_lines(conversation: Conversation) -> list[str]:
    """Return every setting with its value."""
    values = {**conversation.params.to_dict(), MAX_TOKENS: conversation.max_tokens}
    width = max(map(len, SETTING_NAMES))
    return [f"{name:{width}}  {_shown(name, values[name])}" for name in SETTING_NAMES]


def describe_sampling(params: SamplingParams, max_tokens: int | None) -> str:
    """Return the effective sampling settings in one line; those that are off are left out."""
    penalties = (params.repeat_penalty, params.presence_penalty, params.frequency_penalty)
    cuts = {
        "top_n_sigma": f"top-n-sigma {params.top_n_sigma:g}",
        "top_k": f"top-k {params.top_k}",
        "typ_p": f"typical {params.typical_p:g}",
        "top_p": f"top-p {params.top_p:g}",
        "min_p": f"min-p {params.min_p:g}",
        "xtc": f"XTC {params.xtc_probability:g} from {params.xtc_threshold:g}",
        "mirostat": f"mirostat {params.mirostat} to {params.mirostat_ent:g} bits",
    }
    if params.is_greedy:
        parts = ["greedy (temp 0)"]
        parts += [cuts["typ_p"]] if "typ_p" in params.chain else []
    else:
        parts = ["temp 1"]
        if "temperature" in params.chain:
            is_dynamic = params.dynatemp_range > 0.0 and not params.mirostat
            spread = f" +- {params.dynatemp_range:g}" if is_dynamic else ""
            parts = [f"temp {params.temperature:g}{spread}"]
        parts += [text for name, text in cuts.items() if name in params.chain]
        parts.append(f"seed {_shown('seed', params.seed)}")
    if "penalties" in params.chain:
        parts.append("penalties " + "/".join(f"{penalty:g}" for penalty in penalties))
    parts += [f"DRY {params.dry_multiplier:g}"] if "dry" in params.chain else []
    if params.samplers != DEFAULT_ORDER and not params.mirostat:
        parts.append(f"in the order {';'.join(params.samplers)}")
    parts += [f"by a {params.grammar.noun}"] if params.grammar is not None else []
    parts += [f"{len(params.logit_bias)} logit biases"] if params.logit_bias else []
    parts += [f"at most {max_tokens} tokens"] if max_tokens is not None else []
    return " · ".join(parts)


def _shown(name: str, value: Any) -> str:  # noqa: ANN401 - values of any setting
    if name == "seed":
        return "random" if value is None else str(value)
    if name == MAX_TOKENS:
        return "no limit" if value is None else str(value)
    if name in ("stop", "dry_sequence_breakers"):
        return ", ".join(map(repr, value)) or "none"
    if name == "grammar":
        return "none" if value is None else value.noun
    if name == "samplers":
        return ";".join(value)
    if name == "logit_bias":
        return ", ".join(format_logit_bias(*bias) for bias in value.items()) or "none"
    return f"{value:g}"
