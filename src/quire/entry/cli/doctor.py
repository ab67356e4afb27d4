"""`quire doctor`: checks the machine and the installation, and names the fix of every problem.

Works with a missing or broken PyTorch, because that is imported in a separate process.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator

from quire.config.flags import FlagParser
from quire.entry.cli.finding import BAD, OK, WARN, Finding

SUMMARY = "check this machine and this installation, and name the fix of every problem"
MARKS = {OK: "ok  ", WARN: "warn", BAD: "BAD "}


def configure(parser: FlagParser) -> None:
    """Add the flags of `quire doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port to check (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run all checks and print their findings. Exit code 1 when the level of a finding is "bad"."""
    findings = list(examine(args.port))
    if args.json:
        print(
            json.dumps(
                {"ok": all(f.level != BAD for f in findings), "findings": [f._asdict() for f in findings]}, indent=1
            )
        )
    else:
        for finding in findings:
            print(f"{MARKS[finding.level]}  {finding.name:<14} {finding.text}")
            if finding.fix:
                print(f"{'':<21}-> {finding.fix}")
        print(_verdict(findings))
    sys.stdout.flush()
    return 1 if any(finding.level == BAD for finding in findings) else 0


def examine(port: int) -> Iterator[Finding]:
    """Run all checks and yield their findings. One check asks if a server could listen on `port`."""
    from quire.entry.cli import check_machine, check_software

    checks: list[Callable[[], Iterator[Finding]]] = [
        check_software.versions,
        check_software.torch,
        check_software.packages,
        check_machine.cpu,
        check_machine.memory,
        check_machine.gpus,
        check_machine.limits,
        check_machine.disk,
        check_software.hub,
        check_software.compiler,
        check_software.kernel_cache,
        lambda: check_machine.port(port),
        check_software.environment,
    ]
    for check in checks:
        try:
            yield from check()
        except (OSError, ValueError, LookupError) as error:
            yield Finding(
                "doctor", WARN, f"a check failed ({type(error).__name__}: {error})", "please report this line"
            )


def _verdict(findings: list[Finding]) -> str:
    bad, warned, fine = (sum(f.level == level for f in findings) for level in (BAD, WARN, OK))
    problems = f"{bad} problem{'s' * (bad > 1)}" if bad else "No problems"
    return f"\n{problems}: {fine} ok, {warned} warning{'s' * (warned != 1)}."
