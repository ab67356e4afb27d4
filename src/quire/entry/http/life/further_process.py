"""A further HTTP process of a server (--api-server-count). It serves until the first one ends it, or is gone."""

import logging
import os
import socket
from functools import partial

from quire.config.flags import error_text
from quire.contracts.errors import QuireError
from quire.entry.exit_codes import exit_code
from quire.entry.http.console import Console
from quire.entry.http.server import FRONT_MODULE, run_loop, serve
from quire.observe.log_lines import lost_lines, set_up_logging
from quire.observe.log_writer import log_written_apart
from quire.procs.front_ends import FrontStart
from quire.procs.parent import end_with_parent, read_start

if __name__ == "__main__":
    start = read_start(FrontStart, FRONT_MODULE)
    end_with_parent(lambda: None)
    with log_written_apart(partial(lost_lines, log_format=start.config.log.log_format)):
        set_up_logging(start.config.log.log_format, f"http {start.place.number}")
        logging.getLogger("quire").setLevel(start.config.log.level)
        console = Console(start.config, open(os.devnull, "w"))  # the first process tells the user
        try:
            code = run_loop(serve(start.config, socket.socket(fileno=start.listener), console, start.place))
        except QuireError as error:  # of a failed start
            if start.place.again:  # else the first process tells about it
                logging.getLogger("quire").error(
                    "HTTP process %d cannot start: %s", start.place.number, error_text(error)
                )
            code = exit_code(error)
    os._exit(code)
