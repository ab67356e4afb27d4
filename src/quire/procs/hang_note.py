"""The word that a step of the core hangs, for all HTTP processes of a server: a file in its folder.

The thread that watches the steps writes it, since the core's main thread may be the one that hangs. A message would
reach only the front ends of now. The file holds for one core, so that the next one begins without it.
"""

import logging
import math
from pathlib import Path

from quire.procs.front_ends import FrontPlace

LOG = logging.getLogger("quire")


def note_hang(place: FrontPlace, since: float | None) -> None:
    """Note since when a step hangs, a monotonic time; None: it has ended. A fault is logged: the core goes on."""
    file = _file(place)
    try:
        if since is None:
            file.unlink(missing_ok=True)
        else:
            new = file.with_suffix(".new")
            new.write_text(str(since))
            new.replace(file)  # nobody reads half of it
    except OSError as fault:
        LOG.warning("%s cannot be changed: %s: /ready may be wrong.", file, fault.strerror or fault)


def hung_since(place: FrontPlace) -> float:
    """Return the monotonic time at which the step of the core began that hangs; infinity: none does."""
    try:
        return float(_file(place).read_text())
    except OSError:
        return math.inf


def _file(place: FrontPlace) -> Path:
    return Path(place.folder, f"hung_{place.core}")
