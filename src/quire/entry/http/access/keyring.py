"""The valid API keys of a server, from --api-key and --api-key-file, and the callers that show them."""

import hmac
import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from starlette.types import Scope

from quire.config.serve import AccessConfig
from quire.contracts.errors import ConfigError
from quire.contracts.request import NO_ACCOUNT, Account
from quire.entry.http.access.key_file import FREE, KeyRules, read_keys

LOG = logging.getLogger("quire")


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The sender of a request, as its API key tells it.

    name     name of the key in the file; "": the key has no name, or there are no keys
    owner    identity of the caller, for its stored responses and request ids; b"" without a key
    account  the caller as the engine sees it
    """

    name: str = ""
    owner: bytes = b""
    account: Account = NO_ACCOUNT
    rules: KeyRules = FREE

    @property
    def tenant(self) -> str:
        """Requests of a tenant share KV blocks and records. "": all callers are one tenant."""
        return self.account.tenant


ANYONE = Caller()


class Keyring:
    """The valid API keys. `reload` reads the file again.

    A sent key is looked up by a digest that nobody outside can compute, and then compared in constant time: so timing
    tells nothing about the keys, and the cost does not grow with their number.
    """

    def __init__(self, config: AccessConfig, *, by_priority: bool) -> None:
        self._config, self._by_priority = config, by_priority
        self._file = None if config.api_key_file is None else Path(config.api_key_file)
        self._secret = secrets.token_bytes(32)
        self._callers: Mapping[bytes, tuple[bytes, Caller]] = {}  # blind digest -> SHA-256 of the key, caller
        self.num_named = 0
        self._load()

    def find(self, given: list[bytes]) -> Caller | None:
        """Return the caller of the first valid key among the keys that a request shows; None for none."""
        for key in given:
            digest = sha256(key).digest()
            known, caller = self._callers.get(self._blind(digest), (b"", ANYONE))
            if hmac.compare_digest(digest, known):
                return caller
        return None

    def rules(self) -> Iterator[KeyRules]:
        """Yield the rules of all keys."""
        return (caller.rules for _, caller in self._callers.values())

    def reload(self) -> str:
        """Read the file again. Return a sentence for the operator. Raises `ConfigError` for a file that cannot be used;
        then the keys stay as they were."""
        try:
            self._load()
        except ConfigError as error:
            raise ConfigError(f"The API keys stay as they were: {error}") from None
        return f"{self.num_named} API keys are read again from {self._file}."

    def _load(self) -> None:
        config, named = self._config, dict[str, KeyRules]()
        if self._file is not None:
            named = read_keys(self._file, by_priority=self._by_priority)
            if any(rules.plain for rules in named.values()) and self._file.stat().st_mode & 0o077:
                LOG.warning("other users may read the keys in %s: run chmod 600, or give their sha256.", self._file)
        owners = {sha256(key.encode()).digest(): Caller(owner=key.encode()) for key in config.api_key}
        for name, rules in named.items():
            for digest in rules.digests:
                if digest in owners:
                    raise ConfigError(f"the key of {name!r} is given with --api-key, too: leave it out there.")
                owners[digest] = Caller(name=name, owner=b"\0" + name.encode(), rules=rules)  # keys have no \0
        if named or len(owners) > 1:
            owners = {digest: self._with_account(caller) for digest, caller in owners.items()}
        self._callers = {self._blind(digest): (digest, caller) for digest, caller in owners.items()}
        self.num_named = len(named)

    def _with_account(self, caller: Caller) -> Caller:
        """Return the caller as one of several: with a waiting line of its own, and a tenant unless keys share that."""
        name = sha256(caller.owner).hexdigest()
        tenant = "" if self._config.share_prefix_cache_across_keys else name
        return replace(caller, account=Account(tenant, name, caller.rules.weight))

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def caller_of(scope: Scope) -> Caller:
    """Return the sender of a request that has passed the check of keys; `ANYONE` on a server without keys."""
    caller: Caller = scope.get("state", {}).get("caller", ANYONE)
    return caller


def client_of(scope: Scope) -> str:
    """Return a name for the sender of a request: the digest of its API key's owner; without keys its address."""
    if owner := caller_of(scope).owner:
        return sha256(owner).hexdigest()
    return str((scope.get("client") or ("",))[0])
