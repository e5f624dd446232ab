"""Servers side by side: llama.cpp's and specrun's, asked by one client."""
