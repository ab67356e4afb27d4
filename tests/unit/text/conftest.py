"""Tokenizers of every decoder family, built here from a few hundred entries, and the trained tiny one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from quire.text.token_bytes import byte_alphabet
from quire.text.tokenizer import Tokenizer

WORDS = ["▁the", "▁a", "lo", "▁he", "l", "o", "▁", "w", "h", "e", "é", "中", "文", ".", "s", "▁▁", "a", "b", "c"]


def byte_fallback_backend(strip: bool = True) -> Backend:
    """Llama's layout: <unk> <s> </s>, 256 byte tokens, a few pieces; prompts get <s>."""
    names = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *WORDS]
    vocab = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "▁"), ("l", "o")], byte_fallback=True, unk_token="<unk>")
    backend = Backend(model)
    prepend = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def byte_level_backend() -> Backend:
    """GPT-2's layout: 256 byte tokens, a few merges, special and plain added tokens."""
    vocab = {char: i for i, char in enumerate(byte_alphabet())}
    merges = [("Ġ", "a"), ("h", "e"), ("â", "ľ"), ("ð", "Ł"), ("ðŁ", "ĺ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|eos|>", "<｜begin▁of｜>"])
    backend.add_tokens([AddedToken("é x", normalized=False), AddedToken("<think>", normalized=False)])
    return backend


def metaspace_backend() -> Backend:
    """Unigram with a Metaspace decoder, which drops the mark of the first token."""
    backend = Backend(models.Unigram([("<unk>", 0.0), *[(w, -float(i)) for i, w in enumerate(WORDS)]], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return backend


def word_piece_backend() -> Backend:
    """BERT's layout, which has no bytes per token."""
    words = ["[UNK]", "[CLS]", "[SEP]", "he", "##llo", "wo", "##rld", ".", ",", "é", "##é", "��", "n", "'", "t"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    return backend


FAMILIES: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level_backend,
    "byte_fallback": byte_fallback_backend,
    "byte_fallback_no_strip": lambda: byte_fallback_backend(strip=False),
    "metaspace": metaspace_backend,
    "word_piece": word_piece_backend,
}


@pytest.fixture(scope="session")
def families() -> dict[str, Tokenizer]:
    """A tokenizer of each decoder family, by name."""
    return {name: Tokenizer(build()) for name, build in FAMILIES.items()}


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, families: dict[str, Tokenizer]) -> Tokenizer:
    """Each of them in turn."""
    return families[request.param]


@pytest.fixture(scope="session")
def tiny_folder(shared: Path) -> Path:
    """Folder of the small trained model."""
    return shared / "models" / "quire-tiny"


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Tokenizer:
    """Its tokenizer."""
    return Tokenizer.load(tiny_folder)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint folder: `save(backend, **files)`, files named by stem, given as JSON values."""

    def write(backend: Backend | None = None, **files: object) -> Path:
        if backend is not None:
            backend.save(str(tmp_path / "tokenizer.json"))
        for stem, content in files.items():
            (tmp_path / f"{stem}.json").write_text(json.dumps(content), "utf-8")
        return tmp_path

    return write


@pytest.fixture(scope="session")
def build() -> dict[str, Callable[[], Backend]]:
    """Builders of the families, for tests that save a folder."""
    return FAMILIES
