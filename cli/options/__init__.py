"""Options that commands share: models, sampling, prompts, output; and the opening of models."""
