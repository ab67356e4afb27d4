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

import torch
from torch import Tensor

from quire.assemble.engine import Engine, assemble
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError, RequestFailed
from quire.contracts.sampling import SamplingParams
from quire.entry.local import front_end
from quire.entry.prompts import Prompt
from quire.explain.verify import reference as peer
from quire.explain.verify.dequantized import QuantizedInputs, Rules, describe, write_dequantized
from quire.explain.verify.differences import Differences, relative_difference
from quire.explain.verify.parameters import Changed, changed_parameters, reference_layout
from quire.explain.verify.recording import Recording, stage_name
from quire.explain.verify.steps import check_layers, watch
from quire.explain.verify.verdict import Report, Stage, Step
from quire.text.tokenizer import TOKENIZER_FILE
from quire.worker.taps import HiddenTap

NUM_TOKENS = 32  # greedy tokens compared
NUM_PROMPT = 48  # prompt tokens when the model has no tokenizer
# Rounding of a step, relative to its row, is at most 2.5e-6 (5e-7 where it is a norm): in the bundled and random models
# of every family, and in random ones with the widths of Llama 3.1 8B, Qwen3 8B and DeepSeek-V2-Lite, also with a
# channel that is 5,000 times the others. The bounds are 6 to 12 times that. A wrong number that matters is far above: a
# tensor that is 1.001 times too large differs by 1e-3.
BOUND, NORM_BOUND = 3e-5, 3e-6
# Experts quantize their activations a second time inside the step: rounding of float32 before may turn a value to its
# neighbour. At most 1.2e-4 (FP8) was measured on quire-tiny-moe; without quantization a step is 1e-2 off or more.
EXPERTS_BOUND = 2e-3
TURN = 2.5e-7  # of a rotation per position: an angle is a float32 product, and two of its roundings are so much
TEXT = (
    "The quire is a stack of folded pages. In 1455 about 180 copies of the first printed Bible were made of them; "
    "each copy has 1,286 pages, and every page holds 42 lines."
)


def verify(
    model: str, config: EngineConfig | None = None, prompt: str | None = None, *, reference: Path | None = None
) -> Report:
    """Compare `model` (folder, hub id, or "" for the bundled one) with transformers. Return the report.

    config      engine options; dtype and KV cache are float32, the device is the CPU, and no drafts are verified.
                Options that ask for something else are refused
    prompt      text to compare on; by default a sentence with figures, or fixed ids for a model without a tokenizer
    reference   folder of another checkpoint, which transformers reads instead of `model`. Its tensors are named as
                in `model`, or as in the model family of the config.json in this folder
    Raises ConfigError when transformers is not installed, for such options, or if the context is too short; ModelError
    for a tensor that the reference lacks, and the errors of `assemble`.
    """
    _need_transformers()
    config = config or EngineConfig()
    _check_options(config)
    config = replace(
        config,
        model=replace(config.model, model=model, dtype="float32"),
        cache=replace(config.cache, kv_cache_dtype="float32"),
        device=replace(config.device, device="cpu"),
    )
    engine = assemble(_without_missing_tokenizer(config, model))
    try:
        if engine.args.foreign is not None:
            raise ConfigError(
                f"verify compares layers of Quire with those of transformers, and the layers of "
                f"{engine.args.architecture} are transformers' own: there is nothing to compare."
            )
        check_layers(engine.worker.model)
        if engine.config.scheduler.speculative_config is not None:  # of a repository that names its model
            raise ConfigError(f"verify compares a model without drafts: give {engine.folder}.")
        return _compared(engine, model or "quire-tiny", prompt, reference)
    finally:
        engine.close()


def _compared(engine: Engine, name: str, prompt: str | None, reference: Path | None) -> Report:
    """Run the engine and the reference, of a quantized model the dequantized one."""
    model = engine.worker.model
    with ExitStack() as stack:
        folder, rules = reference or engine.folder, Rules()
        layout = tuple(model.layout)
        if reference is not None:
            layout = reference_layout(layout, reference)
        if any(param.stored or param.scheme for param in model.layout):
            read, folder = folder, Path(stack.enter_context(TemporaryDirectory(prefix="quire-verify-")))
            layout, rules = write_dequantized(model, layout, read, folder)
        changed = changed_parameters(model, layout, folder)
        prompt_ids = _prompt_ids(engine, prompt)
        tokens, ours = _run_quire(engine, prompt_ids)
        token_ids = [*prompt_ids, *tokens[:-1]]
        theirs = peer.load(folder)
        stack.enter_context(QuantizedInputs(theirs, rules, layout))
        alone = peer.run_alone(theirs, token_ids, ours)
        found = peer.run_on(theirs, token_ids, ours)
    return _report(name, reference or engine.folder, tokens, alone, found, changed, quantized=describe(model))


def _report(
    model: str,
    folder: Path,
    tokens: list[int],
    alone: dict[str, Tensor],
    found: Differences,
    changed: tuple[Changed, ...],
    *,
    quantized: tuple[str, bool],
) -> Report:
    """quantized: schemes in words, and True where activations are quantized."""
    ours = found.ours
    chosen = alone["logits"][-len(tokens) :]
    wanted = chosen.argmax(-1).tolist()
    at = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b), None)
    num_rows, stages, (words, rounds) = len(alone["logits"]), [], quantized
    for name, steps in ours.pieces.items():
        parts = tuple(
            Step(step, found.found.get((name, step), float("inf")), _bound(step, num_rows, rounds)) for step in steps
        )
        total = ours.result(name, parts[-1].name)
        stages.append(Stage(name, parts, relative_difference(total.flatten(1), alone[name])))
    return Report(
        model=model,
        reference=str(folder),
        num_prompt=num_rows - len(tokens) + 1,
        stages=tuple(stages),
        changed=changed,
        ours=tuple(tokens),
        theirs=tuple(wanted),
        margin=0.0 if at is None else float(chosen[at, wanted[at]] - chosen[at, tokens[at]]),
        scale=float(chosen.abs().max()),
        quantized=words,
        rounds=rounds,
    )


def _bound(step: str, num_rows: int, rounds: bool) -> float:
    """Return the largest difference of a step that rounding explains, relative to its row.

    rounds   activations are quantized
    """
    if step == "experts" and rounds:
        return EXPERTS_BOUND
    if step.endswith("norm"):
        return NORM_BOUND
    return BOUND + TURN * num_rows if step in ("queries", "keys") else BOUND


def _check_options(config: EngineConfig) -> None:
    """Raise ConfigError for options that name something else than is compared."""
    if config.device.device not in ("auto", "cpu"):
        raise ConfigError(f"verify compares step by step on the CPU: leave out device={config.device.device}.")
    cache, dtype, asked = config.cache.kv_cache_dtype, config.model.dtype, config.scheduler.speculative_config
    if cache not in ("auto", "float32"):
        raise ConfigError(
            f"verify compares with keys and values in float32: leave out --kv-cache-dtype {cache}, whose rounding "
            "is no error of a step."
        )
    if dtype not in ("auto", "float32"):
        raise ConfigError(f"verify compares in float32: leave out --dtype {dtype}.")
    if asked is not None:
        drafter = f"method {asked['method']}" if asked.get("method") else "a draft model"
        raise ConfigError(
            f"verify compares the layers of a model, without drafts ({drafter}): "
            "leave out --speculative-config. Drafts change no token: each is verified by these layers."
        )


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


def _without_missing_tokenizer(config: EngineConfig, model: str) -> EngineConfig:
    """Skip the tokenizer of a folder that has none, as random test checkpoints do; token ids suffice."""
    folder = Path(config.model.tokenizer or model)
    if not model or not folder.is_dir() or (folder / TOKENIZER_FILE).is_file():
        return config
    return replace(config, model=replace(config.model, skip_tokenizer_init=True))


def _prompt_ids(engine: Engine, prompt: str | None) -> list[int]:
    """Return the token ids of the prompt, cut so that the greedy tokens still fit the context."""
    room = engine.core.facts.max_model_len - NUM_TOKENS
    if room < 1:
        raise ConfigError(f"verify needs a context of more than {NUM_TOKENS} tokens: raise max_model_len.")
    if prompt is None and engine.tokenizer is None:
        return [(37 * i * i + 11 * i + 5) % engine.args.vocab_size for i in range(NUM_PROMPT)][:room]
    return front_end(engine).encode(Prompt(text=prompt or TEXT))[:room]


def _run_quire(engine: Engine, prompt_ids: list[int]) -> tuple[list[int], Recording]:
    """Generate NUM_TOKENS greedy tokens and record the result of every step; prefill and decode are joined."""
    recording, model = Recording(), engine.worker.model
    last = model.args.num_layers - 1
    watch(model, recording)

    def keep(where: int | str, hidden: Tensor) -> None:
        if where == "embed":
            recording.keep("embed", "embed_tokens", hidden)
        else:
            recording.keep(stage_name(int(where), recording.ends[int(where)]), "sum", hidden)

    engine.worker.features.attach(HiddenTap(model, keep))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    front = front_end(engine)
    generation, requests = front.start(Prompt(token_ids=prompt_ids), params)
    for request in requests:
        engine.core.add(request)
    while not generation.finished:
        front.apply(engine.core.step())
    (completion,) = generation.completions
    if completion.finish_reason == "error":
        raise RequestFailed(
            f"Quire's own request failed ({completion.stop_reason}), so there is nothing to compare: "
            f"{_not_finite(recording)} is the first step with NaN or infinity; check the parameters of that step.",
            code=str(completion.stop_reason),
        )
    with torch.inference_mode():
        normed = model.norm(recording.result(stage_name(last, recording.ends[last]), "sum"))
        recording.keep("norm", "norm", normed)
        recording.keep("logits", "lm_head", model.head.whole(normed))
    return completion.token_ids, recording


def _not_finite(recording: Recording) -> str:
    """Return the name of the first step with NaN or infinity."""
    steps = ((stage, step) for stage, pieces in recording.pieces.items() for step in pieces)
    return next(
        (f"{step} of {stage}" for stage, step in steps if not recording.result(stage, step).isfinite().all()),
        "lm_head of logits",
    )
