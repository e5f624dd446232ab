"""Tiny tokenizers of every kind that models have, trained on this project's sources."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from specrun.convert.tokenizer.pre_tokenizer import _SHAPES

# Mixed scripts, digits, runs of whitespace, emoji, code, special tokens as text.
NASTY = (
    "Grüße an 東京, Привет мир! हिन्दी ไทย 안녕 שלום\n\n\n \t 3 33 3333.14 1,000,000  x   y\r\n"
    "👩‍👩‍👧‍👦🏳️‍🌈 naïve café Ⅷ ½ ² don't I'LL we've 'S\n\tdef f(self, *args) -> int:\n        "
    "return a[0]//2  # ok\n"
    "https://example.org/?q=a%20b&c=~d <|user|> <s></s><unk> <0x0A> a▁b <pad> "
    "[INST]\u00a0\u3000end  "
)
CONTROLS = ("<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
_WORLD = "Grüße Привет мир 東京 안녕하세요 naïve café 3.14 1000 don't we've\n" * 4


@cache
def corpus() -> list[str]:
    """Lines to train on."""
    folder = Path(__file__).resolve().parents[2] / "runtime"
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    return [*text.splitlines()[:2000], *_WORLD.splitlines()]


def _pre_tokenizer(name: str) -> Any:
    stages = next(stages for stages, known in _SHAPES.items() if known == name)
    built: list[Any] = []
    for kind, detail in stages:
        if kind == "Split":
            built.append(pre_tokenizers.Split(Regex(detail), "isolated"))
        elif kind == "Digits":
            built.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            built.append(
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=detail == "regex")
            )
    return built[0] if len(built) == 1 else pre_tokenizers.Sequence(built)


@cache
def byte_level(name: str, size: int = 600) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer that splits as llama.cpp's pre-tokenizer `name` does, three
    control tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 4, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(list(CONTROLS))
    tokenizer.add_tokens(["<tool>"])
    names: dict[str, Any] = {"eos_token": "<|end|>"}
    if name in ("llama-bpe", "tekken"):
        names["bos_token"] = "<|user|>"
        bos = ("<|user|>", tokenizer.token_to_id("<|user|>"))
        template = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[bos])
        tokenizer.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), template]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **names)


@cache
def sentencepiece_bytes(size: int = 600, **options: Any) -> bytes:
    """A tokenizer.model: BPE with byte tokens; `options` are SentencePiece's."""
    model = io.BytesIO()
    usual: dict[str, Any] = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "character_coverage": 0.99,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        vocab_size=size,
        **{**usual, **options},
    )
    return model.getvalue()


def llama_style(folder: Path) -> PreTrainedTokenizerBase:
    """Llama 2's kind as published: a space before each text, bos added; tokenizer.model is left in
    `folder`."""
    tokenizer = newer_llama_style(folder).backend_tokenizer
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = None
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **names)


def newer_llama_style(folder: Path) -> PreTrainedTokenizerBase:
    """The same tokens as transformers 5 splits text into: a space before what does not begin with
    one."""
    (folder / "tokenizer.model").write_bytes(sentencepiece_bytes())
    found = LlamaTokenizer.from_pretrained(folder, add_bos_token=True, chat_template=TEMPLATE)
    found.add_special_tokens({"additional_special_tokens": list(CONTROLS)})
    found.add_tokens([AddedToken("<tool>", normalized=False)])
    return found


def gemma_style(folder: Path) -> PreTrainedTokenizerBase:
    """Gemma's kind: no space before the text, runs of newlines as tokens; tokenizer.model is left
    in `folder`."""
    special = {
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
    }
    tokens = ("<mask>", "<start_of_turn>", "<end_of_turn>", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁")
    data = sentencepiece_bytes(add_dummy_prefix=False, user_defined_symbols=tokens, **special)
    (folder / "tokenizer.model").write_bytes(data)
    return GemmaTokenizer.from_pretrained(folder, add_bos_token=True, chat_template=TEMPLATE)
