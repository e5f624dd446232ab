"""What is written to the terminal: text, tables, progress, errors."""
