"""The pages of a rank on another host than its engine core's: other engines read them there, by number of the block.

The core's share (`block_share.py`) says which number a block has, and where each rank serves its pages. Nobody asks the
core while pages are read: the reader asks for the numbers again when it has the pages. A block with the same number
was there all the time.

    hello, welcome   as of the core's share; the only shard is that of the rank
    read             ReadPages; then for each block a page header and the bytes, as of the core's share

Knows ranges of pages and numbers. Knows nothing of keys and of what is in use. Never imports torch.
"""

import socket
from collections.abc import Callable, Mapping

import msgspec

from quire.kvnet.block_share import WRONG_SPACE, BlockLine, NotShared, ReadPages, Shared
from quire.kvnet.share_server import ShareServer
from quire.kvstore.shards import PageFiles, Shard, packed_ranges

TO_PAGES: msgspec.msgpack.Decoder[msgspec.Struct] = msgspec.msgpack.Decoder(ReadPages)


class PageShare:
    """Serves the host memory of a rank until the end of its process.

    place    host and port to listen on;  key  that the others must know
    shards   namespace -> the part of each block, or of each checkpoint, that the rank holds
    """

    line: Callable[[socket.socket], BlockLine] = BlockLine

    def __init__(self, place: tuple[str, int], key: bytes, shards: Mapping[bytes, Shard]) -> None:
        self._shards = shards
        self.server = ShareServer(place, key, lambda end: self.line(end), self._serve)
        self.server.start()

    def _serve(self, line: BlockLine, namespace: bytes) -> None:
        shard = self._shards.get(namespace)
        if shard is None:
            line.send(NotShared(WRONG_SPACE))
            return
        line.send(Shared((shard,)))
        while not self.server.closed:
            asked = line.receive(TO_PAGES)
            assert isinstance(asked, ReadPages)
            ranges, size = packed_ranges(asked.ranges)
            with PageFiles() as files:
                files.open((shard,), ranges)
                page = memoryview(bytearray(size))
                for key, block in zip(asked.keys, asked.blocks, strict=True):
                    files.read(block, page)
                    line.send_page(key, page, block, bare=asked.bare)
