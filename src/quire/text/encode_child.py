"""The process that encodes one long text: `python -m quire.text.encode_child FOLDER SPECIAL`.

`Tokenizer.encode` starts it. It reads the text as UTF-8 from standard input, writes the token ids as uint32, and ends,
so that the system gets back all the memory that the encoding took.
"""

import sys
from array import array
from pathlib import Path

from quire.text.tokenizer import Tokenizer


def main(folder: str, special: str) -> None:
    """Encode stdin with the tokenizer in `folder`. Write uint32 ids to stdout. `special`: "1" adds special tokens."""
    text = sys.stdin.buffer.read().decode()
    array("I", Tokenizer.load(Path(folder)).encode(text, special == "1")).tofile(sys.stdout.buffer)


if __name__ == "__main__":
    main(*sys.argv[1:])
