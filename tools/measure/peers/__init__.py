"""Servers side by side: llama.cpp's, llama-cpp-python and specrun's, asked by one client."""
