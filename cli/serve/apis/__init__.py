"""The APIs of the server: OpenAI's, Anthropic's, ollama's, and llama-server's own paths."""
