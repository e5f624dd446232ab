"""The command line: click commands over the runtime, the only package that prints."""
