"""Compiles the kernels that tests/interpreted compiles, and records them: the tests do not compile them again.

python tools/record_kernels.py      takes minutes, and writes tests/interpreted/known_kernels.json

To be run after a change of kernels, of their launches or of their checks. Without it the tests compile what is new each
time, and say so in a warning.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run the tests that compile, each kernel anew, and write what they have compiled."""
    sys.path.insert(0, str(ROOT))
    from tests.interpreted.known_kernels import SWITCH, record

    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "kernels")
        words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "compile", "tests/interpreted"]
        environment = os.environ | {SWITCH: str(written), "TRITON_INTERPRET": "1"}
        code = subprocess.run(words, cwd=ROOT, env=environment).returncode
        if code != 0:
            return code
        found: dict[str, set[str]] = {}
        for line in written.read_text().splitlines():
            module, key = line.split()
            found.setdefault(module, set()).add(key)
    record(found)
    print(json.dumps({module: len(keys) for module, keys in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
