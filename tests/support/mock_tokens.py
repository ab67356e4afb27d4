"""The answers of the mock executor, known beforehand."""

from collections.abc import Sequence

from quire.engine.mock_executor import chain, first_digest, next_token


def mock_tokens(prompt: Sequence[int], seed: int, count: int, vocab_size: int, adapter: str = "") -> list[int]:
    """Return the first `count` tokens that the mock generates for a prompt. adapter: its content digest; "": none"""
    digest, tokens = first_digest(adapter), []
    for token in prompt:
        digest = chain(digest, token)
    for _ in range(count):
        tokens.append(next_token(digest, seed, vocab_size))
        digest = chain(digest, tokens[-1])
    return tokens
