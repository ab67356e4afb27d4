"""The environment: the only module that reads it.

    QUIRE_<OPTION>    any engine option, as its flag would take it: QUIRE_MAX_MODEL_LEN=32k
    HF_TOKEN          token for gated repositories on the hub

Knows names and texts; `flags.py` knows what the texts mean.
"""

import difflib
import os
from collections.abc import Iterable

PREFIX, PEER_PREFIX = "QUIRE_", "VLLM_"
PEER_NAMES = {  # their variable -> what to use here
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes (in bytes; 4G works)",
    "VLLM_CPU_OMP_THREADS_BIND": "--num-threads",
}


def variable(option: str) -> str:
    """The environment variable of an option: max_model_len -> QUIRE_MAX_MODEL_LEN."""
    return PREFIX + option.upper()


def option_texts(options: Iterable[str]) -> dict[str, str]:
    """Option -> the text of its variable, for those that are set and not empty."""
    return {option: text for option in options if (text := os.environ.get(variable(option), ""))}


def hf_token() -> str | None:
    """The hub token of the environment; None when there is none."""
    return os.environ.get("HF_TOKEN") or None


def environment_warnings(options: Iterable[str]) -> list[str]:
    """Lines about variables that look meant for us and are not read: misspelt ones, and the peer's, all in one."""
    known = [*map(variable, options)]
    lines = []
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if near:
                lines.append(f"{name} is not read: did you mean {near[0]}?")
    peer = [name for name in sorted(os.environ) if name.startswith(PEER_PREFIX)]
    if peer:
        hints = [f"{PEER_NAMES[name]} for {name}" for name in peer if name in PEER_NAMES]
        advice = f" Use {', '.join(hints)}." if hints else ""
        lines.append(f"{', '.join(peer)} {'is' if len(peer) == 1 else 'are'} not read by Quire.{advice}")
    return lines
