"""The refusal of a caller by the limits of its key. It never leaves a router's process."""


class CallerRefused(Exception):
    """A caller may not do this, or has reached a limit.

    status, code   of the HTTP answer
    retry_after    seconds until the caller may try again
    """

    def __init__(self, status: int, message: str, code: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after
