"""Parsing of the prompts that `generate` takes into `Prompt`: text or token ids, with a cache salt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from quire.contracts.adapters import Adapter
from quire.contracts.errors import InvalidParameter, shown
from quire.contracts.step import F32
from quire.entry.torch_tensors import checked_matrix
from quire.text.tokenizer import Tokenizer

PROMPT_KEYS = {"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt"}
MAX_SALT = 256


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as `text`, as `token_ids`, or as both. With both, the engine uses the ids. `embeds`: [tokens, hidden]
    float32, the input of the first layer; then the ids only count the tokens.
    `cache_salt`: KV blocks are shared only among prompts with the same salt. `chunks`: (first token, end) of marked
    content parts, see `text/kv_chunk_marks.py`. `adapter`: that of the request; None: the base model."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str = ""
    chunks: tuple[tuple[int, int], ...] = ()
    embeds: F32 | None = None
    adapter: Adapter | None = None


PromptLike = str | Sequence[int] | Mapping[str, object] | Prompt


def piece_prompt(tokenizer: Tokenizer, pieces: Sequence[Sequence[str]], special: bool) -> Prompt:
    """Return the prompt of a text in pieces: every second one is a chunk. See `MarkedParts.pieces`.

    pieces    lists of texts, each of which is tokenized by itself
    special   add special tokens such as BOS
    """
    ids, ends = list[int](), [0]
    for piece in pieces:
        for text in piece:
            ids += tokenizer.encode(text, special and not ids)
        ends.append(len(ids))
    chunks = tuple((first, end) for first, end in zip(ends[1::2], ends[2::2], strict=False) if first < end)
    return Prompt(text="".join(map("".join, pieces)), token_ids=ids, chunks=chunks)


def parse_prompts(prompts: PromptLike | Sequence[PromptLike] | None) -> list[Prompt]:
    """Parse one prompt, or a list: a string, token ids, {"prompt": ...} or {"prompt_token_ids": ...} each.

    None is refused as any other type: a caller may have left it out for an old keyword.
    """
    if isinstance(prompts, (str, Mapping, Prompt)) or _is_ids(prompts):
        return [parse_prompt(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidParameter(
            f"prompts must be a string, token ids, a dict or a list of these, not {type(prompts).__name__}.",
            param="prompts",
        )
    return [parse_prompt(p) for p in prompts]


def parse_prompt(prompt: object) -> Prompt:
    """Parse one prompt of any accepted type. Raises `InvalidParameter` for another."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if _is_ids(prompt):
        return Prompt(token_ids=list(prompt))
    raise InvalidParameter(
        f"a prompt must be a string, a list of token ids, {{'prompt': text}} or "
        f"{{'prompt_token_ids': ids}}, not {type(prompt).__name__}.",
        param="prompt",
    )


def _parse_mapping(prompt: Mapping[str, object]) -> Prompt:
    unknown = sorted(set(prompt) - PROMPT_KEYS)
    if unknown:
        raise InvalidParameter(
            f"prompt key {shown(unknown[0])} is not implemented: use {', '.join(sorted(PROMPT_KEYS))}.",
            param=unknown[0],
        )
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt") or ""
    given, embeds = prompt.get("prompt_embeds"), None
    if text is None and ids is None and given is None:
        raise InvalidParameter("a prompt dict needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'.", param="prompt")
    if given is not None:
        if text is not None or ids is not None:
            raise InvalidParameter("'prompt_embeds' is a prompt by itself: leave the other out.", param="prompt_embeds")
        embeds = checked_matrix(given, "prompt_embeds")
        ids = [0] * len(embeds)
    if text is not None and not isinstance(text, str):
        raise InvalidParameter("'prompt' must be a string.", param="prompt")
    if ids is not None and not _is_ids(ids):
        raise InvalidParameter("'prompt_token_ids' must be a non-empty list of integers.", param="prompt_token_ids")
    if not isinstance(salt, str) or len(salt) > MAX_SALT:
        raise InvalidParameter(f"'cache_salt' must be a string of at most {MAX_SALT} characters.", param="cache_salt")
    return Prompt(text=text, token_ids=None if ids is None else list(ids), cache_salt=salt, embeds=embeds)


def _is_ids(value: object) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and len(value) > 0
        and all(issubclass(kind, int) and kind is not bool for kind in set(map(type, value)))
    )
