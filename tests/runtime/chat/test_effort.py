"""How much is thought, in the variables of templates; each reads another one."""

from __future__ import annotations

from typing import Any

import pytest

from specrun.runtime.chat import ChatTemplate, Effort

OFF, LOW, MEDIUM, MAX = (Effort(level=word) for word in ("none", "low", "medium", "max"))
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
PRINTED = "Reasoning: {{ reasoning_effort }}"
NAMED = """{% set known = ["no_think", "low", "high"] %}
{% if reasoning_effort is defined %}{% if reasoning_effort not in known %}
{{ raise_exception("unknown effort") }}{% endif %}{% endif %}"""
CLOSED = "{% if reasoning_effort in ['minimal', 'low'] %}<|think|><|end|>{% endif %}"
BOTH = "{% if thinking %}<think>{{ reasoning_effort if reasoning_effort == 'max' }}{% endif %}"
BUDGET = "{% if thinking_budget == 0 %}<think></think>{% else %}{{ thinking_budget }}{% endif %}"
MODE = "{% if thinking_mode == 'disabled' %}</think>{% endif %}"
# template, effort, variables
CASES: list[tuple[str, Effort, dict[str, Any]]] = [
    (SWITCH, Effort(), {}),
    (SWITCH, OFF, {"enable_thinking": False}),
    (SWITCH, LOW, {"enable_thinking": True}),
    (SWITCH, Effort(is_on=False, level="high"), {"enable_thinking": False}),
    (SWITCH, Effort(budget=0), {"enable_thinking": False}),
    (SWITCH, Effort(budget=5), {"enable_thinking": True}),
    (PRINTED, MEDIUM, {"reasoning_effort": "medium"}),
    (PRINTED, MAX, {"reasoning_effort": "high"}),
    (PRINTED, OFF, {"reasoning_effort": "low"}),
    (PRINTED, Effort(is_on=True, budget=3000), {"reasoning_effort": "medium"}),
    (PRINTED, Effort(level="deep"), {"reasoning_effort": "deep"}),
    (NAMED, OFF, {"reasoning_effort": "no_think"}),
    (NAMED, MEDIUM, {"reasoning_effort": "high"}),
    (NAMED, Effort(level="minimal"), {"reasoning_effort": "low"}),
    (CLOSED, OFF, {"reasoning_effort": "minimal"}),
    (BOTH, OFF, {"thinking": False}),
    (BOTH, MAX, {"thinking": True, "reasoning_effort": "max"}),
    (BUDGET, OFF, {"thinking_budget": 0}),
    (BUDGET, LOW, {"thinking_budget": 1024}),
    (BUDGET, MAX, {"thinking_budget": -1}),
    (BUDGET, Effort(budget=77), {"thinking_budget": 77}),
    (MODE, OFF, {"thinking_mode": "disabled"}),
    ("{{ messages }}", MAX, {}),
]


@pytest.mark.parametrize(("source", "effort", "variables"), CASES)
def test_an_effort_is_said_in_the_variables_of_the_template(source, effort, variables):
    assert effort.variables(ChatTemplate(source)) == variables
