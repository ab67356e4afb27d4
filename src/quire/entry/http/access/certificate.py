"""The TLS certificate of a server: the check of its files, and its end. Knows nothing of connections."""

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from quire.config.serve import HttpConfig
from quire.contracts.errors import ConfigError

PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
VERSION, UTC_TIME = 0xA0, 0x17  # tags of DER


def check_certificate(config: HttpConfig) -> None:
    """Raise `ConfigError` for files of a certificate and its key that cannot be used, also not together."""
    files = {"ssl_certfile": config.ssl_certfile, "ssl_keyfile": config.ssl_keyfile}
    if config.ssl_certfile is None:
        return
    for name, file in files.items():
        try:
            Path(file or "").open("rb").close()
        except OSError as error:
            raise ConfigError(f"{name}={file!r} cannot be read: {error.strerror}.") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        words = " with ".join(f"{name}={file!r}" for name, file in files.items())
        raise ConfigError(f"{words} cannot be used: {error}.") from None


def end_of(file: str) -> float | None:
    """Return the end of the first certificate of a PEM file, in seconds since the epoch; None: the file has none."""
    if (found := PEM.search(Path(file).read_text(errors="replace"))) is None:
        return None
    ((_, whole),) = _elements(ssl.PEM_cert_to_DER_cert(found[0]))
    _, signed = next(_elements(whole))
    serial, algorithm, issuer, validity, *_ = (part for tag, part in _elements(signed) if tag != VERSION)
    _, (tag, text) = _elements(validity)
    form = "%y%m%d%H%M%SZ" if tag == UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), form).replace(tzinfo=UTC).timestamp()


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of DER elements that stand one behind the other."""
    at = 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:  # the size follows, in so many bytes
            length, at = size & 0x7F, at + (size & 0x7F)
            size = int.from_bytes(der[at - length : at])
        yield tag, der[at : at + size]
        at += size
