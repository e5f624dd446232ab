"""The torch Llama, its optimizer, how it is trained, and its files."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from support.saved_llama import load_folder
from support.tiny_family import all_in_one, tiny_settings

from family.conversations import encode, turn
from family.llama import Llama, LlamaLearner, next_labels
from family.tokenizer import save_folder, train_tokenizer
from specrun.bench.drafters.corpus import Entry
from specrun.train.heads.layers import rope_angles, rotate
from specrun.train.target.shape import ModelShape
from specrun.train.trainer.optimizer import Muon, orthogonalize
from specrun.train.trainer.trainer import load_state, train_learner

SHAPE = ModelShape(vocab_size=300, hidden=64, n_layers=2, feed_forward=128, n_heads=2, n_kv_heads=2)
ENTRIES = [
    Entry("one.first", "function", None, "Return the very first thing."),
    Entry("two.second", "function", None, "Delete all that came second."),
    Entry("three.third", "function", None, "Wait until a third appears."),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([entry.sentence for entry in ENTRIES] * 2, vocab_size=300)


@pytest.fixture(scope="module")
def corpus(tokenizer):
    return all_in_one(
        [
            encode(turn(f"What does {entry.name} do?", entry.sentence), tokenizer)
            for entry in ENTRIES
        ]
    )


class Epochs:
    """Other texts in every epoch, read twice; `stop` ends the run when its epoch is asked for."""

    def __init__(self, corpus, stop=None):
        self.corpus, self.stop, self.asked = corpus, stop, []

    def epoch(self, number):
        self.asked.append(number)
        if number == self.stop:
            raise KeyboardInterrupt
        return replace(self.corpus, training=((0, 1, 2), (1, 2), (2, 0))[number % 3])


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
    cos, sin = rope_angles(torch.arange(40), SHAPE.head_size, SHAPE.rope_theta)
    query, key = torch.randn(2, SHAPE.head_size, generator=torch.Generator().manual_seed(1))

    def score(query_position, key_position):
        rotated = [
            rotate(
                states.view(1, 1, 1, -1), cos[position : position + 1], sin[position : position + 1]
            ).flatten()
            for states, position in ((query, query_position), (key, key_position))
        ]
        return float(rotated[0] @ rotated[1])

    assert score(5, 2) == pytest.approx(score(33, 30), abs=1e-4)
    assert score(0, 0) == pytest.approx(float(query @ key), abs=1e-4)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


def test_rope_turns_by_the_stated_angle():
    cos, sin = rope_angles(torch.arange(4), SHAPE.head_size, SHAPE.rope_theta)
    states = torch.zeros(SHAPE.head_size)
    states[0] = 1.0
    turned = rotate(states.view(1, 1, 1, -1), cos[3:4], sin[3:4]).flatten()
    assert float(turned[0]) == pytest.approx(float(torch.cos(torch.tensor(3.0))))
    assert float(turned[SHAPE.head_size // 2]) == pytest.approx(float(torch.sin(torch.tensor(3.0))))


def test_the_loss_counts_only_what_is_learnt(corpus):
    model = Llama(SHAPE)
    batch = corpus.batch((0, 1, 2))
    labels = next_labels(batch)
    wanted = labels >= 0
    assert int(wanted.sum()) == int(batch.learnt.sum())
    by_hand = (
        -torch.log_softmax(model(batch.ids[:, :-1])[wanted], -1)
        .gather(1, labels[wanted][:, None])
        .mean()
    )
    (part,) = LlamaLearner(model).losses(batch, torch.Generator(), 0)
    torch.testing.assert_close(part.value, by_hand)
    assert part.plain == pytest.approx(float(by_hand.detach()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_muon_is_the_orthogonalized_momentum(dtype):
    weights = torch.nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(4)))
    optimizer = Muon([weights], lr=0.1, dtype=dtype)
    momentum, expected = torch.zeros(8, 4), weights.detach().clone()
    for step in range(3):
        weights.grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        momentum = 0.95 * momentum + 0.05 * weights.grad
        update = 0.05 * weights.grad + 0.95 * momentum  # Nesterov's
        expected -= 0.1 * 0.2 * 8**0.5 * orthogonalize(update[None].to(dtype))[0].float()
        optimizer.step()
    torch.testing.assert_close(
        weights.detach(), expected, atol=1e-5 if dtype == torch.float32 else 3e-3, rtol=0
    )


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 32, 128), (2, 128, 32)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.median() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 32, 128), (2, 128, 32), (1, 40, 50)])
def test_orthogonalizing_is_a_polynomial_of_the_singular_values(shape):
    """By definition, in float64, of matrices whose singular values fall to a ten-thousandth."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    left, _, right = torch.linalg.svd(noise.double(), full_matrices=False)
    values = torch.logspace(0, -4, left.shape[-1], dtype=torch.float64)
    wanted = values / values.norm()
    for _ in range(5):
        wanted = 3.4445 * wanted - 4.7750 * wanted**3 + 2.0315 * wanted**5
    found = orthogonalize((left * values @ right).float())
    torch.testing.assert_close(found.double(), left * wanted @ right, atol=1e-3, rtol=0)
    fewer = orthogonalize((left * values @ right).float(), steps=4)
    assert (fewer.double() - left * wanted @ right).abs().max() > 1e-2


def test_rates_warm_up_stay_and_fall():
    settings = tiny_settings(steps=1000, warmup_steps=100)
    assert settings.rate_factor(0) == pytest.approx(1 / 101)
    assert settings.rate_factor(300) == 1.0
    assert settings.rate_factor(750) == pytest.approx(0.5)
    assert settings.rate_factor(999) == pytest.approx(0.002)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_tiny_model_learns_three_sentences(corpus, optimizer):
    settings = replace(
        tiny_settings(steps=60, warmup_steps=5, learning_rate=0.01), matrix_optimizer=optimizer
    )
    curves = train_learner(LlamaLearner(Llama(SHAPE)), Epochs(corpus), settings).curves
    assert curves.losses[-1] < 0.05 < 2.0 < curves.losses[0]
    assert curves.measures == [(60, {"exact": 1.0, "tokens": 1.0})]


def test_an_untrained_model_knows_nothing(corpus):
    recall = LlamaLearner(Llama(SHAPE)).measure([corpus.batch((0, 1)), corpus.batch((2,))])
    assert recall["exact"] == 0.0
    assert recall["tokens"] < 0.2


def test_recall_counts_answers_and_tokens(corpus):
    class Sure(torch.nn.Module):
        """Says what stands in the text, but for the last token of the second answer."""

        def forward(self, ids):
            following = labels.clamp(min=0).clone()
            last = int((labels[1] >= 0).nonzero()[-1])
            following[1, last] += 1
            return torch.nn.functional.one_hot(following, 300)

    learner, batch = LlamaLearner(Llama(SHAPE)), corpus.batch((0, 1, 2))
    labels = next_labels(batch)
    learner.model = Sure()
    n_tokens = int((labels >= 0).sum())
    assert learner.measure([batch]) == {"exact": 2 / 3, "tokens": (n_tokens - 1) / n_tokens}


def test_resumed_training_is_uninterrupted_training(corpus, tmp_path):
    """With Muon, whose momentum is part of the checkpoint, and other texts in every epoch: bit by
    bit."""
    settings = replace(tiny_settings(steps=13, warmup_steps=3), tokens_per_batch=40)
    whole = Llama(SHAPE)
    expected = train_learner(LlamaLearner(whole), Epochs(corpus), settings)
    path = tmp_path / "state.pt"
    with pytest.raises(KeyboardInterrupt):
        train_learner(LlamaLearner(Llama(SHAPE)), Epochs(corpus, stop=3), settings, path)
    stopped = load_state(path)
    assert stopped["place"]["step"] > 3
    assert {"optimizer", "muon"} <= stopped.keys()
    resumed, texts = Llama(SHAPE, seed=5), Epochs(corpus)
    rest = train_learner(LlamaLearner(resumed), texts, settings, path, resume=True)
    assert texts.asked[0] == 3  # texts of earlier epochs are not drawn again
    assert rest.resumed_at == stopped["place"]["step"]
    assert rest.curves == expected.curves
    assert rest.tokens == expected.tokens
    for name, weights in whole.state_dict().items():
        assert torch.equal(weights, resumed.state_dict()[name]), name
    again = train_learner(LlamaLearner(Llama(SHAPE)), Epochs(corpus), settings, path, resume=True)
    assert (again.resumed_at, again.curves) == (13, expected.curves)


def test_a_plateau_may_be_lengthened(corpus, tmp_path):
    path = tmp_path / "state.pt"
    longer = tiny_settings(steps=12, warmup_steps=1)
    expected = train_learner(LlamaLearner(Llama(SHAPE)), Epochs(corpus), longer).curves.losses
    with pytest.raises(KeyboardInterrupt):
        train_learner(
            LlamaLearner(Llama(SHAPE)), Epochs(corpus, stop=2), replace(longer, steps=20), path
        )
    rest = train_learner(
        LlamaLearner(Llama(SHAPE)), Epochs(corpus), longer, path, resume=True
    ).curves.losses
    assert rest[:2] == pytest.approx(expected[:2])
    assert len(rest) == 12


def test_only_hidden_matrices_are_muons(corpus):
    matrices, others = LlamaLearner(Llama(SHAPE)).groups()
    assert (matrices.hidden_matrices, others.hidden_matrices) == (True, False)
    assert {weights.ndim for weights in matrices.parameters} == {2}
    assert sorted(weights.ndim for weights in others.parameters) == [1] * 5 + [
        2
    ]  # norms, and the embedding


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
        "config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
