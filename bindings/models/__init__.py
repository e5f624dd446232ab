"""Models as llama.cpp loads them: vocabulary, adapters, NextN blocks, trials of files."""
