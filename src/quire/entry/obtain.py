"""Finds, or downloads, the model of a server before the core's process starts. No torch."""

from dataclasses import replace
from pathlib import Path

from quire.assemble.obtain import obtain_weights, read_model
from quire.config.engine import EngineConfig
from quire.config.speculators import resolve_speculators
from quire.entry.installed import check_torch
from quire.plan.meetings import check, inputs_of, met
from quire.platforms.cpu import read_cpu_facts
from quire.platforms.detect import resolve_device
from quire.text.load import load_text
from quire.weights.folder import absent_weights, resolve_folders


def obtain_model(config: EngineConfig) -> tuple[Path, Path]:
    """Return the folders of the model and of its tokenizer. Models on the hub are downloaded.
    Raises a `UserError`; those that small files or headers of weights show, before the download of weights."""
    if config.device.device != "mock":
        check_torch()
    config = resolve_speculators(config, resolve_folders(config)[0])
    folder, tokenizer_folder = resolve_folders(config)
    if absent_weights(config, folder) is not None:
        device, cpu = resolve_device(config.device.device).device, read_cpu_facts()
        args, dtype, quantization = read_model(config, folder, device, cpu)
        check(met(inputs_of(config, args, device)))
        load_text(config, folder, tokenizer_folder=tokenizer_folder)
        obtain_weights(
            config, folder, args, dtype, cpu.free_memory if device == "cpu" else None, quantization=quantization.config
        )
    return folder, tokenizer_folder


def core_config(config: EngineConfig) -> EngineConfig:
    """Return the configuration of the core's process: no chat template, no downloads, no progress bar.
    No tokenizer at the start either: the front end tokenizes. The core loads one when a request has a grammar."""
    return replace(
        config,
        model=replace(config.model, skip_tokenizer_init=True, chat_template=None),
        load=replace(config.load, offline=True, hf_token=None, use_tqdm_on_load=False),
    )
