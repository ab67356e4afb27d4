"""Environment variables; no other module reads them.

    QUIRE_<OPTION>    any option, written as in its flag: QUIRE_MAX_MODEL_LEN=32k; commas separate the items of a list
    VLLM_BATCH_INVARIANT  1: the option batch_invariant, under vLLM's name
    QUIRE_CACHE_DIR   folder of compiled kernels (default: ~/.cache/quire)
    QUIRE_CPU_WITHOUT instruction sets that count as absent, by their names in /proc/cpuinfo: avx512f,amx_tile
    QUIRE_TEST_RANKS_SHARE_GPU  1: all ranks of an engine share one GPU, slowly: for Quire's own tests
    QUIRE_CLUSTER_KEY key that the hosts of an engine share (default: the file cluster_key in QUIRE_CACHE_DIR)
    CC                the C compiler that Triton uses
    TRITON_CACHE_DIR  folder of compiled Triton kernels (default: triton in QUIRE_CACHE_DIR)
    OTEL_BSP_MAX_QUEUE_SIZE, OTEL_BSP_MAX_EXPORT_BATCH_SIZE   spans that wait, and spans of one message; OpenTelemetry's
                      SDK reads its other OTEL_ variables itself, once it is loaded
    QUIRE_BACKEND_API_KEY  key with which `quire route` asks its backends, unless --backend-api-key names one
    HF_TOKEN          token for gated repositories on the hub
    OPENAI_API_KEY    key that `quire chat --url` and `quire complete --url` send, unless QUIRE_API_KEY is set

Knows names and texts; `option_parsers.py` parses the texts.
"""

import difflib
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from quire.contracts.errors import ConfigError
from quire.contracts.text_table import read_rows

CACHE_DIR = "QUIRE_CACHE_DIR"
CPU_WITHOUT, SHARE_GPU = "QUIRE_CPU_WITHOUT", "QUIRE_TEST_RANKS_SHARE_GPU"
CLUSTER_KEY, LEAST_KEY = "QUIRE_CLUSTER_KEY", 16
BACKEND_KEY = "QUIRE_BACKEND_API_KEY"
PREFIX, PEER_PREFIX = "QUIRE_", "VLLM_"
OTHER_NAMES = ("QUIRE_FULL", "QUIRE_PYTHON", "QUIRE_TEST_SHARED", "QUIRE_VENV")  # read by scripts and tests
PEER_KEY = "VLLM_API_KEY"
PEER_OPTIONS = {"batch_invariant": "VLLM_BATCH_INVARIANT"}  # option -> vLLM's variable, which is read
PEER_NAMES = dict(read_rows(Path(__file__).with_name("peer_variables.txt")))  # vLLM's variable -> what to use here
# Variables that Kubernetes sets in every container for a service named quire or quire-something.
SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")
SERVICE_NAME = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")
PROXY_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def variable(option: str) -> str:
    """Return the environment variable of an option: max_model_len -> QUIRE_MAX_MODEL_LEN."""
    return PREFIX + option.upper()


def option_texts(options: Iterable[str]) -> dict[str, str]:
    """Return option -> text of its environment variable. Empty ones and those that Kubernetes sets are left out."""
    texts = {option: os.environ.get(variable(option), "") for option in options}
    return {option: text for option, text in texts.items() if text and not SERVICE_ADDRESS.fullmatch(text)}


def refuse_empty(names: Iterable[str], instead: str) -> None:
    """Raise `ConfigError` for a variable that exists though it names nothing, as an unset one in a script leaves it.

    instead   what would happen without the error
    """
    for name in names:
        if not os.environ.get(name, "unset").strip(" ,\t\r\n"):
            raise ConfigError(f"{name} is set, but empty: {instead}. Put a value in it, or unset it.")


def peer_texts(options: Iterable[str]) -> dict[str, str]:
    """Return option -> text of the variable of vLLM that sets it, for those in `PEER_OPTIONS`."""
    texts = {option: os.environ.get(PEER_OPTIONS.get(option, ""), "") for option in options}
    return {option: text for option, text in texts.items() if text}


def hf_token() -> str | None:
    """Return the token for the Hugging Face hub from HF_TOKEN; None when the variable is not set or empty."""
    return os.environ.get("HF_TOKEN") or None


def span_limits(waiting: int, at_once: int) -> tuple[int, int]:
    """Return how many spans may wait for a collector, and how many go at once, by OpenTelemetry's variables.
    waiting, at_once: where a variable is not set, or no positive number"""
    names = {"OTEL_BSP_MAX_QUEUE_SIZE": waiting, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": at_once}
    texts = {name: os.environ.get(name, "") for name in names}
    most, batch = (int(text) if (text := texts[name]).isdecimal() and int(text) else names[name] for name in names)
    return most, min(batch, most)


def client_key() -> str | None:
    """Return the API key for requests to a server, from QUIRE_API_KEY or else OPENAI_API_KEY; None without both."""
    return os.environ.get(variable("api_key")) or os.environ.get("OPENAI_API_KEY") or None


def backend_key() -> str:
    """Return the API key with which a router asks its backends, from QUIRE_BACKEND_API_KEY; "" without one.
    Raises `ConfigError` for a variable that is set and empty."""
    refuse_empty((BACKEND_KEY,), "backends with keys would refuse the router's own questions")
    return os.environ.get(BACKEND_KEY, "")


def child_variables() -> dict[str, str]:
    """Return the environment of a child process: search paths, Python's variables, locale and time zone.

    API keys and other secrets are left out.
    """
    return {
        name: text
        for name, text in os.environ.items()
        if name in ("PATH", "TZ", "LD_LIBRARY_PATH") or name.startswith(("PYTHON", "LC_", "LANG"))
    }


def with_variables(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of this process, with those in `more` added or replaced."""
    return {**os.environ, **more}


def absent_variables(more: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `more` that this process does not have."""
    return {name: text for name, text in more.items() if name not in os.environ}


def variables_to_pass(*, key: bool) -> dict[str, str]:
    """Return the variables of this process for ranks that Ray starts: without Ray's own and those of a GPU.

    key   True: with the key of the cluster, which ranks need that read blocks of other engines
    """
    texts = {
        name: text
        for name, text in os.environ.items()
        if name not in (CLUSTER_KEY, "CUDA_VISIBLE_DEVICES", "LOCAL_RANK") and not name.startswith("RAY_")
    }
    return texts | ({CLUSTER_KEY: cluster_key()[0].decode()} if key else {})


def unknown_variables(options: Iterable[str]) -> dict[str, str | None]:
    """Return each QUIRE_ variable that is set and unknown -> the known name nearest to it, or None."""
    known = [CACHE_DIR, CPU_WITHOUT, SHARE_GPU, CLUSTER_KEY, BACKEND_KEY, *map(variable, options)]
    found: dict[str, str | None] = {}
    for name, text in sorted(os.environ.items()):
        if not name.startswith(PREFIX) or name in OTHER_NAMES:
            continue
        foreign = SERVICE_NAME.fullmatch(name) or SERVICE_ADDRESS.fullmatch(text)
        if name not in known and not foreign:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            found[name] = near[0] if near else None
    return found


def cache_folder() -> Path:
    """Return the folder of compiled kernels and other files that Quire creates again when they are missing.

    The folder may not exist yet. Without a home directory the path begins with "~".
    """
    return Path(os.path.expanduser(os.environ.get(CACHE_DIR) or "~/.cache/quire"))


def cpu_without() -> frozenset[str]:
    """Return the instruction sets in QUIRE_CPU_WITHOUT: Quire acts as if the CPU lacked them, to test lesser CPUs."""
    return frozenset(os.environ.get(CPU_WITHOUT, "").replace(",", " ").split())


def ranks_share_gpu() -> bool:
    """True when QUIRE_TEST_RANKS_SHARE_GPU lets all ranks of an engine run on one GPU."""
    return os.environ.get(SHARE_GPU) == "1"


def c_compiler() -> str | None:
    """Return the C compiler that CC names; None when CC is not set."""
    return os.environ.get("CC") or None


def triton_cache_folder() -> Path:
    """Return the folder of compiled Triton kernels; it may not exist yet."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(os.path.expanduser(named)) if named else cache_folder() / "triton"


def environment_warnings(options: Iterable[str]) -> list[str]:
    """Return warnings about variables that Quire does not read, though their names look like its own or vLLM's."""
    known = list(options)
    lines = [f"{name} is not read by Quire." for name, near in unknown_variables(known).items() if near is None]
    lines += [
        f"{variable(option)} holds {text}, which Kubernetes sets for a service of this name: ignored."
        for option in known
        if SERVICE_ADDRESS.fullmatch(text := os.environ.get(variable(option), ""))
    ]
    peer = peer_variables()
    if peer:
        hints = [f"{name}: {PEER_NAMES[name]}" for name in peer if name in PEER_NAMES]
        advice = f" {'; '.join(hints)}." if hints else ""
        lines.append(f"{', '.join(peer)} {'is' if len(peer) == 1 else 'are'} not read by Quire.{advice}")
    return lines


def peer_variables() -> list[str]:
    """Return the names of vLLM's variables that are set and not read, except those that Kubernetes sets."""
    return [
        name
        for name, text in sorted(os.environ.items())
        if name.startswith(PEER_PREFIX) and name not in PEER_OPTIONS.values()
        if not SERVICE_NAME.fullmatch(name) and not SERVICE_ADDRESS.fullmatch(text)
    ]


def proxies() -> dict[str, str]:
    """Return the proxy variables that are set, in lower or upper case."""
    return {name: text for name, text in sorted(os.environ.items()) if name.lower() in PROXY_NAMES and text}


def hub_home() -> Path:
    """Return the folder of the Hugging Face hub client, with its cache of models and its token."""
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface"


def hub_cache() -> Path:
    """Return the folder in which the Hugging Face hub client keeps downloaded models."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named).expanduser() if named else hub_home() / "hub"


def hub_offline() -> bool:
    """True when HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids network calls to the Hugging Face hub."""
    return any(
        os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def rank_variables(interface: str = "lo") -> dict[str, str]:
    """Return the variables to add to the environment of ranks' processes; those that the user has set are left out.

    They switch NVLink multicast off, and make ranks talk through a network interface of this host: the loopback
    interface while all ranks are on one host. gloo makes its connections at once, whatever the user has set: later
    none is taken. interface   its name; "" leaves the choice to gloo and NCCL
    """
    wanted = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    if sys.platform == "linux" and interface:
        wanted["GLOO_SOCKET_IFNAME"] = interface
        if interface != "lo":
            wanted["NCCL_SOCKET_IFNAME"] = f"={interface}"
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    return missing | {"TORCH_GLOO_LAZY_INIT": "0"}


def cluster_key() -> tuple[bytes, str]:
    """Return the key that hosts of an engine share, and the place where it was found, for messages.

    The variable QUIRE_CLUSTER_KEY wins over the file `cluster_key` in the cache folder. The first of the hosts that
    share a home folder makes the file. Raises `ConfigError`.
    """
    text, where, path = os.environ.get(CLUSTER_KEY, ""), CLUSTER_KEY, cache_folder() / "cluster_key"
    if not text:
        where = str(path)
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name) as file:
                    file.write(secrets.token_hex(32))
                    file.flush()
                    with suppress(FileExistsError):  # of two processes, the first to link its file makes the key
                        os.link(file.name, path)
            text = path.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"{CLUSTER_KEY} is not set, and {path} cannot be used ({error.strerror}): hosts of an "
                f"engine need the same key. Set {CLUSTER_KEY} to the same text on all hosts."
            ) from None
    if len(text) < LEAST_KEY:
        raise ConfigError(
            f"the key in {where} has {len(text)} characters: use at least {LEAST_KEY}, such as those of "
            "`openssl rand -hex 32`."
        )
    return text.encode(), where


def locale() -> str:
    """Return the locale of messages, such as zh_CN.UTF-8; "" if none is set."""
    return next((found for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (found := os.environ.get(name))), "")
