"""The report of `quire verify`: its values and their printed form. Knows no tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from quire.explain.verify.parameters import Changed

TIE = 1e-3  # of the largest logit: rounding in many layers may reverse a smaller lead
SHOWN = 6  # lines of a list before "and N more"
# Where to look for the error of a step whose parameters are right: what it computes beside their product. The names in
# brackets are keys of config.json, and fields of the family's row in FAMILIES.
BESIDE = {
    "embed_tokens": "the factor on embeddings (embedding_multiplier, root_embeddings)",
    "queries": "the rotation (rope_theta, rope_scaling, interleaved, rotated)",
    "keys": "the rotation (rope_theta, rope_scaling, interleaved, rotated), or the write to the cache",
    "values": "the write to the cache",
    "attention": "the scale of the scores, their soft cap, the window, the mask, or the cache",
    "recurrence": "the convolution, the decay, the strength (a, b), the state, or the norm of heads with its gate",
    "convolution": "the convolution, or the gates before and behind it",
    "attention times its gate": "the gate (attn_output_gate)",
    "router": "how experts are scored and chosen (norm_topk_prob, routed_scaling_factor, groups)",
    "gate_proj, up_proj": "the activation (hidden_act, act)",
    "shared gate_proj, up_proj": "the activation",
    "sum": "the sum of the layer's input and what the layer adds (residual_multiplier)",
    "lm_head": "the factor or the soft cap of logits (logit_scale, logits_scaling, final_logit_softcapping)",
}


@dataclass(frozen=True)
class Step:
    """An operation of a stage, compared with transformers on the same input.

    difference   the largest difference of the results, relative to the row; see `relative_difference`
    bound        the largest difference that float32 rounding explains
    """

    name: str
    difference: float
    bound: float

    @property
    def diverged(self) -> bool:
        """True when rounding does not explain the difference, or the difference is not a number."""
        return not self.difference <= self.bound


@dataclass(frozen=True)
class Stage:
    """The embedding, a half of a layer, the last norm, or the logits.

    so_far   difference of the stage's result when transformers gets only the token ids: rounding of all stages so far
             adds up
    """

    name: str
    steps: tuple[Step, ...]
    so_far: float

    @property
    def worst(self) -> Step:
        """The step that is nearest to its bound, or farthest beyond it."""
        return max(self.steps, key=lambda step: step.difference / step.bound if isfinite(step.difference) else 1e30)

    @property
    def first_divergent(self) -> Step | None:
        """The first step that differs by more than rounding; None if none does."""
        return next((step for step in self.steps if step.diverged), None)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of `verify`.

    stages      in the order in which they are computed
    changed     tensors of the checkpoint whose numbers are not those with which Quire computes
    ours        greedy tokens of Quire
    theirs      greedy choices of transformers, each after the same earlier tokens (those of Quire). Where numbers are
                rounded on purpose (`apart`) those of the logits that were compared, as the last step
    margin      first difference of the tokens: lead of the token of `theirs` over Quire's, in logits; 0: no difference
    scale       largest absolute logit of `theirs`
    quantized   quantization schemes of the model's matrices, in words; "": none
    rounds      True when activations are quantized
    cache       type of a KV cache of codes; "": the KV cache is float32
    drafts      numbers of drafts, and of these accepted; (0, 0): no speculation
    """

    model: str
    reference: str
    num_prompt: int
    stages: tuple[Stage, ...]
    changed: tuple[Changed, ...]
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    margin: float
    scale: float
    quantized: str = ""
    rounds: bool = False
    cache: str = ""
    drafts: tuple[int, int] = (0, 0)

    @property
    def apart(self) -> bool:
        """True when a tiny difference may grow where both compute alone: codes turn from a number to its neighbour."""
        return self.rounds or bool(self.cache)

    @property
    def first_divergent(self) -> tuple[str, str] | None:
        """(stage, step) names of the first step that differs by more than rounding; None if none does."""
        return next(((stage.name, step.name) for stage in self.stages if (step := stage.first_divergent)), None)

    @property
    def first_token(self) -> int | None:
        """Index of the first greedy token that differs; None if all are equal."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)

    @property
    def tied(self) -> bool:
        """True when the greedy tokens show no error: none differs, or the first difference is a tie.

        A tie: the lead in logits is at most TIE of the largest, so rounding decides.
        """
        return self.first_token is None or self.margin <= TIE * self.scale

    @property
    def ok(self) -> bool:
        """True when every step, every parameter and every greedy token agrees."""
        return self.first_divergent is None and not self.changed and self.tied

    def render(self) -> str:
        """Return the table of stages, the greedy tokens and the verdict as plain text."""
        width = max(len(stage.name) for stage in self.stages)
        inner = max(len(stage.worst.name) for stage in self.stages)
        lines = [
            f"{self.model}: {self.num_prompt} prompt and {len(self.ours)} greedy tokens, float32, against "
            f"transformers on {self.reference}",
            "own: the worst step of a stage, given the same input. so far: both compute alone from the tokens on.",
            "Both are relative to the largest value of a row.",
            "",
            f"{'stage'.ljust(width)}   so far      own  of step",
        ]
        if self.quantized:
            how = (
                "and quantizes activations by the same rules, so a tiny difference may grow where both compute alone"
                if self.rounds
                else "and leaves activations as they are"
            )
            lines[3:3] = [f"Weights: {self.quantized}.", f"The reference has them dequantized in float32, {how}."]
        if self.cache:
            lines[3:3] = [
                f"KV cache: {self.cache}. The reference attends to the numbers that were read from it, so its rounding "
                "is in the steps that are written to it alone.",
                "A tiny difference may grow where both compute alone.",
            ]
        first = self.first_divergent
        for stage in self.stages:
            shown = stage.first_divergent or stage.worst
            mark = f"{shown.name.ljust(inner)}  <-- differs" if stage.first_divergent else shown.name
            lines.append(f"{stage.name.ljust(width)}  {stage.so_far:7.1e}  {shown.difference:7.1e}  {mark}")
        if first is not None:
            lines += ["", *self._steps(first[0])]
        return "\n".join([*lines, "", self._tokens_line(), *self._drafts_line(), *self._verdict()])

    def _steps(self, name: str) -> Iterator[str]:
        stage = next(stage for stage in self.stages if stage.name == name)
        width = max(len(step.name) for step in stage.steps)
        yield f"steps of {name}:"
        for step in stage.steps:
            yield (
                f"  {step.name.ljust(width)}  {step.difference:7.1e}  bound {step.bound:.0e}"
                f"{'  <-- differs' if step.diverged else ''}"
            )

    def _tokens_line(self) -> str:
        at = self.first_token
        if at is None:
            return f"greedy tokens: all {len(self.ours)} equal"
        tie = "; a tie, not an error" if self.tied and self.first_divergent is None else ""
        return (
            f"greedy tokens: first difference at token {at}: Quire {self.ours[at]}, "
            f"{'the logits' if self.apart else 'transformers'} {self.theirs[at]} (margin {self.margin:.3g}{tie})"
        )

    def _drafts_line(self) -> Iterator[str]:
        made, accepted = self.drafts
        if made:
            yield f"drafts: {accepted} of {made} accepted; each token is the greedy choice after the tokens before it."

    def _verdict(self) -> Iterator[str]:
        first = self.first_divergent
        if self.ok and self.quantized:
            yield (
                "equal: every step within its bound, every product that of the dequantized weights, every parameter "
                "that is not quantized bit for bit the checkpoint's."
            )
            return
        if self.ok:
            yield "equal: every step within the rounding of float32, every parameter bit for bit the checkpoint's."
            return
        if first is not None:
            stage, step = first
            half = [one for one in self.stages if one.name.rpartition(" ")[2] == stage.rpartition(" ")[2]]
            alike = sum(any(one.name == step and one.diverged for one in stage.steps) for stage in half)
            every = sum(any(one.name == step for one in stage.steps) for stage in half)
            yield f"differs: {step} of {stage} is the first step beyond rounding."
            if alike > 1:
                yield f"  The same step differs in {alike} of {every} layers: look for one cause of all of them."
        elif not self.changed:
            yield "differs: every step and every parameter agrees, but a greedy token does not: look at sampling."
        else:
            yield "differs: every step agrees on these tokens, but parameters are not the checkpoint's."
        yield from self._parameters()

    def _parameters(self) -> Iterator[str]:
        if self.changed:
            yield "  Parameters that Quire computes with and that are not the checkpoint's:"
            yield from (f"    {changed}" for changed in self.changed[:SHOWN])
            if len(self.changed) > SHOWN:
                yield f"    and {len(self.changed) - SHOWN} more"
        elif self.first_divergent is not None:
            step = self.first_divergent[1]
            beside = "the norm (rms_norm_eps, plus_one, centered)" if step.endswith("norm") else BESIDE.get(step)
            beside = beside or "the code of this step"
            yield f"  Every parameter is bit for bit the checkpoint's, which leaves {beside}."
            if "(" in beside:
                yield "  The names are keys of config.json, and fields of the family's row in args/families.py."
