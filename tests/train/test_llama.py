"""The torch Llama, its optimizer, its loop and its files."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from saved_llama import load_folder

from specrun.train.batches import collate, encode
from specrun.train.checkpoint import save_folder
from specrun.train.conversations import turn
from specrun.train.corpus import Entry
from specrun.train.llama import Llama, LlamaShape, rope_tables, rotate
from specrun.train.loop import LoopSettings, rate_factor, train
from specrun.train.muon import orthogonalize
from specrun.train.recall import measure_recall
from specrun.train.tokenizer import train_tokenizer

SHAPE = LlamaShape(vocab_size=300, hidden_size=64, num_layers=2, intermediate_size=128, num_heads=2)
ENTRIES = [
    Entry("one.first", "function", None, "Return the very first thing."),
    Entry("two.second", "function", None, "Delete all that came second."),
    Entry("three.third", "function", None, "Wait until a third appears."),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([entry.sentence for entry in ENTRIES] * 2, vocab_size=300)


@pytest.fixture(scope="module")
def batches(tokenizer):
    samples = [encode(turn(f"What does {entry.name} do?", entry.sentence), tokenizer) for entry in ENTRIES]
    return [collate(samples), collate(samples[:2])]


@torch.no_grad()
def test_later_tokens_do_not_change_earlier_logits():
    model = Llama(SHAPE)
    ids = torch.randint(0, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 300
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_rope_scores_depend_on_distance_alone():
    cos, sin = rope_tables(SHAPE, 40)
    query, key = torch.randn(2, SHAPE.head_dim, generator=torch.Generator().manual_seed(1))

    def score(query_position, key_position):
        rotated = [
            rotate(states.view(1, 1, 1, -1), cos[position : position + 1], sin[position : position + 1]).flatten()
            for states, position in ((query, query_position), (key, key_position))
        ]
        return float(rotated[0] @ rotated[1])

    assert score(5, 2) == pytest.approx(score(33, 30), abs=1e-4)
    assert score(0, 0) == pytest.approx(float(query @ key), abs=1e-4)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


def test_rope_turns_by_the_stated_angle():
    cos, sin = rope_tables(SHAPE, 4)
    states = torch.zeros(SHAPE.head_dim)
    states[0] = 1.0
    turned = rotate(states.view(1, 1, 1, -1), cos[3:4], sin[3:4]).flatten()
    assert float(turned[0]) == pytest.approx(float(torch.cos(torch.tensor(3.0))))
    assert float(turned[SHAPE.head_dim // 2]) == pytest.approx(float(torch.sin(torch.tensor(3.0))))


def test_the_loss_counts_only_labelled_positions(batches):
    model = Llama(SHAPE)
    batch = batches[0]
    logits = model(batch.ids)
    wanted = batch.labels >= 0
    by_hand = -torch.log_softmax(logits[wanted], -1).gather(1, batch.labels[wanted][:, None]).mean()
    torch.testing.assert_close(model.loss(batch.ids, batch.labels), by_hand)


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 32, 128), (2, 128, 32)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.median() > 0.6
    assert values.max() < 1.3


def test_rates_warm_up_stay_and_fall():
    settings = LoopSettings(steps=1000, warmup_steps=100, decay=0.5)
    assert rate_factor(0, settings) == pytest.approx(0.01)
    assert rate_factor(300, settings) == 1.0
    assert rate_factor(750, settings) == pytest.approx(0.5)
    assert rate_factor(999, settings) == pytest.approx(0.002)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_tiny_model_learns_three_sentences(batches, tokenizer, optimizer):
    model = Llama(SHAPE)
    settings = LoopSettings(steps=60, warmup_steps=5, matrix_optimizer=optimizer)
    report = train(model, lambda epoch: batches, settings)
    assert report.losses[-1] < 0.05 < 2.0 < report.losses[0]
    assert measure_recall(model, ENTRIES, tokenizer).exact == 1.0


def test_an_untrained_model_knows_nothing(tokenizer):
    recall = measure_recall(Llama(SHAPE), ENTRIES, tokenizer)
    assert recall.exact == 0.0
    assert recall.tokens < 0.2


def test_resumed_training_is_uninterrupted_training(batches, tmp_path):
    settings = LoopSettings(steps=13, warmup_steps=3)
    whole = train(Llama(SHAPE), lambda epoch: batches, settings)
    path = tmp_path / "state.pt"
    calls = []

    def interrupted(epoch):
        if epoch == 3:
            raise KeyboardInterrupt
        return batches

    with pytest.raises(KeyboardInterrupt):
        train(Llama(SHAPE), interrupted, replace(settings, save_seconds=0.0), path)
    rest = train(Llama(SHAPE, seed=5), lambda epoch: batches, settings, path, calls.append)
    assert rest.losses == whole.losses[6:]
    assert calls == [2, 3, 4, 5]  # the interruption came before epoch 2 was reported
    assert replace(rest.progress, seconds=0.0) == replace(whole.progress, seconds=0.0)
    assert train(Llama(SHAPE), lambda epoch: batches, settings, path).losses == []


def test_saved_folders_look_like_hugging_faces(tokenizer, tmp_path):
    model = Llama(SHAPE, seed=3)
    save_folder(model, tokenizer, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 0
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    layer = {
        "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
        "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    }  # fmt: skip
    expected = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in layer}
    assert names == expected | {"model.embed_tokens.weight", "model.norm.weight"}
    ids = torch.arange(10)[None]
    torch.testing.assert_close(load_folder(tmp_path / "model")(ids), model(ids))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
