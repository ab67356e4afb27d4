"""Layer-by-layer comparison with Hugging Face's implementation of the same model, both in float32.

Quire runs one greedy request through its engine (paged cache, prefill and decode steps); transformers then computes
the same tokens in one pass, so every row of every layer has its counterpart and the first layer that is wrong shows.
Knows where both sides can be tapped; knows nothing of how a layer works.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.assemble import Engine, assemble
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.sampling import SamplingParams
from quire.entry.local import front_end
from quire.entry.prompts import Prompt
from quire.text.tokenizer import TOKENIZER_FILE

NUM_TOKENS = 32  # greedy tokens compared
NUM_PROMPT = 48  # prompt tokens when the model has no tokenizer
# Float32 rounding differs by 1e-6 to 1e-5 of a row's largest value after tens of layers, because sums are taken in
# another order; a wrong weight, bias, rotation, scale or mask moves a row by percents. The geometric middle is 1e-3.
TOLERANCE = 1e-3
TEXT = (
    "The quire is a stack of folded pages. In 1455 about 180 copies of the first printed Bible were made of them; "
    "each copy has 1,286 pages, and every page holds 42 lines."
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two stages are apart over all rows.

    absolute   the largest absolute difference
    relative   the same divided by the largest absolute value of the reference's row; the worst row counts
    """

    name: str
    absolute: float
    relative: float

    @property
    def diverged(self) -> bool:
        """Whether this is more than rounding; not a number counts as more."""
        return not self.relative <= TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of `verify`.

    rows      embed, each layer, norm and logits, in the order they are computed; before a layer with experts, the
              weights [T, E] that its router gives to them, so that a token sent to other experts is seen there
    ours      greedy tokens;  theirs  the reference's choice after the same tokens, so equal up to the first difference
    margin    at that difference: by how much the reference prefers its own token (logits); 0 when there is none
    """

    model: str
    reference: str
    num_prompt: int
    rows: tuple[Difference, ...]
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    margin: float

    @property
    def first_divergent(self) -> str | None:
        """Name of the first stage that differs by more than rounding."""
        return next((row.name for row in self.rows if row.diverged), None)

    @property
    def first_token(self) -> int | None:
        """Index of the first greedy token that differs."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)

    @property
    def ok(self) -> bool:
        """Whether every stage agrees and every greedy token is the same."""
        return self.first_divergent is None and self.first_token is None

    def render(self) -> str:
        """The table and the verdict as plain text."""
        width = max(len(row.name) for row in self.rows)
        lines = [
            f"{self.model}: {self.num_prompt} prompt and {len(self.ours)} greedy tokens, float32, against "
            f"transformers on {self.reference}",
            "",
            f"{'stage'.ljust(width)}  largest difference  relative to its row",
        ]
        for row in self.rows:
            mark = "  <-- diverges" if row.name == self.first_divergent else ""
            lines.append(f"{row.name.ljust(width)}  {row.absolute:18.3e}  {row.relative:19.3e}{mark}")
        return "\n".join([*lines, "", self._tokens_line(), self._verdict()])

    def _tokens_line(self) -> str:
        at = self.first_token
        if at is None:
            return f"greedy tokens: all {len(self.ours)} equal"
        return (
            f"greedy tokens: {at} of {len(self.ours)} equal; then {self.ours[at]} here and {self.theirs[at]} there, "
            f"which the reference prefers by {self.margin:.2e}"
        )

    def _verdict(self) -> str:
        if self.first_divergent is not None:
            return f"differs: {self.first_divergent} is the first stage beyond a relative difference of {TOLERANCE:g}."
        if self.first_token is not None:
            return "differs: every stage agrees, but a greedy token does not; a tiny margin means a tie, not an error."
        return f"equal: no stage differs by more than {TOLERANCE:g} of its row."


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Stages by name, [T, width] each over the same T tokens; the logits' last rows chose the greedy tokens."""

    stages: dict[str, Tensor]
    logits: Tensor


def verify(
    model: str, config: EngineConfig | None = None, prompt: str | None = None, *, reference: Path | None = None
) -> Report:
    """Compare `model` (folder, hub id, or "" for the bundled one) with transformers.

    config      engine options; dtype is forced to float32, and the device to the CPU
    prompt      text to compare on; by default a sentence with figures, or fixed ids for a model without a tokenizer
    reference   folder that transformers reads instead of the model's own, to compare two checkpoints
    Raises ConfigError when transformers is not installed or the context is too short, and what assembling raises.
    """
    _need_transformers()
    config = config or EngineConfig()
    if config.device.device not in ("auto", "cpu"):
        raise ConfigError(f"verify compares layer by layer on the CPU: leave out device={config.device.device}.")
    config = replace(config, model=replace(config.model, model=model, dtype="float32"),
                     device=replace(config.device, device="cpu"))  # fmt: skip
    engine = assemble(_without_missing_tokenizer(config, model))
    try:
        prompt_ids = _prompt_ids(engine, prompt)
        tokens, ours = _run_quire(engine, prompt_ids)
        folder = reference or engine.folder
    finally:
        engine.close()
    theirs = _run_transformers(folder, [*prompt_ids, *tokens[:-1]])
    rows = tuple(_difference(name, ours.stages[name], theirs.stages[name]) for name in ours.stages)
    chosen = theirs.logits[len(prompt_ids) - 1 :]
    wanted = tuple(chosen.argmax(-1).tolist())
    at = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b), None)
    return Report(
        model=model or "quire-tiny",
        reference=str(folder),
        num_prompt=len(prompt_ids),
        rows=(*rows, _difference("logits", ours.logits, theirs.logits)),
        ours=tuple(tokens),
        theirs=wanted,
        margin=0.0 if at is None else float(chosen[at, wanted[at]] - chosen[at, tokens[at]]),
    )


def _need_transformers() -> None:
    try:
        import transformers
    except ImportError:
        raise ConfigError("verify compares with transformers: install it with `pip install quire[verify]`.") from None
    transformers.utils.logging.disable_progress_bar()


def _without_missing_tokenizer(config: EngineConfig, model: str) -> EngineConfig:
    """Random test checkpoints have no tokenizer; token ids will do."""
    folder = Path(config.model.tokenizer or model)
    if not model or not folder.is_dir() or (folder / TOKENIZER_FILE).is_file():
        return config
    return replace(config, model=replace(config.model, skip_tokenizer_init=True))


def _prompt_ids(engine: Engine, prompt: str | None) -> list[int]:
    """Token ids of the prompt, cut so that the greedy tokens still fit the context."""
    room = engine.core.facts.max_model_len - NUM_TOKENS
    if room < 1:
        raise ConfigError(f"verify needs a context of more than {NUM_TOKENS} tokens: raise max_model_len.")
    if prompt is None and engine.tokenizer is None:
        return [(37 * i * i + 11 * i + 5) % engine.args.vocab_size for i in range(NUM_PROMPT)][:room]
    return front_end(engine).encode(Prompt(text=prompt or TEXT))[:room]


def _run_quire(engine: Engine, prompt_ids: list[int]) -> tuple[list[int], _Run]:
    """NUM_TOKENS greedy tokens, and what every stage gave on the way, prefill chunks and decode steps joined."""
    pieces: dict[str, list[Tensor]] = {}

    def keep(where: int | str, hidden: Tensor) -> None:
        name = where if isinstance(where, str) else f"layer {where}"  # a router's decision comes before its layer
        pieces.setdefault(name, []).append(hidden.to("cpu", copy=True))

    def keep_routing(layer: int, weights: Tensor, ids: Tensor) -> None:
        dense = weights.new_zeros(len(ids), moe.routing.num_experts).scatter_(1, ids.long(), weights)
        keep(f"layer {layer} router", dense)

    moe = engine.args.moe
    for layer in sorted(moe.layers) if moe is not None else ():
        engine.worker.model.layers[layer].mlp.on_routing = partial(keep_routing, layer)
    engine.worker.programs.on_hidden = keep
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    front = front_end(engine)
    generation, requests = front.start(Prompt(token_ids=prompt_ids), params)
    for request in requests:
        engine.core.add(request)
    while not generation.finished:
        front.apply(engine.core.step())
    stages = {name: torch.cat(parts) for name, parts in pieces.items()}
    model = engine.worker.model
    with torch.inference_mode():
        stages["norm"] = model.norm(list(stages.values())[-1])
        return generation.completions[0].token_ids, _Run(stages=stages, logits=model.head(stages["norm"]))


def _run_transformers(folder: Path, token_ids: list[int]) -> _Run:
    """The same stages of one pass over all tokens."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False
    ).eval()
    stages: dict[str, Tensor] = {}

    def tap(name: str) -> Any:
        def keep(module: Any, given: Any, result: Any) -> None:
            stages[name] = (result[0] if isinstance(result, tuple) else result)[0].detach()

        return keep

    def routing_tap(name: str) -> Any:
        def keep(module: Any, given: Any, result: tuple[Tensor, Tensor, Tensor]) -> None:
            logits, weights, ids = result
            stages[name] = torch.zeros_like(logits).scatter_(1, ids, weights).detach()

        return keep

    body = model.base_model
    body.get_input_embeddings().register_forward_hook(tap("embed"))
    for index, layer in enumerate(body.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(routing_tap(f"layer {index} router"))
        layer.register_forward_hook(tap(f"layer {index}"))
    body.norm.register_forward_hook(tap("norm"))
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    return _Run(stages=stages, logits=logits)


def _difference(name: str, ours: Tensor, theirs: Tensor) -> Difference:
    """ours, theirs [T, width]."""
    apart = (ours.double() - theirs.double()).abs().amax(-1)
    size = theirs.double().abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return Difference(name=name, absolute=float(apart.max()), relative=float((apart / size).max()))
