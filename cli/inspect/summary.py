"""Facts of a GGUF file from its header alone: for JSON, and as texts for people."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from specrun.bindings.gguf import ArrayValue, GGUFHeader
from specrun.bindings.models.nextn import NEXTN_ARCHITECTURES, read_nextn
from specrun.bindings.models.vocabulary import STORED_KINDS
from specrun.cli.terminal.screen import bytes_text, count_text
from specrun.cli.tune.target_costs import SIZES, experts_text
from specrun.runtime.planning import bytes_per_position, expected_experts, mixture

_SPECIAL = "_token_id"
_TOKENIZER = "tokenizer.ggml."


def summarise(path: Path, header: GGUFHeader) -> dict[str, Any]:
    """Return the facts as a mapping, ready for JSON; None for those that the file lacks."""
    nextn = read_nextn(path, header)
    return {
        "file": str(path),
        "file_bytes": header.file_size,
        "gguf_version": header.version,
        "architecture": header.architecture,
        "name": _value(header, "general.name"),
        "parameters": header.n_parameters,
        "file_type": header.file_type_name,
        "bits_per_weight": round(header.bits_per_weight, 3) if header.n_parameters else None,
        "context_length": _own(header, "context_length"),
        "layers": _own(header, "block_count"),
        "nextn_blocks": nextn.count,
        "nextn_only": nextn.alone,
        "embedding_width": _own(header, "embedding_length"),
        "feed_forward_width": _own(header, "feed_forward_length"),
        "heads": _own(header, "attention.head_count"),
        "key_value_heads": _own(header, "attention.head_count_kv"),
        "key_value_bytes_per_token": int(bytes_per_position(header)) or None,
        "experts": _experts(header),
        "vocabulary": _vocabulary(header),
        "chat_template": isinstance(header.metadata.get("tokenizer.chat_template"), str),
        "cut_layers": _cut_layers(header),
        "cut_source": _value(header, "specrun.cut.source"),
        "cut_source_layers": _value(header, "specrun.cut.source_layers"),
        "padded_parameters": _value(header, "specrun.padded_parameters"),
        "padded_from": _value(header, "specrun.padded_from"),
        "split_files": _value(header, "split.count"),
        "tensors": len(header.tensors),
        "tensor_types": _tensor_types(header),
    }


def describe_summary(facts: dict[str, Any]) -> dict[str, str]:
    """Return the facts as texts for people, without the table of tensor types."""
    vocabulary, size = facts["vocabulary"], facts["vocabulary"]["size"]
    bits, files = facts["bits_per_weight"], facts["split_files"]
    special = ", ".join(
        f"{name} {token['id']} {token['text']!r}"
        for name, token in vocabulary["special_tokens"].items()
    )
    texts = {
        "file": facts["file"],
        "size": f"{bytes_text(facts['file_bytes'])} (GGUF version {facts['gguf_version']})",
        "architecture": facts["architecture"],
        "name": facts["name"],
        "parameters": f"{facts['parameters']:,} ({count_text(facts['parameters'])})",
        "file type": facts["file_type"],
        "bits per weight": bits and f"{bits:.2f}",
        "context length": facts["context_length"],
        "layers": facts["layers"],
        "NextN blocks": _nextn_text(facts),
        "embedding width": facts["embedding_width"],
        "feed-forward width": facts["feed_forward_width"],
        "heads": facts["heads"],
        "key-value heads": facts["key_value_heads"],
        "keys and values": _key_value_text(facts),
        "experts": _experts_text(facts),
        "vocabulary": size and f"{vocabulary['kind']}, {size:,} tokens",
        "pre-tokenizer": vocabulary["pre_tokenizer"],
        "special tokens": special or None,
        "chat template": "yes" if facts["chat_template"] else "no",
        "cut": _cut_text(facts),
        "padded": _padded_text(facts),
        "split": files and f"one of {files} files; this one alone is counted",
        "sha256": facts.get("sha256"),
    }
    return {
        name: f"{text:,}" if isinstance(text, int) else str(text)
        for name, text in texts.items()
        if text
    }


def tensor_rows(facts: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the table of tensor types for people."""
    return [
        (name, f"{row['tensors']:,}", count_text(row["parameters"]), bytes_text(row["bytes"]))
        for name, row in facts["tensor_types"].items()
    ]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own(header: GGUFHeader, key: str) -> Any:  # noqa: ANN401 - any metadata value
    return _value(header, f"{header.architecture}.{key}")


def _value(header: GGUFHeader, key: str) -> Any:  # noqa: ANN401 - any metadata value
    value = header.metadata.get(key)
    if not isinstance(value, ArrayValue):
        return value
    values = value.tolist()
    return values[0] if len(set(values)) == 1 else values  # one number a layer


def _cut_layers(header: GGUFHeader) -> list[int] | None:
    value = header.metadata.get("specrun.cut.layers")
    return [int(layer) for layer in value] if isinstance(value, ArrayValue) else None


def _cut_text(facts: dict[str, Any]) -> str | None:
    if facts["cut_layers"] is None:
        return None
    shown = ", ".join(map(str, facts["cut_layers"]))
    return f"layers {shown} of the {facts['cut_source_layers']} of {facts['cut_source']}"


def _padded_text(facts: dict[str, Any]) -> str | None:
    if not isinstance(facts["padded_parameters"], int):
        return None
    return (
        f"{count_text(facts['padded_parameters'])} of the parameters only cost time: "
        f"{facts['padded_from']}, widened"
    )


def _key_value_text(facts: dict[str, Any]) -> str | None:
    size = facts["key_value_bytes_per_token"]
    return size and f"{bytes_text(size)} a token in F16, read for every token after it"


def _experts(header: GGUFHeader) -> dict[str, Any] | None:
    n_experts, n_used = mixture(header)
    if not n_experts:
        return None
    read = {str(n): round(expected_experts(n_experts, n_used, n), 2) for n in SIZES}
    return {"count": n_experts, "used": n_used, "read_by_tokens": read}


def _experts_text(facts: dict[str, Any]) -> str | None:
    experts = facts["experts"]
    return experts and experts_text(experts["count"], experts["used"])


def _nextn_text(facts: dict[str, Any]) -> str | None:
    if not facts["nextn_blocks"]:
        return None
    if facts["architecture"] not in NEXTN_ARCHITECTURES:
        what = "llama.cpp cannot draft with them"
    elif facts["nextn_only"]:
        what = "without a model: mtp(FILE) drafts with them"
    else:
        what = "--drafter mtp drafts with them"
    return f"{facts['nextn_blocks']}; {what}"


def _vocabulary(header: GGUFHeader) -> dict[str, Any]:
    metadata = header.metadata
    tokens = metadata.get(f"{_TOKENIZER}tokens")
    kind = metadata.get(f"{_TOKENIZER}model")
    special: dict[str, dict[str, Any]] = {}
    for key, value in metadata.items():
        if key.startswith(_TOKENIZER) and key.endswith(_SPECIAL) and isinstance(value, int):
            inside = isinstance(tokens, ArrayValue) and 0 <= value < len(tokens)
            text = str(tokens[value]) if inside and isinstance(tokens, ArrayValue) else None
            name = key.removeprefix(_TOKENIZER).removesuffix(_SPECIAL)
            special[name] = {"id": value, "text": text}
    return {
        "kind": STORED_KINDS.get(str(kind), str(kind)) if kind is not None else None,
        "size": len(tokens) if isinstance(tokens, ArrayValue) else None,
        "pre_tokenizer": _value(header, f"{_TOKENIZER}pre"),
        "special_tokens": special,
    }


def _tensor_types(header: GGUFHeader) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for tensor in header.tensors:
        row = table.setdefault(tensor.type_name, {"tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += tensor.n_elements
        row["bytes"] += tensor.n_bytes
    return dict(sorted(table.items(), key=lambda item: -item[1]["bytes"]))
