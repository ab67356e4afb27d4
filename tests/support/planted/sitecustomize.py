"""Plants a fault in one rank of an engine: Python imports this module at its start when it is on PYTHONPATH.

MANY_RANKS_FAULT is "RANK:PLACE:KIND:FILE". The rank writes the time of `time.monotonic` to FILE, then it sends itself
the signal KIND, or raises the exception KIND, or a thread of it waits for ever (KIND "freeze"). Places:

    load      the rank has loaded a part of its weights
    size      the KV cache is made
    prefill   a step with a prompt is launched
    decode    the 8th step without prompts is launched
    mover     weights of experts are fetched, beside the steps
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
import threading
import time
from types import ModuleType
from typing import Any

if "quire.ranks.process" in sys.orig_argv and (text := os.environ.get("MANY_RANKS_FAULT")):
    RANK, PLACE, KIND, FILE = text.split(":", 3)
    NAME = "quire.assemble.rank_child"
    DECODES = 8

    def fail() -> None:
        with open(FILE, "w") as file:
            file.write(str(time.monotonic()))
        if KIND == "freeze":
            threading.Event().wait()
        elif KIND.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, KIND))
            time.sleep(1)  # a signal to the process may end another thread first
        else:
            raise __import__("builtins").__dict__[KIND]("planted by a test")

    def plant(module: Any) -> None:
        import msgspec

        build, size, submit = module.build_rank, module.ChildRank.size, module.ChildRunner.submit
        decodes: list[None] = []

        def build_rank(start: bytes, on_loading: Any) -> Any:
            if msgspec.msgpack.decode(start)["plan"]["mesh"]["rank"]["number"] != int(RANK):
                return build(start, on_loading)

            def loading(done: int, total: int) -> None:
                if PLACE == "load" and done:
                    fail()
                on_loading(done, total)

            module.ChildRank.size, module.ChildRunner.submit = sized, submitted
            if PLACE == "mover":
                from quire.distributed.expert_moves import ExpertMover

                mover: Any = ExpertMover
                mover._fetch = lambda *given: fail()
            return build(start, loading)

        def sized(self: Any, payload: Any) -> Any:
            found = size(self, payload)
            if PLACE == "size":
                fail()
            return found

        def submitted(self: Any, plan: Any) -> None:
            if len(plan.slots):
                decode = plan.num_decodes == len(plan.slots)
                decodes.extend([None] * decode)
                if PLACE == "prefill" and not decode or PLACE == "decode" and len(decodes) == DECODES:
                    fail()
            submit(self, plan)

        module.build_rank = build_rank

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name != NAME:
                return None
            sys.meta_path.remove(self)
            spec: Any = importlib.util.find_spec(name)
            run = spec.loader.exec_module

            def execute(module: ModuleType) -> None:
                run(module)
                plant(module)

            spec.loader.exec_module = execute
            return spec

    sys.meta_path.insert(0, Finder())
