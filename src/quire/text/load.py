"""The text side of a model: its tokenizer, chat template, end-of-sequence ids and sampling defaults.

Knows the files that hold them. Knows nothing of weights and devices, so that a server loads it without torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.args.pooling import PoolingPlan, read_pooling
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError, InvalidParameter
from quire.contracts.sampling import SamplingParams
from quire.text.chat import ChatTemplate
from quire.text.defaults import load_eos_ids, load_generation_defaults
from quire.text.output_styles import OutputStyles, check_variables, choose_styles
from quire.text.special import read_json
from quire.text.tokenizer import Tokenizer

SOURCES = ("auto", "none", "vllm")  # values of generation_config; "vllm" is vLLM's name of "none"


@dataclass(frozen=True, kw_only=True)
class TextSide:
    """A model's parts that handle text: tokenizer, chat template, end-of-sequence ids, sampling defaults, pooling.

    tokenizer   None with skip_tokenizer_init; then there is no chat template either
    parsers     (tool call parser, reasoning parser): names; None = detected in the chat template
    """

    tokenizer: Tokenizer | None
    tokenizer_folder: Path
    chat_template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    default_params: SamplingParams
    pooling: PoolingPlan
    parsers: tuple[str | None, str | None] = (None, None)

    @cached_property
    def tokenizer_class(self) -> str:
        """Name of the tokenizer's class in transformers, with transformers' default for a folder that names none."""
        given = read_json(self.tokenizer_folder / "tokenizer_config.json").get("tokenizer_class")
        return given if isinstance(given, str) and given else "PreTrainedTokenizerFast"

    @cached_property
    def styles(self) -> OutputStyles:
        """Formats of the model's tool calls and reasoning. Raises `ConfigError` for an unknown name."""
        token_id = None if self.tokenizer is None else self.tokenizer.token_id
        return choose_styles(self.chat_template, *self.parsers, token_id)

    def with_parsers(
        self, tool_parser: str | None, reasoning_parser: str | None, variables: Mapping[str, Any] | None = None
    ) -> "TextSide":
        """Return a text side with parsers of these names, and with the tokens that end a turn in their formats.
        Raises `ConfigError` for an unknown name, and for default `variables` of the template that the model lacks."""
        given = replace(self, parsers=(tool_parser, reasoning_parser))
        try:
            check_variables(given.styles, variables or {})
        except InvalidParameter as error:
            raise ConfigError(f"--default-chat-template-kwargs: {error}") from None
        return replace(given, eos_ids=(*dict.fromkeys((*self.eos_ids, *_turn_ends(given.styles, self.tokenizer))),))

    def begun_message(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the last tokens of a prompt, from the beginning of its last message on, for a model that writes
        messages; () for other models."""
        row = self.styles.messages
        start = None if row is None or self.tokenizer is None else self.tokenizer.token_id(row.tokens.start)
        at = next((at for at in range(len(prompt) - 1, -1, -1) if prompt[at] == start), len(prompt))
        return tuple(prompt[at:])

    @cached_property
    def tag_ids(self) -> tuple[list[int], list[int]]:
        """Ids of the special tokens that detokenizing must not skip: (if the text is parsed for reasoning alone, if it
        is parsed for reasoning and tool calls). These tokens are the tags around reasoning and calls."""
        tokenizer, styles = self.tokenizer, self.styles

        def among(*rows: object) -> list[int]:
            tags = str([row for row in rows if row is not None])  # a text with all of them
            return (
                []
                if tokenizer is None
                else [
                    i for i in sorted(tokenizer.all_special_ids) if (text := tokenizer.token_text(i)) and text in tags
                ]
            )

        return among(styles.reasoning), among(styles.reasoning, styles.tools)


def load_text(
    config: EngineConfig, folder: Path, *, tokenizer_folder: Path | None = None, apart: bool = False
) -> TextSide:
    """Load tokenizer, chat template and defaults of the model in `folder`.

    tokenizer_folder   None = `folder`
    apart              encode long texts in a child process
    Raises a `UserError` that names the fix when a file is missing or damaged, or an option cannot be met.
    """
    model = config.model
    tokenizer_folder = tokenizer_folder or folder
    # First, since it fails without config.json.
    pooling = read_pooling(folder, model.pooler_config, config.load.hf_overrides)
    tokenizer = None if model.skip_tokenizer_init else Tokenizer.load(tokenizer_folder)
    if tokenizer is not None and apart:
        tokenizer.apart = tokenizer_folder
    template = None if tokenizer is None else ChatTemplate.load(tokenizer_folder, model.chat_template)
    side = TextSide(
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        chat_template=template,
        eos_ids=tuple(load_eos_ids(folder, tokenizer)),
        default_params=_default_params(config, folder),
        pooling=pooling,
    )
    return side.with_parsers(None, None)


def _turn_ends(styles: OutputStyles, tokenizer: Tokenizer | None) -> list[int]:
    """Return the tokens that end a turn of a model that writes messages. Some checkpoints list only a part of them."""
    if tokenizer is None or (row := styles.messages) is None:
        return []
    return [i for i in map(tokenizer.token_id, (row.tokens.stop, row.tokens.call)) if i is not None]


def _default_params(config: EngineConfig, folder: Path) -> SamplingParams:
    source = config.model.generation_config
    if source not in SOURCES:
        raise ConfigError(f"generation_config={source!r}: must be auto or none.")
    override = config.model.override_generation_config
    return SamplingParams(**load_generation_defaults(folder, read=source == "auto", override=override))
