"""Repositories of the speculators library: an EAGLE head, with the name of the model that it drafts for."""

from dataclasses import replace
from pathlib import Path

from quire.args.checkpoint import read_raw_config
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError


def resolve_speculators(config: EngineConfig, folder: Path) -> EngineConfig:
    """Return the options of an engine. Those for a repository of the speculators library become the options for the
    model that its head drafts for, with the head. A model that drafts with its own layers need not be named.

    folder   folder of the model that the options name
    """
    if asked := config.scheduler.speculative_config:
        named = asked.get("model")
        itself = isinstance(named, str) and (named == config.model.model or Path(named).resolve() == folder.resolve())
        if not (itself and str(asked.get("method")).endswith("mtp")):
            return config
        kept = {name: value for name, value in asked.items() if name != "model"}
        return replace(config, scheduler=replace(config.scheduler, speculative_config=kept))
    raw = read_raw_config(folder)
    library = raw.get("speculators_config")
    if not isinstance(library, dict):
        return config
    try:
        name, (first, *_) = library["verifier"]["name_or_path"], library["proposal_methods"]
        given = {
            "method": raw["speculators_model_type"],
            "model": config.model.model,
            "num_speculative_tokens": first["speculative_tokens"],
        }
        if not (name and isinstance(name, str)):  # None would be the bundled model
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{folder / 'config.json'}: speculators_config names no verifier or no speculative_tokens: "
            "serve the model of the head, with --speculative-config."
        ) from None
    if config.model.revision:
        raise ConfigError(
            f"revision={config.model.revision} of a speculators repository is not implemented: download "
            "it and give its folder."
        )
    return replace(
        config, model=replace(config.model, model=name), scheduler=replace(config.scheduler, speculative_config=given)
    )
