"""The embedded demo family: its corpus, tokenizer, Llama in torch, and model card."""
