"""The LM head of a checkpoint that stores it although config.json ties it to the embedding. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.args.checkpoint import read_raw_config
from quire.weights.files import StoredTensor, read_checkpoint, stored_in

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def unread_head(folder: Path, overrides: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return a note if tie_word_embeddings makes the loader ignore an LM head that differs from the embedding; else ().

    Many released checkpoints store the embedding twice, so three rows of both are compared, byte by byte. A head of
    another dtype or shape (a padded vocabulary) gives no note: it may hold the same numbers, and could not be used.

    overrides   values over those of config.json (hf_overrides)
    """
    if not read_raw_config(folder, overrides).get("tie_word_embeddings") or HEAD not in stored_in(folder):
        return ()
    tensors = read_checkpoint(folder).tensors
    head, embedding = tensors[HEAD], tensors.get(EMBEDDING)
    if embedding is None or (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return ()
    if _rows(head) == _rows(embedding):
        return ()
    return (
        f"{HEAD} in {head.file.name} differs from the embedding and is not read, because config.json says "
        "tie_word_embeddings=true: with tie_word_embeddings=false there it is used.",
    )


def _rows(tensor: StoredTensor) -> list[bytes]:
    """Read the first, middle and last row of a tensor."""
    count = tensor.shape[0] if tensor.shape else 1
    width = tensor.num_bytes // max(1, count)
    rows = []
    with tensor.file.open("rb") as file:
        for row in (0, count // 2, max(0, count - 1)):
            file.seek(tensor.offset + row * width)
            rows.append(file.read(width))
    return rows
