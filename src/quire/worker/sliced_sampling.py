"""Sampling where each rank holds the logits of a slice of the vocabulary. Every rank gets the tokens that one device
would draw, because noise is keyed by the id and the winner is the largest key over all ranks.

Greedy rows and draws without filters: the ranks exchange the packed keys of their best ids, 8 bytes a row. Filters,
penalties, bias and masks: every rank gathers the logits and samples the whole rows.
"""

from torch import Tensor

from quire.contracts.step import I32
from quire.distributed.vocabulary import VocabularySlice
from quire.kernels.sampling import Rows, SamplerOperations
from quire.kernels.sampling.rows import Mode


class SlicedSampling:
    """`SamplerOperations` of a rank that holds the logits of a slice of the vocabulary (tensor parallel).

    whole   sampler operations on logits of the whole vocabulary
    """

    def __init__(self, whole: SamplerOperations, vocabulary: VocabularySlice) -> None:
        self._whole, self._vocabulary = whole, vocabulary

    @property
    def tokens(self) -> Tensor:
        """Tokens [>= R] int64 drawn last, the same on every rank."""
        return self._whole.tokens

    @property
    def codes(self) -> Tensor:
        """Error codes [>= R] uint8 of the rows sampled last. See `SamplerOperations`."""
        return self._whole.codes

    def take_masks(self, places: I32, masks: I32) -> None:
        """Set the grammar masks of the next `sample`. See `SamplerOperations`."""
        self._whole.take_masks(places, masks)

    def sample(self, logits: Tensor, rows: Rows, mode: Mode) -> None:
        """Draw one token for each row of this rank's logits [R, count]. See `SamplerOperations`."""
        if mode > Mode.UNFILTERED:
            self._whole.sample(self._vocabulary.whole(logits), rows, mode)
            return
        keys = self._whole.keys(logits, rows, mode, self._vocabulary.first)
        self._whole.settle(self._vocabulary.group.all_gather(keys).amax(dim=0))
