"""Bandwidth and memory of conversion, quantization and importance matrices, beside baselines."""
