"""OpenAI's newer API: /v1/responses."""
