"""The error tree: exit codes, and a named error with advice for every return code of
llama_decode."""

from __future__ import annotations

import pytest

from specrun.bindings import errors
from specrun.bindings.errors import (
    DecodeAbortedError,
    DecodeError,
    DecodeFailedError,
    DecodeMemoryError,
    InvalidBatchError,
    NoCacheSlotError,
    SpecrunError,
    decode_error,
)

CODES = [
    (1, NoCacheSlotError, "-c"),
    (2, DecodeAbortedError, "aborted"),
    (-1, InvalidBatchError, "positions"),
    (-2, DecodeMemoryError, "-b"),
    (-3, DecodeFailedError, "-ngl"),
    (-99, DecodeFailedError, "-ngl"),
    (7, DecodeFailedError, "-ngl"),
]


@pytest.mark.parametrize(
    ("code", "kind", "advice"), CODES, ids=[f"code{code}" for code, _, _ in CODES]
)
def test_every_return_code_has_a_named_error_with_advice(code, kind, advice):
    error = decode_error(code, 17)
    assert type(error) is kind
    assert error.code == code
    assert advice in str(error)
    assert "17" in str(error)
    assert f"returned {code}" in str(error)


def test_every_decode_error_is_reachable_from_a_return_code():
    assert {kind for _, kind, _ in CODES} == set(DecodeError.__subclasses__())


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.SpecrunError, 1),
        (errors.OptionError, 2),
        (errors.ModelError, 3),
        (errors.FileMissingError, 3),
        (errors.MalformedFileError, 3),
        (errors.ModelLoadError, 3),
        (errors.UnsupportedModelError, 3),
        (errors.TemplateError, 3),
        (errors.PairError, 4),
        (errors.OutOfMemoryError, 5),
        (errors.ContextFullError, 5),
        (errors.DecodeMemoryError, 5),
        (errors.BusyError, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_exit_codes(kind, code):
    assert kind.exit_code == code


def test_everything_raised_on_purpose_is_one_family():
    kinds = [kind for name, kind in vars(errors).items() if name.endswith("Error")]
    assert kinds
    assert all(issubclass(kind, SpecrunError) for kind in kinds)


def test_a_missing_file_prints_its_sentence_only():
    assert str(errors.FileMissingError("there is no file a.gguf")) == "there is no file a.gguf"
