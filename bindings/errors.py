"""The error tree of specrun: every message names the problem, the value, and the remedy.

`exit_code` is the command line's exit status: 1 unless a class or one above it has another.
"""

from __future__ import annotations

from specrun.bindings.installation import extra_command, install_command


class SpecrunError(Exception):
    """Anything specrun raises on purpose."""

    exit_code = 1


class OptionError(SpecrunError, ValueError):
    """An option or argument is out of range, of the wrong kind, or unknown."""

    exit_code = 2


class ModelError(SpecrunError):
    """A model or another input file cannot be used."""

    exit_code = 3


class FileMissingError(ModelError, FileNotFoundError):
    """There is no such file, or it cannot be read."""

    def __str__(self) -> str:
        # FileNotFoundError would print an errno pair; a user needs the message alone.
        return str(self.args[0]) if self.args else ""


class MalformedFileError(ModelError):
    """The file is not GGUF, is truncated, or contradicts itself."""


class ModelLoadError(ModelError):
    """llama.cpp refused the file; the message carries its last words."""


class UnsupportedModelError(ModelError):
    """The file is sound, but its architecture cannot do the request."""


class TemplateError(ModelError):
    """The chat template is missing, broken, or tried to leave its sandbox."""


class PairError(SpecrunError):
    """The drafter does not fit the target; the message names the first difference."""

    exit_code = 4


class OutOfMemoryError(SpecrunError):
    """Memory for a model or a context could not be had."""

    exit_code = 5


class ContextFullError(SpecrunError):
    """The prompt does not fit into the context."""

    exit_code = 5


class DecodeError(SpecrunError):
    """llama.cpp could not evaluate a batch; the cache was restored."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class NoCacheSlotError(DecodeError):
    """The KV cache has no room for the batch (llama_decode returned 1)."""


class DecodeAbortedError(DecodeError):
    """The abort callback stopped the evaluation (llama_decode returned 2)."""


class InvalidBatchError(DecodeError):
    """The batch was refused (llama_decode returned -1)."""


class DecodeMemoryError(DecodeError):
    """An allocation failed while decoding (llama_decode returned -2)."""

    exit_code = 5


class DecodeFailedError(DecodeError):
    """The backend failed (llama_decode returned -3 or an unknown code)."""


class WorkerLostError(SpecrunError):
    """Another process or machine that holds a part of a model cannot be reached any more."""


class HubError(SpecrunError):
    """The hub that models are fetched from cannot be reached, or does not answer as it should."""


class MissingPackageError(SpecrunError):
    """`what` needs a package that is not installed; an `extra` of pyproject.toml brings it.

    Without an extra it should have come with specrun.
    """

    def __init__(self, what: str, package: str, extra: str | None = None) -> None:
        command = f"run {install_command([package])}" if extra is None else extra_command(extra)
        super().__init__(f"{what} needs the package {package}: {command}")


class StaleViewError(SpecrunError):
    """A view of logits or features was used after the next evaluation had overwritten it."""


class ClosedError(SpecrunError):
    """A closed object was used."""


class ForkedError(SpecrunError):
    """A forked process is to evaluate with threads or a GPU that only its parent has."""


class BusyError(SpecrunError):
    """A second call was made while an answer is being streamed."""


_NO_SLOT = "the KV cache has no room for {n} more tokens: raise the context size (-c)"
_INVALID = "llama.cpp refused a batch of {n} tokens: its positions do not continue the cache"
_NO_MEMORY = "no memory to evaluate {n} tokens: lower the context (-c) or batch size (-b)"
_FAILED = "the backend failed to evaluate {n} tokens: run `specrun doctor`, try -ngl 0"
_DECODE_ERRORS: dict[int, tuple[type[DecodeError], str]] = {
    1: (NoCacheSlotError, _NO_SLOT),
    2: (DecodeAbortedError, "the evaluation of {n} tokens was aborted"),
    -1: (InvalidBatchError, _INVALID),
    -2: (DecodeMemoryError, _NO_MEMORY),
}


def decode_error(code: int, n_tokens: int) -> DecodeError:
    """Return the named error for a return code of `llama_decode` over `n_tokens` tokens."""
    kind, text = _DECODE_ERRORS.get(code, (DecodeFailedError, _FAILED))
    return kind(f"{text.format(n=n_tokens)} (llama_decode returned {code})", code)
