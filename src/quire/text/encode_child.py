"""The process that encodes one long text: `python -m quire.text.encode_child FOLDER SPECIAL MEMORY MOST`.

`Tokenizer.encode` starts it. It reads the text as UTF-8 from standard input, writes the token ids as uint32, and ends,
so that the system gets back all the memory that the encoding took.
"""

import sys
from array import array
from pathlib import Path

from quire.text.children import limit_memory
from quire.text.tokenizer import EXPANDED, Tokenizer


def main(folder: str, special: str, memory: str, most: str) -> None:
    """Encode stdin with the tokenizer in `folder`. Write uint32 ids to stdout.

    special   "1" adds special tokens
    memory    limit in bytes of what the encoding may add to this process's address space
    most      largest number of ids; the exit code for more is EXPANDED
    """
    text, tokenizer = sys.stdin.buffer.read().decode(), Tokenizer.load(Path(folder))
    limit_memory(int(memory))
    ids = tokenizer.encode(text, special == "1")
    if len(ids) > int(most):
        sys.exit(EXPANDED)
    array("I", ids).tofile(sys.stdout.buffer)


if __name__ == "__main__":
    main(*sys.argv[1:])
