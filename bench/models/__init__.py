"""Two models on one text: perplexity, KL divergence, agreement, errors of tensors."""
