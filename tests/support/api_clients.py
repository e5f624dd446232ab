"""Clients that nobody here wrote, closed when their test ends: open sockets are warnings."""

from __future__ import annotations

from typing import Any

import openai

_OPEN: list[Any] = []


def openai_client(address: str) -> openai.OpenAI:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    _OPEN.append(client)
    return client


def anthropic_client(address: str, key: str = "none") -> Any:
    import anthropic

    client = anthropic.Anthropic(base_url=address, api_key=key, max_retries=0)
    _OPEN.append(client)
    return client


def close_clients() -> None:
    while _OPEN:
        _OPEN.pop().close()
