"""The tour of one token through the bundled model: what its twelve stops show."""

from typing import Any

import torch

from quire.args.layers import DenseArgs, GroupedArgs
from quire.kernels.attention import as_list
from quire.tour.live import BEFORE, Live, SeenCall, TourStop, Values, numbers, shape

PROMPT = "The json module"
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,  # fastest for a model this small
    "kv_cache_memory_bytes": 1 << 24,
    "max_model_len": 512,
    "use_tqdm_on_load": False,
    "async_depth": 1,
    "enforce_eager": True,
}


def _text(live: Live, call: SeenCall) -> Values:
    ids = call.result
    live.notes["pieces"] = [_piece(live, one) for one in ids]
    return [("text", repr(call.given["prompt"].text)), ("token ids", str(ids)), ("pieces", str(live.notes["pieces"]))]


def _piece(live: Live, token_id: int) -> str:
    """Return the text of a token, or its bytes where it is a part of a character: "<E6>"."""
    tokenizer = live.llm.get_tokenizer()
    text: str = tokenizer.decode([token_id])
    return "".join(f"<{one:02X}>" for one in tokenizer.token_bytes(token_id)) if "\ufffd" in text else text


def _plan(live: Live, call: SeenCall) -> Values:
    plan = call.result.plan
    first, last = plan.admitted[0].slot, int(plan.num_tokens.sum())
    return [
        ("requests in the step", str(len(plan.slots))),
        ("slot of the request", str(first)),
        ("tokens to compute", f"{last}, of at most {live.llm.engine.config.scheduler.token_budget():,} in a step"),
        ("rows that need logits", str(int(plan.num_rows.sum()))),
    ]


def _blocks(live: Live, call: SeenCall) -> Values:
    allocator, (table,) = call.owner, call.result
    return [
        ("tokens of the prompt", str(call.given["num_tokens"])),
        ("tokens found in the prefix cache", str(call.given["match"].num_tokens)),
        ("tokens of a block", str(allocator.block_size)),
        ("block table", str(table.tolist())),
        ("free blocks", f"{allocator.pool.num_free:,} of {allocator.pool.num_blocks:,}"),
    ]


def _inputs(live: Live, call: SeenCall) -> Values:
    step, buffers = call.given["step"], call.given["buffers"]
    tokens = step.num_tokens
    return [
        ("token_ids", str(buffers.token_ids[:tokens].tolist())),
        ("positions", str(buffers.positions[:tokens].tolist())),
        ("kv_slots", str(buffers.kv_slots[0, :tokens].tolist())),
        ("seq_lens", str(buffers.seq_lens[: step.num_seqs].tolist())),
        ("sample_rows", str(buffers.sample_rows[: step.num_rows].tolist())),
    ]


def _embedding(live: Live, call: SeenCall) -> Values:
    pieces = zip(live.notes["pieces"], call.result, strict=True)
    return [("result", shape(call.result)), *((repr(piece), numbers(row)) for piece, row in pieces)]


def _layer(live: Live, call: SeenCall) -> Values:
    before, after = call.given["hidden"][-1], call.result[-1]
    return [
        ("hidden states", shape(call.result)),
        ("last token, before", numbers(before)),
        ("last token, after", numbers(after)),
        ("what the layer added", numbers(after - before)),
    ]


def _heads(live: Live, call: SeenCall) -> Values:
    kv, slots = call.given["kv"], call.given["kv_slots"].tolist()
    block, offset = divmod(slots[-1], kv.block_size)
    qkv, q = call.given["qkv"], call.result
    return [
        ("qkv", f"{shape(qkv)}: {q.shape[1]} heads of queries, {kv.k.shape[1]} of keys, {kv.k.shape[1]} of values"),
        ("slots in the cache", f"{slots}; the last is block {block}, place {offset}"),
        ("key of the last token, head 0", numbers(kv.k[block, 0, offset])),
        ("value of the last token, head 0", numbers(kv.v[block, 0, offset])),
    ]


def _attention(live: Live, call: SeenCall) -> Values:
    q, kv, meta = (call.given[name] for name in ("q", "kv", "meta"))
    length = as_list(meta.seq_lens)[0]
    blocks = meta.block_tables[0, : -(-length // kv.block_size)].long()
    keys = kv.k[blocks].float().transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(q.shape[1] // kv.k.shape[1], 1)
    weights = (torch.einsum("hd,lhd->hl", q[-1].float(), keys) * call.given["scale"]).softmax(-1)
    pieces = live.notes["pieces"]
    shown = [
        (f"head {head} of the last token reads", ", ".join(f"{p!r} {w:.2f}" for p, w in zip(pieces, row, strict=False)))
        for head, row in enumerate(weights.tolist())
    ]
    return [("queries", shape(q)), ("context", f"{length} tokens in {len(blocks)} block"), *shown]


def _feed_forward(live: Live, call: SeenCall) -> Values:
    dense = live.llm.engine.args.layers[0].feed_forward
    assert isinstance(dense, DenseArgs)
    before, after = call.given["x"][-1], call.result[-1]
    return [
        ("hidden states", shape(call.result)),
        ("inner width", str(dense.width)),
        ("last token, before", numbers(before)),
        ("what the feed-forward layer added", numbers(after - before)),
    ]


def _head(live: Live, call: SeenCall) -> Values:
    best, ids = call.result[0].softmax(-1).topk(5)
    live.notes["best"] = [(_piece(live, i), p) for i, p in zip(ids.tolist(), best, strict=True)]
    return [
        ("hidden state of the last token", shape(call.given["hidden"])),
        ("logits", f"{shape(call.result)}, from {call.result.min():.2f} to {call.result.max():.2f}"),
        ("best five", ", ".join(f"{piece!r} {float(p):.1%}" for piece, p in live.notes["best"])),
    ]


def _draw(live: Live, call: SeenCall) -> Values:
    (token,), (logit,) = (one.tolist() for one in call.result)
    live.notes["drawn"] = live.llm.get_tokenizer().decode([token])
    return [("token", f"{token} = {live.notes['drawn']!r}"), ("logit", f"{logit:.2f}")]


def _finish(live: Live, call: SeenCall) -> Values:
    return [
        ("tokens of the step", str(call.result.tokens.tolist())),
        ("ended requests", str(len(call.result.finished))),
    ]


def _answer(live: Live) -> Values:
    phases = [one.phase for one in live.root.inside[0].inside if one.phase]
    return [("steps of this request", "; ".join(phases)), ("text so far", repr(live.output.outputs[0].text))]


STOPS = (
    TourStop(r"FrontEnd\.encode", BEFORE, ("self.tokenizer.encode(",), _text),
    TourStop(r"Scheduler\.plan", 0, ("share_budget(", "self.admitter.admit(", "self._writer.write("), _plan),
    TourStop(r"KVAllocator\.admit", 0, ("pool.share(", "pool.take("), _blocks, drawing="memory"),
    TourStop(r"step\.\w+\.build_inputs", 0, ("out=b.positions)", "b.token_ids.copy_(", "out=kv_slots)"), _inputs),
    TourStop("embed", 0, ("self._scaled(self._rows(token_ids))",), _embedding, drawing="model"),
    TourStop(r"layers\.0", 0, ("hidden = self.attention(hidden", "hidden = self.mlp(hidden"), _layer),
    TourStop(
        r"heads\.\w+\.prepare",
        0,
        ("apply_rope(", "write_kv("),
        _heads,
        formula="quire.kernels.heads.ref:prepare",
        drawing="attention",
    ),
    TourStop(
        r"attention\.\w+\.paged_attention",
        0,
        ('torch.einsum("hd,lhd->hl"', "scores.softmax(", 'torch.einsum("hl,lhd->hd"'),
        _attention,
        formula="quire.kernels.attention.ref:paged_attention",
    ),
    TourStop(r"layers\.0\.mlp", 0, ("branch.add(self.down",), _feed_forward),
    TourStop("head", 0, ("self.kernel.run_float(",), _head),
    TourStop(r"sampling\.draw\.draw_greedy", 0, (".argmax(",), _draw),
    TourStop(
        r"EngineCore\.step",
        0,
        ("self.begin_step()", "self.submit(planned)", "self.confirm()"),
        _finish,
        _answer,
        formula="quire.engine.core:EngineCore._advance",
        tie="around",
    ),
)


def facts(live: Live) -> dict[str, Any]:
    """Return the values that the texts name."""
    engine = live.llm.engine
    args, mixer, dense = engine.args, engine.args.layers[0].mixer, engine.args.layers[0].feed_forward
    assert isinstance(mixer, GroupedArgs) and isinstance(dense, DenseArgs)
    return {
        "prompt_tokens": len(live.output.prompt_token_ids or ()),
        "vocab": f"{args.vocab_size:,}",
        "hidden": args.hidden_size,
        "layers": args.num_layers,
        "heads": mixer.num_heads,
        "kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "inner": dense.width,
        "block": engine.core.facts.block_size,
        "drawn": repr(live.notes["drawn"]),
        "shared": mixer.num_heads // mixer.num_kv_heads,
        "chance": f"{float(live.notes['best'][0][1]):.0%}",
    }
