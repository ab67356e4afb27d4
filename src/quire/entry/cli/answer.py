"""Prints an answer while it is generated, stops it at Ctrl-C, and knows how fast it came."""

import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.entry.interrupt import interruptible

if TYPE_CHECKING:
    from quire.contracts.output import RequestOutput


@dataclass(kw_only=True)
class Answer:
    """One answer, complete or interrupted. Times are seconds since the question; `first` is None without a token."""

    text: str = ""
    num_tokens: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    first: float | None = None
    seconds: float = 0.0
    interrupted: bool = False
    failure: str | None = None

    def stats(self) -> str:
        """One line: counts and speed."""
        prompt = f"prompt {self.num_prompt} tokens" + (f" ({self.num_cached} cached)" if self.num_cached else "")
        if self.first is None:
            return f"{prompt}, no answer in {self.seconds:.2f} s"
        speed = self.num_tokens / self.seconds if self.seconds else 0.0
        return (f"{prompt}, answer {self.num_tokens} tokens in {self.seconds:.2f} s: {speed:.1f} tokens/s, first after "
                f"{1000 * self.first:.0f} ms")


def print_answer(pieces: "Iterator[RequestOutput]") -> Answer:
    """Print the pieces (DELTA outputs of one completion) to stdout as they come, and a last newline. Ctrl-C ends it."""
    answer = Answer()
    with interruptible() as stop:
        try:
            _print_pieces(pieces, answer, stop)
        finally:
            if isinstance(pieces, Generator):
                pieces.close()  # aborts the request
    if not answer.text.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    return answer


def _print_pieces(pieces: "Iterator[RequestOutput]", answer: Answer, stop: threading.Event) -> None:
    start = time.perf_counter()
    for piece in pieces:
        delta = piece.outputs[0]
        answer.seconds = time.perf_counter() - start
        if answer.first is None and delta.token_ids:
            answer.first = answer.seconds
        answer.num_tokens += len(delta.token_ids)
        answer.num_prompt, answer.num_cached = len(piece.prompt_token_ids), piece.num_cached_tokens or 0
        answer.text += delta.text
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        if delta.finish_reason == "error":
            answer.failure = str(delta.stop_reason)
        if stop.is_set():
            answer.interrupted = True
            return
