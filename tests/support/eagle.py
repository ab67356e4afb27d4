"""Tiny models and EAGLE heads in the forms of published ones, and the formulas of the heads in plain PyTorch."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, VOCAB, KNOWN, DIM = 64, 8192, 3000, 32
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
HEAD = LLAMA | {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "max_position_embeddings": 2048,
    "attention_bias": True,
    "model_type": "llama",
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


OUTPUTS = (
    "o_proj.weight",
    "out_proj.weight",
    "down_proj.weight",
    "o_proj.bias",
    "experts.down_proj",
    "down_proj_bias",
    "w2.weight",
    "output_linear.weight",
)
FAMILIES: dict[str, dict[str, Any]] = {  # of targets: keys beside those of `LLAMA`
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 11},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        "initializer_range": 0.3,  # with larger weights rounding shows in the tests' bounds
    },
    "lfm2": {
        "layer_types": ["conv", "conv", "full_attention"] * 2, "block_multiple_of": 8, "initializer_range": 0.3,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention"] * 2, "mamba_n_heads": 4, "mamba_n_groups": 1,
        "mamba_d_state": 16, "mamba_chunk_size": 16, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 72, "initializer_range": 0.3,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*M-", "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
        "ssm_state_size": 16, "chunk_size": 16, "initializer_range": 0.1,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16,
        "initializer_range": 0.3,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 11, "rope_parameters": None},
}  # fmt: skip


def model(folder: Path, tokenizer: Path, scale: float = 0.02, family: str = "llama") -> Path:
    """Write a model whose next token depends, with scale 0, on its last token alone."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **LLAMA | {"initializer_range": 1.0} | FAMILIES[family])
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, value in made.named_parameters():
        if name.endswith(OUTPUTS):
            value.data *= scale
    made.lm_head.weight.data /= 4
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


def tensors(kind: str, known: int, seed: int, norms: str = "") -> dict[str, Tensor]:
    """Random tensors of a head, with the names of the flat form. norms: as in `EagleArgs`."""
    torch.manual_seed(seed)
    wide = 2 * HIDDEN if kind == "eagle3" else HIDDEN
    at = "midlayer." if kind == "eagle3" else "layers.0."
    shapes = {"fc.weight": (HIDDEN, (3 if kind == "eagle3" else 2) * HIDDEN)}
    shapes |= {f"{at}self_attn.{x}_proj.weight": (HIDDEN, wide) for x in "qkv"}
    shapes |= {
        f"{at}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{at}mlp.gate_proj.weight": (96, HIDDEN),
        f"{at}mlp.up_proj.weight": (96, HIDDEN),
        f"{at}mlp.down_proj.weight": (HIDDEN, 96),
    }
    small = 0.5 if kind == "eagle" else 1.0  # no norm bounds what it makes of its own output
    found = {name: small * torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    found |= {f"{at}self_attn.{x}_proj.bias": torch.randn(HIDDEN) / 4 for x in "qkvo"}
    places = [f"{at}post_attention_layernorm"]
    if kind == "eagle3":
        places += [f"{at}input_layernorm", f"{at}hidden_norm", "norm"]
        found["lm_head.weight"] = torch.randn(known, HIDDEN) / 8
    if kind == "eagle3" and known < VOCAB:
        targets = torch.arange(0, VOCAB, 2)[:known] + torch.arange(known) % 2
        found["d2t"] = targets - torch.arange(known)
        found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter_(0, targets, True)
    found |= {f"{name}.weight": torch.rand(HIDDEN) + 0.5 for name in places}
    if norms == "joined":
        found["input_norm.weight"] = torch.rand(3 * HIDDEN) + 0.5
    elif norms:
        found |= {f"fc_norm.{place}.weight": torch.rand(HIDDEN) + 0.5 for place in range(3)}
    return found


def write(
    folder: Path, kind: str, own: dict[str, Tensor], *, library: bool = False, verifier: str = "", **keys: Any
) -> Path:
    """Write a head: flat, or in the form of the speculators library."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = HEAD | {"architectures": [f"LlamaForCausalLM{kind.capitalize()}"]}
    if kind == "eagle3":
        config["draft_vocab_size"] = len(own.get("lm_head.weight", own.get("d2t", ())))
    if library:
        own = {name.replace("midlayer.", "layers.0."): value for name, value in own.items()}
        own["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)  # a copy, which is not read
        config = {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": len(own["lm_head.weight"]),
            "speculators_model_type": kind,
            "target_hidden_size": None,
            "transformer_layer_config": HEAD,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": verifier},
            },
        }
    (folder / "config.json").write_text(json.dumps(config | keys))
    save_file({name: value.contiguous().clone() for name, value in own.items()}, folder / "model.safetensors")
    return folder


def knowing(kind: str, target: Path, known: int = VOCAB) -> dict[str, Tensor]:
    """Tensors of a head that continues each of the tokens it knows as the model of scale 0 does.

    Attention sees its own token alone, because queries and keys are large and equal at all positions. Of EAGLE-3 the
    values are the embedding less the state, to which they are added; an EAGLE head's output is the embedding.
    """
    own = {
        name: value if "layernorm" in name or "norm" in name else torch.zeros_like(value)
        for name, value in tensors(kind, known, 0).items()
    }
    given = load_file(target / "model.safetensors")
    if kind == "eagle":
        own["fc.weight"][:, :HIDDEN] = torch.eye(HIDDEN)
        return own
    own |= {name: torch.ones(HIDDEN) for name in own if name.endswith("norm.weight")}
    for x in "qk":
        own[f"midlayer.self_attn.{x}_proj.bias"] = torch.full((HIDDEN,), 30.0)
    own["midlayer.self_attn.v_proj.weight"] = torch.cat((torch.eye(HIDDEN), -torch.eye(HIDDEN)), 1)
    own["midlayer.self_attn.o_proj.weight"] = torch.eye(HIDDEN)
    drawn = tensors(kind, known, 0)
    if "d2t" in drawn:
        own |= {name: drawn[name] for name in ("d2t", "t2d")}
    own["lm_head.weight"] = given["lm_head.weight"][torch.arange(known) + own.get("d2t", torch.zeros(known).long())]
    return own


def fitted(kind: str, folder: Path, texts: list[list[int]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and keys of a head whose first draft is a linear fit to a model's states in these texts.

    As in `knowing`, attention sees its own token alone, and the MLP is zero.
    """
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config, norm = made.config, made.model.norm
    hidden, layers, rows, wanted = config.hidden_size, config.num_hidden_layers, [], []
    held = norm.register_forward_pre_hook(lambda module, given: wanted.append(given[0][0, 1:]))
    with torch.inference_mode():
        for text in texts:
            found = made.model(torch.tensor([text]), output_hidden_states=True).hidden_states
            tokens = found[0][0, 1:]
            if kind == "eagle":
                wanted[-1] = found[-1][0, 1:]
                rows.append(torch.cat((tokens, found[-1][0, :-1]), -1))
            else:
                own = tokens * torch.rsqrt(tokens.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
                rows.append(torch.cat((own, *(found[i][0, :-1] for i in (2, layers // 2, layers - 3))), -1))
        fit = torch.linalg.lstsq(torch.cat(rows), torch.cat(wanted)).solution.T
    held.remove()
    at, wide = ("midlayer", 2 * hidden) if kind == "eagle3" else ("layers.0", hidden)
    shapes = {f"self_attn.{x}_proj.weight": (hidden, wide) for x in "qkv"} | {
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (96, hidden),
        "mlp.up_proj.weight": (96, hidden),
        "mlp.down_proj.weight": (hidden, 96),
    }
    own = {f"{at}.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    own |= {f"{at}.self_attn.{x}_proj.bias": torch.full((hidden,), 30.0 * (x in "qk")) for x in "qkvo"}
    own |= {f"{at}.post_attention_layernorm.weight": torch.ones(hidden), "fc.weight": fit[:, -(wide + hidden) :]}
    if kind == "eagle3":
        own |= {f"{at}.{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "hidden_norm")}
        own["fc.weight"], own[f"{at}.self_attn.o_proj.weight"] = fit[:, hidden:], fit[:, :hidden]
        own[f"{at}.self_attn.v_proj.weight"] = torch.eye(hidden, wide)
        own |= {"norm.weight": norm.weight.detach(), "lm_head.weight": made.lm_head.weight.detach()}
    heads = hidden // DIM
    return own, {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
    }


class Oracle:
    """The formulas of EAGLE and EAGLE-3, of a model in transformers and the tensors of a head."""

    def __init__(
        self,
        target: Path,
        kind: str,
        own: dict[str, Tensor],
        layers: tuple[int, ...] = (2, 3, 3),
        norm_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.kind, self.layers, self.norm_residual, self.norm_output = kind, layers, norm_residual, norm_output
        self.own = {name.replace("midlayer.", "").replace("layers.0.", ""): value for name, value in own.items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.own[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.own[f"{name}.weight"].T + self.own.get(f"{name}.bias", torch.zeros(()))

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> Tensor:
        """The state before each token; that before the first is unknown."""
        last = list[Tensor]()
        body, names = self.model.model, ("norm", "embedding_norm", "norm_f", "final_layernorm")
        norm = next(getattr(body, name) for name in names if hasattr(body, name))
        held = norm.register_forward_pre_hook(lambda module, given: last.append(given[0]))
        found = self.model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        held.remove()
        if self.kind == "eagle3":
            every = [*found[:-1], *last]
            read = [every[layer][0] for layer in self.layers]
            if "fc_norm.0.weight" in self.own:
                read = [self.norm(state, f"fc_norm.{place}") for place, state in enumerate(read)]
            joined = torch.cat(read, -1)
            states = self.linear(self.norm(joined, "input_norm") if "input_norm.weight" in self.own else joined, "fc")
        else:
            states = found[-1][0]
        return torch.cat((torch.zeros_like(states[:1]), states[:-1]))

    def rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def layer(self, ids: Tensor, states: Tensor) -> Tensor:
        embedded = self.model.get_input_embeddings()(ids)
        if self.kind == "eagle3":
            normed = self.norm(states, "hidden_norm")
            x = torch.cat((self.norm(embedded, "input_layernorm"), normed), -1)
            residual = normed if self.norm_residual else states
        else:
            x = residual = self.linear(torch.cat((embedded, states), -1), "fc")
        q, k, v = (self.linear(x, f"self_attn.{part}_proj").view(len(ids), -1, DIM) for part in "qkv")
        scores = torch.einsum("qhd,khd->hqk", self.rotated(q), self.rotated(k)) / DIM**0.5
        scores += torch.full_like(scores[0], float("-inf")).triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        hidden = residual + self.linear(attended, "self_attn.o_proj")
        normed = self.norm(hidden, "post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(normed, "mlp.gate_proj"))
        return hidden + self.linear(gate * self.linear(normed, "mlp.up_proj"), "mlp.down_proj")

    @torch.inference_mode()
    def drafts(self, tokens: list[int], states: Tensor, count: int) -> Tensor:
        """The logits [count, V] of the likeliest drafts behind some tokens, with the `states` of these."""
        ids, found = torch.tensor(tokens), []
        for _ in range(count):
            state = self.layer(ids, states)[-1:]
            found.append(self.logits(state))
            state = self.norm(state, "norm") if self.norm_output else state
            ids, states = torch.cat((ids, found[-1].argmax()[None])), torch.cat((states, state))
        return torch.stack(found)

    def logits(self, state: Tensor) -> Tensor:
        if self.kind == "eagle":
            whole: Tensor = self.model.lm_head(state)
            return whole[0]
        own = self.linear(self.norm(state, "norm"), "lm_head")[0]
        logits = torch.full((VOCAB,), float("-inf"))
        logits[torch.arange(len(own)) + self.own.get("d2t", torch.zeros(len(own)).long())] = own
        return logits
