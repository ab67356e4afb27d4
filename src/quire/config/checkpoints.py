"""The option `state_checkpoint`: places at which states of recurrent layers are kept for later requests."""

from dataclasses import dataclass, replace

from quire.contracts.errors import ConfigError

PLACES = ("prompt", "branch", "turn")
EVERY = 256  # tokens between two checkpoints of an answer
MOST_EVERY = 2**30  # tokens between two checkpoints; places are 32-bit numbers
WAYS = f"name some of {', '.join(PLACES)} and every=N, with commas between them, or none"


@dataclass(frozen=True, kw_only=True)
class CheckpointPlaces:
    """Places at which a checkpoint of a request's states is taken.

    prompt   the last possible place before the last token of a prompt
    branch   the place where a prompt left tokens whose blocks were cached
    turn     the last multiple of `every` tokens, or of EVERY, in an answer
    every    tokens between two checkpoints of a prompt; 0: a prompt has none but those above

    Checkpoints stand at ends of KV blocks, so `every` and EVERY are rounded up: see `on_blocks`.
    """

    prompt: bool = True
    branch: bool = True
    turn: bool = True
    every: int = 0

    def __str__(self) -> str:
        named = [name for name in PLACES if getattr(self, name)] + [f"every={self.every}"] * bool(self.every)
        return ",".join(named) or "none"

    def on_blocks(self, unit: int) -> "CheckpointPlaces":
        """Return the places with `every` rounded up to whole KV blocks. unit: tokens after which a block ends."""
        return replace(self, every=whole_blocks(self.every, unit))

    def in_answers(self, unit: int) -> int:
        """Return the tokens between two checkpoints of an answer, in whole KV blocks of `unit` tokens."""
        return whole_blocks(self.every or EVERY, unit)


def whole_blocks(tokens: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `tokens`."""
    return -(-tokens // unit) * unit


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
    return CheckpointPlaces(
        **{name: name in words for name in PLACES}, every=_read_every(text, every[0]) if every else 0
    )


def _read_every(text: str, number: str) -> int:
    digits = number.lstrip("0")
    if not (digits.isdecimal() and digits.isascii()):
        raise ConfigError(f"state_checkpoint={text!r}: N of every=N is a number of tokens above 0, such as every=1024.")
    if len(digits) > len(str(MOST_EVERY)) or int(digits) > MOST_EVERY:
        shown = digits if len(digits) < 32 else f"a number of {len(digits):,} digits"
        raise ConfigError(
            f"state_checkpoint: every=N is at most {MOST_EVERY}, not {shown}: lower N, or leave every=N out."
        )
    return int(digits)
