"""The request that `quire verify` runs through Quire: its engine, its prompt, and what the ranks record of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

from quire.assemble.engine import Engine, assemble, plan_ranks, read_files
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError, RequestFailed
from quire.contracts.sampling import SamplingParams
from quire.entry.local import front_end
from quire.entry.prompts import Prompt
from quire.explain.verify import recorder
from quire.explain.verify.dequantized import Holding
from quire.explain.verify.recorder import load
from quire.explain.verify.recording import Recording
from quire.plan.layout import alone
from quire.plan.meeting_rows.records import VERIFY, Inputs
from quire.plan.meetings import check, inputs_of, met
from quire.text.tokenizer import TOKENIZER_FILE

NUM_TOKENS = 32  # greedy tokens compared
NUM_PROMPT = 48  # prompt tokens when the model has no tokenizer
TEXT = (
    "The quire is a stack of folded pages. In 1455 about 180 copies of the first printed Bible were made of them; "
    "each copy has 1,286 pages, and every page holds 42 lines."
)
Controls = Callable[..., list[Any]]  # runs an operation of `LayerRecorder` on every rank; returns values by rank


class Made(NamedTuple):
    """A request that Quire has answered.

    tokens      greedy tokens
    recording   results of the steps
    drafts      numbers of drafts, and of these accepted
    """

    tokens: list[int]
    recording: Recording
    drafts: tuple[int, int] = (0, 0)


def check_options(config: EngineConfig, model: str, *scopes: str) -> None:
    """Raise ConfigError for what the table of meetings says `quire verify` does not work with.

    scopes   STEPS: it compares step by step
    """

    def refuse(inputs: Inputs) -> None:
        check([row for scope in (VERIFY, *scopes) for row in met(inputs, scope)])

    refuse(inputs_of(config))  # before the model is looked for
    found = read_files(replace(config, model=replace(config.model, model=model)))
    draft = None if found.draft is None else found.draft.args
    refuse(inputs_of(found.config, found.args, found.device.device, draft=draft))


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """Context manager: yield an engine whose ranks can record. A folder without a tokenizer needs none."""
    engine = assemble(_without_missing_tokenizer(config))
    try:
        yield engine
    finally:
        engine.close()


def held_by_ranks(engine: Engine) -> list[Holding]:
    """Return every rank with its parameters."""
    if engine.runner is not None:
        return [(alone(engine.args), tuple(engine.worker.model.layout))]
    plans = plan_ranks(engine.config, read_files(engine.config))
    return [(plan.mesh.rank, plan.params) for plan in plans]


def controls(engine: Engine) -> Controls:
    """Add a `LayerRecorder` to every rank. Return their operations."""
    if engine.runner is None:
        engine.core.executor.control("attach", {"module": recorder.__name__})
        return lambda name, **given: cast(list[Any], engine.core.executor.control(name, given))
    own = recorder.make(engine.worker, alone(engine.args))
    engine.worker.features.attach(own)
    return lambda name, **given: [own.controls[name](**given)]


def _without_missing_tokenizer(config: EngineConfig) -> EngineConfig:
    """Skip the tokenizer of a folder that has none, as random test checkpoints do; token ids suffice."""
    model = config.model.model
    folder = Path(config.model.tokenizer or model)
    if not model or not folder.is_dir() or (folder / TOKENIZER_FILE).is_file():
        return config
    return replace(config, model=replace(config.model, skip_tokenizer_init=True))


def prompt_tokens(engine: Engine, prompt: str | None) -> list[int]:
    """Return the token ids of the prompt, cut so that the greedy tokens still fit the context."""
    room = engine.core.facts.max_model_len - NUM_TOKENS
    if room < 1:
        raise ConfigError(f"verify needs a context of more than {NUM_TOKENS} tokens: raise max_model_len.")
    if prompt is None and engine.tokenizer is None:
        return [(37 * i * i + 11 * i + 5) % engine.args.vocab_size for i in range(NUM_PROMPT)][:room]
    return front_end(engine).encode(Prompt(text=prompt or TEXT))[:room]


def run_quire(engine: Engine, prompt_ids: list[int], control: Controls) -> Made:
    """Generate NUM_TOKENS greedy tokens. Return them, and what the ranks have recorded meanwhile."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    front, drafts = front_end(engine), (0, 0)
    generation, requests = front.start(Prompt(token_ids=prompt_ids), params)
    for request in requests:
        engine.core.add(request)
    while not generation.finished:
        outputs = engine.core.step()
        front.apply(outputs)
        if found := outputs.stats.drafts:
            drafts = found[1], sum(found[2:])
    (completion,) = generation.completions
    failed = completion.finish_reason == "error"
    with TemporaryDirectory(prefix="quire-verify-") as folder:
        control("recorded", folder=folder, length=0 if failed else len(prompt_ids) + NUM_TOKENS - 1)
        recording = load(Path(folder))
    if failed:
        raise RequestFailed(
            f"Quire's own request failed ({completion.stop_reason}), so there is nothing to compare: "
            f"{_not_finite(recording)} is the first step with NaN or infinity; check the parameters of that step.",
            code=str(completion.stop_reason),
        )
    return Made(completion.token_ids, recording, drafts)


def _not_finite(recording: Recording) -> str:
    """Return the name of the first step with NaN or infinity."""
    steps = ((stage, step) for stage, pieces in recording.pieces.items() for step in pieces)
    return next(
        (f"{step} of {stage}" for stage, step in steps if not recording.result(stage, step).isfinite().all()),
        "lm_head of logits",
    )
