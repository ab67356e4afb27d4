"""The reference of the step runner: every request is computed anew from its tokens, alone, in every step.

No slot tables, no pages, nothing that is kept between steps but tokens: a request's cache is one block as long as its
sequence, its attention is the reference, and its tokens are drawn by the specification of sampling, row by row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.assemble.kv_views import kv_views
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import (
    I32,
    NO_MASKS,
    POOL,
    PROMPT_LOGPROBS,
    SAMPLE,
    Admission,
    RowLogprobs,
    StepPlan,
    StepResult,
)
from quire.kernels.attention import AttentionMeta
from quire.kernels.sampling import specification
from quire.kernels.sampling.sampled import joined
from quire.layers.context import StepContext
from quire.layers.stack import Model, embedded, run_layers
from quire.plan.kv_geometry import kv_components

from .row_logprobs import row_logprobs


@dataclass
class NaiveRequest:
    """A request's tokens, and how many of them steps have computed."""

    spec: SamplerSpec
    tokens: list[int]
    computed: int
    pool: str

    @staticmethod
    def admitted(a: Admission) -> "NaiveRequest":
        """As it takes its slot."""
        return NaiveRequest(a.sampler, a.token_ids.tolist(), a.num_computed, a.pool)


class NaiveRunner:
    """Runs plans; the model's kernels are the references. `get_masks` of `run`: see `Executor.release`.

    num_groups   of KV; a request has its whole cache in each
    texts   seed -> tokens of the request with this seed, prompt and output, as far as it came
    tie   a token whose logit leads by less may be another's in `given`, another runner's result, and is taken over: of
          greedy requests, in types that round
    """

    def __init__(self, model: Model, tie: float = 0.0, num_groups: int = 1) -> None:
        self.model, self.tie, self.num_groups = model, tie, num_groups
        self.requests: dict[int, NaiveRequest] = {}
        self.texts: dict[int, list[int]] = {}

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, get_masks: Callable[[], I32] = lambda: NO_MASKS, given: StepResult | None = None
    ) -> StepResult:
        """Run a step to its end, and return its result."""
        for slot in plan.released.tolist():
            self.requests.pop(slot, None)
        self.requests |= {a.slot: NaiveRequest.admitted(a) for a in plan.admitted}
        self.texts |= {a.sampler.seed: self.requests[a.slot].tokens for a in plan.admitted}
        masks = dict(zip(plan.grammar.tolist(), get_masks(), strict=True))
        runs: dict[int, list[int]] = {}
        failed: dict[int, str] = {}
        logprobs: dict[int, RowLogprobs] = {}
        scored: dict[int, RowLogprobs] = {}
        pooled: dict[int, np.ndarray] = {}
        for i, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True)):
            request, bits = self.requests[slot], int(plan.outputs[i])
            first, request.computed = request.computed, request.computed + (1 if i < plan.num_decodes else count)
            hidden, logits = self.logits(request)
            if bits & PROMPT_LOGPROBS and (rows := prompt_rows(request, logits, first)) is not None:
                scored[slot] = rows
                failed |= {slot: "nan_logits"} if np.isnan(rows.logprobs[:, 0]).any() else {}
            if bits & POOL and request.computed == request.spec.num_prompt:
                pooled[slot] = vector(self.model.norm(hidden).float(), request.pool)
                failed |= {} if np.isfinite(pooled[slot]).all() else {slot: "nan_hidden"}
            if bits & SAMPLE:
                known, runs[slot], named = len(request.tokens), [], []
                for at in range(1 if given is None else accepted_by(given, slot)):
                    if at:  # a draft was right: the token after it, as plain decoding would draw it
                        request.computed += 1
                        _, logits = self.logits(request)
                    token, code = draw(logits[-1], request, masks.get(slot))
                    failed |= {slot: code} if code else {}
                    if given is not None and logits[-1, token] - logits[-1, other := given_token(given, slot, at)] < (
                        self.tie
                    ):
                        token = other
                    named += [rows] if (rows := sampled_row(logits[-1], token, request.spec)) else []
                    request.tokens.append(token)
                runs[slot] = request.tokens[known:]
                logprobs |= {slot: joined(named)} if named else {}
        counts = np.array([len(run) for run in runs.values()], np.int32)
        width = counts.max(initial=1)
        tokens = np.array([(run + [-1] * width)[:width] for run in runs.values()], np.int32).reshape(-1, width)
        return StepResult(
            step=plan.step,
            slots=np.array(list(runs), np.int32),
            tokens=tokens,
            num_accepted=counts,
            failed=failed,
            logprobs=logprobs,
            prompt_logprobs=scored,
            pooled=pooled,
            num_computed=int(plan.num_tokens.sum()),
        )

    def logits(self, request: NaiveRequest) -> tuple[Tensor, Tensor]:
        """Hidden states [T, hidden] and logits [T, V] of a request's computed tokens."""
        hidden = self.hidden(request.tokens[: request.computed])
        return hidden, self.model.head(self.model.norm(hidden))

    def hidden(self, tokens: list[int]) -> Tensor:
        """The layers' hidden states [T, hidden] of a sequence."""
        model, length = self.model, len(tokens)
        ids, positions = torch.tensor(tokens), torch.arange(length)
        dtype = model.embed(ids[:1]).dtype
        components = kv_components(model.args.mixers[0], str(dtype).removeprefix("torch."))
        caches = (
            tuple(torch.zeros(1, c.num_heads, length, c.head_dim, dtype=dtype) for c in components)
            for _ in model.layers
        )
        meta = AttentionMeta(
            query_start=[0, length],
            seq_lens=[length],
            kv_slots=positions,
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
        )
        ctx = StepContext(positions, (meta,) * self.num_groups, kv_views([one.mixer for one in model.held], caches))
        return run_layers(model, *embedded(model, ids, ctx))


def draw(logits: Tensor, request: NaiveRequest, mask: I32 | None) -> tuple[int, str]:
    """The next token from raw logits [V], or 0 and why there is none."""
    if not (logits < torch.inf).all():
        return 0, "nan_logits"
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little").astype(bool)
        logits = logits.masked_fill(torch.from_numpy(~allowed), -torch.inf)
    if not (specification.edited(logits, request.spec, request.tokens) > -torch.inf).any():
        return 0, "no_token"
    return specification.sample(logits, request.spec, request.tokens), ""


def sampled_row(logits: Tensor, token: int, spec: SamplerSpec) -> RowLogprobs | None:
    """Log-probabilities of a token that was drawn, for who asks."""
    if spec.num_logprobs is None and not spec.logprob_ids:
        return None
    extra = torch.tensor(spec.logprob_ids) if spec.logprob_ids else None
    return row_logprobs(logits[None], torch.tensor([token]), spec.num_logprobs or 0, extra)


def given_token(result: StepResult, slot: int, at: int) -> int:
    """Token number `at` of a slot's run in a result."""
    return int(result.tokens[result.slots.tolist().index(slot), at])


def accepted_by(result: StepResult, slot: int) -> int:
    """Number of tokens of a slot's run in a result."""
    return int(result.num_accepted[result.slots.tolist().index(slot)])


def valid(result: StepResult) -> list[list[int]]:
    """The valid tokens of each slot."""
    return [run[:count] for run, count in zip(result.tokens.tolist(), result.num_accepted.tolist(), strict=True)]


def prompt_rows(request: NaiveRequest, logits: Tensor, first: int) -> RowLogprobs | None:
    """Log-probabilities of the prompt's tokens after the positions from `first` on that were computed."""
    last = min(request.computed, request.spec.num_prompt - 1)
    if last <= first:
        return None
    targets = torch.tensor(request.tokens[first + 1 : last + 1])
    assert request.spec.num_prompt_logprobs is not None
    return row_logprobs(logits[first:last], targets, request.spec.num_prompt_logprobs)


def vector(rows: Tensor, pool: str) -> np.ndarray:
    """Rows of a whole prompt [T, hidden] as one vector."""
    found: Mapping[str, Tensor] = {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}
    return found[pool].numpy()


def agree(found: StepResult, expected: StepResult, atol: float = 1e-4) -> None:
    """Fails unless two results say the same, numbers up to `atol`."""
    assert (found.step, found.num_computed) == (expected.step, expected.num_computed)
    assert found.slots.tolist() == expected.slots.tolist()
    assert valid(found) == valid(expected), found.step
    assert found.num_accepted.tolist() == expected.num_accepted.tolist()
    assert found.failed == expected.failed
    for one, other in ((found.logprobs, expected.logprobs), (found.prompt_logprobs, expected.prompt_logprobs)):
        assert one.keys() == other.keys()
        for slot, rows in one.items():
            assert rows.ids.tolist() == other[slot].ids.tolist()
            assert rows.ranks.tolist() == other[slot].ranks.tolist()
            np.testing.assert_allclose(rows.logprobs, other[slot].logprobs, atol=atol)
    assert found.pooled.keys() == expected.pooled.keys()
    for slot, vector in found.pooled.items():
        np.testing.assert_allclose(vector, expected.pooled[slot], rtol=1e-4, atol=atol)
