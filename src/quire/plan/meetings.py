"""The table of what works with what (compatibility of features): which features meet, what becomes of it, and why.

Rows lie by theme in `meeting_rows/`. Resolving an engine collects all rows that apply, and tells them together. Errors
about one option alone, or about the content of a checkpoint, are raised where they are found.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from quire.args.checkpoint import ModelArgs
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError, InvalidParameter, UnsupportedModel
from quire.contracts.parallel import Parallel
from quire.contracts.speculation import read_speculative_config
from quire.plan.meeting_rows.facts import filled
from quire.plan.meeting_rows.features import FEATURES
from quire.plan.meeting_rows.records import ENGINE, IDLE, MISSING, REQUEST, AskedFields, Inputs, Row
from quire.plan.meeting_rows.rows import ROWS
from quire.plan.placement import parallel_sizes


class Meeting(NamedTuple):
    """A row that applies to an engine or a request, as plain values.

    feature   the two that meet, with the option of the first: "CacheBlend with method mtp (--enable-cache-blend)"
    reason    sentence without its remedy
    remedy    change that helps; "": the reason says it
    status    "refused", "missing" (not implemented yet) or "no effect"
    """

    feature: str
    reason: str
    remedy: str
    status: str

    @property
    def said(self) -> str:
        """The whole sentence. A reason that ends in a table has its remedy on a line of its own."""
        between = "\n" if "\n" in self.reason else ": "
        return self.reason + (between + self.remedy) * bool(self.remedy) + "."


def inputs_of(
    config: EngineConfig,
    args: ModelArgs | None = None,
    device: str = "",
    *,
    draft: ModelArgs | None = None,
    parallel: Parallel | None = None,
) -> Inputs:
    """Return the inputs of rows, as far as they are known before a plan.

    device     "": as the option says
    parallel   None: as the options say
    """
    return Inputs(
        config=config,
        args=args,
        parallel=parallel or parallel_sizes(config.parallel),
        device=device or config.device.device,
        speculation=read_speculative_config(config.scheduler.speculative_config),
        draft=draft,
    )


def rows_of(inputs: Inputs, scope: str = ENGINE) -> Iterator[Row]:
    """Yield the rows that apply, in the order of the table."""
    for row in ROWS:
        if row.scope == scope and FEATURES[row.feature].when(inputs) and FEATURES[row.other].when(inputs):
            yield row


def met(inputs: Inputs, scope: str = ENGINE) -> tuple[Meeting, ...]:
    """Return the rows that apply as plain values, in the order of the table."""
    return tuple(_meeting(row, inputs) for row in rows_of(inputs, scope))


def _meeting(row: Row, inputs: Inputs) -> Meeting:
    one, other = FEATURES[row.feature], FEATURES[row.other]
    flag, words = filled(one.flag, inputs), filled(one.words, inputs)
    link = "and" if " with " in words else "with"
    what = filled(row.what, inputs) or f"{words} {link} {filled(other.words, inputs)}"
    reason = filled(row.reason, inputs)
    if row.status == MISSING:
        reason = f"{f'{flag}: ' * bool(flag)}{what} is not implemented yet, because {reason}"
    return Meeting(f"{what} ({flag})" if flag else what, reason, filled(row.remedy, inputs), row.status)


def check(meetings: Sequence[Meeting], *, planned: bool = False) -> None:
    """Raise an error that tells all rows by which an engine cannot run; do nothing when there is none.

    planned   True: an engine that only lacks what is not implemented yet can be planned
    Raises UnsupportedModel if all rows are "missing", else ConfigError.
    """
    found = [one for one in meetings if one.status != IDLE]
    lacking = all(one.status == MISSING for one in found)
    if found and not (planned and lacking):
        raise (UnsupportedModel if lacking else ConfigError)(told(found, "This engine cannot run"))


def check_fields(asked: AskedFields) -> None:
    """Raise `InvalidParameter` for fields of a request that exclude each other."""
    param = "prompt_embeds" if asked.embeds else asked.chunks or "kv_transfer_params"
    if found := met(Inputs(request=asked), REQUEST):
        raise InvalidParameter(told(found, "This request cannot be served"), param=param)


def told(meetings: Sequence[Meeting], outcome: str) -> str:
    """Return the sentence of the only row; of several rows their number, and a line for each."""
    if len(meetings) == 1:
        return meetings[0].said
    return "\n- ".join([f"{outcome}, for {len(meetings)} reasons:", *(one.said for one in meetings)])


def described(meetings: Sequence[Meeting]) -> dict[str, list[dict[str, str]]]:
    """Return all rows as plain values, and beside them those about features that are not implemented yet."""
    every = [one._asdict() for one in meetings]
    return {"missing": [one for one in every if one["status"] == MISSING], "meetings": every}


def table() -> dict[str, Any]:
    """Return the whole table as plain values. Names in braces stand for facts of an engine."""
    return {
        "features": {name: {"flag": one.flag, "words": one.words} for name, one in FEATURES.items()},
        "rows": [
            {name: getattr(row, name) for name in ("feature", "other", "status", "scope", "reason", "remedy")}
            for row in ROWS
        ],
    }


def idle_notes(meetings: Sequence[Meeting]) -> tuple[str, ...]:
    """Return the sentences of rows about options that change nothing, as notes."""
    return tuple(one.said for one in meetings if one.status == IDLE)
