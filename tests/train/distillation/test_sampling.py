"""Sampled answers: token by token the ones that the model's own laws and the given noise stand
for."""

import pytest
import torch

from specrun.train.target import sampling
from specrun.train.target.sampling import answers_as_they_end, in_order, uniform_numbers

PROMPTS = [[5, 9, 30], [7], [11, 12, 13, 14, 15, 16], [40, 41]]
N_LONGEST = 12


@pytest.fixture
def uniforms():
    return uniform_numbers([(0, row) for row in range(len(PROMPTS))], N_LONGEST)


def sample_answers(*arguments, **settings):
    return in_order(answers_as_they_end(*arguments, **settings))


@torch.no_grad()
def token_by_law(model, text, uniform, temperature):
    """The token at `uniform` of the law after a text, from a fresh evaluation without padding or
    cache."""
    logits = model.module(input_ids=torch.tensor([text])).logits[0, -1].double()
    cumulative = torch.softmax(logits / temperature, -1).cumsum(-1)
    return int((cumulative <= uniform * cumulative[-1]).sum())


def disagreements(model, answers, uniforms, temperature):
    """How many tokens of the answers are not the model's own."""
    return sum(
        token_by_law(model, prompt + answer[:place], float(uniforms[row, place]), temperature)
        != token
        for row, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))
        for place, token in enumerate(answer)
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_answers_are_drawn_from_the_models_own_laws(target, uniforms, temperature):
    answers = sample_answers(target, PROMPTS, uniforms, temperature=temperature, end_ids={0})
    assert disagreements(target, answers, uniforms, temperature) == 0
    assert {len(answer) for answer in answers} != {N_LONGEST}  # some ended by themselves
    assert all(0 not in answer[:-1] for answer in answers)


def test_answers_of_another_model_are_told_apart(target, draft, uniforms):
    answers = sample_answers(draft, PROMPTS, uniforms, temperature=1.0, end_ids={0})
    assert disagreements(draft, answers, uniforms, 1.0) == 0
    n_tokens = sum(map(len, answers))
    assert disagreements(target, answers, uniforms, 1.0) > 0.8 * n_tokens


def test_the_likeliest_tokens_are_those_that_transformers_generates(target, uniforms):
    answers = sample_answers(target, PROMPTS, uniforms, temperature=0.0, end_ids={0})
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        reference = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=N_LONGEST,
            do_sample=False,
            pad_token_id=0,
        )
        assert prompt + answer == reference[0].tolist()


def test_the_cache_grows_and_shrinks_as_transformers_own(target, uniforms, monkeypatch):
    """Room for two tokens at a time, and rows that end dropped at once: the same answers."""
    from transformers import DynamicCache

    from specrun.train.target import growing_cache

    wanted = sample_answers(target, PROMPTS, uniforms, temperature=1.0, end_ids=range(40))
    assert len({len(answer) for answer in wanted}) > 1
    monkeypatch.setattr(growing_cache, "_PIECE", 2)
    monkeypatch.setattr(sampling, "_WORTH_DROPPING", 0.0)
    grown = sample_answers(target, PROMPTS, uniforms, temperature=1.0, end_ids=range(40))
    assert grown == wanted
    monkeypatch.setattr(growing_cache, "growing_cache", lambda config: DynamicCache(config=config))
    assert sample_answers(target, PROMPTS, uniforms, temperature=1.0, end_ids=range(40)) == wanted


def test_an_answer_does_not_depend_on_the_others(target, uniforms):
    together = sample_answers(target, PROMPTS, uniforms, temperature=1.0, end_ids={0})
    for row, prompt in enumerate(PROMPTS):
        alone = sample_answers(
            target, [prompt], uniforms[row : row + 1], temperature=1.0, end_ids={0}
        )
        assert alone == [together[row]]


def test_barred_tokens_are_never_said(draft, uniforms):
    free = sample_answers(draft, PROMPTS, uniforms, temperature=1.0, end_ids=())
    assert max(token for answer in free for token in answer) >= 50
    barred = sample_answers(draft, PROMPTS, uniforms, temperature=1.0, end_ids=(), vocab_size=50)
    assert max(token for answer in barred for token in answer) < 50
    assert {len(answer) for answer in barred} == {N_LONGEST}


def test_a_model_in_training_samples_as_one_at_rest_and_stays_in_training(target, uniforms):
    at_rest = sample_answers(target, PROMPTS, uniforms, temperature=1.0, end_ids={0})
    target.module.train()
    try:
        assert sample_answers(target, PROMPTS, uniforms, temperature=1.0, end_ids={0}) == at_rest
        assert target.module.training
    finally:
        target.module.eval()


def test_noise_is_a_function_of_its_key():
    whole = uniform_numbers([(3, 1), (3, 2), (4, 1)], 5)
    assert torch.equal(uniform_numbers([(3, 2)], 5)[0], whole[1])
    assert len({tuple(row.tolist()) for row in whole}) == 3
    assert float(whole.min()) >= 0.0
    assert float(whole.max()) < 1.0


def test_no_prompts_have_no_answers(target):
    assert sample_answers(target, [], uniform_numbers([], 4), temperature=1.0, end_ids={0}) == []


def test_an_empty_prompt_is_refused(target, uniforms):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        sample_answers(target, [[5], []], uniforms[:2], temperature=1.0, end_ids={0})


@pytest.mark.parametrize("few", [1, 3, 6], ids="few={}".format)
@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_a_cut_law_gives_its_likeliest_tokens_alone_in_their_proportions(top_p, few, monkeypatch):
    """Every token of a law cut by hand has its share of evenly spread numbers; none has another.

    Whether the few tokens that are sorted first are enough of the law or not.
    """
    monkeypatch.setattr(sampling, "_FEW", few)
    logits = torch.tensor([0.3, -1.0, 2.0, 1.0, 2.0, -3.0])
    law = logits.double().softmax(-1)
    order = law.argsort(descending=True, stable=True).tolist()
    kept, mass = [], 0.0
    for token in order:
        if mass < top_p:
            kept.append(token)
            mass += float(law[token])
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = sampling._tokens_at(logits.expand(count, -1), uniforms, 1.0, top_p)
    shares = torch.bincount(drawn, minlength=len(law)).double() / count
    wanted = torch.zeros_like(law)
    wanted[kept] = law[kept] / mass
    assert torch.allclose(shares, wanted, atol=2 / count)
    assert set(drawn.tolist()) == set(kept) != set(range(len(law)))
