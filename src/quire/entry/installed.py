"""Errors for packages that Quire needs and that are not installed. Imports none of them."""

import importlib.util
import sys

from quire.contracts.errors import ConfigError

INSTALL = "run `pip install .` in Quire's folder, where its README.md is"


def not_installed(error: ModuleNotFoundError) -> ConfigError:
    """Return the error for a missing package. Raises `error` itself for a module of Python or Quire."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "quire") or name in sys.stdlib_module_names:
        raise error
    return ConfigError(f"{name} is not installed, and this needs it: {INSTALL}.")


def check_torch() -> None:
    """Raise `ConfigError` when PyTorch is not installed. Called before the core's process, which needs it, starts."""
    if importlib.util.find_spec("torch") is None:
        raise not_installed(ModuleNotFoundError(name="torch"))
