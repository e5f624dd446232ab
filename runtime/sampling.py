"""Sampling settings (temperature, top-k, top-p, penalties, ...) with llama.cpp's defaults."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specrun.bindings.errors import OptionError

RANDOM_SEED = -1
"""The seed that stands for a random one, as in llama.cpp."""


def unknown_name(name: str, known: list[str], kind: str) -> OptionError:
    """Return the error for a name that nothing of this kind has, with the nearest that has."""
    return OptionError(f"there is no {kind} {name!r}: {_nearest(name, known)}")


def unknown_option(name: str, known: list[str], where: str) -> OptionError:
    """Return the error for an option that does not exist, with the nearest one that does."""
    return OptionError(f"{where} has no option {name!r}: {_nearest(name, known)}")


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"


def whole_number(value: object) -> int | None:
    """Return what an integer of Python or numpy says, None for anything else and for booleans."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def random_if_unset(seed: object) -> int:
    """Return a seed, or a random one for None and -1; raises `OptionError` for what is no seed."""
    number = RANDOM_SEED if seed is None else whole_number(seed)
    if number is None:
        raise OptionError(f"seed is {seed!r}: it must be a whole number, or None (random)")
    return secrets.randbits(32) if number == RANDOM_SEED else number


def _is_bias(value: object) -> bool:
    return isinstance(value, int | float) and (math.isfinite(value) or value == -math.inf)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings in llama.cpp's order: bias, penalties, top-k, top-p, min-p, temperature.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch a truncation off. Penalties
    look at the last `repeat_last_n` tokens (0: none, -1: all). `logit_bias` maps token ids to what
    is added to their logit (-inf forbids). `stop` strings end the answer and are not part of it;
    they may span tokens. `seed` None takes the runtime's, -1 a random one. Out-of-range values
    raise `OptionError`.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif not isinstance(self.stop, tuple):
            self._require(isinstance(self.stop, Iterable), "stop", "made of strings")
            object.__setattr__(self, "stop", tuple(self.stop))
        self._require_finite()
        self._require(self.temperature >= 0.0, "temperature", "0 (greedy) or more")
        self._require(self.top_k >= 0, "top_k", "0 (off) or more")
        self._require(0.0 <= self.top_p <= 1.0, "top_p", "between 0 and 1")
        self._require(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        self._require(self.repeat_penalty > 0.0, "repeat_penalty", "above 0 (1 is off)")
        self._require(self.repeat_last_n >= -1, "repeat_last_n", "-1 (all), 0 (off) or a count")
        texts = all(isinstance(stop, str) and stop for stop in self.stop)
        self._require(texts, "stop", "made of strings that are not empty")
        is_mapping = isinstance(self.logit_bias, Mapping)
        self._require(is_mapping, "logit_bias", "a mapping of token ids to numbers")
        biases, tokens = self.logit_bias.values(), self.logit_bias.keys()
        self._require(all(map(_is_bias, biases)), "logit_bias", "made of finite numbers and -inf")
        are_ids = all(isinstance(token, int) and token >= 0 for token in tokens)
        self._require(are_ids, "logit_bias", "keyed by token ids")
        is_seed = self.seed is None or whole_number(self.seed) is not None
        self._require(is_seed, "seed", "a whole number or None")

    def _require_finite(self) -> None:
        penalties = ("repeat_penalty", "presence_penalty", "frequency_penalty")
        for name in ("temperature", "top_p", "min_p", *penalties):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            self._require(is_number and math.isfinite(value), name, "a finite number")
        for name in ("top_k", "repeat_last_n"):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            self._require(is_whole, name, "a whole number")

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise OptionError(f"{name} is {getattr(self, name)!r}: it must be {wanted}")

    @property
    def is_greedy(self) -> bool:
        """Whether the law is always a point mass."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the law depends on the tokens before it other than through the model."""
        added = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return self.repeat_last_n != 0 and (self.repeat_penalty != 1.0 or added)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return settings from a mapping; unknown names raise with the nearest known one."""
        known = [entry.name for entry in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise unknown_option(name, known, "SamplingParams")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a mapping that `from_dict` reads."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    def replace(self, **changes: Any) -> SamplingParams:  # noqa: ANN401 - values of any field
        """Return a copy with some settings changed; unknown names raise."""
        return SamplingParams.from_dict({**self.to_dict(), **changes})
