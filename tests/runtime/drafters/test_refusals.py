"""Expressions that make no sense are refused when they are opened, in a sentence that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.every_drafter import named
from support.tiny_models import F32

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.runtime import Runtime
from specrun.runtime.drafters import early_exit
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.growing.source import Source
from specrun.runtime.drafters.hydra import HydraSource
from specrun.runtime.drafters.mtp import MtpSource

REFUSED = [
    # the language
    ("draft(FILE:twin, treee=2x2)", "did you mean 'tree'"),
    ("draft(FILE:twin, topk=two)", "not a whole number"),
    ("draft(FILE:twin)@2", "a part of relay"),
    ("draft(FILE:twin, n=5@2)", "means nothing here"),
    ("ensemble(draft(FILE:twin)@2, none)", "means nothing here"),
    ("ensemble(draft(FILE:twin), bogus)", "no drafter 'bogus'"),
    ("relay(draft(FILE:twin)@0, none)", "not a positive number"),
    # draft
    ("draft(FILE:twin, tree=17x17)", "llama.cpp allows 256"),
    ("draft(FILE:twin, tree=30x9)", "llama.cpp allows 256"),
    ("draft(FILE:twin, tree=2x2, n=3)", "give one of them"),
    ("draft(FILE:twin, n=auto, tree=2x2)", "n=auto drafts a chain"),
    ("draft(FILE:twin, n=aut)", "not a whole number"),
    ("draft(FILE:twin, depth=9, nodes=3)", "nodes=3 is less than depth=9"),
    ("draft(FILE:twin, depth=3, sampling=without)", "use sampling=argmax"),
    ("draft(FILE:twin, nodes=8, sampling=with)", "use sampling=argmax"),
    ("draft(FILE:twin, tree=2x2, sampling=bogus)", "sampling"),
    ("draft(FILE:twin, n=3, sampling=without)", "sampling"),
    ("draft(FILE:twin, tree=2x2, p_min=2)", "between 0 and 1"),
    ("draft(FILE:twin, p_min=adaptive(start=2))", "start is 2.0: it must be between 0 and 1"),
    ("draft(FILE:twin, p_min=adaptive(beta=1))", "beta"),
    ("draft(FILE:twin, p_min=adaptiv)", "not a number"),
    ("draft(FILE:twin, p_min=adaptive, tree=2x2)", "ends chains, not trees"),
    ("draft(FILE:twin, tree=2x2, vocabulary=text)", "tree= needs tokens that both vocabularies"),
    ("draft(FILE:twin, p_min=0.3, vocabulary=text)", "p_min= needs tokens"),
    ("draft(FILE:twin, sampling=with, vocabulary=text)", "text is drafted greedily"),
    ("draft(FILE:twin, n=0, vocabulary=text)", "at least 1 token"),
    ("draft(FILE:twin, vocabulary=other)", "vocabulary"),
    # partial
    ("partial(window=4, n=4)", "a window of 4 tokens is filled by a draft of 4: give window=5"),
    ("partial(window=0)", "window is 0: give at least 1"),
    ("partial(sink=-1)", "sink is -1: give 0 or more"),
    ("partial(window=5, tree=2x2)", "filled by a draft of 6: give window=7"),
    ("partial(n=4, chunks=-1)", "give 0 or more chunks of at least 1 token"),
    ("partial(n=4, chunks=2, chunk=0)", "give 0 or more chunks of at least 1 token"),
    ("partial(FILE:twin)", "takes 0 unnamed arguments"),
    ("partial(windw=5)", "did you mean 'window'"),
    # blocks, and an early exit
    ("dflash(FILE:dspark, n=3, p_min=2)", "p_min is 2.0: it is a probability"),
    ("dflash(FILE:dflash, n=2, p_min=-0.1)", "p_min is -0.1: it is a probability"),
    ("dflash(FILE:dflash2, depth=3, topk=2, sampling=with)", "use sampling=argmax"),
    ("early-exit(layers=1, p_min=2)", "between 0 and 1"),
    # retrieval and n-grams
    ("rest", "name the datastore"),
    ("rest(FILE:store, places=0)", "places is 0"),
    ("rest(FILE:store, min_match=17)", "min_match is 17"),
    ("rest(FILE:store, n=0)", "n is 0"),
    ("rest(FILE:store, m=3)", "no option 'm'"),
    ("rest(FILE:store, nodes=600)", "nodes"),
    ("rest(FILE:store, FILE:store)", "1 unnamed"),
    ("ngram(order=0)", "order is 0: n-grams of 1 to 5"),
    ("ngram(order=6)", "order is 6"),
    ("ngram(n=0)", "draft at least 1"),
    ("ngram(n=600)", "do not fit a batch of 512: lower n"),
    ("ngram(sampling=without)", "no sampling of ngram called 'without'"),
    ("ngram(p_min=2)", "between 0 and 1"),
    ("ngram(FILE:text)", "takes 0 unnamed arguments"),
    # lookahead and Jacobi
    ("lookahead(window=200, ngram=3, guesses=100)", "300 leaves.*256.*lower window or guesses"),
    ("lookahead(window=100, ngram=9, guesses=10)", "880 tokens.*a batch of 512.*-b"),
    ("lookahead(window=30, ngram=9, guesses=10)", "320 tokens.*a context of 256.*-c"),
    ("lookahead(ngram=1)", "ngram is 1"),
    ("lookahead(ngram=65)", "ngram is 65"),
    ("lookahead(window=-1)", "0 or more"),
    ("lookahead(guesses=-1)", "0 or more"),
    ("lookahead(per_key=0)", "at least 1"),
    ("lookahead(max_keys=999999999)", "at most"),
    ("lookahead(windows=3)", "window"),
    ("lookahead(text=maybe)", "text"),
    ("lookahead(save=no)", "pool=FILE"),
    ("lookahead(a.pool)", "unnamed"),
    ("lookahead(window=x)", "whole number"),
    ("jacobi(n=512)", "513 tokens.*a batch of 512"),
    ("jacobi(n=0)", "n is 0"),
    ("jacobi(n=-3)", "n is -3"),
    ("jacobi(n=auto)", "not a whole number"),
    ("jacobi(until=0)", "until is 0"),
    # combinators
    ("ensemble(draft(FILE:twin))", "at least two drafters"),
    ("ensemble(draft(FILE:twin), draft(FILE:twin, n=0))", "n is 0"),
    ("ensemble(draft(FILE:twin), none, n=3)", "no option 'n'"),
    ("cascade(draft(FILE:twin))", "two parts"),
    ("cascade(draft(FILE:twin, n=0), none)", "n is 0: a draft model must draft at least 1"),
    ("cascade(draft(FILE:twin, p_min=1.5), none)", r"p_min is 1\.5"),
    ("cascade(draft(FILE:twin), none, none)", "2 unnamed arguments at most"),
    ("cascade(prompt-lookup, draft(FILE:twin))", "first part is a model"),
    ("cascade(draft(FILE:twin, tree=2x2), none)", "leave out tree"),
    ("cascade(draft(FILE:twin, n=auto), prompt-lookup)", "n=auto is for a drafter"),
    ("cascade(draft(FILE:twin), prompt-lookup, rounds=-1)", "rounds is -1"),
    ("cascade(draft(FILE:twin), prompt-lookup, round=1)", "did you mean 'rounds'"),
    ("cascade(partial(window=5), prompt-lookup)", "filled by a draft of 5: give window=6"),
    ("cascade(partial(n=auto), none)", "n=auto is for a drafter on its own"),
    ("cascade(partial(tree=2x2), none)", "leave out tree"),
    ("ouroboros(prompt-lookup)", "first part is a model"),
    ("ouroboros(draft(FILE:twin), phrases=0)", "1 or more phrases"),
    ("ouroboros(draft(FILE:twin), phrases=200, length=40)", "do not fit a batch"),
    ("ouroboros(draft(FILE:twin), save=no)", "name it with pool"),
    ("ouroboros(draft(FILE:twin, depth=2, topk=2, nodes=3))", "drafts chains"),
    ("relay(draft(FILE:twin)@2)", "at least two parts"),
]


@pytest.mark.parametrize(("drafter", "problem"), REFUSED)
def test_what_makes_no_sense_is_refused(files: dict[str, Path], drafter: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem) as caught:
        Runtime(files["shallow"], named(drafter, files), **F32)
    assert "\n" not in str(caught.value)


def test_an_early_exit_is_refused_before_its_layers_are_opened(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(early_exit, "ExitLayers")
    with pytest.raises(OptionError, match="between 0 and 1"):
        Runtime(files["shallow"], "early-exit(layers=1, p_min=2)", **F32)


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("nextn", "mtp(FILE:blocks, n=auto)"),
        ("shallow", "early-exit(layers=1)"),
        ("shallow", "hydra(FILE:hydra, nodes=auto)"),
    ],
)
def test_a_drafter_without_its_plan_leaves_no_source_open(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, target: str, drafter: str
) -> None:
    opened, closed = list[Source](), list[Source]()

    def interrupted(self: DraftEnvironment, share: float, *_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for kind in (MtpSource, early_exit.EarlyExitSource, HydraSource):
        made, close = kind.__init__, kind.close
        monkeypatch.setattr(
            kind, "__init__", lambda self, *a, made=made: (opened.append(self), made(self, *a))[1]
        )
        monkeypatch.setattr(
            kind, "close", lambda self, close=close: (closed.append(self), close(self))[1]
        )
    monkeypatch.setattr(DraftEnvironment, "draft_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Runtime(files[target], named(drafter, files), **F32)
    assert opened
    assert closed == opened


def test_a_tree_that_no_batch_holds_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match="do not fit a batch of 64"):
        Runtime(files["shallow"], named("draft(FILE:twin, tree=8x8)", files), **F32, n_batch=64)


def test_recurrent_states_drop_no_tokens(files: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent state, which drops no tokens"):
        Runtime(files["hybrid"], "partial(n=2)", **F32)
