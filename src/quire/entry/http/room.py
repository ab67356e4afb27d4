"""Whether there is room for a whole request: all of its prompts are taken, or none.

The core asks again, prompt by prompt. What passed here passes there: the core's requests are always among those that
are live here, because an end is heard of later here and no request overtakes an abort.
"""

from quire.contracts.errors import QueueFull
from quire.contracts.sampling import SamplingParams
from quire.engine.queue import check_fits


def check_room(num_prompts: int, params: SamplingParams, *, num_live: int, bound: int, num_slots: int) -> None:
    """Raise `QueueFull` when the completions of a request exceed what is free of queue (`bound`) and slots, while
    `num_live` completions have not finished; `InvalidParameter` when they exceed all of it."""
    places = num_prompts * params.n
    check_fits(places, bound, num_slots, "n" if params.n > 1 else "prompt")
    if num_live + places > bound + num_slots:
        raise QueueFull(f"{num_live} completions run or wait already (max_num_seqs={num_slots} and "
                        f"max_waiting={bound}) and {places} more do not fit; try again later.")
