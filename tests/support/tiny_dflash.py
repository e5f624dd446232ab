"""Tiny block drafters of all three generations (DFlash, DFlash2, DSpark), and a numpy reference.

The reference follows llama.cpp at 0c1e570, src/models/dflash.cpp: the encoder fuses the target's
tapped states, each layer puts their keys and values into its cache, and a block of the last token
and masks attends to these and to itself. DSpark adds a Markov head and a confidence head, DFlash2
convolutions and a selector whose scores say how well candidates of neighbouring slots fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from specrun.bindings.ggml.weights import read_numbers
from specrun.bindings.gguf import read_header
from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
Generation = Literal["dflash", "dflash2", "dspark"]
_EPS, _BASE = 1e-6, 10000.0


@dataclass(frozen=True)
class TinyDFlash:
    """A drafter for a target of `width` numbers and `vocab_size` tokens, which it reads at `taps`.

    Without `own_tokens` it borrows the target's embeddings and output matrix. `draft_tokens` is the
    size of a draft vocabulary, 0 for the target's. `window` makes every other layer a sliding one,
    or with `whole_window` all. `mrope` turns all positions by one section, as drafters of M-RoPE
    targets do. `spread` is how much its layers, and a Markov head, change the embeddings.
    """

    generation: Generation = "dflash"
    vocab_size: int = 320
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 48
    layers: int = 2
    taps: tuple[int, ...] = (0, 1)
    block_size: int = 6
    mask: int = 5
    seed: int = 0
    rank: int = 8
    top_k: int = 4
    kernel: int = 3
    group: int = 8
    confidence: bool = True
    from_anchor: bool = True
    causal: bool = False
    own_tokens: bool = False
    draft_tokens: int = 0
    window: int = 0
    whole_window: bool = False
    mrope: bool = False
    spread: float = 1.0
    context: int = 1024
    head: Literal["vanilla", "gated", "rnn"] = "vanilla"

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def first(self) -> int:
        """The first slot of a block that predicts a token."""
        return 0 if self.generation == "dspark" and self.from_anchor else 1

    @property
    def n_slots(self) -> int:
        return self.block_size - self.first

    def latent_matrix(self) -> tuple[Array, Array]:
        """The gate of a Markov head, or the matrix of its state, and the bias of either."""
        parts, own = {"gated": (1, 1), "rnn": (3, 2)}[self.head]
        random = np.random.default_rng([self.seed, 77])
        shape = parts * self.rank, self.width + own * self.rank
        weight = random.standard_normal(shape) * 2.0 * shape[1] ** -0.5
        return weight.astype(np.float32), (0.3 * random.standard_normal(shape[0])).astype(
            np.float32
        )

    def tensors(self) -> Tensors:
        """The tensors by their names in GGUF files, rows first."""
        random = np.random.default_rng([self.seed, len(self.generation)])
        w, size = self.width, self.draft_tokens or self.vocab_size

        def matrix(*shape: int, spread: float = 1.0) -> Array:
            numbers = random.standard_normal(shape) * spread * shape[-1] ** -0.5
            return numbers.astype(np.float32)

        def norm(n: int) -> Array:
            return (1.0 + 0.1 * random.standard_normal(n)).astype(np.float32)

        made: Tensors = {
            "fc.weight": matrix(w, len(self.taps) * w),
            "enc.output_norm.weight": norm(w),
            "output_norm.weight": norm(w),
        }
        if self.own_tokens:
            made["token_embd.weight"] = matrix(self.vocab_size, w, spread=w**0.5)
        if self.own_tokens or self.draft_tokens:
            made["output.weight"] = matrix(size, w, spread=3.0)
        if self.draft_tokens:
            made["d2t"] = np.sort(random.choice(self.vocab_size, size, replace=False))
        if self.generation == "dspark":
            made["markov_w1.weight"] = matrix(self.vocab_size, self.rank, spread=self.rank**0.5)
            made["markov_w2.weight"] = matrix(size, self.rank, spread=2.0 * self.spread)
            if self.confidence:
                made["conf_proj.weight"] = matrix(1, w + self.rank, spread=3.0)
                made["conf_proj.bias"] = np.array([0.2], np.float32)
        for layer in range(self.layers):
            made |= {f"blk.{layer}.{name}": array for name, array in self._layer(matrix, norm)}
        if self.generation == "dflash2":
            made["selector_predecessor.weight"] = matrix(self.vocab_size, self.rank, spread=3.0)
            made["selector_successor.weight"] = matrix(self.vocab_size, self.rank, spread=3.0)
            made["selector_hidden.weight"] = matrix(self.rank, w, spread=self.spread)
        return made

    def _layer(self, matrix: Any, norm: Any) -> list[tuple[str, Array]]:
        w, d = self.width, self.head_width
        made = [
            ("attn_norm.weight", norm(w)),
            ("attn_q.weight", matrix(self.heads * d, w)),
            ("attn_k.weight", matrix(self.kv_heads * d, w)),
            ("attn_v.weight", matrix(self.kv_heads * d, w)),
            ("attn_output.weight", matrix(w, self.heads * d, spread=self.spread)),
            ("attn_q_norm.weight", norm(d)),
            ("attn_k_norm.weight", norm(d)),
            ("ffn_norm.weight", norm(w)),
            ("ffn_gate.weight", matrix(self.ffn, w)),
            ("ffn_up.weight", matrix(self.ffn, w)),
            ("ffn_down.weight", matrix(w, self.ffn, spread=self.spread)),
        ]
        if self.generation == "dflash2":
            n = 2 * self.kernel * (w // self.group)
            for part in ("attn", "ffn"):
                made.append((f"{part}_conv_base", matrix(2, self.kernel, w, spread=w**0.5 / 2)))
                made.append((f"{part}_conv_proj.weight", matrix(n, w, spread=0.3)))
        return made

    # -- files -------------------------------------------------------------------------------------

    def write(self, path: Path, target: Path, **changes: Any) -> Path:
        """Write the drafter of a target, with the target's tokens.

        `changes` are other values of metadata by key, None to leave one out; `without` names
        tensors to leave out.
        """
        metadata = self._metadata(target)
        without = changes.pop("without", ())
        for key, value in changes.items():
            name = key.replace("__", ".")
            metadata.remove(name)
            if isinstance(value, bool):
                metadata.flag(name, value)
            elif isinstance(value, int):
                metadata.count(name, value)
            elif isinstance(value, float):
                metadata.number(name, value)
            elif value is not None:
                metadata.integers(name, value)
        planned = [
            PlannedTensor(
                name,
                array.shape,
                "I64" if name == "d2t" else "F32",
                lambda array=array: array,  # type: ignore[misc]
            )
            for name, array in self.tensors().items()
            if name not in without
        ]
        write_gguf(path, "dflash", metadata, planned)
        return path

    def _metadata(self, target: Path) -> Metadata:
        metadata = Metadata()
        metadata.text("general.name", f"tiny {self.generation}")
        metadata.counts(
            "dflash",
            vocab_size=self.vocab_size,
            context_length=self.context,
            embedding_length=self.width,
            block_count=self.layers,
            feed_forward_length=self.ffn,
            block_size=self.block_size,
        )
        metadata.counts(
            "dflash.attention",
            head_count=self.heads,
            head_count_kv=self.kv_heads,
            key_length=self.head_width,
            value_length=self.head_width,
        )
        metadata.count("dflash.rope.dimension_count", self.head_width)
        metadata.number("dflash.rope.freq_base", _BASE)
        metadata.number("dflash.attention.layer_norm_rms_epsilon", _EPS)
        metadata.integers("dflash.target_layers", self.taps)
        if self.causal:
            metadata.flag("dflash.attention.causal", True)
        if self.mrope:
            metadata.integers("dflash.rope.dimension_sections", [self.head_width // 2, 0, 0, 0])
        if self.window:
            metadata.count("dflash.attention.sliding_window", self.window)
            windows = [self._has_window(layer) for layer in range(self.layers)]
            metadata.flags("dflash.attention.sliding_window_pattern", windows)
        if self.generation == "dspark":
            metadata.flag("dflash.sample_from_anchor", self.from_anchor)
            metadata.flag("dflash.has_confidence_head", self.confidence)
        if self.head != "vanilla":
            weight, bias = self.latent_matrix()
            metadata.text("dflash.markov_head_type", self.head)
            metadata.numbers("dflash.markov_head.weight", weight.reshape(-1).tolist())
            metadata.numbers("dflash.markov_head.bias", bias.tolist())
        if self.generation == "dflash2":
            metadata.counts(
                "dflash",
                conv_kernel_size=self.kernel,
                conv_group_size=self.group,
                selector_rank=self.rank,
                selector_top_k=self.top_k,
            )
        add_tokenizer(metadata, target)
        metadata.count("tokenizer.ggml.mask_token_id", self.mask)
        return metadata

    # -- the reference -----------------------------------------------------------------------------

    def _has_window(self, layer: int) -> bool:
        return self.window > 0 and (self.whole_window or layer % 2 == 0)

    def fused(self, features: Array) -> Array:
        """The encoder: the states of each layer's keys and values, of taps [n, taps * width]."""
        made = self.tensors()
        return _rms(
            features @ made["fc.weight"].T.astype(np.float64), made["enc.output_norm.weight"]
        )

    def block(
        self, features: Array, last: int, n: int, tokens: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """States and logits of a block of n tokens behind a text with these features [m, ...].

        `tokens` are the target's embeddings and output matrix, which a drafter may borrow.
        """
        made, start, d = self.tensors(), len(features), self.head_width
        embeddings = made.get("token_embd.weight", tokens[0]).astype(np.float64)
        output = made.get("output.weight", tokens[1]).astype(np.float64)
        text = self.fused(features) if start else np.zeros((0, self.width))
        state = embeddings[[last, *[self.mask] * (n - 1)]]
        for layer in range(self.layers):
            weights = {
                name.removeprefix(f"blk.{layer}."): array.astype(np.float64)
                for name, array in made.items()
                if name.startswith(f"blk.{layer}.")
            }
            normed, dynamic = _rms(state, weights["attn_norm.weight"]), None
            if self.generation == "dflash2":
                dynamic = normed @ weights["attn_conv_proj.weight"].T
                normed = self._convolved(normed, dynamic, weights["attn_conv_base"], 0)
            query = self._turned(normed, weights, "q", start)
            keys = np.concatenate(
                [self._turned(text, weights, "k", 0), self._turned(normed, weights, "k", start)]
            )
            values = (np.concatenate([text, normed]) @ weights["attn_v.weight"].T).reshape(
                start + n, -1, d
            )
            mixed = self._attention(query, keys, values, layer) @ weights["attn_output.weight"].T
            if dynamic is not None:
                mixed = self._convolved(mixed, dynamic, weights["attn_conv_base"], 1)
            state = state + mixed
            normed, dynamic = _rms(state, weights["ffn_norm.weight"]), None
            if self.generation == "dflash2":
                dynamic = normed @ weights["ffn_conv_proj.weight"].T
                normed = self._convolved(normed, dynamic, weights["ffn_conv_base"], 0)
            gate = normed @ weights["ffn_gate.weight"].T
            up = normed @ weights["ffn_up.weight"].T
            wide = (gate / (1.0 + np.exp(-gate)) * up) @ weights["ffn_down.weight"].T
            if dynamic is not None:
                wide = self._convolved(wide, dynamic, weights["ffn_conv_base"], 1)
            state = state + wide
        state = _rms(state, made["output_norm.weight"])
        logits = state @ output.T
        if self.draft_tokens:
            whole = np.full((n, self.vocab_size), -np.inf)
            whole[:, made["d2t"]] = logits
            logits = whole
        return state, logits

    def bias(self, token: int) -> Array:
        """DSpark: what the Markov head adds to the logits after a token, [vocab]."""
        made = self.tensors()
        after = made["markov_w2.weight"].astype(np.float64) @ made["markov_w1.weight"][token]
        if not self.draft_tokens:
            return after
        whole = np.zeros(self.vocab_size)
        whole[made["d2t"]] = after
        return whole

    def path_biases(self, states: Array, tokens: Sequence[int]) -> list[Array]:
        """What a Markov head adds along a path: `tokens` before each slot that predicts, from the
        text's last on; `states` are those of the whole block."""
        made, found = self.tensors(), list[Array]()
        weight, bias = (part.astype(np.float64) for part in self.latent_matrix())
        state = np.zeros(self.rank)
        for slot, token in enumerate([tokens[0]] * self.first + list(tokens)):
            own = made["markov_w1.weight"][token].astype(np.float64)
            if self.head == "gated":
                gate = weight @ np.concatenate([states[slot], own]) + bias
                latent = own / (1.0 + np.exp(-gate))
            else:
                read = weight @ np.concatenate([state, own, states[slot]]) + bias
                gate, candidate, output = np.split(read, 3)
                share = 1.0 / (1.0 + np.exp(-gate))
                state, latent = share * state + (1 - share) * np.tanh(candidate), np.tanh(output)
            after = made["markov_w2.weight"].astype(np.float64) @ latent
            whole = np.zeros(self.vocab_size)
            whole[made.get("d2t", np.arange(self.vocab_size))] = after
            found.append(whole)
        return found[self.first :]

    def confident(self, state: Array, token: int) -> float:
        """DSpark: the confidence in the token after a given one, by the slot's state."""
        made = self.tensors()
        read = np.concatenate([state, made["markov_w1.weight"][token]])
        x = float(made["conf_proj.weight"][0].astype(np.float64) @ read + made["conf_proj.bias"][0])
        return 1.0 / (1.0 + np.exp(-x))

    def lattice(self, state: Array, logits: Array, last: int) -> list[tuple[Array, Array]]:
        """DFlash2: candidates [k] of each slot, and scores [predecessors, k] (one row at first)."""
        made, found, before = self.tensors(), list[tuple[Array, Array]](), np.array([last])
        for slot in range(1, len(state)):
            candidates = np.argsort(-logits[slot], kind="stable")[: self.top_k]
            gate = made["selector_hidden.weight"].astype(np.float64) @ state[slot]
            cond = made["selector_predecessor.weight"][before] * gate
            scores = cond @ made["selector_successor.weight"][candidates].T.astype(np.float64)
            found.append((candidates, scores + logits[slot][candidates]))
            before = candidates
        return found

    def _turned(self, values: Array, weights: Tensors, part: str, start: int) -> Array:
        """Queries or keys [n, heads, d], normed and turned by their positions."""
        d = self.head_width
        heads = (values @ weights[f"attn_{part}.weight"].T).reshape(len(values), -1, d)
        heads = _rms(heads, weights[f"attn_{part}_norm.weight"])
        steps = np.arange(start, start + len(values))[:, np.newaxis]
        angles = steps * _BASE ** (-np.arange(0, d, 2) / d)
        cos, sin = np.cos(angles)[:, np.newaxis], np.sin(angles)[:, np.newaxis]
        one, other = heads[..., : d // 2], heads[..., d // 2 :]
        return np.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)

    def _attention(self, query: Array, keys: Array, values: Array, layer: int) -> Array:
        n, total, group = len(query), len(keys), self.heads // self.kv_heads
        at = np.arange(total - n, total)[:, np.newaxis] - np.arange(total)  # how far behind
        mixed = np.zeros((n, self.heads, self.head_width))
        for head in range(self.heads):
            scores = query[:, head] @ keys[:, head // group].T / self.head_width**0.5
            if self.causal:
                scores[at < 0] = -np.inf
            if self._has_window(layer):
                scores[at >= self.window] = -np.inf
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, head] = shares / shares.sum(axis=1, keepdims=True) @ values[:, head // group]
        return mixed.reshape(n, -1)

    def _convolved(self, hidden: Array, dynamic: Array, base: Array, side: int) -> Array:
        """Sum over the last tokens of a block, with weights of their own for each token."""
        n, groups = len(hidden), self.width // self.group
        coefficients = dynamic.reshape(n, 2, self.kernel, groups)[:, side]
        result = np.zeros_like(hidden)
        for tap in range(min(self.kernel, n)):
            weight = np.repeat(coefficients[:, tap], self.group, axis=1) + base[side, tap]
            before = np.concatenate([np.zeros((tap, self.width)), hidden[: n - tap]])
            result += weight * before
        return result


def variant(drafter: TinyDFlash, **changes: Any) -> TinyDFlash:
    """The same drafter with other sizes or another seed."""
    return replace(drafter, **changes)


def add_tokenizer(metadata: Metadata, target: Path) -> None:
    """Take over a target's tokens."""
    gguf = __import__("gguf")
    for name, known in gguf.GGUFReader(target).fields.items():
        if name.startswith("tokenizer."):
            element = known.types[-1] if len(known.types) > 1 else None
            metadata.raw(name, known.contents(), known.types[0], element)


def token_matrices(target: Path) -> tuple[Array, Array]:
    """The embeddings and the output matrix of a target in F32, [vocab, width]."""
    shapes = {tensor.name: tensor.shape for tensor in read_header(target).tensors}
    names = "token_embd.weight", "output.weight"
    found = [
        read_numbers(target, name, np.float32).reshape(shapes[name][::-1])
        for name in names
        if name in shapes
    ]
    return found[0], found[-1]


def greedy_chain(drafter: TinyDFlash, logits: Array, last: int) -> Sequence[int]:
    """The drafts that llama.cpp's driver takes of DFlash and DSpark: the most likely tokens."""
    chain = list[int]()
    before = last
    for slot in range(drafter.first, len(logits)):
        row = logits[slot] + (drafter.bias(before) if drafter.generation == "dspark" else 0.0)
        before = int(row.argmax())
        chain.append(before)
    return chain


def _rms(values: Array, weight: Array) -> Array:
    return values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + _EPS) * weight
