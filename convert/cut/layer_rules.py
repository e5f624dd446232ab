"""Layer rules: the parts that llama.cpp gives to layers by their numbers, per architecture.

Most architectures treat all layers alike, and have differences one by one in the file: those can
be cut anywhere. Some derive it from a layer's number (every fourth layer without rope), or from how
many layers there are (Gemma 3 of 62 layers scales its attention otherwise). A cut moves layers to
other numbers, so it is right exactly if every layer kept plays its earlier part; if the part
can be written into the file instead, it is.

The facts are those of the llama.cpp that llama-cpp-python 0.3.36 builds: `load_arch_hparams` and
the graphs in src/models/*.cpp, `load_swa_pattern` and the cache's reuse of layers in
src/llama-model.cpp. An architecture that is not here is not known, and its models are not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from specrun.bindings.gguf import ArrayValue, MetadataValue


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A model's metadata as rules read it; `n_layers` without the NextN layers at the end."""

    architecture: str
    metadata: Mapping[str, MetadataValue]
    n_layers: int

    def number(self, key: str, default: int = 0) -> int:
        """Return a whole number of the architecture's own keys, or `default`."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, int) else default

    def array(self, key: str) -> list[int] | None:
        """Return an array of the architecture's own keys, None if the file has none."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return [int(item) for item in value] if isinstance(value, ArrayValue) else None


@dataclass(frozen=True, slots=True)
class Period:
    """A pattern by layer number that the file may replace by an array with one value a layer.

    `key` holds the array; `period_key` may hold another length than `every`. One layer of each
    period is the exception: the last, or the first if `exception_first`. `needs` is a key
    without which, or with 0, there is no pattern at all.
    """

    key: str
    period_key: str
    every: int
    exception_first: bool = False
    needs: str = ""

    def values(self, facts: LayerFacts) -> list[bool] | None:
        """Return [n_layers] flags, False at the exceptions; None if the model has no pattern."""
        if self.needs and not facts.number(self.needs):
            return None
        stated = facts.array(self.key)
        if stated is not None:
            return [bool(flag) for flag in stated[: facts.n_layers]]
        every = facts.number(self.period_key, self.every)
        exception = 0 if self.exception_first else every - 1
        return [every == 0 or layer % every != exception for layer in range(facts.n_layers)]


Role = Callable[[LayerFacts, int], Hashable]
"""llama.cpp's treatment of a layer because of its number; it must be the same after a cut."""


@dataclass(frozen=True, slots=True)
class LayerRules:
    """How the layers of an architecture depend on their numbers.

    `patterns` can be written as arrays, `roles` cannot. `counts` are sets of layer counts that
    llama.cpp treats as models of another kind. `exit_only` is why only layers at the end may go,
    `refuse` why none may.
    """

    patterns: tuple[Period, ...] = ()
    roles: tuple[Role, ...] = ()
    counts: tuple[frozenset[int], ...] = ()
    exit_only: str = ""
    refuse: Callable[[LayerFacts], str] = lambda _facts: ""

    def kind_of(self, n_layers: int) -> int:
        """Return which of `counts` a model of so many layers belongs to, -1 for none."""
        return next((index for index, counts in enumerate(self.counts) if n_layers in counts), -1)

    def roles_of(self, facts: LayerFacts, layer: int) -> Hashable:
        """Return all properties of a layer that its number decides and no array can hold."""
        return tuple(role(facts, layer) for role in self.roles)


_WINDOW, _RECURRENT = "attention.sliding_window_pattern", "attention.recurrent_layers"


def _windows(every: int, *, full_first: bool = False, always: bool = False) -> LayerRules:
    needs = "" if always else "attention.sliding_window"
    return LayerRules((Period(_WINDOW, _WINDOW, every, full_first, needs),))


_LINEAR_ATTENTION = LayerRules((Period(_RECURRENT, "full_attention_interval", 4),))


def _no_rope_every_fourth(_facts: LayerFacts, layer: int) -> Hashable:
    return (layer + 1) % 4 == 0


def _chunked_without_rope(facts: LayerFacts, layer: int) -> Hashable:
    # Llama 4: a window of 0 in the file means rope everywhere; no key means the usual pattern.
    return facts.number("attention.sliding_window", 1) != 0 and (layer + 1) % 4 == 0


def _windowed_without_rope(facts: LayerFacts, layer: int) -> Hashable:
    return facts.number("attention.sliding_window") > 0 and layer % 4 == 0


def _experts_in_steps(facts: LayerFacts, layer: int) -> Hashable:
    step = facts.number("interleave_moe_layer_step")
    dense = facts.number("leading_dense_block_count")
    return step > 0 and layer >= dense and (layer + 1) % step == 0


def _first(_facts: LayerFacts, layer: int) -> Hashable:
    return layer == 0


def _always(reason: str) -> LayerRules:
    return LayerRules(refuse=lambda _facts: reason)


def _exit_only(reason: str) -> LayerRules:
    return LayerRules(exit_only=reason)


def _shares_between_layers(facts: LayerFacts) -> str:
    if facts.number("embedding_length_per_layer_input"):
        return "one table holds the embeddings of all its layers together"
    shares = facts.number("attention.shared_kv_layers")
    return "its last layers read the keys of earlier ones" if shares else ""


def _sees_pictures(facts: LayerFacts) -> str:
    mapped = facts.array("deepstack_mapping") or []
    return "pictures enter at some of its layers" if any(index >= 0 for index in mapped) else ""


_SPEECH = _always("it makes sounds, not text")
_HEAD = _always("it is a drafter made for one target")
_EARLIER_INDEX = "some of its layers use the selection of the layer before them"

_ALIKE = """
    " llama llama-embed deci falcon grok gpt2 gptneox mpt starcoder refact bloom stablelm qwen qwen2
    qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe phi2 phi3 phimoe plamo plamo2 codeshell orion
    internlm2 minicpm minicpm3 gemma starcoder2 mamba mamba2 maple jamba falcon-h1 xverse dbrx olmo
    olmoe openelm arctic deepseek deepseek2-ocr deepseek32 chatglm glm4 glm4moe bitnet jais jais2
    nemotron nemotron_h nemotron_h_moe exaone granitemoe granitehybrid chameleon plm bailingmoe
    bailingmoe2 bailingmoe3 dots1 arcee ernie4_5 paddleocr hunyuan-moe hunyuan-dense hunyuan_vl
    hy_v3 lfm2 lfm2moe dream llada llada-moe seed_oss grovemoe apertus minimax-m2 minimax-m3 cogvlm
    rnd1 pangu-embedded mistral3 mimo2 step35 spark2_5 maincoder kimi-linear talkie nanbeige
"""
_ENCODERS = """
    bert modern-bert nomic-bert nomic-bert-moe neo-bert eurobert jina-bert-v2 jina-bert-v3 t5encoder
    gemma-embedding clip
"""

RULES: Mapping[str, LayerRules] = {
    **dict.fromkeys(_ALIKE.split(), LayerRules()),
    # Sliding windows by layer number.
    "gemma2": LayerRules(_windows(2, always=True).patterns, counts=(frozenset({46}),)),
    "gemma3": LayerRules(_windows(6).patterns, counts=(frozenset({62}),)),
    **dict.fromkeys(("cohere2", "mellum", "muse-glimmer", "olmo2"), _windows(4)),
    **dict.fromkeys(("cohere2moe", "laguna"), _windows(4, full_first=True)),
    "exaone4": LayerRules(_windows(4).patterns, counts=(frozenset({64}),)),
    "exaone-moe": _windows(4, always=True),
    "gpt-oss": _windows(2),
    "plamo3": _windows(8),
    # Rope, or experts, by layer number.
    "afmoe": LayerRules(_windows(4).patterns, (_no_rope_every_fourth,)),
    "smallthinker": LayerRules(_windows(4, full_first=True).patterns, (_windowed_without_rope,)),
    "smollm3": LayerRules(roles=(_no_rope_every_fourth,)),
    "llama4": LayerRules(
        _windows(4, always=True).patterns, (_chunked_without_rope, _experts_in_steps)
    ),
    "ernie4_5-moe": LayerRules(roles=(_experts_in_steps,)),
    # Linear attention but for one layer in so many.
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _LINEAR_ATTENTION),
    "qwen4exp": LayerRules(
        _LINEAR_ATTENTION.patterns, exit_only="one of its layers reads a table of its own"
    ),
    # The number of layers identifies the model.
    "baichuan": LayerRules(counts=(frozenset({32}), frozenset({40}))),
    "command-r": LayerRules(counts=(frozenset(range(64, 513)),)),
    **dict.fromkeys(
        ("deepseek2", "mistral4"),
        LayerRules(counts=(frozenset({26, 27}), frozenset({47}), frozenset({48}))),
    ),
    # Later layers lean on earlier ones.
    **dict.fromkeys(
        ("rwkv6", "rwkv6qwen2"), _exit_only("its weights are scaled by the layer's number")
    ),
    **dict.fromkeys(("rwkv7", "arwkv7"), LayerRules(roles=(_first,))),
    "kimi-k3": _exit_only("its layers read the states of earlier blocks of layers"),
    "deepseek4": _exit_only("its first layers choose their experts by the token"),
    **dict.fromkeys(("glm-dsa", "glm5-next", "dots3note", "hy_v4"), _exit_only(_EARLIER_INDEX)),
    "gemma4": LayerRules(refuse=_shares_between_layers),
    **dict.fromkeys(("granite", "granite_swa"), LayerRules(refuse=_sees_pictures)),
    "gemma3n": _always("one table holds the embeddings of all its layers together"),
    "graniteswitch": _always("a layer after the last one steers its adapters"),
    "hrm_text": _always("it runs the same layers several times over"),
    "minimax-01": _always("its attention fades by the layer's number"),
    "t5": _always("it has an encoder and a decoder"),
    **dict.fromkeys(_ENCODERS.split(), _always("it is an encoder, which writes no text")),
    **dict.fromkeys(("wavtokenizer-dec", "qwen3tts", "pockettts"), _SPEECH),
    **dict.fromkeys(("eagle3", "dflash", "gemma4-assistant"), _HEAD),
}
