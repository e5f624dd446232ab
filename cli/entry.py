"""The entry point of the installed script: Ctrl-C ends quietly while the program is imported, too.

Nothing is imported before the function runs: the signal often comes during imports.
"""


def main() -> None:
    """Run the program; exit code 130 if it is interrupted before it has begun."""
    try:
        from specrun.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
