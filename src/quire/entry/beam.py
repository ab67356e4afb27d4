"""Beam search over the engine: each round extends every hypothesis by one token. The prefix cache holds its prefix."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.contracts.adapters import Adapter
from quire.contracts.errors import InvalidParameter, PromptTooLong
from quire.contracts.output import BeamSearchOutput, BeamSearchSequence, RequestOutput
from quire.contracts.sampling import BeamSearchParams, SamplingParams
from quire.entry.front_end import FrontEnd
from quire.entry.prompts import Prompt

Generate = Callable[[list[Prompt], SamplingParams], list[RequestOutput]]


@dataclass(frozen=True, kw_only=True)
class _Beam:
    tokens: tuple[int, ...]  # prompt included
    salt: str
    adapter: Adapter | None
    logprob: float = 0.0
    finished: bool = False


def beam_search(
    front: FrontEnd, generate: Generate, prompts: list[Prompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Return the best completions of every prompt, as transformers does with `early_stopping="never"`.

    Score: cumulative logprob / (generated length ** length_penalty). The length counts the end-of-sequence token.
    Each round ranks the candidates of all open hypotheses of a prompt together. An end-of-sequence id among the
    `beam_width` best completes its hypothesis; the `beam_width` best of the others stay open. The search of a prompt
    ends after max_tokens rounds, or when no hypothesis is open. Hypotheses open after the last round count as complete.
    """
    eos = frozenset() if params.ignore_eos else frozenset(front.limits.eos_ids)
    width = params.beam_width
    if any(prompt.embeds is not None for prompt in prompts):
        raise InvalidParameter("beam search needs prompts of tokens: give texts or token ids.", param="prompt_embeds")
    starts = [tuple(front.encode(prompt)) for prompt in prompts]
    open_beams = [[_Beam(tokens=s, salt=p.cache_salt, adapter=p.adapter)] for s, p in zip(starts, prompts, strict=True)]
    complete: list[list[_Beam]] = [[] for _ in starts]
    # At most len(eos) candidates of a hypothesis end it: its `width` best open ones are in the best width + len(eos).
    alternatives = min(width + len(eos), front.limits.vocab_size)
    if 0 <= front.limits.max_logprobs < alternatives:
        raise InvalidParameter(
            f"beam_width={width} needs {alternatives} logprobs per step, and this engine's "
            f"max_logprobs is {front.limits.max_logprobs}: lower beam_width, or start the engine "
            "with a higher max_logprobs.",
            param="beam_width",
        )
    rooms = [min(params.max_tokens, front.limits.max_model_len - len(start)) for start in starts]
    if min(rooms, default=1) < 1:
        raise PromptTooLong(
            f"a prompt has {max(map(len, starts))} tokens and the context "
            f"{front.limits.max_model_len}: shorten it, or raise max_model_len."
        )
    step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=alternatives, ignore_eos=True, detokenize=False)
    for round_ in range(1, max(rooms, default=0) + 1):
        flat = [(i, beam) for i, beams in enumerate(open_beams) for beam in beams]
        if not flat:
            break
        outputs = generate(
            [Prompt(token_ids=list(b.tokens), cache_salt=b.salt, adapter=b.adapter) for _, b in flat], step
        )
        candidates: list[list[_Beam]] = [[] for _ in starts]
        for (i, beam), output in zip(flat, outputs, strict=True):
            candidates[i] += _grown(beam, output, eos)
        for i, found in enumerate(candidates):
            found.sort(key=lambda beam: -beam.logprob)
            last = round_ == rooms[i]
            complete[i] += [beam for beam in found[:width] if beam.finished or last]
            open_beams[i] = [] if last else [beam for beam in found if not beam.finished][:width]
    return [_best(front, complete[i], len(start), params) for i, start in enumerate(starts)]


def _grown(beam: _Beam, output: RequestOutput, eos: frozenset[int]) -> list[_Beam]:
    """Return a copy of the hypothesis for each alternative of its next token."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [
        replace(beam, tokens=(*beam.tokens, token), logprob=beam.logprob + entry.logprob, finished=token in eos)
        for token, entry in logprobs[0].items()
    ]


def _best(front: FrontEnd, beams: list[_Beam], num_prompt: int, params: BeamSearchParams) -> BeamSearchOutput:
    def score(beam: _Beam) -> float:
        normalized: float = beam.logprob / (len(beam.tokens) - num_prompt) ** params.length_penalty
        return normalized

    best = sorted(beams, key=score, reverse=True)[: params.beam_width]
    tokenizer = front.tokenizer
    sequences = []
    for beam in best:
        shown = beam.tokens[num_prompt : len(beam.tokens) - (beam.finished and not params.include_stop_str_in_output)]
        text = None if tokenizer is None else tokenizer.decode(list(shown))
        sequences.append(
            BeamSearchSequence(
                tokens=list(beam.tokens),
                cum_logprob=beam.logprob,
                text=text,
                finish_reason="stop" if beam.finished else "length",
            )
        )
    return BeamSearchOutput(sequences=sequences)
