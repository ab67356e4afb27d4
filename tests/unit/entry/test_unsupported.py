"""Arguments of other engines' offline class: `LLM` accepts values without effect and refuses the others by name."""

from typing import Any

import pytest

from quire.contracts.errors import InvalidParameter
from quire.entry.llm import LLM
from quire.entry.unsupported import METHODS, check_arguments


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"prompt_adapter_request": None, "tokenization_kwargs": {}},
        {"chat_template_content_format": "auto"},
    ],
)
def test_what_asks_for_nothing_is_taken(given: dict[str, Any]) -> None:
    check_arguments(LLM.chat, given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt_adapter_request": object()}, "LLM.generate: prompt_adapter_request is not implemented: adapters"),
        ({"chat_template_content_format": "openai"}, "LLM.generate: chat_template_content_format is not implemented"),
        ({"priorty": [1]}, "LLM.generate has no parameter 'priorty': did you mean 'priority'"),
        ({"zzz": None}, "LLM.generate has no parameter 'zzz': there are use_tqdm, priority"),
    ],
)
def test_the_others_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as error:
        LLM.__new__(LLM).generate("a", **given)
    assert error.value.param in given


@pytest.mark.parametrize("method", [LLM.generate, LLM.encode])
def test_ids_in_the_old_keyword_lead_to_the_form_of_today(method: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"give them as prompts: \[{\"prompt_token_ids\": \[1, 2, 3\]}"):
        method(LLM.__new__(LLM), prompt_token_ids=[[1, 2]])


def test_methods_that_are_not_there_say_what_is() -> None:
    for name, instead in METHODS.items():
        assert not hasattr(LLM.__new__(LLM), name)
        with pytest.raises(AttributeError, match=f"^LLM.{name} is not implemented: ") as error:
            getattr(LLM.__new__(LLM), name)
        assert instead in str(error.value)
    with pytest.raises(AttributeError, match="^'LLM' object has no attribute 'zzz'$"):
        LLM.__new__(LLM).zzz  # type: ignore[attr-defined]  # noqa: B018
