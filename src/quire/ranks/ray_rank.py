"""The actor of a rank on a Ray node: it runs the agent of that rank. It needs Ray only in its own process."""

import socket
from collections.abc import Mapping

import msgspec

from quire.config.engine import EngineConfig
from quire.config.env import absent_variables
from quire.contracts.errors import QuireError
from quire.ranks.agent import HostAgent
from quire.ranks.headless import find_model, versions
from quire.ranks.host_messages import HostHello

JOIN_SECONDS = 1800.0  # for the actors to import Quire, find the model and connect


class RayRank:
    """The actor of a rank.

    module   builds a rank; see `HostAgent`
    env      variables of the driver, which the rank has unless its node sets them
    """

    def __init__(self, module: str, env: Mapping[str, str]) -> None:
        self._module, self._env = module, absent_variables(env)

    def run(self, number: int, place: tuple[str, int], key: bytes, config: bytes) -> str:
        """Run the rank until the engine ends. Return "", or the reason why it could not.

        place   address and port of the engine core;  config  `EngineConfig` as JSON
        """
        import ray

        context = ray.get_runtime_context()
        node = f"{socket.gethostname()}, Ray node {context.get_node_id()[:8]}"
        gpus = tuple(int(index) for index in context.get_accelerator_ids().get("GPU", ()))
        try:
            files = find_model(msgspec.json.decode(config, type=EngineConfig))
            hello = HostHello(node=number, name=node, versions=versions(), devices=gpus, files=files)
            HostAgent(*place, key, hello, self._module, env=self._env, say=print).run(seconds=JOIN_SECONDS)
        except QuireError as error:
            return f"rank {number} on {node}: {error}"
        return ""
