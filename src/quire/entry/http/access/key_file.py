"""The file of API keys (--api-key-file): a name for each key, the key or its SHA-256, and limits. TOML or JSON.

    [keys.alice]
    key = "sk-alice"
    requests_per_minute = 60

docs/server.md has all fields. JSON has the same names. Knows nothing of requests.
"""

import re
import tomllib
from dataclasses import replace
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from quire.config.serve import DeadlineConfig
from quire.contracts.errors import ConfigError, shown

NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")  # names are labels of metrics
DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_KEYS = 10_000
POSITIVE = ("requests_per_minute", "tokens_per_minute", "concurrency")
TIMEOUTS = ("queue_timeout", "first_token_timeout", "request_timeout")


class KeyRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the file. None: no limit.

    key, sha256           the key, or its digest in hexadecimal; several, while clients move from one to the next
    requests_per_minute   POST requests; as many may come at once
    tokens_per_minute     prompt and output tokens; as many may come at once
    concurrency           requests that generate, or compute vectors, at once
    weight                share beside other keys that wait, of the tokens that the engine computes
    priority              most urgent priority of the key's requests; None: they choose
    models                names of models and adapters, with * and ? as in file names
    ..._timeout           time limits of the key's requests, in place of those of the server
    """

    key: str | tuple[str, ...] = ()
    sha256: str | tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    weight: float = 1.0
    priority: int | None = None
    models: tuple[str, ...] = ("*",)
    queue_timeout: float | None = None
    first_token_timeout: float | None = None
    request_timeout: float | None = None

    @property
    def plain(self) -> tuple[str, ...]:
        """The keys that are not given by their digests."""
        return (self.key,) if isinstance(self.key, str) else self.key

    @property
    def hexadecimal(self) -> tuple[str, ...]:
        """The digests that are given in place of keys."""
        return (self.sha256,) if isinstance(self.sha256, str) else self.sha256

    @property
    def digests(self) -> list[bytes]:
        """SHA-256 of each key, 32 bytes."""
        return [sha256(key.encode()).digest() for key in self.plain] + [*map(bytes.fromhex, self.hexadecimal)]

    def may_use(self, model: str) -> bool:
        """True when the key may use a model or an adapter of this name."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)

    def priority_of(self, asked: int | None) -> int:
        """Return the priority of a request that asks for `asked`: never before the key's own priority."""
        return asked or 0 if self.priority is None else max(self.priority, self.priority if asked is None else asked)

    def deadlines(self, server: DeadlineConfig) -> DeadlineConfig:
        """Return the time limits of the key's requests: its own ones, else those of the server."""
        own = {name: seconds for name in TIMEOUTS if (seconds := getattr(self, name)) is not None}
        return replace(server, **own) if own else server


FREE = KeyRules()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: dict[str, dict[str, Any]]
    defaults: dict[str, Any] = {}


def read_keys(path: Path, *, by_priority: bool) -> dict[str, KeyRules]:
    """Return name -> rules of the keys in a file. Raises `ConfigError` with the name of the entry that is wrong.
    by_priority: the engine serves by priority"""
    where = f"api_key_file={str(path)!r}"
    try:
        data = path.read_bytes()
        content = tomllib.loads(data.decode()) if path.suffix == ".toml" else msgspec.json.decode(data)
        file = msgspec.convert(content, _File)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # of UTF-8, TOML, JSON, or of the fields
        kind = "TOML" if path.suffix == ".toml" else "JSON (a TOML file is named *.toml)"
        raise ConfigError(f"{where} is no file of keys in {kind}: {error}.") from None
    if not file.keys or len(file.keys) > MAX_KEYS:
        raise ConfigError(f"{where} has {len(file.keys)} keys: give 1 to {MAX_KEYS:,}.")
    if secrets := {"key", "sha256"} & file.defaults.keys():
        raise ConfigError(
            f"{where}: {min(secrets)} in the defaults would be the same for all names: give it to a name."
        )
    found, names = dict[str, KeyRules](), dict[bytes, str]()
    for name, fields in file.keys.items():
        try:
            found[name] = rules = msgspec.convert(file.defaults | fields, KeyRules)
            _check(name, rules, by_priority)
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{where}, key {shown(name)}: {str(error).rstrip('.')}.") from None
        for digest in rules.digests:
            if (other := names.setdefault(digest, name)) != name:
                raise ConfigError(f"{where}: {shown(other)} and {shown(name)} have the same key: give each its own.")
    if len(names) > MAX_KEYS:
        raise ConfigError(f"{where} has {len(names)} keys, those of rotations included: give 1 to {MAX_KEYS:,}.")
    return found


def _check(name: str, rules: KeyRules, by_priority: bool) -> None:
    """Raise `ConfigError` for an entry that cannot work."""
    if not NAME.fullmatch(name):
        raise ConfigError("a name has 1 to 64 letters, digits and . _ @ -")
    if not rules.plain and not rules.hexadecimal:
        raise ConfigError("give key or sha256, or a list of them")
    if not all(map(is_key, rules.plain)):
        raise ConfigError("a key must be printable ASCII without spaces around it, and not empty")
    if not all(map(DIGEST.fullmatch, rules.hexadecimal)):
        raise ConfigError("sha256 must be 64 hexadecimal digits, in small letters: `printf %s KEY | sha256sum`")
    for field in POSITIVE:
        if (value := getattr(rules, field)) is not None and value < 1:
            raise ConfigError(f"{field}={value}: must be at least 1, or be left out")
    for field in (*TIMEOUTS, "weight"):
        if (value := getattr(rules, field)) is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{field}={value}: must be above 0 and finite, or be left out")
    if rules.priority is not None and not by_priority:
        raise ConfigError("priority needs --scheduling-policy priority")
    if not -(2**31) <= (rules.priority or 0) < 2**31:
        raise ConfigError("priority must be a 32-bit integer")


def is_key(text: str) -> bool:
    """True for a text that can be an API key: it must survive in a header."""
    return bool(text) and text.isprintable() and text == text.strip() and text.isascii()
