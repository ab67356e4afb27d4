"""The text of one generated sequence: detokenizer and stop strings together.

Knows the parameters of the sequence and its text so far. Knows nothing of the engine: it returns a stop string that it
finds, and the caller cuts the tokens at `num_tokens` and aborts the request.
"""

from collections.abc import Sequence

from quire.contracts.sampling import SamplingParams
from quire.text.detokenizer import detokenizer_for
from quire.text.stops import StopMatcher
from quire.text.tokenizer import Tokenizer


class SequenceText:
    """Detokenizer of one sequence, with the search for stop strings.

    num_tokens   tokens of the output: all that were pushed, or those up to the end of a stop string
    stop         the stop string that ended the text, or None
    stepwise     True with stop strings: every token must be pushed when it comes. Otherwise tokens may be pushed
                 together, when the text is needed
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self.num_tokens = 0
        self.stop: str | None = None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._shown: list[str] = []
        self._stops = StopMatcher(params.stop_strings, include_stop=self._include_stop)
        self.stepwise = bool(params.stop_strings)
        self._detokenizer = detokenizer_for(
            tokenizer,
            prompt_ids,
            skip_special_tokens=params.hides_special_tokens,
            shown=params.shown_special_ids,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )

    @property
    def text(self) -> str:
        """All text so far, except the end that may begin a stop string or is half a character."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def push(
        self, token_ids: Sequence[int], finished: bool = False, *, ended_by_token: bool = False
    ) -> tuple[str, str | None]:
        """Add tokens. Return (new text, stop string or None). Tokens after a stop string are ignored.

        finished         no more tokens will come: return text that was held back, too
        ended_by_token   the last id is the end-of-sequence or stop token that finished the sequence: it counts, but
                         is not in the text, unless `include_stop_str_in_output`
        """
        if self.stop is not None:
            return "", self.stop
        hidden = ended_by_token and not self._include_stop
        delta = self._advance(token_ids[:-1] if hidden else token_ids)
        if self.stop is None:
            self.num_tokens += hidden
        if finished and self.stop is None:
            delta += self._match(self._detokenizer.flush())
            delta += self._stops.flush()
        if delta:
            self._shown.append(delta)
        return delta, self.stop

    def _advance(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens. With stop strings, tokens are taken one by one until a stop string is complete."""
        if not self.stepwise:  # nearly every call
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        delta = ""
        for token_id in token_ids:
            if self.stop is None:
                self.num_tokens += 1
                delta += self._match(self._detokenizer.push((token_id,)))
        return delta

    def _match(self, text: str) -> str:
        shown, self.stop = self._stops.push(text, active=self.num_tokens > self._min_tokens or not self._min_tokens)
        return shown
