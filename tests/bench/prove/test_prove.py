"""`specrun prove`: sound pairs pass, and each check fails for the fault that it detects."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from support.commands import results_of, run
from support.mutated_source import IS_COMPILED, Mutant, mutated
from support.tiny_mamba import write_tiny_mamba
from support.tiny_models import F32
from support.tiny_nextn import write_tiny_qwen35
from support.wrong_rules import KeepsFirst

from specrun.bench.prove import rules, texts
from specrun.bench.prove.cache import check_cache, check_conversations
from specrun.bench.prove.prove import STEPS, Proof, ProofOptions, prove
from specrun.bench.prove.rules import WithoutResidual, check_rule
from specrun.bench.prove.setting import ALPHA, Check, Setting
from specrun.bench.prove.texts import check_faults, check_law, check_texts
from specrun.runtime.acceptance import exact
from specrun.runtime.engine import Runtime
from specrun.runtime.language import quoted
from specrun.runtime.laws import Law, SamplingParams
from specrun.runtime.round import CachedText, NoDrafter, Shape, TargetModel
from specrun.runtime.round import target as target_module
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees import DraftTree
from specrun.runtime.trees.layout import Move

pytestmark = pytest.mark.long

WRONG_CODE = [
    Mutant(
        "q-forgotten",
        exact,
        "share * law.probability(token) / draft_prob",
        "share * law.probability(token)",
    ),
    Mutant("residual-forgotten", exact, "else remaining.residual(draw.law)", "else remaining"),
]
SECONDS = 1e-3  # each check does its least


@pytest.fixture(scope="module")
def drafter(tiny_flat_twin: Path) -> str:
    return f"draft({quoted(str(tiny_flat_twin))}, tree=2x2)"


@pytest.fixture
def setting(tiny_model: Path, drafter: str) -> Iterator[Setting]:
    with Runtime(tiny_model, drafter, **{**F32, "n_ctx": 1024}) as runtime:
        yield Setting(runtime, 0, SECONDS)


def statuses(proof: Proof) -> dict[str, str]:
    return {check.name: check.status for check in proof.checks}


@pytest.mark.parametrize(
    ("shape", "accept"), [("free", "exact"), ("free", "kseq"), ("fixed", "exact")]
)
def test_a_sound_pair_passes(tiny_model: Path, drafter: str, shape: str, accept: str) -> None:
    options = F32 | ({"flash_attention": "on"} if shape == "fixed" else {})
    with Runtime(tiny_model, drafter, shape=shape, accept=accept, **options) as runtime:
        proof = prove(runtime, ProofOptions(SECONDS))
    wanted = dict.fromkeys((name for name, _ in STEPS), "passed")
    if shape == "fixed":
        wanted["conversations"] = "left out"
    assert statuses(proof) == wanted, proof
    assert proof.passed
    bounds = {check.name: check.bound for check in proof.checks}
    assert bounds["same text"] == (0.0 if shape == "fixed" else pytest.approx(2e-4, rel=1))
    assert bounds["cache"] == (0.0 if shape == "fixed" else 1e-4)
    found = [check for check in proof.checks if check.status == "passed"]
    assert all(check.times > 0 and check.control and check.false_alarm for check in found)


def test_a_lossy_rule_is_not_held_to_the_law(tiny_model: Path, drafter: str) -> None:
    with Runtime(tiny_model, drafter, accept="typical", **F32) as runtime:
        found = [check(Setting(runtime, 0, SECONDS)) for check in (check_rule, check_law)]
    assert [check.status for check in found] == ["left out", "left out"]
    assert all("typical" in check.note and "not exact" in check.note for check in found)


def test_a_rule_that_states_its_law_is_held_to_that(tiny_model: Path, tiny_drafter: Path) -> None:
    """Its texts are not plain decoding's at any temperature, but a fault must not change them."""
    drafter = f"draft({quoted(str(tiny_drafter))}, tree=2x2)"
    with Runtime(tiny_model, drafter, accept="cascade-token-v3(alpha=0.9)", **F32) as runtime:
        proof = prove(runtime, ProofOptions(SECONDS))
        greedy = SamplingParams(temperature=0.0)
        with Setting(runtime, 0, SECONDS).session(NoDrafter()) as plain:
            theirs = plain.stream([5, 6, 7], greedy, seed=0, max_tokens=24).drain().token_ids
        ours = runtime.generate([5, 6, 7], greedy, max_tokens=24).token_ids
    wanted = dict.fromkeys((name for name, _ in STEPS), "passed")
    assert statuses(proof) == wanted | {"distribution of texts": "left out"}
    assert ours != theirs  # or faults would prove nothing about such rules


def test_a_cascade_that_verifies_nothing_keeps_its_own_text_after_faults(
    tiny_model: Path, tiny_drafter: Path
) -> None:
    drafter = f"draft({quoted(str(tiny_drafter))}, n=3)"
    with Runtime(tiny_model, drafter, accept="token-cascade(alpha=0.9)", **F32) as runtime:
        found = statuses(prove(runtime, ProofOptions(SECONDS)))
    assert (found["cache"], found["same text"], found["faults"]) == ("passed",) * 3
    assert found["distribution of texts"] == found["conversations"] == "left out"


def test_a_recurrent_target_is_given_chains(tmp_path: Path) -> None:
    """Those of mamba are evaluated again where they are refused, in one conversation."""
    with Runtime(write_tiny_mamba(tmp_path / "mamba.gguf"), "jacobi(n=3)", **F32) as runtime:
        proof = prove(runtime, ProofOptions(SECONDS))
    found = statuses(proof)
    assert proof.passed, proof
    assert found["rule"] == found["cache"] == found["faults"] == "passed"
    assert found["conversations"] == "left out"


def test_a_state_that_can_be_rolled_back_takes_chains(tmp_path: Path) -> None:
    with Runtime(write_tiny_qwen35(tmp_path / "qwen35.gguf"), "mtp(n=4)", **F32) as runtime:
        setting = Setting(runtime, 0, SECONDS)
        found, together = check_cache(setting), check_conversations(setting)
    assert together.status == "passed", together
    assert found.status == "passed", found
    assert "no branches; a recurrent state takes chains only" in found.tested
    assert "trees" not in found.note


@pytest.mark.parametrize("shape", ["free", "fixed", 8])
def test_a_target_without_drafter(tiny_model: Path, shape: Shape) -> None:
    """Narrower than the usual chain is a fixed shape of no drafts."""
    with Runtime(tiny_model, "none", shape=shape, **F32) as runtime:
        setting = Setting(runtime, 0, SECONDS)
        found = [check(setting) for check in (check_cache, check_texts)]
    assert [check.status for check in found] == ["passed", "passed"], found


def test_a_context_too_small_for_a_text(tiny_model: Path) -> None:
    with Runtime(tiny_model, "none", **{**F32, "n_ctx": 100}) as runtime:
        proof = prove(runtime, ProofOptions(SECONDS), steps=[("cache", check_cache)])
    assert statuses(proof) == {"cache": "left out"}
    assert "raise the context size (-c)" in proof.checks[0].note


# -- the fault that each check detects -------------------------------------------------------------


def test_a_rule_that_forgets_the_residual_fails_twice(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the enumeration and 600 texts see it (chi-square of size 1e-4)."""
    sound = [check_rule(setting), check_law(setting)]
    monkeypatch.setattr(texts, "_LEAST_TEXTS", 600)
    setting.runtime.session.rule = WithoutResidual()
    found = [check_rule(setting), check_law(setting)]
    assert [check.status for check in sound] == ["passed", "passed"]
    assert [check.status for check in found] == ["failed", "failed"]


def test_what_is_enumerated_is_the_code_that_decides_rounds(setting: Setting) -> None:
    """By the settings under test, the default ones here, and by settings that cut nothing."""
    found = check_rule(setting)
    code = "compiled code" if IS_COMPILED else "Python"
    assert f"walks with distributions in {code}, " in found.tested
    assert "by temperature 0.8, top-k 40, top-p 0.95, min-p 0.05" in found.tested
    numbers = re.findall(r"([\d,]+) (?:by|without)", found.tested)
    assert min(int(number.replace(",", "")) for number in numbers) > 100
    setting.params = [SamplingParams(temperature=0.0), SamplingParams(top_k=2, min_p=0.0)]
    again = check_rule(setting)
    assert again.status == "passed"
    assert "temperature 0, top-k 40, top-p 0.95, min-p 0.05 and temperature 0.8" in again.tested


@pytest.mark.parametrize("mutant", WRONG_CODE, ids=str)
def test_a_wrong_rule_fails(setting: Setting, mutant: Mutant) -> None:
    """It is the one source with one expression changed: it is what the check enumerates."""
    setting.runtime.session.rule = mutated(mutant).BlockRule()
    proof = prove(setting.runtime, ProofOptions(SECONDS), steps=[("rule", check_rule)])
    assert statuses(proof) == {"rule": "failed"}


def test_a_stale_sibling_fails(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    moves_onto = target_module.moves_onto

    def keeps_strays(*arguments: object) -> tuple[Move, ...]:
        moves = moves_onto(*arguments)  # type: ignore[arg-type]
        return tuple(move._replace(strays=False) for move in moves)

    assert check_cache(setting).status == "passed"
    monkeypatch.setattr(target_module, "moves_onto", keeps_strays)
    found = check_cache(setting)
    assert found.status == "failed"
    assert "trees drift further than chains" in found.note
    assert found.figure is not None
    assert found.bound is not None
    assert found.figure > 10 * found.bound


def test_a_rule_that_keeps_drafts_changes_texts(setting: Setting) -> None:
    setting.runtime.session.rule = KeepsFirst()
    found = check_texts(setting)
    assert found.status == "failed"
    assert "part from plain decoding's" in found.note


def test_what_a_failed_round_leaves_behind_fails(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that, once an evaluation failed, has lost cells that it still takes for cached."""
    target = setting.runtime.session.target

    def loses(text: CachedText, tree: DraftTree) -> EvaluatedRows:
        try:
            return TargetModel.evaluate(target, text, tree)
        except BaseException:
            target.context.memory.truncate(3, 20)
            raise

    assert check_faults(setting).status == "passed"
    monkeypatch.setattr(texts, "_LEAST_FAULTS", 40)
    monkeypatch.setattr(target, "evaluate", loses)
    found = check_faults(setting)
    assert found.status == "failed"
    assert "are not a fresh session's" in found.note


def test_an_error_is_a_failure_and_ctrl_c_an_end(setting: Setting) -> None:
    def breaks(_: Setting) -> Check:
        raise ValueError("broken")

    def stops(_: Setting) -> Check:
        raise KeyboardInterrupt

    steps = [("a", breaks), ("b", stops), ("c", breaks)]
    proof = prove(setting.runtime, ProofOptions(SECONDS), steps=steps)
    assert statuses(proof) == {"a": "failed", "b": "left out", "c": "left out"}
    assert [check.note for check in proof.checks] == [
        "ValueError: broken",
        "interrupted",
        "interrupted",
    ]
    assert proof.interrupted
    assert not proof.passed


# -- figures ---------------------------------------------------------------------------------------


def test_how_close_two_tokens_were(setting: Setting) -> None:
    """At temperature 0 the difference of log-probabilities; else what would turn the same draw."""
    prompt = setting.prompts()[0]
    with setting.session(NoDrafter()) as plain:
        for temperature in (0.0, 1.3):
            text = texts.answer(plain, prompt, texts.sampled(temperature), 5)
            assert texts.parting(plain, prompt, (text, text), temperature, 5) is None
            assert texts.parting(plain, prompt, (text[:-1], text), temperature, 5) == math.inf
        text = texts.answer(plain, prompt, texts.sampled(0.0), 5)
        law = texts.plain_law(plain, prompt, texts.sampled(1.0))
        best, second = np.argsort(-law.probs)[:2].tolist()
        assert text[0] == best
        gap = math.log(law.probs[best] / law.probs[second])
        found = texts.parting(plain, prompt, ([second, *text[1:]], text), 0.0, 5)
        assert found == pytest.approx(gap)


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 47, 100])
def test_the_tail_of_chi_square(freedom: int) -> None:
    for statistic in (0.0, 0.1, 5.0, 60.0, 200.0):
        wanted = stats.chi2.sf(statistic, freedom)
        assert texts.chi_square_tail(statistic, freedom) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("size", "evenness"), [(12, 0.5), (3000, None)])
def test_the_chi_square_test_keeps_its_size(size: int, evenness: float | None) -> None:
    """Texts drawn from the laws themselves: of 100 tests at size 5 %, 5 are expected to reject.

    More than 17 have probability below 1e-5 (binomial); a law at 1.5 times the temperature is
    rejected each time.
    """
    source = np.random.default_rng(3)

    def law_after(prefix: tuple[int, ...]) -> Law:
        own = np.random.default_rng([7, *prefix])
        if evenness is None:  # Zipf's: many rare tokens
            weights = own.permutation(1.0 / np.arange(1, size + 1))
            return Law(weights / weights.sum())
        return Law(own.dirichlet(np.full(size, evenness)))

    n_texts, rejected = 300, 0
    laws = texts.likely_laws(law_after, n_texts, frozenset())
    assert (4 < len(laws) <= 48) == (size == 12)
    for _ in range(100):
        drawn = []
        for _ in range(n_texts):
            text: tuple[int, ...] = ()
            while text in laws:
                text = (*text, int(source.choice(size, p=laws[text].probs)))
            drawn.append(text)
        rejected += texts.fit(drawn, laws).p_value < 0.05
    assert rejected <= 17
    assert texts.fit(drawn, texts.tilted(laws, 1.5)).p_value < ALPHA
    assert texts.fit([(size, 99), *drawn], laws).p_value == 0.0


# -- the command -----------------------------------------------------------------------------------


def test_the_command_reports_what_it_did(tiny_model: Path, drafter: str) -> None:
    line = ["prove", "--minutes", "0.001", "-t", "1", "-fa", "off", "--json"]
    line += ["--temp", "1.3,0", "--top-k", "5"]
    done = run(" ".join(line), "-m", tiny_model, "--drafter", drafter)
    (found,) = results_of(done)
    assert [check["name"] for check in found["checks"]] == [name for name, _ in STEPS]
    assert {check["status"] for check in found["checks"]} == {"passed"}
    assert "by temperature 1.3, top-k 5" in found["checks"][0]["tested"]


def test_the_command_fails_with_its_checks(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "TOLERANCE", -1.0)
    done = run("prove --minutes 0.001 -t 1 -o md --drafter prompt-lookup", "-m", tiny_model)
    assert done.exit_code == 1
    assert "rule: exact changes the target's distribution" in done.stderr
    assert "| failed" in done.stdout
