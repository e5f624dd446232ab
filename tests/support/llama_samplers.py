"""llama.cpp's own samplers over one row, chained as its `common_sampler_init` chains them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from llama_cpp import llama_cpp

from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime import SamplingParams

_ALL = 4096


class LlamaSamplers:
    """A chain of native samplers, freed by `close` or at the end of a `with`.

    `vocabulary` is where DRY looks up its breakers. XTC draws by `seed`.
    """

    def __init__(
        self, params: SamplingParams, size: int, vocabulary: Vocabulary | None = None, seed: int = 0
    ) -> None:
        native = llama_cpp
        self._chain = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
        self._params, self._size, self._seed, self._vocabulary = params, size, seed, vocabulary
        biases = (native.llama_logit_bias * len(params.logit_bias))(*params.logit_bias.items())
        self._add(native.llama_sampler_init_logit_bias(size, len(biases), biases))
        if params.mirostat:
            self._add(native.llama_sampler_init_temp(params.temperature))
            tau, eta = params.mirostat_ent, params.mirostat_lr
            if params.mirostat == 1:
                self._add(native.llama_sampler_init_mirostat(size, seed, tau, eta, 100))
            else:
                self._add(native.llama_sampler_init_mirostat_v2(seed, tau, eta))
            return
        for name in params.samplers:
            self._add(self._made(name))
        self._add(native.llama_sampler_init_dist(seed))  # the last one computes the probabilities

    def __enter__(self) -> LlamaSamplers:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_sampler_free(self._chain)

    def accept(self, tokens: Sequence[int]) -> None:
        """Let penalties see tokens of the text."""
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._chain, token)

    def law(self, logits: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the law of a row, dense, and the token that was drawn from it."""
        size = len(logits)
        data = (llama_cpp.llama_token_data * size)()
        cells = np.frombuffer(data, dtype=[("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
        cells["id"], cells["logit"] = np.arange(size), logits
        array = llama_cpp.llama_token_data_array(data, size, -1, False)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        kept = np.ctypeslib.as_array(array.data, (array.size,))
        law = np.zeros(size)
        law[kept["id"]] = kept["p"]
        return law, int(array.data[array.selected].id)

    def _add(self, sampler: object) -> None:
        llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def _made(self, name: str) -> object:
        native, params = llama_cpp, self._params
        match name:
            case "penalties":
                added = params.repeat_penalty, params.frequency_penalty, params.presence_penalty
                window = _ALL if params.repeat_last_n < 0 else params.repeat_last_n
                return native.llama_sampler_init_penalties(self._size, window, *added)
            case "dry":
                return self._dry()
            case "top_n_sigma":
                return native.llama_sampler_init_top_n_sigma(params.top_n_sigma)
            case "top_k":
                return native.llama_sampler_init_top_k(params.top_k)
            case "typ_p":
                return native.llama_sampler_init_typical(params.typical_p, 0)
            case "top_p":
                return native.llama_sampler_init_top_p(params.top_p, 0)
            case "min_p":
                return native.llama_sampler_init_min_p(params.min_p, 0)
            case "xtc":
                chance, threshold = params.xtc_probability, params.xtc_threshold
                return native.llama_sampler_init_xtc(chance, threshold, 0, self._seed)
        assert name == "temperature"
        warmth = params.temperature, params.dynatemp_range, params.dynatemp_exp
        return native.llama_sampler_init_temp_ext(*warmth)

    def _dry(self) -> object:
        params = self._params
        texts = [text.encode() for text in params.dry_sequence_breakers]
        breakers = (ctypes.c_char_p * len(texts))(*texts)
        handle = None if self._vocabulary is None else self._vocabulary._handle
        if handle is None:  # without breakers the vocabulary is not read
            breakers, texts = (ctypes.c_char_p * 0)(), []
        window = _ALL if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n
        return llama_cpp.llama_sampler_init_dry(
            handle,
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            window,
            breakers,
            len(texts),
        )
