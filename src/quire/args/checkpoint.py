"""Reader of a checkpoint's config.json: its keys become the arguments of a model family.

Knows Hugging Face's spellings of each key, old and new, and the keys that change the math. A key that changes the math
and is not implemented is refused by name. An unknown key is listed in `ModelArgs.notes`. Knows nothing of tensors,
devices or flags. No torch.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import structs

from quire.args.eagle import UNBOUNDED, EagleArgs, read_head
from quire.args.experts import MoEArgs, has_experts, read_moe
from quire.args.families import FAMILIES, Family
from quire.args.foreign import ForeignEnds
from quire.args.grouped import read_cap, read_grouped
from quire.args.keys import Keys
from quire.args.latent import latent_layers
from quire.args.layers import (
    NONE,
    AttentionArgs,
    BesideArgs,
    DenseArgs,
    EndArgs,
    FeedForwardArgs,
    GroupedArgs,
    LayerArgs,
    MixerArgs,
    NormArgs,
)
from quire.args.multipliers import gate_factor, read_factors
from quire.args.overrides import check_overrides, overridden, override_note
from quire.args.prediction import PredictionArgs, read_prediction
from quire.args.recurrent import FEED_FORWARDS, READERS, read_recurrent, state_notes
from quire.args.rope import UNROTATED, RopeArgs, Rotation, of_layers, read_rope
from quire.args.spelling import respelled
from quire.args.windows import LayerRule, read_layer_rules
from quire.args.wrappers import WRAPPERS, WrapperArgs, unwrapped
from quire.contracts.errors import ModelError, ModelNotFound
from quire.contracts.text_table import read_rows

DTYPES = ("float32", "bfloat16", "float16")
ACTS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # hidden_act -> activation of `quire.kernels.activation`
WRAPPED = "{} also reads images: its language model alone runs, and requests with images are refused"
MOST_LAYERS = 4000  # thirty times those of the deepest models; a plan of more takes seconds


# Keys of config.json that no family reads in its own way -> the values that have no effect; None: all values.
NEUTRAL: Mapping[str, list[Any] | None] = {
    key: json.loads(neutral[0]) if neutral else None
    for keys, *neutral in read_rows(Path(__file__).with_name("checkpoint_keys.txt"))
    for key in keys.split()
}


# Model types that are known and do not run yet -> what they need that is missing.
LACKING: Mapping[str, str] = {
    name: needs for names, needs in read_rows(Path(__file__).with_name("lacking.txt")) for name in names.split()
}


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Arguments of a decoder model, complete: layers and kernels add no defaults of their own.

    layers           every layer of the checkpoint
    prediction       those of them that predict several tokens (MTP)
    eagle            an EAGLE head, not a model
    dtype            dtype of the stored weights by config.json ("bfloat16", ...)
    foreign          the ends of a model of transformers, whose layers are `ForeignArgs`; None: a model of Quire's own
    wrapper          place of the model in the checkpoint of a model around it, of which nothing else runs
    notes            notes for the user about ignored and unknown keys, one sentence each
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerArgs, ...]
    norm: NormArgs
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    ends: EndArgs = EndArgs()
    prediction: PredictionArgs = PredictionArgs()
    eagle: EagleArgs | None = None
    wrapper: WrapperArgs | None = None
    foreign: ForeignEnds | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def extra_layers(self) -> int:
        """The number of layers that predict several tokens. They stand behind the model's own."""
        return self.prediction.layers

    @property
    def draft_layers(self) -> int:
        """The number of these that an engine runs to draft tokens."""
        return self.prediction.drafting

    @property
    def num_layers(self) -> int:
        """The number of layers without those that predict several tokens."""
        return len(self.layers) - self.extra_layers

    @cached_property
    def mixers(self) -> tuple[MixerArgs, ...]:
        """Each kind and size of mixers once, in the order of the layers."""
        return tuple(dict.fromkeys(mixer for one in self.layers for mixer in one.mixers))

    @property
    def attending(self) -> tuple[AttentionArgs, ...]:
        """The mixers that attend to tokens; each model has one. The others are recurrent."""
        return tuple(one for one in self.mixers if isinstance(one, AttentionArgs))

    @property
    def keeps_states(self) -> bool:
        """True if some layers are recurrent, and keep a state of each request."""
        return len(self.attending) < len(self.mixers)

    @cached_property
    def rotations(self) -> tuple[Rotation, ...]:
        """Each rotation of heads once, in the order of the layers."""
        return tuple(dict.fromkeys(one.rotation for one in self.attending))

    @cached_property
    def moe(self) -> MoEArgs | None:
        """The experts of the layers that have experts, which are alike in all of them; None: no layer has.

        Those that predict several tokens may store them in another form.
        """
        found = [one.experts for one in self.layers if one.experts is not None]
        assert len({structs.replace(one, stored="") for one in found}) <= 1, "layers with other experts"
        return next(iter(found), None)

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with experts that an engine runs: the model's, then those that draft."""
        own = self.layers[: self.num_layers + self.draft_layers]
        return tuple(layer for layer, one in enumerate(own) if one.experts is not None)

    @property
    def inputs(self) -> int:
        """Numbers of the further embedding that each layer has of a token; 0: there is none."""
        return self.layers[0].inputs

    def kept_by(self, layer: int) -> int:
        """Return the number of the layer whose KV cache a layer reads: most often its own."""
        mixer = self.layers[layer].mixer
        return mixer.kv_from if isinstance(mixer, GroupedArgs) and mixer.kv_from >= 0 else layer


def read_checkpoint_config(folder: Path, head: str = "", overrides: Mapping[str, Any] | None = None) -> ModelArgs:
    """Read `folder/config.json`, with other values by the option `hf_overrides`.

    Raises ModelNotFound, ModelError (damaged) or UnsupportedModel, one line each; ConfigError for an override.
    """
    path = Path(folder) / "config.json"
    stored = _read_json(path)
    if not overrides:
        return parse_checkpoint_config(stored, str(path), head)
    raw = overridden(stored, overrides)
    inner, wrapper = unwrapped(raw, str(path))
    if (family := FAMILIES.get(str(inner.get("model_type")))) is not None:
        idle = {key for key, neutral in NEUTRAL.items() if neutral is None}
        reads = {*family.reads, *(NEUTRAL.keys() - idle)}
        check_overrides(overrides, reads, idle, "text_config" if wrapper is not None else "")
    args = parse_checkpoint_config(raw, f"{path} with hf_overrides", head)
    return replace(args, notes=(override_note(stored, overrides), *args.notes))


def read_raw_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the decoded `folder/config.json`, of the language model where another is around it.

    overrides   values over those of the file, of the option `hf_overrides`
    Raises ModelNotFound or ModelError.
    """
    path = Path(folder) / "config.json"
    return dict(unwrapped(overridden(_read_json(path), overrides or {}), str(path))[0])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{path} does not exist: a model folder needs a config.json.") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also for numbers with thousands of digits
        raise ModelError(f"{path} cannot be read ({error}): download it again.") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds {type(raw).__name__}, not an object: download it again.")
    return raw


def parse_checkpoint_config(raw: Mapping[str, Any], source: str = "config.json", head: str = "") -> ModelArgs:
    """Turn the decoded config.json into `ModelArgs`; `source` names the file in errors, `head` is as in `read_head`."""
    raw, wrapper = unwrapped(raw, source)
    keys, eagle = read_head(raw, source, head)
    model_type, family, headless = _find_family(keys)
    keys = respelled(keys, model_type, family)
    _refuse_math(keys, family)
    hidden = keys.size("hidden_size")
    max_positions = keys.size("max_position_embeddings")
    layers = keys.size("num_hidden_layers", most=MOST_LAYERS)
    rope, rope_notes = read_rope(
        of_layers(keys, "full_attention"), max_positions, family.theta, sections="mrope_section" in family.keys
    )
    context = max(max_positions, rope.extended_positions)
    alone = family.recurrent and not family.form.both
    recurrent = read_recurrent(keys, family.recurrent, layers) if alone else frozenset[int]()
    rules = read_layer_rules(_of_attention(keys, family), family, UNBOUNDED if eagle else context, layers)
    ropes = rope, _sliding_rope(keys, family, max_positions, rope)
    prediction = read_prediction(keys, family, MOST_LAYERS)
    dtype, dtype_notes = _dtype(keys, family)
    args = ModelArgs(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        layers=_layers(keys, family, ropes, rules, prediction.layers, recurrent),
        norm=NormArgs(
            eps=keys.positive(family.form.eps_key, family.form.eps),
            plus_one=family.form.plus_one,
            centered=family.form.centered,
        ),
        tie_word_embeddings=keys.flag("tie_word_embeddings", family.form.tied) or headless,
        max_position_embeddings=context,
        dtype=dtype,
        ends=_ends(keys, family, hidden),
        prediction=prediction,
        wrapper=wrapper,
        notes=(
            *([WRAPPED.format(wrapper.model_type)] if wrapper else ()),
            *_notes(keys, family),
            *prediction.notes(layers),
            *rope_notes,
            *dtype_notes,
            *(state_notes(keys) if family.recurrent else ()),
            *(["this model has no head: use it for embeddings, its generated text is noise."] if headless else ()),
        ),
    )
    if eagle is None:
        return args
    vocab = Keys(raw, source).size("draft_vocab_size", eagle.vocab_size, most=eagle.vocab_size)
    return replace(
        args,
        model_type=head,
        vocab_size=vocab,
        max_position_embeddings=UNBOUNDED,
        tie_word_embeddings=False,
        eagle=eagle,
    )


def _layers(
    keys: Keys,
    family: Family,
    ropes: tuple[RopeArgs, RopeArgs],
    rules: Sequence[LayerRule],
    extra: int,
    recurrent: Collection[int] = (),
) -> tuple[LayerArgs, ...]:
    """Return the layers of the checkpoint, by their rules; `extra` more predict several tokens.

    ropes       rotations of layers with full attention and of those with a window
    recurrent   numbers of the layers that do not attend
    Layers that predict several tokens have full attention, and experts where any layer has.
    """
    mixers = _mixers(keys, family, ropes, rules, extra)
    for layer in recurrent:
        mixers[layer] = READERS[family.recurrent](keys)
    act = _activation(keys, family)
    width = keys.size(family.form.width_key, family.form.width)
    bias = keys.flag("mlp_bias") if "mlp_bias" in family.keys else False
    both = family.form.both
    dense = DenseArgs(width=width, bias=bias, act=act, gate_scale=gate_factor(keys) if both else 1.0)
    parts: list[FeedForwardArgs] = [dense] * len(mixers)
    if "use_double_wide_mlp" in family.keys and keys.flag("use_double_wide_mlp"):
        shares = [isinstance(one, GroupedArgs) and one.kv_from >= 0 for one in mixers]
        parts = [structs.replace(dense, width=2 * width) if shared else dense for shared in shares]
    if family.experts and has_experts(keys, family.experts) and (not family.beside or keys.flag(family.beside)):
        moe, sparse = read_moe(keys, family.experts, len(rules))
        for layer in (*sparse, *range(len(rules), len(mixers))):
            mlp = parts[layer]
            assert isinstance(mlp, DenseArgs)
            parts[layer] = BesideArgs(dense=mlp, experts=structs.replace(moe, act=act)) if family.beside else moe
    for layer, word in enumerate(keys.names("layer_types") if family.form.single else ()):
        (mixers if word in FEED_FORWARDS else parts)[layer] = NONE
    residual = keys.positive("residual_multiplier", 1.0) if "residual_multiplier" in family.keys else 1.0
    form: dict[str, Any] = {"scaled": family.form.scaled, "residual": residual}
    form |= {"beside": READERS[family.recurrent](keys), "factors": read_factors(keys)} if both else {}
    form["inputs"] = _layer_inputs(keys, family)
    kinds = ("after", "before") if family.form.norms == "by kind" else (family.form.norms,) * 2
    norms = [kinds[layer in recurrent] for layer in range(len(mixers))]
    return tuple(
        LayerArgs(mixer=one, feed_forward=part, norms=places, **form)
        for one, part, places in zip(mixers, parts, norms, strict=True)
    )


def _of_attention(keys: Keys, family: Family) -> Keys:
    """Return the keys without those of recurrent layers, so that all layers attend."""
    return Keys({**keys, "layer_types": None}, keys.source) if family.recurrent else keys


def _mixers(
    keys: Keys, family: Family, ropes: tuple[RopeArgs, RopeArgs], rules: Sequence[LayerRule], extra: int
) -> list[MixerArgs]:
    """Return the mixer of each layer. See `_layers`."""
    own = of_layers(keys, "full_attention")
    if family.latent:
        assert all(rule.window is None for rule in rules), "a family with latent attention has no windows"
        return [*latent_layers(own, family.latent, ropes[0] if rules[0].rotated else UNROTATED, len(rules), extra)]
    full = windowed = read_grouped(own, family, ropes[0], full=True)
    if family.heads.by_kind:
        windowed = read_grouped(of_layers(keys, "sliding_attention"), family, ropes[1], full=False)
    mixers: list[MixerArgs] = [full] * (len(rules) + extra)
    sources = _kv_sources(keys, family, rules)
    for layer, rule in enumerate(rules):
        rope = ropes[rule.sliding] if rule.rotated else UNROTATED
        kind = windowed if rule.sliding else full
        mixers[layer] = structs.replace(kind, window=rule.window, rope=rope, kv_from=sources.get(layer, -1))
        if family.heads.grow == "unrotated":
            mixers[layer] = _of_rotation(mixers[layer], rotated=rule.rotated)
    return mixers


def _of_rotation(mixer: MixerArgs, *, rotated: bool) -> MixerArgs:
    """Return a mixer of Llama 4: heads that rotate are normalized, and queries of the others grow."""
    assert isinstance(mixer, GroupedArgs), "no latent attention has such layers"
    if rotated:
        return structs.replace(mixer, scores=structs.replace(mixer.scores, growth=0.0))
    return structs.replace(mixer, qk_norm="")


def _kv_sources(keys: Keys, family: Family, rules: Sequence[LayerRule]) -> dict[int, int]:
    """Return each layer that reads the keys and values of another layer, and that layer.

    The last num_kv_shared_layers read those of the last layer before them of their kind.
    """
    if "num_kv_shared_layers" not in family.keys:
        return {}
    first = len(rules) - (keys.count("num_kv_shared_layers", 0, most=len(rules)) or 0)
    last = {rule.sliding: layer for layer, rule in enumerate(rules[:first])}
    if lacking := {rule.sliding for rule in rules} - last.keys():
        kind = "a window" if lacking.pop() else "full attention"
        raise keys.wrong(f"num_kv_shared_layers={len(rules) - first} leaves no layer with {kind} that has its own KV.")
    return {layer: last[rules[layer].sliding] for layer in range(first, len(rules))}


def _sliding_rope(keys: Keys, family: Family, max_positions: int, full: RopeArgs) -> RopeArgs:
    """Return the rotation of layers with a window. full: that of the others."""
    own = of_layers(keys, "sliding_attention")
    if own is not keys:
        return read_rope(own, max_positions, family.window.theta or family.theta)[0]
    if not family.window.plain:
        return full
    return RopeArgs(theta=keys.positive("rope_local_base_freq", family.window.theta or full.theta))


def _ends(keys: Keys, family: Family, hidden: int) -> EndArgs:
    scale = {key: keys.positive(key, 1.0) for key in ("embedding_multiplier", "logits_scaling") if key in family.keys}
    logits = keys.positive("logit_scale", 0.0625) if "logit_scale" in family.keys else 1.0
    logits *= keys.positive("lm_head_multiplier", 1.0) if "lm_head_multiplier" in family.keys else 1.0
    return EndArgs(
        embedding_scale=hidden**0.5 if family.form.root_embeddings else scale.get("embedding_multiplier", 1.0),
        logit_scale=logits / scale.get("logits_scaling", 1.0),
        logit_cap=read_cap(keys, family, "final_logit_softcapping", family.form.logit_cap),
    )


def _layer_inputs(keys: Keys, family: Family) -> int:
    """Return the width of the embedding that each layer has of a token; 0: none."""
    if "hidden_size_per_layer_input" not in family.keys:
        return 0
    width = keys.count("hidden_size_per_layer_input", 256) or 0
    if width and (rows := keys.size("vocab_size_per_layer_input", 262_144)) != keys.size("vocab_size"):
        raise keys.unsupported(
            f"vocab_size_per_layer_input={rows} beside vocab_size={keys.size('vocab_size')} is not implemented: use a "
            "model whose embeddings have the same tokens."
        )
    return width


def _find_family(keys: Keys) -> tuple[str, Family, bool]:
    """Return model_type, its family, and True when the model has no head; the embedding then takes its place."""
    every = {name: family.architecture for name, family in FAMILIES.items()}
    every |= {name: wrapper.architecture for name, wrapper in WRAPPERS.items()}
    ours = ", ".join(f"{name} ({architecture})" for name, architecture in every.items())
    architectures = keys.names("architectures")
    named = {family.architecture: name for name, family in FAMILIES.items()}
    model_type = keys.get("model_type") or (named.get(architectures[0]) if architectures else None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        code = " Its auto_map points to code inside the repository, which is never run." if keys.get("auto_map") else ""
        if isinstance(model_type, str) and model_type in LACKING:
            raise keys.unsupported(f"model_type {model_type!r} is not implemented yet: it needs {LACKING[model_type]}.")
        shown = model_type or (architectures[0] if architectures else "nothing")
        raise keys.unsupported(f"model_type {shown!r} is not implemented.{code} Implemented: {ours}.")
    family = FAMILIES[model_type]
    headless = family.architecture.replace("ForCausalLM", "Model") in architectures
    if architectures and family.architecture not in architectures and not headless:
        raise keys.unsupported(
            f"architecture {architectures[0]!r} of model_type {model_type!r} is not implemented. Implemented: {ours}."
        )
    return model_type, family, headless


def _refuse_math(keys: Keys, family: Family) -> None:
    for key, neutral in NEUTRAL.items():
        if key in keys and key not in family.reads and neutral is not None and keys[key] not in neutral:
            shown = repr(keys[key]) if not isinstance(keys[key], (dict, list)) else "{...}"
            raise keys.unsupported(f"{key}={shown} changes the math and is not implemented: use another model.")
    images = "use_bidirectional_attention"  # Gemma 4: "vision" concerns the tokens of images alone
    if images in family.keys and keys.get(images) not in (None, False, "vision"):
        raise keys.unsupported(f"{images}={keys[images]!r} changes the math and is not implemented: use another model.")


def _activation(keys: Keys, family: Family) -> str:
    """Return the activation of a gated MLP, by its name in `quire.kernels.activation`."""
    key = "hidden_activation" if keys.get("hidden_activation") is not None else "hidden_act"
    value, known = keys.get(key, family.form.act), ACTS if family.form.act != "relu2" else {"relu2": "relu2"}
    if not isinstance(value, str) or value not in known:
        raise keys.unsupported(f"{key}={value!r} is not implemented: use a model with one of {', '.join(known)}.")
    return known[value]


def _dtype(keys: Keys, family: Family) -> tuple[str, tuple[str, ...]]:
    value = keys.get("dtype", keys.get("torch_dtype"))
    if value is None:
        return family.dtype, (f"config.json names no dtype: {family.dtype} is assumed",)
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise keys.unsupported(f"dtype={value!r} is not implemented: use a model in {', '.join(DTYPES)}.")
    return name, ()


def _notes(keys: Keys, family: Family) -> Iterator[str]:
    if keys.get("auto_map"):
        yield f"auto_map is ignored: {keys.get('model_type')} is built in, the repository's own code is never run"
    if unknown := sorted(set(keys) - family.reads - NEUTRAL.keys()):
        yield f"config.json has keys that are not known and were ignored: {', '.join(unknown)}"
