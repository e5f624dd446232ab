"""Anthropic's API: /v1/messages and its count of tokens."""
