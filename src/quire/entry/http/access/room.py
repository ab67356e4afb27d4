"""Room for the completions of a request, in the queue and in the slots of an engine."""

from quire.contracts.errors import QueueFull
from quire.contracts.request import check_fits
from quire.contracts.sampling import SamplingParams


def check_room(num_prompts: int, params: SamplingParams, num_live: int, num_slots: int, bound: int) -> None:
    """Check that queue and slots have room for all completions of a request, beside the `num_live` ones.

    So all prompts of a request are taken, or none. The core checks each prompt again. A request that passes here
    passes there: a completion ends in the core before it ends here, so the core never has more of them.
    bound   most waiting completions (max_waiting)
    Raises `InvalidParameter` when the request can never fit, `QueueFull` when it does not fit now.
    """
    places = num_prompts * params.n
    check_fits(places, bound, num_slots, "n" if params.n > 1 else "prompt")
    if num_live + places > bound + num_slots:
        raise QueueFull(
            f"{num_live} completions run or wait already (max_num_seqs={num_slots}, "
            f"max_waiting={bound}) and {places} more do not fit: try again later."
        )
