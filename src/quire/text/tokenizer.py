"""The tokenizer of a checkpoint folder, over the `tokenizers` library.

Knows `tokenizer.json` and the files beside it. Which special tokens an encoding gets (a BOS, say) is decided by the
post-processor in `tokenizer.json` alone: `add_bos_token` and `add_eos_token` in `tokenizer_config.json` do not count,
as in transformers 5 for folders that have a `tokenizer.json`. Knows nothing of streams (see `detokenizer`).
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
from quire.contracts.errors import InvalidParameter, ModelNotFound, RequestFailed, UnsupportedModel, shown
from quire.text.pieces import PieceTable, byte_alphabet, decoder_rule
from quire.text.special import AddedTokenSpec, SpecialTokens

TOKENIZER_FILE = "tokenizer.json"
APART = 2**20  # characters from which a server encodes a text apart: here 7 MB take 1 GB, and leave 600 MB behind
KEEPING = ("Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext")  # ways to split that lose no character


class Tokenizer:
    """A checkpoint's tokenizer. Threads may share it: what changes after loading are answers that it remembers.

    vocab_size       number of tokens, added ones included (a model's logits may be wider: padding ids mean nothing)
    bos_token_id, eos_token_id, pad_token_id   None where the folder names none
    all_special_ids  ids that `skip_special_tokens` leaves out of a text
    pieces           token id -> bytes; None for decoders whose tokens have no bytes of their own (WordPiece, ...)
    fewest_tokens    tokens that an encoding of a text has at least; see `length_bound`
    apart            texts from APART characters on are encoded in a process of their own, which loads this folder;
                     None: every text is encoded here
    """

    def __init__(self, backend: Backend, special: SpecialTokens | None = None) -> None:
        """Wrap `backend`, adding the tokens that only `special` names; truncation and padding are switched off."""
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
        self.pieces = PieceTable(rule, backend.id_to_token) if rule else None
        self.fewest_tokens = length_bound(backend)
        self.apart: Path | None = None
        self._bad_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = ((), ())  # the last ones, spelled

    @staticmethod
    def load(folder: Path) -> "Tokenizer":
        """Load a folder's tokenizer.

        Errors: `ModelNotFound` when the folder is missing, `UnsupportedModel` when it holds no `tokenizer.json` or a
        file that cannot be read.
        """
        if not folder.is_dir():
            raise ModelNotFound(f"{folder} is not a folder: give a local folder with {TOKENIZER_FILE}, or a hub id.")
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise UnsupportedModel(
                f"{folder} has no {TOKENIZER_FILE}: convert its tokenizer once with transformers, "
                f"`AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})`.")
        special = SpecialTokens.read(folder)
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise UnsupportedModel(f"{path} cannot be read ({error}): fetch the file again.") from error
        return Tokenizer(backend, special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; the post-processor adds its special tokens if `add_special_tokens`.

        Errors: `InvalidParameter` when the text holds half of a surrogate pair.
        """
        if self.apart is not None and len(text) >= APART:
            return encode_apart(self.apart, text, add_special_tokens)
        try:  # a batch of one: `encode` of the backend keeps every other thread out, for 8 s over a text of 8 MB
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise invalid_text(text) from error

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts, in order, encoded in parallel. Errors as `encode`."""
        if self.apart is not None and any(len(text) >= APART for text in texts):
            return [self.encode(text, add_special_tokens) for text in texts]
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:
            return [self.encode(text, add_special_tokens) for text in texts]
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, as transformers' fast tokenizers decode with `clean_up_tokenization_spaces=False`.

        Ids that name no token give no text. Errors: `InvalidParameter` for an id outside uint32.
        """
        try:
            # a batch of one, as in `encode`
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except OverflowError as error:
            raise InvalidParameter("token ids must be integers in [0, 2^32).", param="token_ids") from error

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a sentence; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text; b"" for an id that names no token."""
        if self.pieces is not None:
            return self.pieces.bytes_of(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def to_json(self) -> str:
        """All of it as the text of a `tokenizer.json`."""
        return self._backend.to_str()

    def token_id(self, token: str) -> int | None:
        """Id of a vocabulary entry given exactly; None if there is none."""
        return self._backend.token_to_id(token)

    def added_token(self, token_id: int) -> str | None:
        """Content of an added token (special or not); None for an ordinary one."""
        return self._added.get(token_id)

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences to forbid; see `bad_word_sequences`. Remembers the last answer: every prompt of a request
        asks the same."""
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
    """`Tokenizer.encode` in a process that ends with it. Errors: `RequestFailed` when the process fails, too."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise invalid_text(text) from error
    # -P: no module of the folder in which the server was started; a session of its own: no Ctrl-C
    child = subprocess.run(
        [sys.executable, "-P", "-m", "quire.text.encode_child", str(folder), str(int(add_special_tokens))], input=data,
        stdout=subprocess.PIPE, start_new_session=True, env=child_variables(), check=False)
    if child.returncode:
        raise RequestFailed(f"a text of {len(text)} characters could not be encoded: the process for it ended with "
                            f"code {child.returncode} (-9: out of memory); send a shorter text.", code="internal")
    return array("I", child.stdout).tolist()


def bad_word_sequences(spelled: Sequence[tuple[str, list[int], list[int]]]) -> tuple[tuple[int, ...], ...]:
    """Forbidden token sequences from (word, ids at the start of a text, ids after a space), without repeats.

    The spelling after a space is dropped when it merely ends with the other one, which already forbids it.
    Errors: `InvalidParameter` for a word that has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word, bare, spaced in spelled:
        if not bare:
            raise InvalidParameter(
                f"bad_words: {shown(word)} has no tokens in this model's vocabulary: remove it.", param="bad_words")
        found[tuple(bare)] = None
        if spaced[-len(bare) :] != bare:
            found[tuple(spaced)] = None
    return tuple(found)


def length_bound(backend: Backend) -> Callable[[str], int]:
    """A function that says how many tokens an encoding of a text has at least, by the longest token, without encoding.
    It says 0 where nothing is known, because characters may be lost before or while the text is cut.

    Known for byte-level BPE, where every byte of a text is in a token. Of normalizers only NFC is looked through, on
    ASCII text, which it does not change.
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
    """The error for something that cannot be encoded: not a string, or a string with half of a surrogate pair."""
    if not isinstance(text, str):
        return InvalidParameter(f"a prompt must be a string, not {type(text).__name__}.", param="prompt")
    at = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
    return InvalidParameter(f"the text is not valid Unicode: character {at} is half of a surrogate pair; send whole "
                            "characters.", param="prompt")


def _add_missing(backend: Backend, special: SpecialTokens) -> None:
    """Add what the JSON files name and `tokenizer.json` lacks, in transformers' order: by id, named, extra."""
    have = {(i, t.content, t.special) for i, t in backend.get_added_tokens_decoder().items()}
    for token_id, spec in sorted(special.added.items()):
        if (token_id, spec.content, spec.special) not in have:
            backend.add_tokens([_token(spec)])
    contents = {t.content for t in backend.get_added_tokens_decoder().values()}
    missing = [t for t in (*special.named.values(), *special.extra) if t not in contents]
    if missing:
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in dict.fromkeys(missing)])


def _token(spec: AddedTokenSpec) -> AddedToken:
    return AddedToken(spec.content, special=spec.special, lstrip=spec.lstrip, rstrip=spec.rstrip,
                      single_word=spec.single_word, normalized=spec.normalized)
