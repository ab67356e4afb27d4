"""Engine core on the mock executor, for `--device mock`, with the sizes of a model.

Every request gets the tokens of `mock_executor`; the configuration says how long a step takes. With speculation
0, 1, ... and all drafts of a decode are right in turn. Reads vocabulary and context from a model's config.json, and no
weights. Never imports torch.
"""

from pathlib import Path

from quire.answers.grammar import GrammarCompiler
from quire.answers.grammar_trial import GrammarTrial
from quire.args.checkpoint import read_checkpoint_config
from quire.config.engine import EngineConfig, check_context
from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.errors import ConfigError
from quire.contracts.speculation import read_speculative_config
from quire.engine.adapters import AdapterSlots
from quire.engine.core import EngineCore
from quire.engine.mock_executor import MockExecutor
from quire.kv.allocator import KVAllocator
from quire.kv.hashing import namespace_digest
from quire.kv.pool import BlockPool
from quire.text.tokenizer import Tokenizer

BLOCK_SIZE = 32
MAX_BLOCKS = 65_536  # by default; they hold two million tokens


def build_mock_core(config: EngineConfig, folder: Path, tokenizer_folder: Path | None = None) -> EngineCore:
    """Build a core over a `MockExecutor` with the vocabulary and context of the model in `folder`.

    tokenizer_folder   folder of the tokenizer; None: `folder`
    Raises `ConfigError` when max_model_len exceeds the model's context or the given number of blocks.
    """
    args = read_checkpoint_config(folder, overrides=config.load.hf_overrides)
    speculation = read_speculative_config(config.scheduler.speculative_config)
    scheduler, cache = config.scheduler, config.cache
    size = cache.block_size or BLOCK_SIZE
    length = config.model.max_model_len or args.max_position_embeddings
    check_context(config.model, args.max_position_embeddings)
    given = cache.num_gpu_blocks_override
    if given is not None and config.model.max_model_len is None:
        length = min(length, given * size)
    full = -(-length // size)
    num_blocks = given or max(full, min(scheduler.sequences() * full, MAX_BLOCKS))
    if num_blocks < full:
        raise ConfigError(f"max_model_len={length} needs {full} blocks of {size}: raise num_gpu_blocks_override.")
    executor = MockExecutor(
        num_slots=scheduler.sequences(),
        num_blocks=num_blocks,
        block_size=size,
        vocab_size=args.vocab_size,
        max_model_len=length,
        depth=config.device.async_depth or 1,
        num_drafts=speculation.num_drafts if speculation else 0,
        blends=config.cache.enable_cache_blend,
        draft_lookup=speculation.lookup if speculation else (0, 0),
        drafts_by_batch=speculation.by_batch if speculation else (),
        auto_drafts=speculation.auto if speculation else (),
        accepts=range(speculation.num_drafts + 1) if speculation else (0,),
        width=args.hidden_size,
        step_seconds=config.device.mock_step_ms / 1000,
    )
    component = KVComponent("mock", num_heads=1, head_dim=1, dtype="float32", item_bytes=4)
    geometry = KVGeometry(groups=(KVGroup(block_size=size, layers=(0,), components=(component,)),))
    core = EngineCore(
        executor,
        scheduler,
        KVAllocator(BlockPool(num_blocks), geometry, num_slots=scheduler.sequences()),
        root_key=namespace_digest(model="mock", revision="", dtype="float32", block_size=size, geometry=geometry),
        prefix_caching=cache.enable_prefix_caching,
        compiler=GrammarCompiler(lambda: Tokenizer.load(tokenizer_folder or folder), args.vocab_size, GrammarTrial()),
    )
    if config.adapters.enable_lora:
        core.scheduler.roster.adapters = AdapterSlots(config.adapters.num_slots, config.adapters.num_held)
    return core
