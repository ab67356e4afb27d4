"""A small tokenizer with the special tokens of harmony, the format of gpt-oss's messages. Without files."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from quire.text.special import SpecialTokens
from quire.text.token_bytes import byte_alphabet
from quire.text.tokenizer import Tokenizer

# As gpt-oss names them. The order differs from gpt-oss's, so that an id of gpt-oss that is fixed somewhere fails.
SPECIALS = (
    "<|message|>",
    "<|return|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "<|constrain|>",
    "<|channel|>",
    "<|startoftext|>",
    "<|endoftext|>",
)
MERGES = [("f", "i"), ("n", "a"), ("fi", "na"), ("fina", "l"), ("Ġ", "t"), ("Ġt", "o"), ("u", "n"), ("j", "s")]


class HarmonyTokenizer(Tokenizer):
    """A tokenizer of bytes, some merges ("final", " to") and harmony's special tokens, which are all `SPECIALS`."""

    def __init__(self, specials: tuple[str, ...] = SPECIALS) -> None:
        vocab = byte_alphabet()
        for left, right in MERGES:
            vocab[left + right] = len(vocab)
        backend = Backend(models.BPE(vocab=vocab, merges=MERGES))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        named = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
        super().__init__(backend, SpecialTokens(named=named, extra=specials))

    def spelled(self, text: str) -> list[int]:
        """Return a text as one token per byte, also where it is the text of a special token."""
        chars = {byte: char for char, byte in byte_alphabet().items()}
        found = [self.token_id(chars[byte]) for byte in text.encode()]
        return [i for i in found if i is not None]
