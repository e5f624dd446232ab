"""Drafters of every method over tiny models: `DRAFTERS`, and the files they read (`write_all`)."""

from __future__ import annotations

from pathlib import Path

from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.drafters.retrieval import build_store
from specrun.runtime.language import quoted
from support.tiny_dflash import TinyDFlash
from support.tiny_eagle import random_eagle
from support.tiny_eagle3 import random_eagle3
from support.tiny_gemma4 import TinyAssistant, TinyGemma4
from support.tiny_heads import random_medusa
from support.tiny_hybrids import write_tiny_lfm2, write_tiny_nemotron_h
from support.tiny_hydra import random_hydra
from support.tiny_lookahead import random_embeddings, write_lookahead
from support.tiny_models import CHAT
from support.tiny_nextn import TinyNextN, write_tiny_qwen35

_HIDDEN, _VOCAB = 32, 320

HEADS = [
    ("shallow", "eagle(FILE:eagle, n=4)"),
    ("shallow", "eagle(FILE:eagle, depth=4, topk=2, nodes=6)"),
    ("shallow", "eagle(FILE:eagle, tree=2x2x1, sampling=without)"),
    ("shallow", "eagle(FILE:eagle, depth=3, topk=2, nodes=auto)"),
    ("shallow", "eagle(FILE:eagle, n=4, draft_tokens=120)"),
    ("shallow", "eagle(FILE:eagle, tree=2x2, sampling=with, draft_tokens=120)"),
    ("deep", "eagle3(FILE:eagle3, n=4)"),
    ("deep", "eagle3(FILE:eagle3, depth=3, topk=3, nodes=7)"),
    ("deep", "eagle3(FILE:eagle3, depth=3, topk=2, nodes=5, window=7)"),
    ("shallow", "hydra(FILE:hydra, n=3)"),
    ("shallow", "hydra(FILE:hydra++, n=3)"),
    ("shallow", "hydra(FILE:hydra++, tree=2x2x1)"),
    ("shallow", "hydra(FILE:hydra++, depth=3, topk=2, nodes=6)"),
    ("shallow", "dflash(FILE:dflash, n=4)"),
    ("shallow", "dflash(FILE:dflash2, topk=2, nodes=auto)"),
    ("shallow", "dflash(FILE:dflash2, tree=2x2x1, sampling=without)"),
    ("shallow", "dflash(FILE:dspark, depth=4, topk=2, nodes=6)"),
    ("shallow", "dflash(FILE:dspark, n=3, sampling=with)"),
    ("shallow", "dflash(FILE:dspark, n=3, sampling=with, window=7)"),
    ("shallow", "dflash(FILE:dspark of few tokens, tree=2x2)"),
    ("shallow", "medusa(FILE:medusa, tree=3x2x1)"),
    ("shallow", "medusa(FILE:medusa, nodes=auto)"),
    ("nextn", "mtp(n=4)"),
    ("nextn", "mtp(n=3, sampling=with)"),
    ("nextn", "mtp(FILE:blocks, n=3)"),
    ("nextn", "mtp(tree=2x2x1, sampling=without)"),
    ("nextn", "mtp(depth=3, topk=2, nodes=auto)"),
    ("two blocks", "mtp(n=2)"),
    ("two blocks", "mtp(tree=2x2)"),
    ("gemma4", "mtp(FILE:assistant, n=3)"),
    ("gemma4", "mtp(FILE:assistant, tree=2x2x1, sampling=without)"),
]
"""Drafters with heads, and the targets that they read."""

LOOKAHEAD = [
    "pass(FILE:pass, n=2)",
    "pass(FILE:pass, below=last, sampling=with)",
    "space(FILE:space, n=2, sampling=with)",
]
"""Those that the target drafts itself, at look-ahead positions of the evaluation before."""

MODELS = [
    "none",
    "draft(FILE:twin, n=4)",
    "draft(FILE:twin, n=4, p_min=adaptive)",
    "draft(FILE:twin, tree=2x2)",
    "draft(FILE:twin, depth=3, topk=2, nodes=5)",
    "draft(FILE:twin, depth=3, topk=2, nodes=auto)",
    "draft(FILE:twin, n=4, vocabulary=tokens)",
    "draft(FILE:twin, tree=2x2, vocabulary=tokens)",
    "draft(FILE:twin, n=4, vocabulary=text)",
    "partial(sink=2, window=5, n=4)",
    "partial(sink=2, window=7, tree=2x2)",
    "partial(sink=2, window=5, chunks=2, chunk=3, n=4)",
    "partial(sink=0, window=7, depth=3, topk=2, nodes=5)",
    "early-exit(layers=1, n=3)",
]
"""Those without heads whose drafts follow from the text, of a target that can branch."""

LEARNING = [
    "prompt-lookup(min_ngram=1)",
    "prompt-lookup(min_ngram=1, reference=FILE:text)",
    "rest(FILE:store, min_match=1)",
    "ngram(order=2, n=4)",
    "ngram(order=3, file=FILE:text, n=3)",
    "jacobi",
    "jacobi(n=3, until=6)",
    "lookahead(window=2, ngram=4, guesses=3)",
]
"""Those that learn from one answer to the next what helps to draft."""

COMBINED = [
    "cascade(draft(FILE:twin, n=6), draft(FILE:small, tree=2x2))",
    "cascade(draft(FILE:twin, n=6), prompt-lookup(min_ngram=1))",
    "cascade(partial(sink=2, window=8, n=4), draft(FILE:small, n=3))",
    "cascade(partial(window=8, chunks=2, chunk=4, n=4), prompt-lookup(min_ngram=1))",
    "cascade(draft(FILE:twin, n=6), ngram(n=3))",
    "relay(draft(FILE:twin)@2, draft(FILE:small)@3)",
    "ensemble(draft(FILE:twin), ngram(order=3, n=3))",
    "ensemble(draft(FILE:twin), prompt-lookup(min_ngram=1), lookahead(window=2, ngram=4))",
    "ensemble(pass(FILE:pass, n=2), draft(FILE:twin, n=2))",
    "ouroboros(draft(FILE:twin, n=3))",
    "auto(draft(FILE:twin), prompt-lookup(min_ngram=1), none)",
    "auto(cascade(draft(FILE:twin), draft(FILE:small)), medusa(FILE:medusa, tree=2x1))",
]

DRAFTERS = [
    *(("shallow", drafter) for drafter in (*MODELS, *LOOKAHEAD, *LEARNING, *COMBINED)),
    *HEADS,
    ("hybrid", "none"),
    ("hybrid", "mtp(n=3)"),
    ("hybrid", "dflash(FILE:dspark for hybrids, n=3)"),
    ("qwen35moe", "mtp(n=3)"),
    ("lfm2", "jacobi(n=3, always=yes)"),
    ("nemotron_h", "jacobi(n=3, always=yes)"),
]


def write_all(folder: Path) -> dict[str, Path]:
    """Write tiny models, heads and stores into a folder; return them by name."""
    nextn = TinyNextN(agreement=1.0, strength=0.2, seed=2)
    files = {name: folder / f"{name}.gguf" for name in ("shallow", "deep", "twin", "small")}
    for name, changes in {
        "shallow": {},
        "deep": {"layers": 6},
        "twin": {"scale": 2.0},
        "small": {"width": 16, "layers": 1, "seed": 1},
    }.items():
        write_random_llama(files[name], RandomLlama(**{**CHAT, **changes}))
    heads = {
        "eagle": random_eagle(_HIDDEN).write(folder / "eagle.gguf", _VOCAB),
        "eagle3": random_eagle3(_HIDDEN, _VOCAB).write(folder / "eagle3.gguf", files["deep"]),
        "hydra": random_hydra(_HIDDEN, _VOCAB).write(folder / "hydra.gguf", _VOCAB),
        "hydra++": random_hydra(_HIDDEN, _VOCAB, prefix=True).write(
            folder / "hydra++.gguf", _VOCAB
        ),
        **{
            name: TinyDFlash(name).write(folder / f"{name}.gguf", files["shallow"])
            for name in ("dflash", "dflash2", "dspark")
        },
        "dspark of few tokens": TinyDFlash("dspark", draft_tokens=90).write(
            folder / "dspark90.gguf", files["shallow"]
        ),
        "medusa": random_medusa(_HIDDEN, _VOCAB).write(folder / "medusa.gguf", _VOCAB),
        "pass": write_lookahead(folder / "pass.gguf", random_embeddings(_HIDDEN, 3), _VOCAB),
        "space": write_lookahead(
            folder / "space.gguf",
            random_embeddings(_HIDDEN, 1),
            _VOCAB,
            kind="space",
            position_count=3,
        ),
        "nextn": nextn.write(folder / "nextn.gguf"),
        "two blocks": TinyNextN(blocks=2, seed=1).write(folder / "two blocks.gguf"),
        "blocks": nextn.write_blocks_only(folder / "blocks.gguf"),
        "gemma4": TinyGemma4(strength=0.05).write(folder / "gemma4.gguf"),
        "assistant": TinyAssistant(strength=0.05).write(folder / "assistant.gguf"),
        "hybrid": write_tiny_qwen35(folder / "hybrid.gguf", blocks=1),
        "qwen35moe": write_tiny_qwen35(folder / "qwen35moe.gguf", blocks=1, experts=4),
        "lfm2": write_tiny_lfm2(folder / "lfm2.gguf"),
        "nemotron_h": write_tiny_nemotron_h(folder / "nemotron_h.gguf"),
    }
    for_hybrids = TinyDFlash("dspark", width=64, taps=(0, 1, 3), mrope=True)
    heads["dspark for hybrids"] = for_hybrids.write(folder / "dspark64.gguf", heads["hybrid"])
    text, store = folder / "text.txt", folder / "docs.store"
    text.write_text("To be, or not to be, that is the question. To be, or not to sleep.\n" * 3)
    with Model(files["shallow"], vocab_only=True) as model:
        build_store([text], model.vocabulary, store, model="target")
    return {**files, **heads, "text": text, "store": store}


def named(expression: str, files: dict[str, Path]) -> str:
    """Return a drafter's expression with paths in the place of FILE:name."""
    for name, path in sorted(files.items(), reverse=True):  # "hydra++" before "hydra"
        expression = expression.replace(f"FILE:{name}", quoted(str(path)))
    return expression
