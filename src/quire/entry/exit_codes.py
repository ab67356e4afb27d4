"""Exit codes of Quire's processes, and the code of each error. No torch.

0   done, or stopped by request         3     a configuration or a model that cannot be served
1   any other error                     4     out of memory
2   invalid command line                5     the port is in use
130   Ctrl-C                            141   the reader of the output is gone (SIGPIPE)
"""

from quire.contracts.errors import AddressTaken, ConfigError, InvalidParameter, ModelError

DONE, FAILED, MISUSED, REFUSED, NO_MEMORY, TAKEN, INTERRUPTED, UNREAD = 0, 1, 2, 3, 4, 5, 130, 141
# Words for "out of memory" of Python, PyTorch on a CPU and PyTorch on a GPU, also inside another error's message.
MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError", "OutOfMemory")
MEMORY_WORDS = ("MemoryError", "OutOfMemoryError", "can't allocate memory", "Cannot allocate memory", "out of memory")


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error that ended a command or a server."""
    if any(_says_memory(e) for e in (error, error.__cause__) if e is not None):
        return NO_MEMORY
    if isinstance(error, InvalidParameter):
        return MISUSED
    if isinstance(error, AddressTaken):
        return TAKEN
    return REFUSED if isinstance(error, ConfigError | ModelError) else FAILED


def _says_memory(error: BaseException) -> bool:
    if any(kind.__name__ in MEMORY_ERRORS for kind in type(error).__mro__):
        return True
    return not isinstance(error, ConfigError | ModelError) and any(word in str(error) for word in MEMORY_WORDS)
