"""The same steps by Hugging Face's implementation: run alone, and run with Quire's results as input of each step.

In the second run every step starts from Quire's results, so the difference of a step is its own error: nothing adds up,
and an error in a step shows in no other. Knows the names of transformers' modules.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.contracts.errors import ModelError
from quire.explain.verify.differences import Differences
from quire.explain.verify.recording import (
    ATTENTION,
    FEED_FORWARD,
    INPUT_PRODUCT,
    INPUT_STEPS,
    INPUT_SUM,
    Recording,
    stage_name,
)

INTERFACE = "quire_verify"  # the name under which transformers finds our attention function


def load(folder: Path) -> Any:
    """Load a checkpoint with transformers, in float32. Raises ModelError where transformers cannot load it."""
    import transformers

    wrapped = "text_config" in json.loads((folder / "config.json").read_text())
    loader = transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM
    try:
        model, report = loader.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        if lacking := sorted(name for name in report["missing_keys"] if not wrapped or "language_model." in name):
            raise LookupError(f"it finds no {lacking[0]} there")
    except Exception as error:  # of transformers, safetensors, or whatever else reads a file there
        detail = (str(error).splitlines() or [""])[0]
        raise ModelError(
            f"{folder} is loaded by Quire and not by transformers ({type(error).__name__}: {detail}), so there is "
            "nothing to compare with: give the files that the model was published with, or install another version of "
            "transformers. If transformers has no class for the family yet: copy the folder, give the copy's "
            "config.json the model_type and architectures of the nearest class, and pass the copy with --reference."
        ) from error
    inside = getattr(model.eval(), "language_model", None)
    return inside if hasattr(inside, "lm_head") else model  # Llama 4's runs alone, and fails inside the model around it


@torch.inference_mode()
def run_alone(model: Any, token_ids: list[int], ours: Recording) -> dict[str, Tensor]:
    """Run the model of transformers on the token ids. Return the result [T, width] of every stage (see `Recording`).

    ours   tells where the reference has the results
    """
    body, kept, handles = _body(model), {}, []

    def keep(stage: str) -> Callable[..., None]:
        def hook(module: Any, given: Any, result: Any = None) -> None:
            kept[stage] = _first(given if result is None else result)[0]

        return hook

    handles.append(body.get_input_embeddings().register_forward_hook(keep("embed")))
    for index, layer in enumerate(body.layers):
        if ours.after[index]:
            after = _at(layer, ours.after[index])
            handles.append(after.register_forward_pre_hook(keep(stage_name(index, ATTENTION))))
        elif stage_name(index, ATTENTION) in ours.kinds and ours.ends[index] == FEED_FORWARD:
            # both halves read the same, and there is no sum between
            handles.append(layer.self_attn.register_forward_hook(keep(stage_name(index, ATTENTION))))
        handles.append(layer.register_forward_hook(keep(stage_name(index, ours.ends[index]))))
    handles.append(_final_norm(body).register_forward_hook(keep("norm")))
    kept["logits"] = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    for handle in handles:
        handle.remove()
    kept["embed"] = kept["embed"] * _embedding_factor(model)
    return kept


@torch.inference_mode()
def run_on(model: Any, token_ids: list[int], ours: Recording) -> Differences:
    """Run the model of transformers with Quire's results as the inputs of its steps. Return the differences."""
    differences = Differences(ours)
    body = _body(model)
    _on_result(body.get_input_embeddings(), differences, "embed", "embed_tokens", _embedding_factor(model))
    for index, layer in enumerate(body.layers):
        for stage in _stages(differences, index):
            for step, module in _modules(layer, differences, stage, last=stage.endswith(differences.ours.ends[index])):
                _on_result(module, differences, stage, step)
        fused = _at(layer, "self_attn.qkv_proj")
        if fused is not None:
            _on_fused(fused, differences, stage_name(index, ATTENTION))
        _feed_products(layer, differences, index)
    _on_result(_final_norm(body), differences, "norm", "norm")
    _register_attention(differences)
    model.set_attn_implementation(INTERFACE)
    result = model(torch.tensor([token_ids]), use_cache=False)
    differences.replace("logits", "lm_head", result.logits)  # with all that the reference does after its head
    return differences


def _stages(differences: Differences, index: int) -> list[str]:
    """Return the stages of the halves that a layer has."""
    return [stage for half in (ATTENTION, FEED_FORWARD) if (stage := stage_name(index, half)) in differences.ours.kinds]


def _modules(layer: Any, differences: Differences, stage: str, *, last: bool) -> Iterator[tuple[str, Any]]:
    """Yield (step, module) for the steps of a stage that are the result of a module. last: of the layer's last half"""
    kind = differences.ours.kinds[stage]
    for step in differences.ours.pieces.get(stage, {}):
        whole = step.endswith("norm") or step in INPUT_STEPS  # of a layer, not of one of its halves
        norm = _at(layer, step) if whole else None
        paths = kind.paths.get(step, (f"{kind.room}.{step}",))
        module = norm or (layer if last and step == "sum" else _first_at(layer, paths))
        if module is not None:
            yield step, module


def _feed_products(layer: Any, differences: Differences, index: int) -> None:
    """Compare the steps that are the input of a module: gated products, and the sum after attention."""
    for stage in reversed(_stages(differences, index)):
        for step, paths in differences.ours.kinds[stage].inputs.items():
            if (module := _first_at(layer, paths)) is not None and differences.has(stage, step):
                _on_given(module, differences, stage, step)
    stage = stage_name(index, FEED_FORWARD)
    for step, path in zip((INPUT_SUM, INPUT_PRODUCT), INPUT_STEPS, strict=False):
        if differences.has(stage, step):
            _on_given(_at(layer, path), differences, stage, step)
    if differences.ours.after[index]:
        _on_given(_at(layer, differences.ours.after[index]), differences, stage_name(index, ATTENTION), "sum")


def _first_at(layer: Any, paths: Iterable[str]) -> Any:
    """Return the first module that is at one of the paths, or None."""
    return next((module for path in paths if (module := _at(layer, path)) is not None), None)


def _at(module: Any, path: str) -> Any:
    """Return the module at a dotted path, or None."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _first(value: Any) -> Tensor:
    found: Tensor = value[0] if isinstance(value, tuple) else value
    return found


def _on_given(module: Any, differences: Differences, stage: str, step: str) -> None:
    """Compare the input of a module and overwrite it with Quire's result, because a sum is a later residual, too."""

    def hook(module: Any, given: Any) -> None:
        given[0].copy_(differences.replace(stage, step, given[0]))

    module.register_forward_pre_hook(hook)


def _body(model: Any) -> Any:
    """Return the module with embedding, layers and norm; of a model that reads images, too, its language model's."""
    base = model.base_model
    body = getattr(base, "language_model", base)
    return body if hasattr(body, "layers") else body.model  # Llama 4 names another base


def _final_norm(body: Any) -> Any:
    """Return the norm before the head."""
    return _first_at(body, ("norm", "embedding_norm", "norm_f"))


def _embedding_factor(model: Any) -> float:
    """Return the factor by which the reference multiplies embeddings outside of their module."""
    return float(getattr(model.config, "embedding_multiplier", None) or 1.0)


def _on_result(module: Any, differences: Differences, stage: str, step: str, factor: float = 1.0) -> None:
    """Compare the result of a module, times `factor`, and go on with Quire's."""

    def hook(module: Any, given: Any, result: Any) -> Any:
        if step == "router" and len(result) == 2:  # Llama 4: weights of all experts, and logits
            return differences.replace(stage, step, result[0]), result[1]
        if step == "router":  # logits, weights and ids
            scores, weights, ids = result
            dense = torch.zeros(scores.shape, dtype=weights.dtype).scatter_(-1, ids, weights)
            ours = differences.replace(stage, step, dense)
            weights, ids = ours.topk(ids.shape[-1], -1)
            return scores, weights, ids
        if step == "indexer":
            return differences.replace(stage, step, _ascending(result, differences.ours.result(stage, step).shape[1]))
        theirs = _first(result)
        if step == "experts" and len(theirs) > (rows := differences.num_rows(stage, step)):  # Llama 4: not yet added
            ours = differences.replace(stage, step, theirs.unflatten(0, (-1, rows)).sum(0))
            return torch.cat((ours, ours.new_zeros(len(theirs) - rows, ours.shape[1])))
        if step in ("q_norm", "k_norm") and theirs.dim() == 4 and theirs.shape[2] == differences.num_rows(stage, step):
            return differences.replace(stage, step, theirs.transpose(1, 2)).transpose(1, 2)  # heads come before tokens
        ours = differences.replace(stage, step, theirs * factor) / factor
        return (ours, *result[1:]) if isinstance(result, tuple) else ours

    module.register_forward_hook(hook)


def _on_fused(module: Any, differences: Differences, stage: str) -> None:
    """Compare the result of one projection to queries, keys and values, and go on with Quire's."""
    steps = ("q_proj", "k_proj", "v_proj")
    widths = [differences.ours.result(stage, step).flatten(1).shape[1] for step in steps]

    def hook(module: Any, given: Any, result: Tensor) -> Tensor:
        parts = zip(steps, result.split(widths, -1), strict=True)
        return torch.cat([differences.replace(stage, step, part) for step, part in parts], -1)

    module.register_forward_hook(hook)


def _ascending(indices: Tensor, width: int) -> Tensor:
    """Return the tokens that rows attend to [B, T, width], of those that an indexer chose [B, T, K]; -1 is none."""
    behind = torch.arange(indices.shape[1])[:, None]
    kept = indices.long().masked_fill(indices > behind, torch.iinfo(torch.int64).max).sort(-1).values
    kept = kept.masked_fill(kept > behind, -1)
    return torch.nn.functional.pad(kept, (0, width - kept.shape[-1]), value=-1).int()


def _of_chosen(mask: Tensor | None, indices: Tensor | None) -> Tensor | None:
    """Return the mask [B, 1, T, S] for the tokens that an indexer chose, `indices` [B, T, K]; None: there is none."""
    if mask is None or indices is None:
        return mask
    known = indices.long().clamp(min=0)[:, None]  # rows with fewer tokens attend to all, also to the first
    hidden = torch.ones(mask.shape, dtype=torch.bool).scatter(-1, known, False)
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _register_attention(differences: Differences) -> None:
    """Let transformers attend with Quire's queries, keys and values, by the family's own eager function."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        stage = stage_name(module.layer_idx, ATTENTION)
        q, k, v = differences.ours.kinds[stage].replace(differences, stage, q, k, v)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        result, weights = eager(module, q, k, v, _of_chosen(mask, options.get("indices")), **options)
        return differences.replace(stage, "attention", result), weights

    AttentionInterface.register(INTERFACE, attend)
    AttentionMaskInterface.register(INTERFACE, AttentionMaskInterface()["eager"])
