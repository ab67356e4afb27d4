"""A small DeepSeek on the CPU, built from a configuration alone: no checkpoint, random weights, a few seconds.

    python examples/deepseek_cpu.py [FOLDER]

FOLDER holds the config.json of a DeepSeek-V2 or V3; no other file in it is read. Vocabulary, rotation and routing stay
as they are there; every size above that of `CONFIG` is reduced to it, so that 1.3 GB of memory are enough.

Prints the shape of the logits of a batch, compares the two forms of latent attention, and follows one token through a
layer of experts.

Names in DeepSeek's published code (inference/model.py of DeepSeek-V3), and here, for layer 1:

    Transformer.embed                embed.weight
    Block.attn_norm, Block.ffn_norm  layers.1.attention_norm.weight, layers.1.mlp_norm.weight
    MLA.wq_a, MLA.wkv_a              layers.1.attention.down.weight
    MLA.q_norm, MLA.wq_b             layers.1.attention.q_norm.weight, layers.1.attention.q.weight
    MLA.kv_norm                      layers.1.attention.kv_norm.weight
    MLA.wkv_b                        layers.1.attention.kv_up.weight
    MLA.wo                           layers.1.attention.output.weight
    MLA.kv_cache, MLA.pe_cache       `kernels/latent/__init__.py` (`LatentView.latent`, `LatentView.rope`)
    attn_impl = naive, absorb        `layers/latent.py` (`LatentAttention`): most_absorbed = 0, infinity
    Gate.weight, Gate.bias           layers.1.mlp.router.weight, layers.1.mlp.router.correction
    Gate.topk, Gate.n_groups         `args/experts.py` (`Routing.top_k`, `Routing.num_groups`)
    Gate.route_scale                 `args/experts.py` (`Routing.scaling`)
    Expert.w1, Expert.w3             layers.1.mlp.experts.gate_up
    Expert.w2                        layers.1.mlp.experts.down
    MoE.shared_experts               layers.1.mlp.shared.gate_up.weight, layers.1.mlp.shared.down.weight
    Transformer.norm, .head          norm.weight, head.weight
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config, read_raw_config
from quire.assemble.build import build_model
from quire.assemble.kv_views import kv_views
from quire.config.engine import EngineConfig
from quire.contracts.errors import UserError
from quire.kernels.attention import AttentionMeta
from quire.kernels.select import here
from quire.kvstore.arena import KVArena
from quire.layers.context import StepContext
from quire.layers.decoder import Decoder
from quire.layers.stack import run_layers
from quire.plan.dtype import DTypePlan
from quire.plan.engine import Machine, ModelFacts, resolve_engine
from quire.plan.kv_geometry import kv_components, resolve_geometry
from quire.platforms.cpu import read_cpu_facts
from quire.weights.units import load_units

CONFIG = {
    "model_type": "deepseek_v3", "vocab_size": 102400, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 160, "num_nextn_predict_layers": 0, "max_position_embeddings": 4096, "dtype": "float32",
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024, "mscale": 1.0,
                     "mscale_all_dim": 1.0},
}  # fmt: skip
BATCH, LENGTH, BLOCK = 2, 128, 32
TOKEN = 5  # whose way is shown
KEPT = ("vocab_size", "max_position_embeddings")  # sizes that cost no time here


def reduced(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration with no size above that of CONFIG; says what became smaller."""
    small = {
        key: CONFIG[key]
        for key, value in raw.items()
        if key in CONFIG and key not in KEPT and isinstance(value, int) and value > CONFIG[key]
    }
    if small:
        print("reduced: " + ", ".join(f"{key} {raw[key]} -> {value}" for key, value in small.items()))
    return {key: value for key, value in (raw | small).items() if key != "quantization_config"}  # weights are random


def read(folder: Path) -> ModelArgs:
    """The reduced configuration of a folder; ends the program with a line for one that this example cannot follow."""
    try:
        raw = read_raw_config(folder)
        if raw.get("model_type") not in ("deepseek_v2", "deepseek_v3"):
            sys.exit(
                f"{folder}: model_type is {raw.get('model_type')!r}, and this example follows latent attention "
                "and experts: give a folder with the config.json of a DeepSeek-V2 or V3."
            )
        args = parse_checkpoint_config(reduced(raw), str(folder / "config.json"))
    except UserError as error:
        sys.exit(str(error))
    if args.moe is None or not args.expert_layers or not args.moe.shared_size:
        sys.exit(
            f"{folder}: the first {args.num_layers} layers have no experts, or no shared ones: there is nothing "
            "to follow; give the config.json of a released DeepSeek-V2 or V3."
        )
    return args


def build(args: ModelArgs) -> Decoder:
    """The model with random weights, ready to run."""
    machine = Machine(device="cpu", words="this CPU", total_memory=read_cpu_facts().total_memory)
    dtype = DTypePlan(dtype="float32", reason="of this example")
    model = build_model(
        resolve_engine(EngineConfig(), ModelFacts(folder=Path(), args=args, dtype=dtype), machine, here)
    )
    torch.manual_seed(0)
    for unit in load_units(model.layout):  # what a loader does, without files
        model.take(
            unit.module,
            unit.place,
            {
                raw.name: torch.ones(raw.shape) if "norm" in unit.module else torch.randn(raw.shape) * 0.05
                for raw in unit.tensors
            },
        )
    return model


@torch.inference_mode()
def logits(model: Decoder, token_ids: Tensor) -> Tensor:
    """token_ids [B, L] -> [B, L, V], through a fresh paged cache: all tokens of all sequences in one step."""
    batch, length = token_ids.shape
    blocks = -(-length // BLOCK)
    geometry = resolve_geometry(kv_components(model.args.mixers[0], "float32"), model.args.num_layers, BLOCK)
    arena = KVArena(geometry, 1 + batch * blocks, torch.device("cpu"))  # page 0 is for padding
    tables = 1 + torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    positions = torch.arange(length).repeat(batch)
    pages = tables.long().repeat_interleave(BLOCK, dim=1)[:, :length].flatten()
    meta = AttentionMeta(
        query_start=[length * i for i in range(batch + 1)],
        seq_lens=[length] * batch,
        block_tables=tables,
        kv_slots=pages * BLOCK + positions % BLOCK,
    )
    ctx = StepContext(
        positions, (meta,), kv_views([one.mixer for one in model.held], map(arena.views, range(model.args.num_layers)))
    )
    hidden = run_layers(model, model.embed(token_ids.flatten()), ctx)
    return model.head(model.norm(hidden)).view(batch, length, -1)


def show(what: str, tensor: Tensor) -> None:
    """Print a line: a name and a shape."""
    print(f"  {what:<50}{list(tensor.shape)}")


def follow(model: Decoder, layer: int, token_ids: Tensor) -> None:
    """Print a token's way through the experts of a layer, with the shapes of all tokens together."""
    moe = model.layers[layer].mlp
    moe.on_routing = partial(print_routing, model.args)
    moe.shared.register_module("gate_up", Shown("shared experts: silu(gate) * up", moe.shared.gate_up))
    moe.experts = Shown("routed experts: weighted sum + shared + residual", moe.experts)
    logits(model, token_ids)


class Shown(torch.nn.Module):
    """A layer that says what goes in and out."""

    def __init__(self, what: str, layer: torch.nn.Module) -> None:
        super().__init__()
        self.what, self.layer = what, layer

    def forward(self, x: Tensor, *rest: Tensor, **more: Any) -> Tensor:
        show(f"into {self.what.partition(':')[0]}", x)
        y: Tensor = self.layer(x, *rest, **more)
        show(self.what, y)
        return y


def print_routing(args: ModelArgs, weights: Tensor, ids: Tensor) -> None:
    """Print the router's decisions."""
    show("router: weights", weights)
    show("router: ids", ids)
    routing = args.moe.routing
    groups = sorted({int(expert) * routing.num_groups // routing.num_experts for expert in ids[TOKEN]})
    chosen = ", ".join(f"{int(e)} x {float(w):.3f}" for e, w in zip(ids[TOKEN], weights[TOKEN], strict=True))
    print(f"  token {TOKEN}: experts {chosen}; of groups {groups}; weights sum to {float(weights[TOKEN].sum()):.3f}")


def main(*folders: str) -> None:
    """Build, run, compare, follow."""
    if len(folders) > 1 or folders[:1] in (("-h",), ("--help",)):
        sys.exit(__doc__)
    args = read(Path(folders[0])) if folders else parse_checkpoint_config(CONFIG)
    model = build(args)
    token_ids = torch.randint(0, args.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    whole = logits(model, token_ids)
    print(f"logits: {list(whole.shape)}, of the last position {list(whole[:, -1].shape)}")

    found = {}
    for form, most in (("naive", 0.0), ("absorbed", float("inf"))):
        for layer in model.layers:
            layer.attention.most_absorbed = most
        found[form] = logits(model, token_ids)
    print(
        f"naive and absorbed attention: logits differ by {(found['naive'] - found['absorbed']).abs().max():.1e} "
        f"at a spread of {found['naive'].std():.2f}"
    )
    print(f"left alone, this model expands sequences of more than {args.mixers[0].break_even:.0f} rows in a step")

    layer = min(args.expert_layers)
    print(f"layer {layer}, {BATCH * LENGTH} tokens:")
    follow(model, layer, token_ids)


if __name__ == "__main__":
    main(*sys.argv[1:])
