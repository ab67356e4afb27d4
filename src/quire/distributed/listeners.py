"""Listening sockets of a process: those of a library can be made to take no more connections.

gloo listens on a port for each group, keeps every connection that a stranger opens there, and offers no way to stop.
Each connection is an open file, of which a process may have some thousand. Once the ranks have met nobody else is
expected. Linux only; elsewhere nothing happens.
"""

import ctypes
import logging
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

LOG = logging.getLogger("quire")
SO_ATTACH_FILTER = 26  # of <asm-generic/socket.h>
RETURN_NONE = struct.pack("HBBI", 0x06, 0, 0, 0)  # a filter's only instruction: BPF_RET | BPF_K, 0 bytes of the packet


def listening() -> set[int]:
    """Return the descriptors of this process that listen for TCP connections."""
    found = set[int]()
    if sys.platform != "linux":
        return found
    with suppress(OSError):
        found = _listening()
    return found


def _listening() -> set[int]:
    found = set[int]()
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the folder is closed by now
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    inet = one.family in (socket.AF_INET, socket.AF_INET6)
                    if inet and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(number)
    return found


def refuse_connections(listeners: Iterable[int]) -> None:
    """Make listening sockets take no more connections; those that exist stay.

    The kernel drops what arrives at the socket itself (`man 7 socket`, SO_ATTACH_FILTER). Closing the descriptor, or
    `shutdown`, would end the process: the library's thread takes both for a fault.
    """
    code = ctypes.create_string_buffer(RETURN_NONE)
    program = struct.pack("@HP", 1, ctypes.addressof(code))
    for number in listeners:
        try:
            with socket.socket(fileno=os.dup(number)) as one:
                one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        except OSError as error:  # a sandbox may refuse it
            LOG.warning("a port of gloo stays open to strangers: %s", error)
