"""`quire verify MODEL --against FILE`: Quire, with any options, beside a reference that another machine has stored.

Here Quire computes alone from the tokens on, so rounding adds up from stage to stage. Needs no transformers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.explain.verify.dequantized import describe
from quire.explain.verify.request import (
    Made,
    check_options,
    controls,
    held_by_ranks,
    open_engine,
    prompt_tokens,
    run_quire,
)
from quire.explain.verify.stored import StoredReference, check_checkpoint, projected, read
from quire.explain.verify.verdict import TIE
from quire.plan.cache_dtype import ASKED

# Largest difference of a row, relative to its length, that rounding explains, by the type in which Quire computes.
BOUNDS = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
CODED = 0.5  # where activations or the KV cache are codes
SPREAD = 10  # a logit differs by this much of the root mean square of the differences of its row, at most


@dataclass(frozen=True, kw_only=True)
class StoredComparison:
    """The outcome of `against`.

    where      file of the reference
    engine     type and device of the computation
    stages     (name, largest difference of a row, relative to its length), in the order in which they are computed
    absent     stages of the reference that this engine has not recorded
    rows       tokens compared: those that have the same tokens before them in both
    bound      largest difference that rounding explains
    differs    index of the first greedy token that differs; None: all are equal
    choices    the token of Quire and that of the reference there
    lead       of the reference's token over Quire's, in logits; 0: none differs
    explained  largest lead that the difference of the logits explains
    drafts     numbers of drafts, and of these accepted
    """

    model: str
    where: str
    reference: StoredReference
    engine: str
    stages: tuple[tuple[str, float], ...]
    absent: tuple[str, ...]
    rows: int
    bound: float
    differs: int | None
    choices: tuple[int, int]
    lead: float
    explained: float
    drafts: tuple[int, int]

    @property
    def first_divergent(self) -> str | None:
        """Name of the first stage that differs by more than rounding; None if none does."""
        return next((name for name, difference in self.stages if not difference <= self.bound), None)

    @property
    def ok(self) -> bool:
        """True when every stage agrees, and the greedy tokens, or their first difference is a tie."""
        return not self.absent and self.first_divergent is None and self.lead <= self.explained

    def render(self) -> str:
        """Return the table of stages, the greedy tokens and the verdict as plain text."""
        versions = ", ".join(f"{name} {version}" for name, version in self.reference.versions.items())
        width, first = max((len(name) for name, _ in self.stages), default=0), self.first_divergent
        lines = [
            f"{self.model} in {self.engine}, against {self.where}: a reference in float32 by {versions}",
            "so far: both compute alone from the tokens on. The largest difference of a row, relative to its length; "
            f"{self.rows} rows, bound {self.bound:.0e}.",
            "",
            f"{'stage'.ljust(width)}   so far",
            *(f"{name.ljust(width)}  {found:7.1e}{'  <-- differs' * (name == first)}" for name, found in self.stages),
            "",
        ]
        return "\n".join([*lines, *self._tokens(), *self._verdict()])

    def _tokens(self) -> Iterator[str]:
        ours, theirs = self.choices
        if self.differs is None:
            yield f"greedy tokens: all {len(self.reference.logits)} equal"
        else:
            yield (
                f"greedy tokens: first difference at token {self.differs}: Quire {ours}, reference {theirs} (margin "
                f"{self.lead:.3g}{'; a tie, not an error' * self.ok}); later rows are not compared"
            )
        if self.drafts[0]:
            yield f"drafts: {self.drafts[1]} of {self.drafts[0]} accepted"

    def _verdict(self) -> Iterator[str]:
        first = self.first_divergent
        if self.absent:
            yield f"not compared: {', '.join(self.absent)}: this engine has no such stages, so it is another model."
        elif self.ok:
            yield "equal: every stage within the bound. `quire verify` without --against finds smaller errors."
        elif first is None:
            yield "differs: every stage agrees, but a greedy token does not: look at sampling."
        else:
            yield f"differs: {first} is the first stage beyond rounding."


def against(model: str, config: EngineConfig, prompt: str | None, where: Path) -> StoredComparison:
    """Compare `model` under any options with the reference in the file `where`.

    prompt   text; None: the prompt of the reference
    Raises ConfigError for a file that is no reference, and for one of another checkpoint or prompt.
    """
    reference = read(where)
    check_options(config, model)
    config = replace(config, model=replace(config.model, model=model))
    with open_engine(config) as engine:
        check_checkpoint(reference, engine.folder, where)
        prompt_ids = reference.token_ids[: reference.num_prompt]
        if prompt is not None:
            _check_prompt(prompt_tokens(engine, prompt), prompt_ids, where)
        if (length := engine.core.facts.max_model_len) < len(reference.token_ids):
            raise ConfigError(
                f"{where} has {len(reference.token_ids)} tokens, and the context here {length}: raise max_model_len."
            )
        control = controls(engine)
        control("record", inner=False)
        made = run_quire(engine, prompt_ids, control)
        _, rounds = describe(param for _, params in held_by_ranks(engine) for param in params)
        coded = reference.coded or rounds or config.cache.kv_cache_dtype in ASKED
        words = f"{engine.dtype.dtype} on {engine.device.device}"
        bound = CODED if coded else BOUNDS[engine.dtype.dtype]
    return compared(model or "quire-tiny", str(where), reference, made, words, bound)


def compared(
    model: str, where: str, reference: StoredReference, made: Made, engine: str, bound: float
) -> StoredComparison:
    """Compare what Quire has made with a reference. For the others see `StoredComparison`."""
    wanted = reference.token_ids[reference.num_prompt :]
    differs = next((i for i, (a, b) in enumerate(zip(made.tokens, wanted, strict=True)) if a != b), None)
    rows = len(reference.token_ids) - 1 if differs is None else reference.num_prompt + differs
    found, apart = list[tuple[str, float]](), torch.zeros(rows)
    for index, stage in enumerate(reference.stages):
        if (steps := made.recording.pieces.get(stage)) is not None:
            ours = projected(made.recording.result(stage, [*steps][-1])[:rows].flatten(1).float())
            apart = (ours - reference.projections[index, :rows]).norm(dim=-1)
            norms = reference.norms[index, :rows]
            found.append((stage, float((apart / norms.clamp_min(max(float(norms.median()) / 10, 1e-30))).max())))
    choices, lead, explained = (0, 0), 0.0, 0.0
    if differs is not None:
        logits, choices = reference.logits[differs], (made.tokens[differs], wanted[differs])
        lead = float(logits[choices[1]] - logits[choices[0]])
        explained = max(TIE * float(logits.abs().max()), SPREAD * float(apart[-1]) / len(logits) ** 0.5)
    return StoredComparison(
        model=model,
        where=where,
        reference=reference,
        engine=engine,
        stages=tuple(found),
        absent=tuple(stage for stage in reference.stages if stage not in made.recording.pieces),
        rows=rows,
        bound=bound,
        differs=differs,
        choices=choices,
        lead=lead,
        explained=explained,
        drafts=made.drafts,
    )


def _check_prompt(ours: list[int], theirs: list[int], where: Path) -> None:
    """Raise ConfigError if the tokens of two prompts differ."""
    if ours == theirs:
        return
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    here, there = (str(one[at]) if at < len(one) else "none" for one in (ours, theirs))
    raise ConfigError(
        f"{where} is a reference of another prompt: token {at} is {here} here and {there} there. Leave --prompt out, "
        "and the prompt of the reference is used."
    )
