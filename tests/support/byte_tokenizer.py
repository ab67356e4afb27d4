"""A tokenizer of 256 bytes and a few special tokens, without files."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from quire.text.special import SpecialTokens
from quire.text.token_bytes import byte_alphabet
from quire.text.tokenizer import Tokenizer

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids 0..255 are the bytes of UTF-8. Ids from 256 on are `SPECIALS`, such as <|eos|>.
    `add_bos`: True makes `encode` add <|bos|> in front of a text."""

    def __init__(self, *, add_bos: bool = False) -> None:
        backend = Backend(models.BPE(vocab=byte_alphabet(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        if add_bos:
            backend.post_processor = processors.TemplateProcessing(
                single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], 256)]
            )
        bos, eos, pad, *_ = SPECIALS
        super().__init__(
            backend, SpecialTokens(named={"bos_token": bos, "eos_token": eos, "pad_token": pad}, extra=SPECIALS)
        )
