"""Prints an answer while it is generated, stops it at Ctrl-C, and measures its speed."""

import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.entry.keyboard_interrupt import interruptible

if TYPE_CHECKING:
    from quire.contracts.output import RequestOutput


@dataclass(frozen=True, kw_only=True)
class AnswerPiece:
    """A new part of an answer: its text, its number of tokens, and the finish `reason`. None = not known yet.

    num_prompt   tokens of the prompt
    num_cached   tokens of the prompt that came from the prefix cache
    total        tokens of the whole answer
    failure      code of the error that ended the answer; None = no error
    """

    text: str = ""
    num_tokens: int = 0
    num_prompt: int | None = None
    num_cached: int | None = None
    total: int | None = None
    reason: str | None = None
    failure: str | None = None


@dataclass(kw_only=True)
class Answer:
    """An answer, complete or interrupted.

    first      seconds from the question to the first token; None without a token
    seconds    seconds from the question to the last piece
    """

    text: str = ""
    num_tokens: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    first: float | None = None
    seconds: float = 0.0
    interrupted: bool = False
    reason: str | None = None
    failure: str | None = None

    def add(self, piece: AnswerPiece) -> None:
        """Append a piece to the answer: add its text, and update the token counts and the finish reason."""
        self.text += piece.text
        self.num_tokens = self.num_tokens + piece.num_tokens if piece.total is None else piece.total
        self.num_prompt = self.num_prompt if piece.num_prompt is None else piece.num_prompt
        self.num_cached = self.num_cached if piece.num_cached is None else piece.num_cached
        self.reason, self.failure = piece.reason or self.reason, piece.failure or self.failure

    def stats(self) -> str:
        """Return token counts and speed as one line."""
        prompt = f"prompt {self.num_prompt} tokens" + (f" ({self.num_cached} cached)" if self.num_cached else "")
        if self.first is None:
            return f"{prompt}, no answer in {self.seconds:.2f} s"
        speed = self.num_tokens / self.seconds if self.seconds else 0.0
        return (
            f"{prompt}, answer {self.num_tokens} tokens in {self.seconds:.2f} s: {speed:.1f} tokens/s, first after "
            f"{1000 * self.first:.0f} ms"
        )


def local_pieces(outputs: "Iterator[RequestOutput]") -> Iterator[AnswerPiece]:
    """Convert the outputs of a request (n=1, `OutputKind.DELTA`) to pieces of its answer."""
    try:
        for output in outputs:
            delta = output.outputs[0]
            failed = delta.finish_reason == "error"
            yield AnswerPiece(
                text=delta.text,
                num_tokens=len(delta.token_ids),
                num_prompt=len(output.prompt_token_ids),
                num_cached=output.num_cached_tokens or 0,
                reason=delta.finish_reason,
                failure=str(delta.stop_reason) if failed else None,
            )
    finally:
        if isinstance(outputs, Generator):
            outputs.close()  # aborts the request


def print_answer(pieces: Iterator[AnswerPiece], *, whole_steps: bool = True) -> Answer:
    """Print the pieces to stdout as they come, then end the line. Return the answer, also when Ctrl-C stopped it.
    `whole_steps`: True = Ctrl-C takes effect after the piece that is being computed; False = immediately."""
    answer = Answer()
    try:
        with interruptible() if whole_steps else nullcontext(threading.Event()) as stop:
            _print_pieces(pieces, answer, stop)
    except KeyboardInterrupt:
        if whole_steps:
            raise  # the second Ctrl-C
        answer.interrupted = True
    finally:
        if isinstance(pieces, Generator):
            pieces.close()
    if not answer.text.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    return answer


def _print_pieces(pieces: Iterator[AnswerPiece], answer: Answer, stop: threading.Event) -> None:
    start = time.perf_counter()
    for piece in pieces:
        answer.seconds = time.perf_counter() - start
        if answer.first is None and piece.num_tokens:
            answer.first = answer.seconds
        answer.add(piece)
        sys.stdout.write(piece.text)
        sys.stdout.flush()
        if stop.is_set():
            answer.interrupted = True
            return
