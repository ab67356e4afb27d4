"""Metrics of steps and requests, and the records of `/debug/requests`.

Phases of a request: queue, until a step schedules it; prefill, until its first token; decode, until its end.
"""

import logging
import time
from typing import Any

from starlette.types import Scope

from quire.config.engine import EngineConfig
from quire.contracts import errors
from quire.contracts.output import StepOutputs
from quire.entry.completion import Generation
from quire.entry.front_end import Taken
from quire.entry.http.errors import TOO_LONG, HttpError
from quire.observe.metrics import Metrics
from quire.procs.child_process import ChildProcess
from quire.procs.messages import Dropped, Ready

LOG = logging.getLogger("quire")

REFUSALS: tuple[tuple[type[Exception], str], ...] = (
    (errors.QueueFull, "queue_full"),
    (errors.QueueTimeout, "queue_timeout"),
    (errors.PromptTooLong, "prompt_too_long"),
    (errors.RequestError, "invalid"),
    (errors.EngineClosed, "closed"),
    (errors.EngineStarting, "starting"),
    (errors.EngineDead, "dead"),
)


def note_ready(metrics: Metrics, ready: Ready, config: EngineConfig, core: ChildProcess | None) -> None:
    """Note a core that is loaded."""
    metrics.engine_ready(
        num_slots=ready.num_slots,
        num_blocks=ready.num_blocks,
        block_size=ready.block_size,
        max_model_len=ready.max_model_len,
        cache_dtype=(ready.plans.get("cache") or ready.dtype).partition(" ")[0],
        enable_prefix_caching=config.cache.enable_prefix_caching,
        core_pid=core.pid if core is not None else None,
    )


def count_step(metrics: Metrics, step: StepOutputs, taken: Taken) -> None:
    """Count one step, its tokens and their latencies. `taken`: changes of the step to the live requests."""
    metrics.step(step.stats, len(step.handles) + step.stats.num_elsewhere, step.adapters)
    if taken.num_tokens:
        metrics.tokens(taken.num_tokens)
    for before, count in taken.gaps.items():
        metrics.inter_token(taken.now - before, count)
    for generation in taken.started:
        metrics.first_token(taken.now - generation.metrics.arrival_time)
    for _ in range(taken.num_stop_strings):
        metrics.aborted("stop_string")


def count_finished(metrics: Metrics, generation: Generation, reason: str) -> None:
    """Count a prompt whose completions have all ended. `reason`: finish reason of the first, or "abort"."""
    token_s = [s for c in generation.completions if (s := c.mean_token_time) is not None]
    num_outputs = [len(completion.token_ids) for completion in generation.completions]
    metrics.request_finished(reason, **_measured(generation), num_outputs=num_outputs, token_s=token_s)


def request_record(generation: Generation, state: str, cause: str = "") -> dict[str, object]:
    """Return the record of a prompt for `/debug/requests`: its id, counts and seconds; no text.
    cause: cause of the state "abort", or code of an error; "" for none"""
    arrived = time.time() - (time.monotonic() - generation.metrics.arrival_time)
    handles = [completion.handle for completion in generation.completions]
    return (
        {"request_id": generation.request_id, "state": state, "cause": cause, "handles": handles, "arrived": arrived}
        | _measured(generation)
        | {
            "num_output": sum(len(completion.token_ids) for completion in generation.completions),
            "prefix": generation.metrics.prefix,
            "fetched": generation.metrics.origins,
            "drafts": [completion.drafts for completion in generation.completions],
        }
    )


def _measured(generation: Generation) -> dict[str, Any]:
    times = generation.metrics
    arrival, began, first = times.arrival_time, generation.began, times.first_token_time
    end = times.finished_time if times.finished_time is not None else time.monotonic()
    began = began if began is None or first is None else min(began, first)
    return {
        "num_prompt": len(generation.prompt_token_ids),
        "queue_s": None if began is None else max(0.0, began - arrival),
        "prefill_s": None if began is None or first is None else first - began,
        "decode_s": None if first is None else end - first,
        "e2e_s": end - arrival,
        "num_cached": generation.num_cached or 0,
        "num_preemptions": generation.num_preemptions,
    }


def count_refusal(metrics: Metrics, error: Exception) -> None:
    """Count a request that was refused with `error`, under the reason of its class in `REFUSALS`.

    Of the answers that routes make themselves, those with 400 count; others, such as 404 for an unknown model, do so by
    their status alone.
    """
    if not isinstance(error, HttpError):
        metrics.rejected(next((reason for kind, reason in REFUSALS if isinstance(error, kind)), "internal"))
    elif error.status == 400:
        metrics.rejected("prompt_too_long" if error.code == TOO_LONG else "invalid")


def count_failure(metrics: Metrics, error: Exception, scope: Scope) -> None:
    """Count an HTTP request that has failed, unless the engine had it, which counts its end."""
    ticket = scope.get("state", {}).get("ticket")
    if ticket is None or not ticket.streams:
        count_refusal(metrics, error)


def count_dropped(metrics: Metrics, message: Dropped) -> None:
    """Count bytes that are no message, and log the first ones."""
    metrics.dropped.add(message.direction)
    if message.num == 1:
        LOG.warning(
            "the internal socket %s got data that is no message: another process writes to it. Such "
            "data is dropped; this is logged once.",
            message.direction,
        )
