"""Prompts for models that fill in the middle. Knows their tokens by name, and nothing of requests."""

from itertools import chain
from typing import NamedTuple

from quire.contracts.errors import InvalidParameter
from quire.text.tokenizer import Tokenizer


class Gap(NamedTuple):
    """Tokens of a fill-in-the-middle prompt.

    before   token before the prefix (the text before the gap)
    after    token before the suffix (the text after the gap)
    fill     token before the answer; "" = none, and the suffix comes first in the prompt
    """

    before: str
    after: str
    fill: str


GAPS = (
    Gap("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    Gap("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Gap("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Gap("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Gap("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    Gap("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    Gap("[PREFIX]", "[SUFFIX]", ""),
)  # Codestral


def around_gap(tokenizer: Tokenizer, before: str, after: str, special: bool) -> list[int]:
    """Return the token ids of the prompt that asks for the text between `before` and `after`.
    `special`: True adds the special tokens that the tokenizer puts before any text. Raises `InvalidParameter` when the
    tokenizer has no fill-in-the-middle tokens."""
    for gap in GAPS:
        first, second, third = (tokenizer.token_id(name) if name else None for name in gap)
        if first is None or second is None or (third is None and gap.fill):
            continue
        # Some tokenizers put a space before every text. Encoding after "\n" avoids a space in the middle.
        head = tokenizer.encode("\n", False)
        rest = tokenizer.encode("\n" + after, False)[len(head) :] if len(head) > 1 else tokenizer.encode(after, False)
        parts = [[first, *tokenizer.encode(before, False)], [second, *rest]]
        parts = parts[::-1] if third is None else [*parts, [third]]
        return [*tokenizer.encode("", special), *chain.from_iterable(parts)]
    raise InvalidParameter(
        "suffix is not implemented for this model: its tokenizer has no tokens for filling in the "
        "middle. Put everything into the prompt.",
        param="suffix",
    )
