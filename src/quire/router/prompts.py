"""The prompt of a request, as far as a router needs it: chunks of its text, and the fields that decide its way.

Every field stays the JSON text that the client has sent: a value of a wrong type is the backend's to refuse. Knows
nothing of tokenizers: lengths in tokens are the backend's, or estimates.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from quire.contracts.errors import RequestError

CHUNK = 512  # bytes of a prompt's JSON, some 128 tokens of English: one KV block of a GPU
MOST_CHUNKS = 4_096  # chunks of a prompt that are looked at
BYTES_PER_TOKEN = 4  # estimate, of English text
# Fields of a body that make its prompt, in the order in which templates put them.
PARTS = ("tools", "system", "instructions", "prompt", "messages", "input")
TURNS = ("prompt", "messages", "input")  # of these, the fields that grow with a conversation
BEGINNING = 4 * CHUNK  # bytes of a prompt by which it is hashed when it is one text
# Fields that /tokenize takes of a completion or a chat.
TOKENIZED = (
    "model prompt messages tools add_special_tokens add_generation_prompt continue_final_message chat_template "
    "chat_template_kwargs documents reasoning_effort"
).split()
MESSAGES = re.compile(rb"\[\s*\{")
ONCE = (b"", b"null", b"1")  # values of n and best_of that give one answer
Fields = dict[str, msgspec.Raw]
TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


class RoutedBody:
    """The body of a request. Raises `RequestError` if it is not a JSON object.

    fields   name -> JSON text of the value
    size     bytes of the prompt's JSON
    chunks   hashes of the prompt's beginnings: the first 512 bytes, 1,024, ...
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.fields: Fields = {}
        if data:
            try:
                self.fields = msgspec.json.decode(data, type=Fields)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise RequestError(f"the body is not a JSON object: {error}. Send one, in UTF-8.") from None
        text = b"".join(self.text(name) for name in PARTS)
        self.size = len(text)
        self.chunks = self._hash(text)

    @functools.cached_property
    def model(self) -> str:
        """The model that the body names; "": it names none."""
        try:
            return msgspec.json.decode(self.text("model"), type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""

    @functools.cached_property
    def num_tokens(self) -> int:
        """Tokens of the prompt: counted if it is token ids, else estimated."""
        ids = self.token_ids()
        return self.size // BYTES_PER_TOKEN if ids is None else len(ids)

    def text(self, name: str) -> bytes:
        """Return the JSON text of a field; b"" if the body lacks it."""
        return bytes(self.fields.get(name, b""))

    def given(self, name: str) -> bool:
        """True when the body has a field and its value is not null."""
        return self.text(name) not in (b"", b"null")

    @property
    def is_plain(self) -> bool:
        """True for one prompt with one answer, so that two backends can share the work."""
        several = self.text("prompt").startswith(b"[") and self.token_ids() is None
        return (
            not several
            and all(self.text(name) in ONCE for name in ("n", "best_of"))
            and not any(self.given(name) for name in ("kv_transfer_params", "prompt_logprobs"))
        )

    def token_ids(self) -> list[int] | None:
        """Return the prompt if it is a list of token ids."""
        try:
            return msgspec.json.decode(self.fields["prompt"], type=TokenIds)
        except (KeyError, msgspec.DecodeError):
            return None

    def session(self) -> bytes:
        """Return what all requests of a conversation begin with, and few others: the text by which it is hashed.

        The client's own name for it (`prompt_cache_key`) if there is one; else everything up to the first message of a
        user, which later turns repeat; of a prompt that is no list of messages its first `BEGINNING` bytes.
        """
        if self.given("prompt_cache_key"):
            names: tuple[str, ...] = ("model", "cache_salt", "prompt_cache_key")
            return b"\0".join(self.text(name) for name in names)
        names = ("model", "cache_salt", *(part for part in PARTS if part not in TURNS))
        begins = [self.text(name) for name in names]
        for name in TURNS:
            begins += _beginning(self.text(name))
        return b"\0".join(begins)

    def with_fields(self, changes: dict[str, Any], without: Sequence[str] = ()) -> bytes:
        """Return the body with other values of some fields, and without others."""
        kept: dict[str, Any] = {name: value for name, value in self.fields.items() if name not in without}
        return msgspec.json.encode(kept | changes)

    def to_tokenize(self) -> bytes:
        """Return the body for /tokenize."""
        return msgspec.json.encode({name: self.fields[name] for name in TOKENIZED if name in self.fields})

    def _hash(self, text: bytes) -> list[int]:
        """Return the chained hashes of the prompt's chunks. Python's hash has a key of its own in every process."""
        key = hash((self.text("model"), self.text("cache_salt")))
        keys = []
        for at in range(0, min(self.size, CHUNK * MOST_CHUNKS) - CHUNK + 1, CHUNK):
            key = hash((key, text[at : at + CHUNK]))
            keys.append(key)
        return keys


class _Message(msgspec.Struct):
    role: str = ""


def _beginning(text: bytes) -> Iterator[bytes]:
    """Yield the messages up to the first one of a user; the beginning of what is no list of messages."""
    try:
        messages = msgspec.json.decode(text, type=list[msgspec.Raw]) if MESSAGES.match(text) else []
    except (msgspec.DecodeError, UnicodeDecodeError):
        messages = []
    if not messages:
        yield text[:BEGINNING]
    for message in messages:
        yield bytes(message)
        if _role(message) == "user":
            return


def _role(message: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(message, type=_Message).role
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
