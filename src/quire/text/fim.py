"""How models that fill in the middle are shown a gap. Knows tokens by name, and nothing of requests."""

from itertools import chain
from typing import NamedTuple

from quire.contracts.errors import InvalidParameter
from quire.text.tokenizer import Tokenizer


class Gap(NamedTuple):
    """The tokens before what comes before the gap, before what comes after it, and before what fills it ("": none, and
    what comes after the gap stands first)."""

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
    Gap("[PREFIX]", "[SUFFIX]", ""))  # Codestral


def around_gap(tokenizer: Tokenizer, before: str, after: str, special: bool) -> list[int]:
    """The prompt that asks for what stands between two texts; `special`: with what the tokenizer puts before any text.
    Errors: `InvalidParameter` where the tokenizer has no tokens for that."""
    for gap in GAPS:
        first, second, third = (tokenizer.token_id(name) if name else None for name in gap)
        if first is None or second is None or (third is None and gap.fill):
            continue
        # A tokenizer that puts a space before every text would put one into the middle of this one.
        head = tokenizer.encode("\n", False)
        rest = tokenizer.encode("\n" + after, False)[len(head):] if len(head) > 1 else tokenizer.encode(after, False)
        parts = [[first, *tokenizer.encode(before, False)], [second, *rest]]
        parts = parts[::-1] if third is None else [*parts, [third]]
        return [*tokenizer.encode("", special), *chain.from_iterable(parts)]
    raise InvalidParameter("suffix is not implemented for this model: its tokenizer has no tokens for filling in the "
                           "middle. Put everything into the prompt.", param="suffix")
