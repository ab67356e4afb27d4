"""The tokenizer of a checkpoint folder, over the `tokenizers` library.

Knows `tokenizer.json` and the files beside it. Only the post-processor in `tokenizer.json` adds special tokens to an
encoding (a BOS, say). `add_bos_token` and `add_eos_token` in `tokenizer_config.json` have no effect, as in transformers
5 for folders with a `tokenizer.json`. Knows nothing of streams (see `detokenizer`).
"""

import json
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.normalizers import NFC

from quire.config.env import child_variables
from quire.contracts.errors import InvalidParameter, ModelNotFound, QuireError, RequestFailed, UnsupportedModel, shown
from quire.text.normalizer_limits import failures_of_one_text, growth_of, is_panic
from quire.text.special import AddedTokenSpec, SpecialTokens
from quire.text.token_bytes import TokenBytes, byte_alphabet, decoder_rule

TOKENIZER_FILE = "tokenizer.json"
APART = 2**20  # characters; longer texts are encoded in a child: in the server, 7 MB take 1 GB and leave 600 MB behind
CHILD_SECONDS, CHILD_SECONDS_PER_CHAR = 30.0, 30.0 / 2**20  # limit of a child: 30 s, and 30 s per MiB of text
CHILD_MEMORY, CHILD_MEMORY_PER_CHAR = 2 * 2**30, 512  # likewise of its address space, in bytes
EXPANDED = 3  # exit code of a child whose text has far more tokens than characters
KEEPING = ("Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext")  # ways to split that lose no character


class Tokenizer:
    """A checkpoint's tokenizer. Threads may share it: after loading, only its caches change.

    vocab_size       number of tokens, with added tokens; a model's logits may have more columns, which mean no token
    bos_token_id, eos_token_id, pad_token_id   None if the folder names none
    all_special_ids  ids that `skip_special_tokens` leaves out of a text
    bytes_table      table token id -> bytes; None for decoders whose tokens have no fixed bytes (WordPiece, ...)
    fewest_tokens    function: lower bound of the number of tokens of a text; see `length_bound`
    growth           upper bound of the factor by which the normalizer makes a text longer, see `growth_of`
    apart            folder of the tokenizer: a child process loads it to encode texts that may have APART characters or
                     more once normalized; None = all texts are encoded in this process
    """

    def __init__(self, backend: Backend, special: SpecialTokens | None = None) -> None:
        """Wrap `backend`: add the tokens that only `special` names, switch off truncation and padding."""
        self._backend = backend
        special = special or SpecialTokens()
        backend.no_truncation()
        backend.no_padding()
        _add_missing(backend, special)
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.all_special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        named = {name: backend.token_to_id(token) for name, token in special.named.items()}
        self.bos_token_id, self.eos_token_id = named.get("bos_token"), named.get("eos_token")
        self.pad_token_id = named.get("pad_token")
        rule = decoder_rule(backend)
        self.bytes_table = TokenBytes(rule, backend.id_to_token) if rule else None
        self.fewest_tokens = length_bound(backend)
        self.growth = growth_of(backend)
        self.apart: Path | None = None
        self.separator = ""  # of parts of a text that are encoded each by itself; "": texts are encoded whole
        self._bad_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = ((), ())  # last words, ids

    @staticmethod
    def load(folder: Path) -> "Tokenizer":
        """Load a folder's tokenizer. Errors: `ModelNotFound` when the folder is missing, `UnsupportedModel` when it
        holds no `tokenizer.json` or a file that cannot be read."""
        if not folder.is_dir():
            raise ModelNotFound(f"{folder} is not a folder: give a local folder with {TOKENIZER_FILE}, or a hub id.")
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise UnsupportedModel(
                f"{folder} has no {TOKENIZER_FILE}: convert its tokenizer once with transformers, "
                f"`AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})`."
            )
        special = SpecialTokens.read(folder)
        try:
            return Tokenizer(Backend.from_file(str(path)), special)
        except BaseException as error:  # the library raises bare Exception for every kind of damage, or panics
            if isinstance(error, QuireError) or not (isinstance(error, Exception) or is_panic(error)):
                raise
            raise UnsupportedModel(f"{path} cannot be read ({error}): fetch the file again.") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. The post-processor adds special tokens if `add_special_tokens`.
        Raises `InvalidParameter` when the text has half of a surrogate pair."""
        if self.separator and self.separator in text and text != self.separator:
            (first, *others), between = text.split(self.separator), self.encode(self.separator, False)
            later = [token for part in others for token in between + self.encode(part, False)]
            return self.encode(first, add_special_tokens) + later
        if self.apart is not None and self._is_long(text):
            return encode_apart(self.apart, text, add_special_tokens)
        try:  # a batch of one: the backend's `encode` blocks all other threads, for 8 s with a text of 8 MB
            with failures_of_one_text():
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise invalid_text(text) from error

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode several texts in parallel. Return their token ids in order. Raises as `encode`."""
        if self.separator or (self.apart is not None and any(map(self._is_long, texts))):
            return [self.encode(text, add_special_tokens) for text in texts]
        try:
            with failures_of_one_text():
                encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:
            return [self.encode(text, add_special_tokens) for text in texts]
        return [encoding.ids for encoding in encodings]

    def _is_long(self, text: str) -> bool:
        """True for a text that is encoded in a child process, where that is done."""
        return len(text) * self.growth >= APART

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, as transformers' fast tokenizers do without clean_up_tokenization_spaces.
        Unknown ids give no text. Raises `InvalidParameter` for an id outside uint32."""
        try:
            with failures_of_one_text():  # a batch of one, as in `encode`
                return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except OverflowError as error:
            raise InvalidParameter(
                "a token id is negative or above 2^32 - 1: send ids of the vocabulary.", param="token_ids"
            ) from error

    def token_text(self, token_id: int) -> str:
        """Return the text of one token inside a sentence. Bytes of an incomplete character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text; b"" for an unknown id."""
        if self.bytes_table is not None:
            return self.bytes_table.bytes_of(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry; None if there is none."""
        return self._backend.token_to_id(token)

    def added_token(self, token_id: int) -> str | None:
        """Return the content of an added token (special or not); None for an ordinary token."""
        return self._added.get(token_id)

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences to forbid for the `bad_words` of a request; see `bad_word_sequences`.
        The last answer is cached, since all prompts of a request have the same words."""
        asked = tuple(words)
        known, sequences = self._bad_words
        if asked != known:
            bare = [word.lstrip(" ") or word for word in asked]
            starts = self.encode_batch(bare, add_special_tokens=False)
            spaced = self.encode_batch([" " + word for word in bare], add_special_tokens=False)
            sequences = bad_word_sequences(list(zip(asked, starts, spaced, strict=True)))
            self._bad_words = asked, sequences
        return sequences


def encode_apart(folder: Path, text: str, add_special_tokens: bool) -> list[int]:
    """Encode a text as `Tokenizer.encode` does, in a child process, which has limits of time, memory and tokens.
    Raises `RequestFailed` when the child fails, or reaches a limit."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise invalid_text(text) from error
    seconds = CHILD_SECONDS + CHILD_SECONDS_PER_CHAR * len(text)
    memory, most = CHILD_MEMORY + CHILD_MEMORY_PER_CHAR * len(data), 2**16 + 4 * len(data)
    arguments = str(folder), str(int(add_special_tokens)), str(memory), str(most)
    try:
        # -P: no modules from the working directory. Its own session: Ctrl-C does not reach it.
        child = subprocess.run(
            [sys.executable, "-P", "-m", "quire.text.encode_child", *arguments],
            input=data,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=child_variables() | {"TOKENIZERS_PARALLELISM": "false"},  # else threads, each with memory of its own
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why = f"it took more than {seconds:.0f} s"
    else:
        if not child.returncode:
            return array("I", child.stdout).tolist()
        why = f"the process for it ended with code {child.returncode} (-6, -9: out of memory)"
        if child.returncode == EXPANDED:
            why = f"the model's tokenizer makes more than {most} tokens of it"
    raise RequestFailed(
        f"a text of {len(text)} characters could not be encoded: {why}; send a shorter text.", code="internal"
    )


def bad_word_sequences(spelled: Sequence[tuple[str, list[int], list[int]]]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences to forbid for `bad_words`, without repeats.
    `spelled`: (word, its ids at the start of a text, its ids after a space). The ids after a space are left out if they
    end with the other ids, which already forbid them. Raises `InvalidParameter` for a word without tokens."""
    found: dict[tuple[int, ...], None] = {}
    for word, bare, spaced in spelled:
        if not bare:
            raise InvalidParameter(
                f"bad_words: {shown(word)} has no tokens in this model's vocabulary: remove it.", param="bad_words"
            )
        found[tuple(bare)] = None
        if spaced[-len(bare) :] != bare:
            found[tuple(spaced)] = None
    return tuple(found)


def length_bound(backend: Backend) -> Callable[[str], int]:
    """Return a function that gives a lower bound of the number of tokens of a text, without encoding it.

    The bound is len(text) / (length of the longest token) for byte-level BPE, which loses no byte. It is 0 for other
    tokenizers, which may lose characters. It is also 0 for text that is not ASCII if the tokenizer has a normalizer,
    which may shorten such text.
    """
    if not _is_lossless(backend):
        return lambda text: 0
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
    plain = backend.normalizer is None
    return lambda text: -(-len(text) // longest) if plain or text.isascii() else 0


def _is_lossless(backend: Backend) -> bool:
    before = backend.pre_tokenizer
    if before is None or not isinstance(backend.model, BPE) or not isinstance(backend.normalizer, NFC | None):
        return False
    spec = json.loads(before.__getstate__())
    steps = spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    kept = all(step["type"] in ("ByteLevel", "Digits") or step.get("behavior") in KEEPING for step in steps)
    greedy = any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values())  # take spaces along
    whole = all(backend.token_to_id(char) is not None for char in byte_alphabet())
    return kept and steps[-1]["type"] == "ByteLevel" and whole and not greedy


def invalid_text(text: object) -> InvalidParameter:
    """Return the error for a value that cannot be encoded: not a string, or a string with half of a surrogate pair."""
    if not isinstance(text, str):
        return InvalidParameter(f"a prompt must be a string, not {type(text).__name__}.", param="prompt")
    at = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
    return InvalidParameter(
        f"the text is not valid Unicode: character {at} is half of a surrogate pair; send whole characters.",
        param="prompt",
    )


def _add_missing(backend: Backend, special: SpecialTokens) -> None:
    """Add tokens that the JSON files name and `tokenizer.json` lacks, in transformers' order: by id, named, extra."""
    have = {(i, t.content, t.special) for i, t in backend.get_added_tokens_decoder().items()}
    for token_id, spec in sorted(special.added.items()):
        if (token_id, spec.content, spec.special) not in have:
            backend.add_tokens([_token(spec)])
    contents = {t.content for t in backend.get_added_tokens_decoder().values()}
    missing = [t for t in (*special.named.values(), *special.extra) if t not in contents]
    if missing:
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in dict.fromkeys(missing)])


def _token(spec: AddedTokenSpec) -> AddedToken:
    return AddedToken(
        spec.content,
        special=spec.special,
        lstrip=spec.lstrip,
        rstrip=spec.rstrip,
        single_word=spec.single_word,
        normalized=spec.normalized,
    )
