"""Tensors of torch.save, read without torch: the same numbers, and nothing else is accepted."""

import base64
import io
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire.contracts.errors import InvalidParameter
from quire.entry.torch_tensors import checked_matrix, read_matrix

WIDTH = 6
PLAIN = torch.arange(30, dtype=torch.float32).reshape(5, WIDTH) / 7


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def read(data: bytes, most: int = 9) -> Any:
    return read_matrix(base64.b64encode(data).decode(), "prompt_embeds", width=WIDTH, most=most)


@pytest.mark.parametrize(
    "tensor",
    [
        PLAIN,
        PLAIN.bfloat16().requires_grad_(),
        PLAIN.half(),
        PLAIN.T.contiguous().T,
        torch.cat([PLAIN, PLAIN])[2:7],
        torch.randn(300, 2 * WIDTH)[::2, 1::2][:9],
    ],
)
def test_a_matrix_has_the_numbers_that_torch_has(tensor: torch.Tensor) -> None:
    found = read(saved(tensor))
    assert found.dtype == np.float32 and (found == tensor.detach().float().numpy()).all()
    assert (checked_matrix(tensor, "x") == found).all() and (checked_matrix(found, "x") == found).all()


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return (pytest.fail, ("it was run",))


def changed(name: str, change: Callable[[bytes], bytes], packing: int = zipfile.ZIP_STORED) -> bytes:
    """Return the file of PLAIN with another content of a part."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(PLAIN))) as old, zipfile.ZipFile(out, "w", packing) as new:
        for one in old.namelist():
            new.writestr(one, change(old.read(one)) if one.endswith(name) else old.read(one))
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a tensor"),
        (saved(PLAIN)[:200], "not a tensor"),
        (saved(Evil()), "not a single matrix"),
        (saved([PLAIN]), "not a single matrix"),
        (saved(PLAIN.double()), "not a single matrix"),
        (saved(PLAIN[None]), "not a single matrix"),
        (saved(PLAIN, _use_new_zipfile_serialization=False), "not a tensor"),
        (changed("data.pkl", lambda old: pickle.dumps(Evil())), "not a single matrix"),
        (changed("data.pkl", lambda old: old + b" " * 9000), "larger"),
        (changed("data.pkl", lambda old: old.replace(b"K\x05K\x06", b"K\x09K\x06")), "numbers are missing"),
        (changed("data/0", lambda old: old[:-4]), "numbers are missing"),
        (changed("none", lambda old: old, zipfile.ZIP_DEFLATED), "compressed"),
        (saved(PLAIN[:, :5]), "send .tokens, 6"),
        (saved(PLAIN[:0]), "send .tokens, 6"),
        (saved(torch.cat([PLAIN, PLAIN])), "at most 9 tokens"),
        (saved(PLAIN * float("nan")), "not finite"),
    ],
)
def test_anything_else_is_refused_and_nothing_is_run(data: bytes, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as caught:
        read(data)
    assert caught.value.param == "prompt_embeds"


@pytest.mark.parametrize("value", [PLAIN[0], PLAIN.int(), [[1.0]], PLAIN.numpy()[:, :0], PLAIN * float("inf")])
def test_a_value_that_is_no_matrix_of_numbers_is_refused(value: Any) -> None:
    with pytest.raises(InvalidParameter):
        checked_matrix(value, "prompt_embeds")
