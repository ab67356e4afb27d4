"""The layers of a checkpoint that predict several tokens (MTP), by config.json. No torch."""

from collections.abc import Iterator, Sequence

import msgspec

from quire.args.families import Family
from quire.args.keys import Keys
from quire.args.latent import IndexArgs, LatentArgs
from quire.args.layers import LayerArgs

SKIPPED = "Multi-token-prediction (MTP) layers are skipped"  # begin of a note
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # keys of their number; a family reads one of them
QWEN = "mtp."  # begin of the names of their tensors in Qwen3-Next and Qwen3.5


class PredictionArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of a checkpoint that predict several tokens (MTP). They stand behind the model's own.

    layers     their number
    drafting   number of these that an engine runs to draft tokens; the others are skipped
    root       begin of the names of their tensors, which have numbers of their own from 0 on; "": they have the names
               of further layers of the model
    embedded   True: they have an embedding of their own
    embeds     True: a drafter reads the model's embedding, which the last stage of a pipeline has, too
    read       False: those of the model's family are not implemented
    shares     True: the first pass of a step chooses tokens by the indexer of the layer, and the step's later passes
               attend to the same; False: each pass chooses
    """

    layers: int = 0
    drafting: int = 0
    root: str = ""
    embedded: bool = False
    embeds: bool = False
    read: bool = False
    shares: bool = False

    @property
    def lack(self) -> str:
        """The reason why they cannot draft, behind "the layer of the checkpoint, which"; "": they can."""
        count = COUNTS[bool(self.root)]
        if not self.read:
            return "has none that is read: those of this family of models are not implemented, if it has any"
        if not self.layers:
            stored = f", or no tensors {self.root}layers.* are stored" if self.root else ""
            return f"has none (config.json has no {count}{stored})"
        if self.layers > 1:
            return f"has {self.layers} of them ({count}), and only 1 is implemented"
        return "has an embedding of its own (mtp_use_dedicated_embeddings)" if self.embedded else ""

    def shared_choice(self, layers: Sequence[LayerArgs]) -> IndexArgs | None:
        """Return the indexer of the layer that drafts, if later passes of a step attend to the choice of the first.

        layers   of the checkpoint, the last of which predict several tokens
        """
        own = layers[-self.layers].mixer if self.drafting and self.shares else None
        return own.index if isinstance(own, LatentArgs) else None

    def named(self, name: str) -> str:
        """Return the name of a tensor of such a layer, from its name in a layer of the model, with "{i}" in it."""
        return name.replace("model.layers.{i}.", f"{self.root}layers.0.") if self.root else name

    def notes(self, first: int) -> Iterator[str]:
        """Yield a note for the user about layers that draft nothing. first: number of the first one."""
        if self.layers:
            last = f" to {first + self.layers - 1}" if self.layers > 1 else ""
            place = f"{self.root}*" if self.root else f"layer {first}{last}"
            yield f'{SKIPPED} ({place} of the checkpoint) without --speculative-config \'{{"method": "mtp"}}\''


def read_prediction(keys: Keys, family: Family, most: int) -> PredictionArgs:
    """Return the layers that predict several tokens, at most `most`. Names of stored tensors may tell otherwise."""
    if COUNTS[1] in family.keys:
        return PredictionArgs(
            layers=keys.count(COUNTS[1], 0, most=most) or 0,
            root=QWEN,
            embedded=keys.flag("mtp_use_dedicated_embeddings"),
            read=True,
        )
    if COUNTS[0] not in family.keys:
        return PredictionArgs()
    spelled = "num_mtp_layers" if "num_mtp_layers" in keys else COUNTS[0]
    return PredictionArgs(
        layers=keys.count(spelled, 1, most=most) or 0,
        read=True,
        shares="index_share_for_mtp_iteration" in family.keys and keys.flag("index_share_for_mtp_iteration"),
    )
