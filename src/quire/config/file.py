"""A configuration file: YAML, with the flags' names as keys. Knows what YAML is, not what the options mean."""

from pathlib import Path
from typing import Any

from quire.contracts.errors import ConfigError


def read_config_file(path: Path) -> dict[str, Any]:
    """Key -> value, in the file's order, dashes for underscores.

    Raises `ConfigError` for a file that cannot be read, is no YAML, holds no mapping, or holds a key twice.
    """
    import yaml  # type: ignore[import-untyped]  # here: most commands read no file

    try:
        text = path.read_text(encoding="utf-8")
        value, tree = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: the file is not UTF-8 text.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: the file is no YAML ({' '.join(str(error).split())}).") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"--config {path}: the file must hold one `option: value` per line.")
    keys = [str(key.value).replace("_", "-") for key, _ in tree.value]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigError(f"--config {path}: {twice} is there twice.")
    return {str(key).replace("_", "-"): item for key, item in value.items()}
