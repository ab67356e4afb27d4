"""Checks of `quire doctor` on the installation: packages, PyTorch, the hub's cache and token, the environment.

Does not import the packages it checks: PyTorch is imported in a separate process. Findings contain no secrets.
"""

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from quire import __version__
from quire.config import env
from quire.config.bundled import bundled_model
from quire.config.serve import server_names
from quire.contracts.errors import ModelNotFound
from quire.entry.cli.finding import BAD, OK, WARN, Finding
from quire.entry.cli.table import format_bytes
from quire.entry.installed import INSTALL
from quire.kernels.native.build import intact
from quire.kernels.native.levels import lacking, level_of, shipped
from quire.platforms.cpu import read_cpu_flags

TORCH_SECONDS = 120
TORCH_QUESTION = """\
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
                  "gpus": torch.cuda.device_count() if torch.version.cuda else 0}))
"""
COMPILERS = ("cc", "gcc", "clang")


def versions() -> Iterator[Finding]:
    """Yield findings about the versions of Python, Quire and the system."""
    old = sys.version_info < (3, 11)
    yield Finding(
        "python",
        BAD if old else OK,
        f"{platform.python_version()} ({sys.executable})",
        "install Python 3.11 or newer" if old else "",
    )
    yield Finding("quire", OK, f"{__version__}, {platform.system()} {platform.release()}")
    try:
        bundled_model()
    except ModelNotFound as error:
        yield Finding("quire", BAD, "the bundled model is missing", str(error))


def torch() -> Iterator[Finding]:
    """Yield findings about PyTorch: the import, the version and the build."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH_QUESTION], capture_output=True, text=True, timeout=TORCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        yield Finding("torch", BAD, f"importing it took more than {TORCH_SECONDS} s", "check the disk it is on")
        return
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        yield Finding(
            "torch",
            BAD,
            f"cannot be imported: {lines[-1]}",
            INSTALL if "No module named 'torch'" in lines[-1] else "pip install --force-reinstall torch",
        )
        return
    found = json.loads(done.stdout.splitlines()[-1])
    build = f"built for CUDA {found['cuda']}, sees {found['gpus']} GPUs" if found["cuda"] else "built for CPUs"
    yield Finding("torch", OK, f"{found['version']}, {build}, {found['threads']} threads")


def packages() -> Iterator[Finding]:
    """Yield findings about Quire's required packages: installed or not, and their versions."""
    try:
        required = importlib.metadata.requires("quire") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", OK, "Quire runs from its source folder; its requirements are not checked")
        return
    wrong = []
    for line in required:
        match = re.match(r"([A-Za-z0-9._-]+)\s*(.*)", line)
        if match is None or ";" in line:
            continue
        wrong += _mismatch(match.group(1), match.group(2))
    if wrong:
        yield Finding("packages", BAD, "; ".join(wrong), INSTALL)
    else:
        yield Finding("packages", OK, f"{len([r for r in required if ';' not in r])} requirements are met")


def _mismatch(name: str, bounds: str) -> list[str]:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return [f"{name} is missing"]
    for bound in filter(None, bounds.split(",")):
        sign, wanted = re.match(r"\s*([<>=!~]+)\s*(\S+)", bound).groups()  # type: ignore[union-attr]
        if (sign == ">=" and _number(version) < _number(wanted)) or (
            sign == "<" and _number(version) >= _number(wanted)
        ):
            return [f"{name} is {version}, and {bounds} is needed"]
    return []


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def hub() -> Iterator[Finding]:
    """Yield findings about Hugging Face's hub: its cache of models, its token, and offline mode."""
    cache = env.hub_cache()
    models = sorted(folder for folder in cache.glob("models--*") if folder.is_dir()) if cache.is_dir() else []
    size = sum(f.stat().st_size for m in models for f in (m / "blobs").glob("*") if f.is_file())
    yield Finding("hub cache", OK, f"{len(models)} models, {format_bytes(size)} in {cache}")
    stored = (env.hub_home() / "token").is_file()
    origin = "in the environment (HF_TOKEN)" if env.hf_token() else "stored by `hf auth login`" if stored else ""
    yield Finding("hub token", OK, f"found, {origin}" if origin else "none; only gated models need one")
    if env.hub_offline():
        yield Finding(
            "hub",
            WARN,
            "offline by the environment (HF_HUB_OFFLINE): nothing is downloaded",
            "unset it to download models",
        )


def compiler() -> Iterator[Finding]:
    """Yield a finding about the C compiler, which the native kernels need."""
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    flags = read_cpu_flags()
    if found is None and shipped(flags):
        without = f" (without {' '.join(lacking(flags))})" if lacking(flags) else ""
        yield Finding(
            "compiler",
            WARN if without else OK,
            f"no C compiler: the native kernels of the wheel are used, for x86-64 {level_of(flags)}{without}",
            "install gcc or clang" if without else "",
        )
    elif found is None:
        yield Finding(
            "compiler", WARN, "no C compiler: PyTorch's kernels are used instead of native ones", "install gcc or clang"
        )
    else:
        yield Finding("compiler", OK, found)


def kernel_cache() -> Iterator[Finding]:
    """Yield findings about the cache of compiled kernels."""
    folder = env.cache_folder() / "kernels"
    files = list(folder.glob("quire-*.so")) if folder.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    yield Finding("kernel cache", OK, f"{len(files)} libraries, {format_bytes(size)} in {folder}")
    damaged = [file.name for file in files if not intact(file)]
    if damaged:
        yield Finding(
            "kernel cache", WARN, f"damaged: {', '.join(damaged)}", "delete them; they are compiled again when needed"
        )


def environment() -> Iterator[Finding]:
    """Yield findings about environment variables that are misspelled, not read, or set a proxy."""
    names = tuple(server_names())
    for name, near in env.unknown_variables(names).items():
        if near is not None:
            yield Finding("environment", BAD, f"{name} is not known", f"did you mean {near}?")
    for line in env.environment_warnings(names):
        yield Finding("environment", WARN, line)
    for name, text in env.proxies().items():
        yield Finding("proxy", OK, f"{name}={_without_password(text)}")
    if env.client_key():
        yield Finding("api key", OK, "the environment holds one (not shown)")


def _without_password(url: str) -> str:
    """Return a proxy's address without user name and password."""
    before, at, host = url.rpartition("@")
    if not at:
        return url
    return f"{before.partition('://')[0]}://***@{host}" if "://" in before else f"***@{host}"
