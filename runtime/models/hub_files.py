"""Hub repositories: their names, `OWNER/REPO[:QUANT]`, and llama.cpp's choice of files in them.

`-hf` means the same file here as in llama.cpp: that of the quantization named, otherwise Q4_K_M,
Q8_0 or the first model of the repository; a model in parts is all of its parts. Projectors of
pictures (`mmproj`), importance matrices and heads that draft are no models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specrun.bindings.errors import OptionError

HUB_PREFIX = "hf:"
"""What begins the name of a model that may be fetched from the hub, as in hf:OWNER/REPO:Q8_0."""

_NAME = re.compile(r"([\w.-]+)/([\w.-]+)(?::([\w.-]+))?", re.ASCII)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_QUANTIZATION = re.compile(
    r"[-._]((?:UD-)?(?:I?Q\d[A-Z0-9_]*|B?F16|F32|TQ\d_\d|MXFP4[A-Z0-9_]*|NVFP4))$", re.IGNORECASE
)
_DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
_HEADS = ("mtp-", "eagle3-", "dflash-", "dspark-")
_NEVER_MODELS = ("mmproj", "imatrix")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, and the quantization that is asked for; "": the usual one."""

    owner: str
    repo: str
    tag: str = ""

    @property
    def repo_id(self) -> str:
        """OWNER/REPO, as the hub has it."""
        return f"{self.owner}/{self.repo}"

    def __str__(self) -> str:
        return f"{self.repo_id}:{self.tag}" if self.tag else self.repo_id

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Return the name that `text` is, with or without `hf:`; raises OptionError for others."""
        match = _NAME.fullmatch(text.removeprefix(HUB_PREFIX).strip())
        if match is None or {match[1], match[2]} & {".", ".."} or ".." in text or "--" in text:
            raise OptionError(
                f"{text!r} names no repository of the hub: give OWNER/REPO, or OWNER/REPO:QUANT"
            )
        tag = match[3] or ""
        return cls(match[1], match[2], "" if tag == "latest" else tag)


def choose_files(names: Sequence[str], tag: str) -> tuple[str, ...]:
    """Return the files of a listing that are its model with this tag, "": its usual one.

    The first file is the one to open; there are others where the model is split. A tag may also be
    the whole name of a file. Heads are chosen where a repository has nothing else. Without such a
    file the answer is empty.
    """
    models = [name for name in names if is_model_file(name)]
    models = models or [name for name in names if is_weights_file(name)]
    firsts = [name for name in models if _place(name)[1] == 1]
    for wanted in (tag,) if tag else _DEFAULT_TAGS:
        pattern = re.compile(rf"{re.escape(wanted)}([.-]|$)", re.IGNORECASE)
        for name in firsts:
            if pattern.search(name):
                return parts_of(name, names)
    return () if tag or not firsts else parts_of(firsts[0], names)


def parts_of(first: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return all parts of a split model in order, of those that are there; else `first` alone."""
    stem, _, count = _place(first)
    if count == 1:
        return (first,)
    parts = (name for name in names if name.endswith(".gguf"))
    places = {name: _place(name) for name in parts}
    same = [name for name, place in places.items() if (place[0], place[2]) == (stem, count)]
    return tuple(sorted(same, key=lambda name: places[name][1]))


def n_parts(name: str) -> int:
    """Return of how many parts the model is to which a file belongs."""
    return _place(name)[2]


def is_first_part(name: str) -> bool:
    """Whether a model is opened by this file."""
    return _place(name)[1] == 1


def is_model_file(name: str) -> bool:
    """Whether llama.cpp takes a file for a model, by its name."""
    base = name.rpartition("/")[2]
    return is_weights_file(name) and not any(part in base for part in _HEADS)


def is_weights_file(name: str) -> bool:
    """Whether a file holds a model, or heads that draft for one, by its name."""
    base = name.rpartition("/")[2]
    return base.endswith(".gguf") and not any(part in base for part in _NEVER_MODELS)


def stem_of(name: str) -> str:
    """Return the name of a file without folders, .gguf and the number of its part."""
    return _place(name.rpartition("/")[2])[0]


def tag_of(name: str) -> str:
    """Return the quantization in a file's name, in capitals; "": it has none."""
    match = _QUANTIZATION.search(stem_of(name))
    return "" if match is None else match[1].upper()


def _place(name: str) -> tuple[str, int, int]:
    """Return the name without .gguf and part, the number of the part, and how many there are."""
    match = _PART.fullmatch(name)
    if match is None:
        return name.removesuffix(".gguf"), 1, 1
    return match[1], int(match[2]), int(match[3])
