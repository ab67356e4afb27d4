"""`python -m quire`, and the console script `quire`: deals with signals before anything else is imported."""

import sys

from quire.entry.keyboard_interrupt import leave_on_interrupt
from quire.procs.held_signals import hold

SERVERS = ("serve", "route")  # commands that an operator sends SIGHUP, perhaps before they are ready for it


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    leave_on_interrupt()
    if next((word for word in sys.argv[1:] if not word.startswith("-")), "") in SERVERS:
        hold()
    from quire.entry.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
