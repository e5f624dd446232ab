"""Options that commands share: models, sampling, prompts, output; and what is opened from them."""
