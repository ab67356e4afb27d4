"""The option `state_checkpoint`: places at which states of recurrent layers are kept for later requests."""

from dataclasses import dataclass

from quire.contracts.errors import ConfigError

PLACES = ("prompt", "branch", "turn")
EVERY = 256  # tokens between two checkpoints of an answer
WAYS = f"name some of {', '.join(PLACES)} and every=N, with commas between them, or none"


@dataclass(frozen=True, kw_only=True)
class CheckpointPlaces:
    """Places at which a checkpoint of a request's states is taken.

    prompt   the last possible place before the last token of a prompt
    branch   the place where a prompt left tokens whose blocks were cached
    turn     the last multiple of `every` tokens, or of EVERY, in an answer
    every    tokens between two checkpoints of a prompt; 0: a prompt has none but those above
    """

    prompt: bool = True
    branch: bool = True
    turn: bool = True
    every: int = 0

    def __str__(self) -> str:
        named = [name for name in PLACES if getattr(self, name)] + [f"every={self.every}"] * bool(self.every)
        return ",".join(named) or "none"


def read_places(text: str) -> CheckpointPlaces:
    """Return the places that `state_checkpoint` names. Raises ConfigError with the allowed words."""
    words = [word.strip() for word in text.split(",")]
    every = [word.removeprefix("every=") for word in words if word.startswith("every=")]
    wrong = [word for word in words if word not in (*PLACES, "none") and not word.startswith("every=")]
    if wrong:
        raise ConfigError(f"state_checkpoint={text!r}: {wrong[0]!r} is no place: {WAYS}.")
    if "none" in words and len(words) > 1:
        raise ConfigError(f"state_checkpoint={text!r}: none excludes the others: {WAYS}.")
    if len(set(words)) < len(words) or len(every) > 1:
        raise ConfigError(f"state_checkpoint={text!r} names a place twice: leave one of them out.")
    if every and not (every[0].isdecimal() and every[0].isascii() and 0 < int(every[0][:10])):
        raise ConfigError(f"state_checkpoint={text!r}: N of every=N is a number of tokens above 0, such as every=1024.")
    return CheckpointPlaces(**{name: name in words for name in PLACES}, every=int(every[0]) if every else 0)
