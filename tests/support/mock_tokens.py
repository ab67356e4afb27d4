"""The answers of the mock executor, known beforehand."""

from collections.abc import Sequence

from quire.engine.mock_executor import FIRST, chain, next_token


def mock_tokens(prompt: Sequence[int], seed: int, count: int, vocab_size: int) -> list[int]:
    """Return the first `count` tokens that the mock generates for a prompt."""
    digest, tokens = FIRST, []
    for token in prompt:
        digest = chain(digest, token)
    for _ in range(count):
        tokens.append(next_token(digest, seed, vocab_size))
        digest = chain(digest, tokens[-1])
    return tokens
