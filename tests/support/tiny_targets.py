"""A tiny Llama that has learnt a few answers by heart: folder, GGUF file, data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specrun.convert import convert_checkpoint
from specrun.train.data.documents import read_documents
from specrun.train.data.tokens import TargetTokenizer
from support.tiny_tokenizers import byte_level

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ANSWERS = {
    "first?": "The first of all was made of stone and stood alone.",
    "second?": "Two of them went down to the river at night.",
    "third?": "A third would never say what it had seen there.",
    "fourth?": "Four winds blow over the hill and none of them rests.",
    "fifth?": "Every fifth word is a lie, says the old book.",
    "last?": "In the end there is but one, and it sleeps.",
}
LAYERS, HIDDEN = 4, 64


@dataclass(frozen=True)
class TaughtTarget:
    """`folder` is the checkpoint, `gguf` the same in F32, `data` the chats it has learnt."""

    folder: Path
    gguf: Path
    data: Path


def write_untaught(
    folder: Path, *, size: int = 400, seed: int = 0, **changes: object
) -> LlamaForCausalLM:
    """Write a checkpoint with random weights and a tokenizer of `size` tokens; return the model."""
    tokenizer = byte_level("gpt-2", size)
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": TEMPLATE})
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return model


def write_chats(path: Path) -> Path:
    """Write the questions and answers, one object a line."""
    lines = [
        json.dumps({"prompt": question, "answer": answer}) for question, answer in ANSWERS.items()
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_taught(folder: Path, steps: int = 90) -> TaughtTarget:
    """Train a checkpoint on its answers until it says them by heart, and convert it."""
    model = write_untaught(folder / "target")
    data = write_chats(folder / "chats.jsonl")
    tokenizer = TargetTokenizer(folder / "target")
    sequences = [tokenizer.encode(document) for document in read_documents([data])]
    length = max(map(len, sequences))
    ids = torch.zeros(len(sequences), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, sequence in enumerate(sequences):
        tokens = torch.from_numpy(sequence.ids.astype("int64"))
        ids[row, : len(sequence)] = tokens
        labels[row, : len(sequence)] = torch.where(torch.from_numpy(sequence.learnt), tokens, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, 2 * (1 - step / steps))
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert loss.item() < 0.05, f"the tiny target did not learn its answers: loss {loss.item():.3f}"
    model.save_pretrained(folder / "target")
    gguf = folder / "target.gguf"
    convert_checkpoint(folder / "target", gguf, outtype="f32", verify=False)
    return TaughtTarget(folder / "target", gguf, data)
