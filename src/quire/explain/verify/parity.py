"""Step-by-step comparison with Hugging Face's implementation of the same model, both in float32.

Quire runs one greedy request through its engine (paged cache, prefill and decode steps). transformers then computes
every step of every layer from Quire's results of the steps before it (`reference.py`), so the difference of a step is
its own error. Two models are equal when no step differs by more than the rounding of float32, when every parameter is
the checkpoint's bit for bit, and when the greedy tokens are the same or tied.
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from quire.assemble.engine import Engine
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.explain.verify import reference as peer
from quire.explain.verify.bounds import Bounds
from quire.explain.verify.dequantized import QuantizedInputs, Rules, describe, write_dequantized
from quire.explain.verify.differences import Differences, relative_difference
from quire.explain.verify.parameters import Changed, reference_layout
from quire.explain.verify.request import (
    check_options,
    controls,
    held_by_ranks,
    open_engine,
    prompt_tokens,
    run_quire,
)
from quire.explain.verify.stored import check_dump, take
from quire.explain.verify.verdict import Report, Stage, Step
from quire.plan.cache_dtype import ASKED
from quire.plan.meeting_rows.records import STEPS
from quire.plan.placement import parallel_sizes

LOGITS = ("logits", "lm_head")


def verify(
    model: str,
    config: EngineConfig | None = None,
    prompt: str | None = None,
    *,
    reference: Path | None = None,
    dump: Path | None = None,
) -> Report:
    """Compare `model` (folder, hub id, or "" for the bundled one) with transformers. Return the report.

    config      engine options; the dtype is float32, and the device the CPU unless it is named. Options that ask for
                something that is not compared are refused
    prompt      text to compare on; by default a sentence with figures, or fixed ids for a model without a tokenizer
    reference   folder of another checkpoint, which transformers reads instead of `model`. Its tensors are named as
                in `model`, or as in the model family of the config.json in this folder
    dump        file to which the values of transformers are written; see `stored.py`
    Raises ConfigError when transformers is not installed, for such options, or if the context is too short; ModelError
    for a tensor that the reference lacks, and the errors of `assemble`.
    """
    _need_transformers()
    config = config or EngineConfig()
    check_options(config, model, STEPS)
    if dump is not None:
        check_dump(dump)
    device, cache = config.device.device, config.cache.kv_cache_dtype
    config = replace(
        config,
        model=replace(config.model, model=model, dtype="float32"),
        cache=replace(config.cache, kv_cache_dtype="float32" if cache == "auto" else cache),
        device=replace(config.device, device="cpu" if device == "auto" else device),
    )
    with open_engine(config) as engine:
        return _compared(engine, model or "quire-tiny", prompt, reference, dump)


def _compared(engine: Engine, name: str, prompt: str | None, reference: Path | None, dump: Path | None) -> Report:
    """Run the engine and the reference, of a quantized model the dequantized one."""
    with ExitStack() as stack:
        folder, rules, held = reference or engine.folder, Rules(), held_by_ranks(engine)
        if reference is not None:
            held = [(rank, reference_layout(params, reference, rank)) for rank, params in held]
        words, rounds = describe(param for _, params in held for param in params)
        if any(param.stored or param.scheme for _, params in held for param in params):
            read, folder = folder, Path(stack.enter_context(TemporaryDirectory(prefix="quire-verify-")))
            rules = write_dequantized(engine.args, held, read, folder)
        control = controls(engine)
        control("record", inner=True)
        every = [Changed(**fields) for own in control("changed", folder=str(folder)) for fields in own]
        prompt_ids = prompt_tokens(engine, prompt)
        made = run_quire(engine, prompt_ids, control)
        token_ids = [*prompt_ids, *made.tokens[:-1]]
        theirs = peer.load(folder)
        sizes = parallel_sizes(engine.config.parallel)
        stack.enter_context(QuantizedInputs(theirs, rules, [params for _, params in held], sizes))
        by_itself = peer.run_alone(theirs, token_ids, made.recording)
        found = peer.run_on(theirs, token_ids, made.recording)
        cache = ASKED.get(engine.config.cache.kv_cache_dtype, "")
        if dump is not None:
            ids = [*prompt_ids, *made.tokens]
            take(name, engine.folder, ids, len(prompt_ids), by_itself, coded=rounds).write(dump)
        bounds = Bounds(len(token_ids), rounds, cache, engine.device.device == "cuda")
        report = Report(
            model=name,
            reference=str(reference or engine.folder),
            num_prompt=len(prompt_ids),
            stages=_stages(by_itself, found, bounds),
            changed=tuple({one.name: one for one in every}.values()),  # ranks have copies
            quantized=words,
            rounds=rounds,
            cache=cache,
            drafts=made.drafts,
            **answers(made.tokens, made.recording.result(*LOGITS) if rounds or cache else by_itself["logits"]),
        )
    return report


def _stages(by_itself: dict[str, Tensor], found: Differences, bounds: Bounds) -> tuple[Stage, ...]:
    """Return the differences of all stages. by_itself: results of the reference alone"""
    ours, stages = found.ours, list[Stage]()
    for name, steps in ours.pieces.items():
        cached = ours.kinds[name].cached if name in ours.kinds else ()
        parts = tuple(
            Step(step, found.found.get((name, step), float("inf")), bounds.of(step, cached=step in cached))
            for step in steps
        )
        total = ours.result(name, parts[-1].name)
        stages.append(Stage(name, parts, relative_difference(total.flatten(1), by_itself[name])))
    return tuple(stages)


def answers(tokens: list[int], logits: Tensor) -> dict[str, Any]:
    """Return fields of `Report` about greedy tokens of Quire, by the logits [T, V] that decide which are right."""
    chosen = logits[-len(tokens) :]
    wanted = chosen.argmax(-1).tolist()
    at = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b), None)
    return {
        "ours": tuple(tokens),
        "theirs": tuple(wanted),
        "margin": 0.0 if at is None else float(chosen[at, wanted[at]] - chosen[at, tokens[at]]),
        "scale": float(chosen.abs().max()),
    }


def _need_transformers() -> None:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "verify compares with transformers: run `pip install '.[verify]'` in Quire's folder, or "
            "`pip install transformers`."
        ) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # it lists tensors that it does not read, as of extra layers
