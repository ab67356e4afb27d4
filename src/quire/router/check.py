"""The files that a router's flags name, read once without a router: backends, and those that an operator drains."""

from quire.router.discovery import FileSource
from quire.router.fleet import Fleet
from quire.router.settings import RouterConfig
from quire.router.state import RouterState


def check_router_files(config: RouterConfig) -> list[str]:
    """Return sentences about the files. Raises `ConfigError` for one at which the start of a router would end."""
    state, file = RouterState(config.state_file), config.discovery.backend_file
    fleet, lines = Fleet(config, state), list[str]()
    if file is not None:
        source = FileSource(file, config.discovery.discovery_interval)
        fleet.update(source.name, found := source.read())
        lines.append(f"{len(found)} backends are in {file}.")
    if config.state_file is not None:
        lines.append(f"{len(state.draining)} backends are drained, says {config.state_file}.")
    return lines
