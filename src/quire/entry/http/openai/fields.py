"""Fields of other servers' requests that this one does not act on, and what happens to each.

REFUSED fields would change the answer: any value but null and the listed harmless ones is refused. IGNORED ones do not
change it and are taken silently. Every further name that a schema does not have is told back in a header.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.text_table import read_rows


class Refused(NamedTuple):
    """Why a field is refused, and the values (beside null) that ask for nothing and are let through."""

    reason: str
    harmless: list[Any]


def _refused() -> Iterator[tuple[str, Refused]]:
    for names, reason, *harmless in read_rows(Path(__file__).with_name("refused_fields.txt")):
        for name in names.split():
            yield name, Refused(reason, json.loads(harmless[0]) if harmless else [])


REFUSED = dict(_refused())
IGNORED = frozenset(
    "metadata store service_tier prompt_cache_key prompt_cache_retention safety_identifier verbosity prediction "
    "parallel_tool_calls session_id include_reasoning separate_reasoning guided_decoding_backend "
    "guided_whitespace_pattern media_io_kwargs mm_processor_kwargs".split())
