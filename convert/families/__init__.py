"""The model families that can be converted, found by the architecture in config.json."""

from __future__ import annotations

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.convert.checkpoint import JsonObject
from specrun.convert.families import gemma, gemma4, glm, gpt_oss, llama, phi3, qwen, qwen35
from specrun.convert.families.family import Family

_MODULES = (llama, qwen, qwen35, gemma, gemma4, phi3, gpt_oss, glm)
_FAMILIES: tuple[Family, ...] = tuple(family for module in _MODULES for family in module.FAMILIES)
_BY_ARCHITECTURE = {name: family for family in _FAMILIES for name in family.architectures}


def known_architectures() -> tuple[str, ...]:
    """Return the names of config.json's `architectures` that can be converted, sorted."""
    return tuple(sorted(_BY_ARCHITECTURE))


def family_of(config: JsonObject) -> Family:
    """Return the family of a checkpoint.

    Raises UnsupportedModelError, naming the known ones, if there is none.
    """
    names = config.items("architectures")
    if not names or not isinstance(names[0], str):
        raise config.malformed("does not name the model's class in 'architectures'")
    family = _BY_ARCHITECTURE.get(names[0])
    if family is None:
        known = ", ".join(known_architectures())
        raise config.unsupported(
            f"is a {names[0][:80]!r}, and these can be converted: {known}; for "
            "another, make the GGUF file with llama.cpp's convert_hf_to_gguf.py"
        )
    return family
