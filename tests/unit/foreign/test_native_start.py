"""An engine of a family of Quire never imports transformers, nor the room that does."""

import subprocess
import sys

CODE = """
import sys
from quire import LLM
llm = LLM(load_format="dummy", num_threads=1, kv_cache_memory_bytes=16 << 20, skip_tokenizer_init=True)
llm.close()
found = [name for name in sys.modules if name.partition(".")[0] == "transformers" or name.startswith("quire.foreign")]
assert not found, found
"""


def test_native_engines_start_without_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
