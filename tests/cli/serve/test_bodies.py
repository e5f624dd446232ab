"""Bodies as structs: every kind of error names its field and value; depth is counted in bytes."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta, Struct

from specrun.cli.serve.apis.anthropic import MessageBody
from specrun.cli.serve.apis.chat import ChatBody
from specrun.cli.serve.apis.completions import CompletionBody, InfillBody
from specrun.cli.serve.apis.responses import ResponseBody
from specrun.cli.serve.body import checked, decoded, wanted
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.sampling import FIELDS
from specrun.runtime.laws import SETTINGS


class Inner(Struct, forbid_unknown_fields=True):
    depth: int
    n_max: Annotated[int, Meta(ge=0, le=9)] | None = None


class Body(Struct, kw_only=True):
    text: str | None = None
    flag: bool | None = None
    number: float | None = None
    count: Annotated[int, Meta(ge=-1, le=5)] | None = None
    free: int | None = None
    kind: Annotated[Literal["a", "b"] | None, wanted("a or b")] = None
    several: Annotated[str | list[str], Meta(), wanted("a text or texts", whole=True)] = ""
    items: Annotated[list[Inner], Meta(max_length=2)] | None = None
    speculative: Inner | None = None
    anything: Any = None


WRONG: list[tuple[str, str, str]] = [
    ('{"text": 5}', "text", "text is 5: give a text"),
    ('{"flag": 2}', "flag", "flag is 2: give true or false"),
    ('{"number": "x"}', "number", "number is 'x': give a number"),
    ('{"number": true}', "number", "number is True: give a number"),
    ('{"count": 6}', "count", "count is 6: give a whole number from -1 to 5"),
    ('{"count": 2.5}', "count", "count is 2.5: give a whole number from -1 to 5"),
    ('{"count": true}', "count", "count is True: give a whole number from -1 to 5"),
    ('{"free": "one"}', "free", "free is 'one': give a whole number"),
    ('{"kind": "c"}', "kind", "kind is 'c': give a or b"),
    ('{"kind": 3}', "kind", "kind is 3: give a or b"),
    ('{"several": [1]}', "several", "several is [1]: give a text or texts"),
    ('{"items": 1}', "items", "items is 1: give a list"),
    ('{"items": [1]}', "items[0]", "items[0] is 1: give an object"),
    ('{"items": [{}]}', "items[0].depth", "items[0].depth is None: give a whole number"),
    (
        '{"items": [{"depth": 1}, {"depth": null}]}',
        "items[1].depth",
        "items[1].depth is None: give a whole number",
    ),
    (
        '{"items": [{"depth": 1}, {"depth": 1}, {"depth": 1}]}',
        "items",
        "items has 3 items: give at most 2",
    ),
    (
        '{"speculative": {"depth": 1, "n_mx": 1}}',
        "speculative.n_mx",
        "there is no field 'speculative.n_mx': did you mean 'speculative.n_max'?",
    ),
    (
        '{"speculative.depth": 1, "speculative.n_max": 10}',
        "speculative.n_max",
        "speculative.n_max is 10: give a whole number from 0 to 9",
    ),
    ('{"speculative": 3, "speculative.depth": 1}', "speculative", "speculative is 3: give an obj"),
]


@pytest.mark.parametrize(("body", "field", "message"), WRONG)
def test_an_error_names_the_field_and_the_value(body: str, field: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        decoded(body.encode(), Body, 64)
    assert caught.value.param == field
    assert str(caught.value).startswith(message)


def test_null_is_left_out_and_unknown_fields_are_ignored() -> None:
    fields = {"text": None, "count": None, "items": None, "other": [1, {"a": [2]}]}
    assert decoded(json.dumps(fields).encode(), Body, 64) == Body()


def test_a_dotted_field_is_one_of_its_object_and_goes_before_it() -> None:
    data = b'{"speculative": {"depth": 1, "n_max": 2}, "speculative.n_max": 3}'
    assert decoded(data, Body, 64).speculative == Inner(1, 3)


def test_an_object_within_a_body_is_checked_at_its_place() -> None:
    assert checked({"depth": 1}, Inner, "x[2]") == Inner(1)
    with pytest.raises(RequestError, match=r"^x\[2\]\.depth is 'a': give a whole number$"):
        checked({"depth": "a"}, Inner, "x[2]")
    with pytest.raises(RequestError, match=r"^x\[2\] is \{'depth': 'a'\}: give a thing$"):
        checked({"depth": "a"}, Inner, "x[2]", "a thing")


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, InfillBody, ResponseBody, MessageBody])
def test_every_api_has_every_setting_of_sampling(body: type[Struct]) -> None:
    names = {name for setting in SETTINGS.values() for name in setting.fields}
    assert names == {*FIELDS, "logit_bias"}
    assert names <= set(body.__struct_fields__)


VALUES = st.recursive(
    st.none() | st.integers(0, 9) | st.text(alphabet='[]{}"\\a\u00e9', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet='[]{}"\\b', max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def depth(value: object) -> int:
    inner = [*value.values()] if isinstance(value, dict) else value
    return 1 + max(map(depth, inner), default=0) if isinstance(inner, list) else 0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(VALUES, st.booleans())
def test_the_depth_of_json_is_that_of_its_value(value: object, ascii: bool) -> None:
    fields = {"anything": value, "unknown": value}
    data = json.dumps(fields, ensure_ascii=ascii).encode()
    assert decoded(data, Body, depth(fields)).anything == value
    with pytest.raises(RequestError, match="deeper"):
        decoded(data, Body, depth(fields) - 1)
