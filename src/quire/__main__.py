"""`python -m quire`, and the console script `quire`: deals with Ctrl-C before anything else is imported."""

import sys

from quire.entry.keyboard_interrupt import leave_on_interrupt


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    leave_on_interrupt()
    from quire.entry.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
