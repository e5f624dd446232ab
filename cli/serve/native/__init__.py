"""llama-server's own API: health, properties, slots, tokens, templates, metrics."""
