"""Output to the terminal: text, tables, progress, errors."""
