"""Prompts of /v1/completions that are given as tensors (`prompt_embeds`)."""

from quire.answers.choice_parser import ParserPlan
from quire.contracts.errors import InvalidParameter
from quire.contracts.sampling import SamplingParams
from quire.entry.http.context import ServerContext
from quire.entry.http.openai.prompts import away, fitted
from quire.entry.http.openai.sampling import check_choices
from quire.entry.http.openai.schema import CompletionRequest
from quire.entry.http.request_response import Exchange
from quire.entry.prompts import Prompt
from quire.entry.torch_tensors import read_matrix
from quire.plan.meeting_rows.records import AskedFields
from quire.plan.meetings import check_fields


async def embedded_prompts(
    context: ServerContext, exchange: Exchange, request: CompletionRequest, params: SamplingParams
) -> tuple[list[Prompt], ParserPlan]:
    """Make the prompts of /v1/completions that are given as tensors. The plan parses the answer as plain text."""
    given = request.prompt_embeds if isinstance(request.prompt_embeds, list) else [request.prompt_embeds or ""]
    check_choices(len(given), request)
    if request.prompt or request.suffix:
        raise InvalidParameter("prompt_embeds excludes prompt and suffix: leave them out.", param="prompt_embeds")
    if not context.config.engine.model.enable_prompt_embeds:
        raise InvalidParameter(
            "prompt_embeds: this server takes texts and token ids: start it with --enable-prompt-embeds.",
            param="prompt_embeds",
        )
    check_fields(
        AskedFields(
            embeds=True,
            truncated=request.truncate_prompt_tokens is not None,
            prompt_logprobs=bool(request.echo),
        )
    )
    width, most = context.text().pooling.width, context.ready().max_model_len

    def read() -> list[Prompt]:
        found = [read_matrix(one, "prompt_embeds", width=width, most=most) for one in given]
        return [Prompt(token_ids=[0] * len(embeds), embeds=embeds) for embeds in found]

    prompts = await away(context, exchange, read)
    asked = request.max_tokens
    return [fitted(context, request, prompt, asked, "prompt_embeds") for prompt in prompts], ParserPlan()
