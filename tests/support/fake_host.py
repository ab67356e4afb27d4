"""A host of an engine as a process: `python fake_host.py PORT KEY NODE [MODULE [FIRST COUNT]]`, an agent that starts
fake ranks; FIRST and COUNT are its ranks."""

import signal
import sys

from quire.contracts.errors import QuireError
from quire.ranks.agent import HostAgent
from quire.ranks.host_messages import HostHello

port, key, node = int(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3])
module = sys.argv[4] if len(sys.argv) > 4 else "fake_rank"
first, count = map(int, sys.argv[5:7] or ("0", "0"))
ranks, ended = (first, count), list[str]()
signal.signal(signal.SIGTERM, lambda number, frame: ended.append("was ended by SIGTERM"))
hello = HostHello(node=node, name=f"host{node}", versions="1", devices=(4, 5), ranks=ranks)
try:
    agent = HostAgent("127.0.0.1", port, key, hello, module, env={}, say=print)
    sys.exit(int(not agent.run(lambda: "".join(ended), seconds=20.0)))
except QuireError as error:
    sys.exit(str(error))
