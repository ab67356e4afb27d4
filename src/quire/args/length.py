"""The arguments of a model for the context length of an engine. No torch."""

from dataclasses import replace

from msgspec import structs

from quire.args.checkpoint import ModelArgs
from quire.args.layers import AttentionArgs, LayerArgs

LONG = (
    "LongRoPE: the context is longer than the trained {0} tokens, so all requests rotate by the divisors of long "
    "contexts; --max-model-len {0} chooses the others"
)


def with_length(args: ModelArgs, length: int | None) -> ModelArgs:
    """Return the arguments for an engine whose context has `length` tokens; None: as many as the model has.

    LongRoPE has other divisors for contexts up to its trained length.
    """

    def fitted(one: LayerArgs) -> LayerArgs:
        if not isinstance(one.mixer, AttentionArgs):
            return one
        rope = one.mixer.rope
        if rope.kind != "longrope" or length is None:
            return one
        rope = replace(rope, long=length > rope.original_max_position)
        return structs.replace(one, mixer=structs.replace(one.mixer, rope=rope))

    args = replace(args, layers=tuple(map(fitted, args.layers)))
    trained = max((one.rope.original_max_position for one in args.attending if one.rope.long), default=0)
    return replace(args, notes=(*args.notes, LONG.format(trained))) if trained else args
