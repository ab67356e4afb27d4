"""The two models in plain PyTorch, with parameter layouts that suit training.

``Dense`` is a Qwen3 decoder, ``Moe`` a DeepSeek-V3 decoder with one multi-token
prediction layer.  ``hf_state`` gives the tensors under the names of the Hugging Face
checkpoints.  Master weights are fp32; activations have the dtype of ``compute_dtype``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class DenseConfig:
    vocab_size: int = 8192
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 768
    rope_theta: float = 10_000.0
    eps: float = 1e-6
    dropout: float = 0.0


@dataclass
class MoeConfig:
    vocab_size: int = 8192
    hidden: int = 256
    layers: int = 6
    dense_layers: int = 1
    heads: int = 8
    q_lora: int = 96
    kv_lora: int = 64
    nope: int = 32
    rope: int = 16
    v_dim: int = 32
    intermediate: int = 768
    experts: int = 16
    top_k: int = 4
    groups: int = 4
    top_groups: int = 2
    expert_intermediate: int = 160
    scaling: float = 2.5
    rope_theta: float = 10_000.0
    eps: float = 1e-6
    dropout: float = 0.0


class Linear(nn.Module):
    """A bias-free linear map with fp32 weights, computed in the input's dtype."""

    def __init__(self, inputs: int, outputs: int, zero: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(outputs, inputs) if zero else torch.randn(outputs, inputs) * inputs**-0.5 * 0.6
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def rope_tables(length: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * freq
    return angle.cos().float(), angle.sin().float()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on (first half, second half) pairs; ``x`` is [B, H, T, D]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on neighbouring pairs, as DeepSeek checkpoints have it."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GroupedAttention(nn.Module):
    """Qwen3 attention: grouped queries, normed queries and keys."""

    def __init__(self, c: DenseConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = Linear(c.hidden, c.heads * c.head_dim)
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden, zero=True)
        self.q_norm = Norm(c.head_dim, c.eps)
        self.k_norm = Norm(c.head_dim, c.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, (batch, length, _) = self.c, x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, c.heads, c.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, c.kv_heads, c.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, c.kv_heads, c.head_dim).transpose(1, 2)
        q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        k = k.repeat_interleave(c.heads // c.kv_heads, 1)
        v = v.repeat_interleave(c.heads // c.kv_heads, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class LatentAttention(nn.Module):
    """DeepSeek multi-head latent attention."""

    def __init__(self, c: MoeConfig) -> None:
        super().__init__()
        self.c = c
        self.q_a_proj = Linear(c.hidden, c.q_lora)
        self.q_a_layernorm = Norm(c.q_lora, c.eps)
        self.q_b_proj = Linear(c.q_lora, c.heads * (c.nope + c.rope))
        self.kv_a_proj_with_mqa = Linear(c.hidden, c.kv_lora + c.rope)
        self.kv_a_layernorm = Norm(c.kv_lora, c.eps)
        self.kv_b_proj = Linear(c.kv_lora, c.heads * (c.nope + c.v_dim))
        self.o_proj = Linear(c.heads * c.v_dim, c.hidden, zero=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, (batch, length, _) = self.c, x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, length, c.heads, c.nope + c.rope).transpose(1, 2)
        q_nope, q_rope = q.split([c.nope, c.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora, c.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(batch, length, c.heads, c.nope + c.v_dim).transpose(1, 2)
        k_nope, v = kv.split([c.nope, c.v_dim], -1)
        q_rope = rotate_pairs(q_rope, cos, sin)
        k_rope = rotate_pairs(k_rope[:, None], cos, sin).expand(-1, c.heads, -1, -1)
        q = torch.cat([q_nope, q_rope], -1)
        k = torch.cat([k_nope, k_rope], -1)
        v = F.pad(v, (0, c.nope + c.rope - c.v_dim))  # one head size for the fused kernels
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : c.v_dim]
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Experts(nn.Module):
    """Routed and shared experts.

    All experts are computed for all tokens and the ones not chosen get weight zero:
    for 16 small experts that is faster than sorting tokens, and exact.
    """

    def __init__(self, c: MoeConfig) -> None:
        super().__init__()
        self.c = c
        scale = 0.6 * c.hidden**-0.5
        shape = (c.experts, c.expert_intermediate, c.hidden)
        self.router = nn.Parameter(torch.randn(c.experts, c.hidden) * c.hidden**-0.5)
        self.correction = nn.Buffer(torch.zeros(c.experts))
        self.gate = nn.Parameter(torch.randn(shape) * scale)
        self.up = nn.Parameter(torch.randn(shape) * scale)
        self.down = nn.Parameter(torch.zeros(shape))  # transposed: [expert, intermediate, hidden]
        self.shared_experts = Mlp(c.hidden, c.expert_intermediate)

    def route(self, x: Tensor) -> Tensor:
        """Weights of all experts for every token, zero for those not chosen."""
        c = self.c
        scores = F.linear(x.float(), self.router).sigmoid()
        choice = (scores + self.correction).detach()
        group = choice.unflatten(-1, (c.groups, -1)).topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(group).scatter(-1, group.topk(c.top_groups, -1).indices, 1.0)
        kept = kept.repeat_interleave(c.experts // c.groups, -1)
        index = choice.masked_fill(kept == 0, float("-inf")).topk(c.top_k, -1).indices
        chosen = torch.zeros_like(scores).scatter(-1, index, 1.0)
        weights = scores * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.scaling

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.c
        weights = self.route(x)
        load = (weights > 0).float().flatten(0, -2).mean(0)
        inner = F.silu(F.linear(x, self.gate.flatten(0, 1).to(x.dtype))) * F.linear(
            x, self.up.flatten(0, 1).to(x.dtype)
        )
        inner = inner.unflatten(-1, (c.experts, -1)) * weights.to(x.dtype).unsqueeze(-1)
        routed = inner.flatten(-2) @ self.down.flatten(0, 1).to(x.dtype)
        return routed + self.shared_experts(x), load


class Block(nn.Module):
    """A pre-norm decoder layer; returns the stream and the experts' load (or an empty tensor)."""

    def __init__(self, c: DenseConfig | MoeConfig, sparse: bool = False) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden, c.eps)
        self.post_attention_layernorm = Norm(c.hidden, c.eps)
        self.self_attn = GroupedAttention(c) if isinstance(c, DenseConfig) else LatentAttention(c)
        self.sparse = sparse
        self.mlp = Experts(c) if sparse and isinstance(c, MoeConfig) else Mlp(c.hidden, c.intermediate)
        self.dropout = c.dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        p = self.dropout
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), cos, sin), p, self.training)
        y = self.mlp(self.post_attention_layernorm(x))
        y, load = y if self.sparse else (y, x.new_zeros(0))
        return x + F.dropout(y, p, self.training), load


def lm_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over the learned targets (others are -100)."""
    logits = F.linear(x, weight.to(x.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


class Model(nn.Module):
    """Base of the two models; ``compiled`` switches between compiled and plain functions."""

    def __init__(self, c: DenseConfig | MoeConfig, rope_dim: int, max_length: int = 4096) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.norm = Norm(c.hidden, c.eps)
        cos, sin = rope_tables(max_length, rope_dim, c.rope_theta)
        self.cos, self.sin = nn.Buffer(cos, persistent=False), nn.Buffer(sin, persistent=False)
        self.layers = nn.ModuleList()
        self.compute_dtype = torch.float32
        self.fast_block = Block.forward
        self.fast_loss = lm_loss
        self.compiled = False

    def use_compile(self) -> None:
        self.fast_block = torch.compile(Block.forward)  # one graph per layer kind, reused by all layers
        self.fast_loss = torch.compile(lm_loss)
        self.compiled = True

    def set_dropout(self, p: float) -> None:
        for module in self.modules():
            if isinstance(module, Block):
                module.dropout = p

    def run_block(self, block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        function = self.fast_block if self.compiled and self.training else Block.forward
        return function(block, x, self.cos[:length], self.sin[:length])  # type: ignore[arg-type]

    def hidden(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The normed output of the last layer, and the loads of the sparse layers."""
        x = self.embed_tokens(ids).to(self.compute_dtype)
        loads: list[Tensor] = []
        for block in self.layers:
            x, load = self.run_block(block, x)
            loads.append(load)
        return self.norm(x), loads

    def head_weight(self) -> Tensor:
        return self.embed_tokens.weight

    def logits(self, ids: Tensor) -> Tensor:
        x, _ = self.hidden(ids)
        return F.linear(x, self.head_weight().to(x.dtype)).float()

    def losses(
        self, ids: Tensor, next_ids: Tensor, after_ids: Tensor, after_inputs: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """[main loss, further losses ...] as one tensor, and the loads."""
        function = self.fast_loss if self.compiled and self.training else lm_loss
        x, loads = self.hidden(ids)
        return function(x, self.head_weight(), next_ids)[None], loads


class Dense(Model):
    """Qwen3 with tied embeddings."""

    def __init__(self, c: DenseConfig) -> None:
        super().__init__(c, c.head_dim)
        self.layers.extend(Block(c) for _ in range(c.layers))

    def hf_state(self) -> dict[str, Tensor]:
        return {f"model.{name}": tensor.detach() for name, tensor in self.state_dict().items()}


class Moe(Model):
    """DeepSeek-V3 with one multi-token prediction layer."""

    def __init__(self, c: MoeConfig) -> None:
        super().__init__(c, c.rope)
        self.c = c
        self.layers.extend(Block(c, sparse=i >= c.dense_layers) for i in range(c.layers))
        self.lm_head = nn.Parameter(torch.randn(c.vocab_size, c.hidden) * 0.02)
        self.mtp_block = Block(c, sparse=True)
        self.enorm, self.hnorm = Norm(c.hidden, c.eps), Norm(c.hidden, c.eps)
        self.eh_proj = Linear(2 * c.hidden, c.hidden)
        self.mtp_norm = Norm(c.hidden, c.eps)

    def head_weight(self) -> Tensor:
        return self.lm_head

    def mtp_hidden(self, hidden: Tensor, next_inputs: Tensor) -> tuple[Tensor, Tensor]:
        """From the main output at i and token i+1, the state that predicts token i+2."""
        embedded = self.embed_tokens(next_inputs).to(hidden.dtype)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        x, load = self.run_block(self.mtp_block, x)
        return self.mtp_norm(x), load

    def losses(
        self, ids: Tensor, next_ids: Tensor, after_ids: Tensor, after_inputs: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        function = self.fast_loss if self.compiled and self.training else lm_loss
        x, loads = self.hidden(ids)
        main = function(x, self.lm_head, next_ids)
        y, load = self.mtp_hidden(x, after_inputs)
        return torch.stack([main, function(y, self.lm_head, after_ids)]), [*loads, load]

    def sparse_blocks(self) -> list[Experts]:
        return [b.mlp for b in [*self.layers, self.mtp_block] if isinstance(b.mlp, Experts)]

    @torch.no_grad()
    def balance(self, loads: list[Tensor], rate: float) -> None:
        """Auxiliary-loss-free balancing: raise the bias of idle experts, lower that of busy ones."""
        for experts, load in zip(self.sparse_blocks(), [x for x in loads if x.numel()], strict=True):
            experts.correction.add_(torch.sign(load.mean() - load), alpha=rate)

    def hf_state(self) -> dict[str, Tensor]:
        """Tensors under DeepSeek's names, without the copies that the prediction layer shares."""
        out: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed_tokens.weight,
            "model.norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head,
        }
        last = self.c.layers
        for index, block in enumerate([*self.layers, self.mtp_block]):
            prefix = f"model.layers.{index}."
            for name, tensor in block.state_dict().items():
                if name == "mlp.router":
                    out[prefix + "mlp.gate.weight"] = tensor
                elif name == "mlp.correction":
                    out[prefix + "mlp.gate.e_score_correction_bias"] = tensor
                elif name in ("mlp.gate", "mlp.up", "mlp.down"):
                    for expert, piece in enumerate(tensor):
                        kind = name.split(".")[1]
                        value = piece.T if kind == "down" else piece
                        out[f"{prefix}mlp.experts.{expert}.{kind}_proj.weight"] = value
                else:
                    out[prefix + name] = tensor
        out[f"model.layers.{last}.enorm.weight"] = self.enorm.weight
        out[f"model.layers.{last}.hnorm.weight"] = self.hnorm.weight
        out[f"model.layers.{last}.eh_proj.weight"] = self.eh_proj.weight
        out[f"model.layers.{last}.shared_head.norm.weight"] = self.mtp_norm.weight
        return {name: tensor.detach() for name, tensor in out.items()}
