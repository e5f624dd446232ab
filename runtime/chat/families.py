"""The table of families: how each writes reasoning and calls, and how its templates are known.

Nothing in a model's file names its family; the marks that its chat template writes do. The first
row that fits is taken. The meaning of each row is in `syntax.py`; docs/families.md is this table
for readers.
"""

from __future__ import annotations

import re
from dataclasses import replace

from specrun.runtime.chat.calls import read_messages
from specrun.runtime.chat.syntax import ArgumentForm, CallForm, ThinkTags, ToolSyntax

_NAME = r"(?P<name>[\w.\-]+)"


def _head(pattern: str) -> re.Pattern[str]:
    """Return the pattern of the text between a call's mark and its arguments; NAME is the name."""
    return re.compile(rf"\s*{pattern.replace('NAME', _NAME)}\s*")


# == Calls that are JSON objects ===================================================================


def _objects(
    opener: str,
    closer: str = "",
    *,
    form: CallForm | None = None,
    known_by: tuple[tuple[str, ...], ...] | None = None,
    name: str,
) -> ToolSyntax:
    """Return the row of a family whose calls are a list of objects between two marks."""
    listed = CallForm(
        '{"name": "',
        '", "arguments": ',
        behind="}",
        before_all=f"{opener}[",
        behind_all=f"]{closer}",
        separator=", ",
        mark=opener,
    )
    closers = (closer,) if closer else ()
    groups = ((opener,),) if known_by is None else known_by
    return ToolSyntax(name, groups, "object", form or listed, (opener,), closers=closers)


HERMES = _objects(
    "<tool_call>",
    "</tool_call>",
    name="hermes",
    form=CallForm(
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        behind="}\n</tool_call>",
        separator="\n",
        mark="<tool_call>",
    ),
)
LONGCAT = _objects(
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    name="longcat",
    form=CallForm(
        '<longcat_tool_call>\n{"name": "',
        '", "arguments": ',
        behind="}\n</longcat_tool_call>",
        separator="\n",
        mark="<longcat_tool_call>",
    ),
)
LLAMA3 = ToolSyntax(
    "llama3",
    (("<|start_header_id|>", '"parameters"'), ("<|python_tag|>",)),
    "object",
    CallForm('{"name": "', '", "parameters": ', behind="}", tag="<|python_tag|>"),
    ("<|python_tag|>",),
    closers=("```",),
    at_start=True,
)
GENERIC = ToolSyntax(
    "generic",
    (),
    "object",
    CallForm(
        '{"name": "',
        '", "arguments": ',
        behind="}",
        before_all='{"tool_calls": [',
        behind_all="]}",
        separator=", ",
    ),
    ('{"tool_calls"', '{"tool_call"'),
    closers=("```",),
    at_start=True,
    answer_key="response",
)
COMMAND_R_PLUS = replace(
    _objects("Action:", "```", name="command-r-plus", known_by=(("Action:", "tool_name"),)),
    form=CallForm(
        '{\n        "tool_name": "',
        '",\n        "parameters": ',
        behind="\n    }",
        before_all="Action: ```json\n[\n    ",
        behind_all="\n]```",
        separator=",\n    ",
        mark="Action:",
    ),
)
COMMAND_A = _objects(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    name="command-a",
    form=CallForm(
        '{"tool_call_id": "{index}", "tool_name": "',
        '", "parameters": ',
        behind="}",
        before_all="<|START_ACTION|>[\n    ",
        behind_all="\n]<|END_ACTION|>",
        separator=",\n    ",
        mark="<|START_ACTION|>",
    ),
)
APERTUS = _objects(
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    name="apertus",
    form=CallForm(
        '{"',
        '": ',
        behind="}",
        before_all="<|tools_prefix|>[",
        behind_all="]<|tools_suffix|>",
        separator=", ",
        mark="<|tools_prefix|>",
    ),
)
NEMOTRON = _objects("<TOOLCALL>", "</TOOLCALL>", name="nemotron")
APRIEL = _objects("<tool_calls>", "</tool_calls>", name="apriel")
MINIMAX_M1 = _objects(
    "<tool_calls>",
    "</tool_calls>",
    name="minimax-m1",
    form=CallForm(
        '{"name": "',
        '", "arguments": ',
        behind="}",
        before_all="<tool_calls>\n",
        behind_all="\n</tool_calls>",
        separator="\n",
        mark="<tool_calls>",
    ),
    known_by=(("<tool_calls>", "<beginning_of_sentence>"),),
)
PHI4 = _objects(
    "<|tool_call|>",
    "<|/tool_call|>",
    name="phi-4",
    known_by=(("<|/tool_call|>",), ("<|tool|>", "<|/tool|>")),
)
GRANITE = _objects("<|tool_call|>", name="granite")
FIREFUNCTION = _objects("functools", name="firefunction", known_by=(("functools[",),))
INTERNLM = _objects(
    "<|action_start|><|plugin|>",
    "<|action_end|>",
    name="internlm",
    form=CallForm(
        '<|action_start|><|plugin|>\n{"name": "',
        '", "parameters": ',
        behind="}<|action_end|>",
        mark="<|action_start|><|plugin|>",
    ),
    known_by=(("<|action_start|>", "<|plugin|>"),),
)
GIGACHAT = _objects(
    "<|function_call|>",
    name="gigachat",
    form=CallForm(
        '<|function_call|>{"name": "', '", "arguments": ', behind="}", mark="<|function_call|>"
    ),
)
_GIGACHAT3 = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
GIGACHAT3 = _objects(
    _GIGACHAT3,
    name="gigachat3",
    form=CallForm(_GIGACHAT3 + '{"name": "', '", "arguments": ', behind="}", mark=_GIGACHAT3),
    known_by=(("<|role_sep|>", "<|message_sep|>"),),
)

# == Calls that are a name and a JSON object =======================================================

MISTRAL = replace(
    _objects("[TOOL_CALLS]", name="mistral"),
    kind="named",
    head=_head(r"NAME(\s*\[CALL_ID\]\s*[\w-]*)?(\s*\[ARGS\])?"),
    others=("[CALL_ID]", "[ARGS]"),
    id_length=9,
)
MISTRAL_V11 = replace(
    MISTRAL,
    known_by=(("[TOOL_CALLS]", "[ARGS]"),),
    form=CallForm("[TOOL_CALLS]", "[ARGS]", separator="", mark="[TOOL_CALLS]"),
)
MISTRAL_IDS = replace(
    MISTRAL_V11,
    known_by=(("[TOOL_CALLS]", "[CALL_ID]"),),
    form=replace(MISTRAL_V11.form, before_arguments="[CALL_ID]{id}[ARGS]"),
)
DEEPSEEK_V3 = ToolSyntax(
    "deepseek-v3",
    (("<｜tool▁call▁begin｜>", "```json"),),
    "named",
    CallForm(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        behind="\n```<｜tool▁call▁end｜>",
        before_all="<｜tool▁calls▁begin｜>",
        behind_all="<｜tool▁calls▁end｜>",
        separator="\n",
        mark="<｜tool▁calls▁begin｜>",
    ),
    ("<｜tool▁call▁begin｜>",),
    ("<｜tool▁calls▁begin｜>", "<｜tool_calls_begin｜>"),
    ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁sep｜>",),
    head=_head(r"(function\s*<｜tool▁sep｜>)?\s*NAME\s*(<｜tool▁sep｜>)?\s*(```json)?"),
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek-v3.1",
    known_by=(("<｜tool▁call▁begin｜>",),),
    form=CallForm(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        behind="<｜tool▁call▁end｜>",
        before_all="<｜tool▁calls▁begin｜>",
        behind_all="<｜tool▁calls▁end｜>",
        separator="",
        mark="<｜tool▁calls▁begin｜>",
    ),
)
KIMI_K2 = ToolSyntax(
    "kimi-k2",
    (("<|tool_calls_section_begin|>",),),
    "named",
    CallForm(
        "<|tool_call_begin|>functions.",
        ":{index}<|tool_call_argument_begin|>",
        behind="<|tool_call_end|>",
        before_all="<|tool_calls_section_begin|>",
        behind_all="<|tool_calls_section_end|>",
        separator="",
        mark="<|tool_calls_section_begin|>",
    ),
    ("<|tool_call_begin|>",),
    ("<|tool_calls_section_begin|>",),
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_argument_begin|>",),
    head=_head(r"(functions\.)?NAME(:\d+)?\s*<\|tool_call_argument_begin\|>"),
    numbered_ids=True,
)
SOLAR = ToolSyntax(
    "solar",
    (("<|tool_call:begin|>",),),
    "named",
    CallForm(
        "<|tool_call:begin|>{id}<|tool_call:name|>",
        "<|tool_call:args|>",
        behind="<|tool_call:end|>",
        before_all="<|tool_calls|>",
        separator="",
        mark="<|tool_calls|>",
        answer="<|content|>",
    ),
    ("<|tool_call:begin|>",),
    ("<|tool_calls|>",),
    ("<|tool_call:end|>", "<|calls|>"),
    ("<|tool_call:name|>", "<|tool_call:args|>"),
    head=_head(r"[^<]*<\|tool_call:name\|>NAME<\|tool_call:args\|>"),
)
GEMMA4 = ToolSyntax(
    "gemma4",
    (("<|tool_call>",),),
    "named",
    CallForm(
        "<|tool_call>call:",
        "",
        behind="<tool_call|>",
        separator="",
        quote='<|"|>',
        mark="<|tool_call>",
    ),
    ("<|tool_call>",),
    closers=("<tool_call|>", "<|tool_response>"),
    others=('<|"|>',),
    head=_head("(call:)?NAME"),
)
FUNCTION_GEMMA = replace(
    GEMMA4,
    name="functiongemma",
    known_by=(("<start_function_call>",),),
    form=CallForm(
        "<start_function_call>call:",
        "",
        behind="<end_function_call>",
        separator="",
        quote="<escape>",
        mark="<start_function_call>",
    ),
    openers=("<start_function_call>",),
    closers=("<end_function_call>", "<start_function_response>"),
    others=("<escape>",),
)
GLM_4 = ToolSyntax(
    "glm-4",
    (("[gMASK]", "<|observation|>", "metadata"),),
    "named",
    CallForm("", "\n"),
    closers=("<|observation|>", "<|user|>"),
    at_start=True,
    head=_head(r"NAME\n"),
)
FUNCTIONARY_V31 = ToolSyntax(
    "functionary-v3.1",
    (("<function=",),),
    "named",
    CallForm("<function=", ">", behind="</function>", separator="", mark="<function="),
    ("<function=",),
    closers=("</function>",),
    others=("<|python_tag|>",),
    head=_head("NAME>"),
)
FUNCTIONARY_V32 = ToolSyntax(
    "functionary-v3.2",
    ((">>>all",),),
    "named",
    CallForm("", "\n", separator=">>>", mark=">>>", answer="all\n"),
    (">>>",),
    begins=("all\n",),
    around=(">>>all\n",),
    at_start=True,
    head=_head(r"NAME\n"),
)
MCP = ToolSyntax(
    "mcp",
    (("<use_mcp_tool>",),),
    "named",
    CallForm(
        "<use_mcp_tool>\n<server_name>default</server_name>\n<tool_name>",
        "</tool_name>\n<arguments>\n",
        behind="\n</arguments>\n</use_mcp_tool>",
        separator="\n",
        mark="<use_mcp_tool>",
    ),
    ("<use_mcp_tool>",),
    closers=("</arguments>", "</use_mcp_tool>"),
    head=_head(
        r"(<server_name>[^<]*</server_name>)?\s*<tool_name>\s*NAME\s*</tool_name>\s*<arguments>"
    ),
)

# == Calls whose arguments are tags ================================================================


def _tags(
    name: str,
    known_by: tuple[str, ...],
    call: tuple[str, str, str],
    argument: ArgumentForm,
    *,
    around: tuple[str, str] = ("", ""),
    outer: tuple[str, str] = ("", ""),
    separator: str = "\n",
) -> ToolSyntax:
    """Return the row of a family that writes tags.

    `call` are the texts before a call's name, behind it, and behind its arguments; `around` stands
    around each call, `outer` around all.
    """
    before, behind_name, behind = call
    form = CallForm(
        around[0] + before,
        behind_name,
        behind=behind + around[1],
        before_all=outer[0],
        behind_all=outer[1],
        separator=separator,
        argument=argument,
        mark=(outer[0] or around[0] or before).strip(),
    )
    openers = tuple(each.strip() for each in (around[0], before) if each)
    closers = tuple(each.strip() for each in (behind, around[1], outer[1]) if each.strip())
    sections = (outer[0].strip(),) if outer[0] else ()
    return ToolSyntax(name, (known_by,), "tags", form, openers, sections, closers)


_PARAMETER = ArgumentForm("<parameter=", ">\n", "\n</parameter>\n")
QWEN_CODER = _tags(
    "qwen3-coder",
    ("<tool_call>", "<function="),
    ("<function=", ">\n", "</function>"),
    _PARAMETER,
    around=("<tool_call>\n", "\n</tool_call>"),
)
SEED = _tags(
    "seed",
    ("<seed:tool_call>",),
    ("<function=", ">\n", "</function>"),
    ArgumentForm("<parameter=", ">", "</parameter>\n"),
    around=("<seed:tool_call>\n", "\n</seed:tool_call>"),
)
MINIMAX_M2 = _tags(
    "minimax-m2",
    ("<minimax:tool_call>",),
    ('<invoke name="', '">\n', "</invoke>"),
    ArgumentForm('<parameter name="', '">', "</parameter>\n"),
    outer=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
)
STEP3 = _tags(
    "step3",
    ("<steptml:invoke",),
    ('<steptml:invoke name="', '">', "</steptml:invoke>"),
    ArgumentForm('<steptml:parameter name="', '">', "</steptml:parameter>"),
    around=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
    outer=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    separator="",
)
_MM = "]<]minimax[>["
MINIMAX_M3 = _tags(
    "minimax-m3",
    (_MM,),
    (f'{_MM}<invoke name="', '">', f"{_MM}</invoke>"),
    ArgumentForm(f"{_MM}<", ">", f"{_MM}</{{key}}>"),
    outer=(f"{_MM}<tool_call>\n", f"\n{_MM}</tool_call>"),
)


def _dsml(block: str, known_by: str) -> ToolSyntax:
    """Return DeepSeek's row for a name of the block around calls."""
    return _tags(
        "deepseek-dsml",
        ("DSML", known_by),
        ('<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>"),
        ArgumentForm(
            '<｜DSML｜parameter name="',
            '" string="true">',
            "</｜DSML｜parameter>\n",
            between_json='" string="false">',
        ),
        outer=(f"<｜DSML｜{block}>\n", f"\n</｜DSML｜{block}>"),
    )


DSML = _dsml("function_calls", "function_calls")
DSML_V4 = _dsml("tool_calls", "tool_calls")
GLM = _tags(
    "glm",
    ("<arg_key>",),
    ("<tool_call>", "\n", "</tool_call>"),
    ArgumentForm("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
LONGCAT_TAGS = _tags(
    "longcat",
    ("<longcat_arg_key>",),
    ("<longcat_tool_call>", "\n", "</longcat_tool_call>"),
    ArgumentForm(
        "<longcat_arg_key>",
        "</longcat_arg_key>\n<longcat_arg_value>",
        "</longcat_arg_value>\n",
    ),
)
GLM_COMPACT = _tags(
    "glm",
    ("</arg_key><arg_value>",),
    ("<tool_call>", "", "</tool_call>"),
    ArgumentForm("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    separator="",
)
HUNYUAN = _tags(
    "hunyuan",
    ("<arg_key{}>",),
    ("<tool_call:opensource>", "<tool_sep:opensource>\n", "</tool_call:opensource>"),
    ArgumentForm(
        "<arg_key:opensource>",
        "</arg_key:opensource>\n<arg_value:opensource>",
        "</arg_value:opensource>\n",
    ),
    outer=("<tool_calls:opensource>\n", "\n</tool_calls:opensource>"),
)
KIMI_K3 = _tags(
    "kimi-k3",
    ("<|open|>", "<|end_of_msg|>"),
    ('<|open|>call tool="', '" index="{number}"<|sep|>', "<|close|>call<|sep|>"),
    ArgumentForm(
        '<|open|>argument key="',
        '" type="string"<|sep|>',
        "<|close|>argument<|sep|>",
        between_json='" type="{type}"<|sep|>',
    ),
    outer=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    separator="",
)
KIMI_K3 = replace(
    KIMI_K3,
    others=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    form=replace(KIMI_K3.form, answer="<|open|>response<|sep|>"),
)
MINICPM5 = _tags(
    "minicpm5",
    ('<function name="', '<param name="'),
    ('<function name="', '">', "</function>"),
    ArgumentForm('<param name="', '">', "</param>"),
)

# == Calls of Python ===============================================================================

LFM2 = ToolSyntax(
    "lfm2",
    (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [", "<|im_start|>")),
    "keywords",
    CallForm(
        "",
        "(",
        behind=")",
        before_all="<|tool_call_start|>[",
        behind_all="]<|tool_call_end|>",
        separator=", ",
        keywords=True,
        mark="<|tool_call_start|>",
    ),
    ("<|tool_call_start|>",),
    closers=("<|tool_call_end|>",),
)
OLMO3 = replace(
    LFM2,
    name="olmo3",
    known_by=(("<function_calls>",),),
    form=CallForm(
        "",
        "(",
        behind=")",
        before_all="<function_calls>",
        behind_all="</function_calls>",
        separator="\n",
        keywords=True,
        mark="<function_calls>",
    ),
    openers=("<function_calls>",),
    closers=("</function_calls>",),
)
LLAMA4 = ToolSyntax(
    "llama4",
    (("func_name1(", "params_name1="), ("<|python_start|>",), ("<|header_start|>", "[func")),
    "keywords",
    CallForm("", "(", behind=")", before_all="[", behind_all="]", separator=", ", keywords=True),
    ("<|python_start|>", "<|python_tag|>"),
    closers=("<|python_end|>",),
    at_start=True,
)

# == Replies that are messages =====================================================================

GPT_OSS = ToolSyntax(
    "gpt-oss",
    (("<|channel|>", "<|message|>"),),
    "named",
    CallForm(
        "<|channel|>commentary to=functions.",
        " <|constrain|>json<|message|>",
        mark="<|channel|>commentary to=",
        answer="<|channel|>final<|message|>",
    ),
    closers=("<|end|>", "<|call|>", "<|return|>"),
    others=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    read=read_messages,
)
MUSE = replace(
    _tags(
        "muse",
        ("<atem:function_calls>", "<|eom|>"),
        ('<atem:invoke name="', '">\n', "</atem:invoke>"),
        ArgumentForm('<atem:parameter name="', '">', "</atem:parameter>\n"),
        outer=("<atem:function_calls>\n", "\n</atem:function_calls>"),
    ),
    others=("<|start|>", "<|message|>"),
    read=read_messages,
)
MUSE = replace(
    MUSE,
    closers=(*MUSE.closers, "<|eom|>", "<|eot|>"),
    form=replace(MUSE.form, lead=" to=functions<|message|>", answer=" to=user<|message|>"),
)

LLAMA4_JSON = replace(
    LLAMA3,
    name="llama4",
    known_by=(("<|header_start|>", '"parameters"'),),
    openers=("<|python_start|>", "<|python_tag|>"),
    closers=("<|python_end|>", "```"),
    form=replace(LLAMA3.form, tag="<|python_start|>"),
)

FAMILIES: tuple[ToolSyntax, ...] = (
    GPT_OSS,
    MUSE,
    FUNCTIONARY_V32,
    KIMI_K2,
    KIMI_K3,
    COMMAND_A,
    COMMAND_R_PLUS,
    LFM2,
    MCP,
    MINIMAX_M3,
    STEP3,
    DSML,
    DSML_V4,
    GEMMA4,
    FUNCTION_GEMMA,
    LONGCAT_TAGS,
    LONGCAT,
    MINICPM5,
    MINIMAX_M2,
    SEED,
    HUNYUAN,
    GLM_COMPACT,
    GLM,
    QWEN_CODER,
    FUNCTIONARY_V31,
    MISTRAL_IDS,
    MISTRAL_V11,
    MISTRAL,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    SOLAR,
    APERTUS,
    NEMOTRON,
    MINIMAX_M1,
    APRIEL,
    PHI4,
    GRANITE,
    INTERNLM,
    GIGACHAT,
    GIGACHAT3,
    FIREFUNCTION,
    OLMO3,
    HERMES,
    LLAMA4_JSON,
    LLAMA4,
    LLAMA3,
    GLM_4,
)


def syntax_of(source: str) -> ToolSyntax | None:
    """Return the syntax of tool calls of a chat template's model, None if it is unknown."""
    return next(
        (
            syntax
            for syntax in FAMILIES
            if any(all(text in source for text in group) for group in syntax.known_by)
        ),
        None,
    )


# == Reasoning =====================================================================================

_COHERE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_K3 = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
_SOLAR = ("<|begin|>assistant", "<|content|>", "<|end|>", "<|calls|>")
_APRIEL = ("[BEGIN FINAL RESPONSE]", ("[END FINAL RESPONSE]",))
_THINK = ("<think>", "</think>")

# Texts, all of which a template has, and the marks that its model writes.
THINKING: tuple[tuple[tuple[str, ...], ThinkTags], ...] = (
    (
        ("<|channel|>analysis<|message|>",),
        ThinkTags("<|channel|>analysis<|message|>", "<|end|>", follow="<|start|>assistant"),
    ),
    (
        ("to=self", "<|message|>"),
        ThinkTags(" to=self<|message|>", "<|eom|>", follow="<|start|>assistant"),
    ),
    (("<|channel>thought",), ThinkTags("<|channel>thought", "<channel|>", anywhere=True)),
    (("<|START_THINKING|>",), ThinkTags("<|START_THINKING|>", "<|END_THINKING|>", _COHERE)),
    (
        ("<|open|>", "<|end_of_msg|>"),
        ThinkTags("<|open|>think<|sep|>", "<|close|>think<|sep|>", (*_K3, "<|end_of_msg|>")),
    ),
    (
        ("<|think|>", "<|begin|>assistant"),
        ThinkTags("<|think|>", "<|end|>", _SOLAR, follow="<|begin|>assistant"),
    ),
    (("Here are my reasoning steps:",), ThinkTags("Here are my reasoning steps:", *_APRIEL)),
    (
        ("Here is my thought process:",),
        ThinkTags("Here is my thought process:", "Here is my response:"),
    ),
    (("<|inner_prefix|>",), ThinkTags("<|inner_prefix|>", "<|inner_suffix|>")),
    (("<seed:think>",), ThinkTags("<seed:think>", "</seed:think>")),
    (("<mm:think>",), ThinkTags("<mm:think>", "</mm:think>")),
    (("<think{}>",), ThinkTags("<think:opensource>", "</think:opensource>")),
    (("[THINK]",), ThinkTags("[THINK]", "[/THINK]")),
    (("</thought>",), ThinkTags("<thought>", "</thought>")),
    (("longcat_think>",), ThinkTags("<longcat_think>", "</longcat_think>")),
    (("</reasoning>",), ThinkTags("<reasoning>", "</reasoning>")),
    (("<think>", "<answer>"), ThinkTags(*_THINK, ("<answer>", "</answer>"))),
    (("<think>", "<response></response>"), ThinkTags(*_THINK, ("<response>", "</response>"))),
    (("</think>", "<response>\\n"), ThinkTags(*_THINK, ("<response>", "</response>"))),
    (("<think>",), ThinkTags(*_THINK)),
    (("</think>",), ThinkTags(*_THINK)),
)


def think_tags_of(source: str) -> ThinkTags | None:
    """Return the tags around the reasoning of a chat template's model, None if it has none."""
    return next((tags for known, tags in THINKING if all(text in source for text in known)), None)
