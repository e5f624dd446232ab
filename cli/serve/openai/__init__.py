"""OpenAI's API: chat completions, completions, models, embeddings."""
