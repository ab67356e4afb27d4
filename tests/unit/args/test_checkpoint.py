"""Reading config.json: spellings, refusals by name, notes, and every real configuration at hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import LACKING, parse_checkpoint_config, read_checkpoint_config
from quire.args.families import FAMILIES
from quire.args.layers import DenseArgs, GroupedArgs
from quire.args.wrappers import WRAPPERS
from quire.contracts.errors import ModelError, ModelNotFound, UnsupportedModel

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": [3, 5],
    "tie_word_embeddings": True,
}


def changed(**changes: Any) -> dict[str, Any]:
    """QWEN3 with some keys replaced; None removes nothing, `...` removes the key."""
    return {key: value for key, value in (QWEN3 | changes).items() if value is not ...}


def family_config(model_type: str, **changes: Any) -> dict[str, Any]:
    named = {"model_type": model_type, "architectures": [FAMILIES[model_type].architecture]}
    return changed(**(named | changes))


def test_reads_every_field() -> None:
    args = parse_checkpoint_config(QWEN3)
    assert (args.mixers[0].num_heads, args.mixers[0].num_kv_heads, args.mixers[0].head_dim, args.num_layers) == (
        4,
        2,
        32,
        4,
    )
    assert args.mixers[0].rope.theta == 5000.0 and args.mixers[0].rope.kind == "default"
    assert args.dtype == "bfloat16" and args.tie_word_embeddings
    assert args.mixers[0].qk_norm and not args.mixers[0].input_bias and args.notes == ()


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": ..., "dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": None}, "float32"),
    ],
    ids=str,
)
def test_dtype_spellings(changes: dict[str, Any], dtype: str) -> None:
    assert parse_checkpoint_config(changed(**changes)).dtype == dtype


def test_missing_dtype_is_said() -> None:
    assert "float32" in parse_checkpoint_config(changed(torch_dtype=...)).notes[0]


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_theta": ..., "rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5000.0}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_scaling": LLAMA3 | {"type": "llama3"}, "rope_parameters": {"rope_type": "default"}},
    ],
    ids=["old", "older", "new", "mixed", "both"],
)
def test_rope_spellings(changes: dict[str, Any]) -> None:
    rope = parse_checkpoint_config(changed(**changes)).mixers[0].rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == ("llama3", 5000.0, 8.0, 512)


def test_rope_theta_defaults_as_transformers_does() -> None:
    assert parse_checkpoint_config(changed(rope_theta=...)).mixers[0].rope.theta == 10_000.0
    inner = changed(rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert parse_checkpoint_config(inner).mixers[0].rope.theta == 7.0


def test_yarn_extends_the_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert parse_checkpoint_config(changed(rope_scaling=yarn)).max_position_embeddings == 16384
    silent = parse_checkpoint_config(changed(rope_scaling={"type": "yarn", "factor": 2.0}))
    assert silent.mixers[0].rope.original_max_position == 4096


@pytest.mark.parametrize(
    ("model_type", "changes", "head_dim"),
    [
        ("llama", {"head_dim": None}, 16),
        ("llama", {"head_dim": ...}, 16),
        ("qwen2", {"head_dim": ...}, 16),
        ("qwen3", {"head_dim": ...}, 128),
        ("mistral", {"head_dim": 32, "sliding_window": None}, 32),
    ],
    ids=str,
)
def test_head_dim(model_type: str, changes: dict[str, Any], head_dim: int) -> None:
    assert parse_checkpoint_config(family_config(model_type, **changes)).mixers[0].head_dim == head_dim


def test_biases_by_family() -> None:
    def biases(model_type: str, **changes: Any) -> tuple[bool, bool, bool]:
        args = parse_checkpoint_config(family_config(model_type, sliding_window=None, **changes))
        mixer, dense = args.layers[0].mixer, args.layers[0].feed_forward
        assert isinstance(mixer, GroupedArgs) and isinstance(dense, DenseArgs)
        return mixer.input_bias, mixer.output_bias, dense.bias

    assert biases("llama", attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases("llama") == biases("mistral") == biases("qwen3") == (False, False, False)
    assert biases("qwen2") == (True, False, False)
    assert biases("qwen3", attention_bias=True) == (True, True, False)


MIXED = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (family_config("llama", sliding_window=512), "sliding_window=512"),
        (changed(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (
            family_config("mistral", sliding_window=9, layer_types=["full_attention", "sliding_attention"] * 2),
            "two kinds",
        ),
        (changed(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0"),
        (changed(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
        (changed(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (changed(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
        (changed(rope_scaling={"type": "spiral", "factor": 2.0}), "spiral"),
        (changed(rope_scaling={"type": "default", "mrope_section": [1, 2, 3]}), "mrope_section"),
        (changed(rope_parameters={"mid_attention": {"rope_type": "default"}}), "by layer"),
        (changed(rope_scaling={"full_attention": {}}), "rope_scaling.full_attention={}"),
        (changed(hidden_act="gelu"), "hidden_act='gelu'"),
        (changed(num_experts=8), "num_experts=8"),
        (changed(vision_config={"depth": 2}), "vision_config"),
        (changed(torch_dtype="float8_e4m3fn"), "float8_e4m3fn"),
        (changed(architectures=["Qwen3ForSequenceClassification"]), "Qwen3ForSequenceClassification"),
        (changed(model_type="gpt2", architectures=["GPT2LMHeadModel"]), "gpt2"),
        (changed(model_type="own", auto_map={"AutoModel": "own.py"}), "auto_map"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        parse_checkpoint_config(config)
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


YARN = {"type": "yarn", "factor": 4.0}
QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MOE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2}, "qwen3_moe": QWEN_MOE,
    "qwen2_moe": QWEN_MOE | {"shared_expert_intermediate_size": 24},
}  # fmt: skip


def windows(raw: dict[str, Any]) -> list[int | None]:
    return [one.mixer.window for one in parse_checkpoint_config(raw).layers if isinstance(one.mixer, GroupedArgs)]


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_a_window_is_compared_with_the_context_of_the_model(model_type: str) -> None:
    """A window as long as the context changes nothing; YaRN makes the context longer than max_position_embeddings."""
    raw = family_config(
        model_type, sliding_window=4096, use_sliding_window=True, max_window_layers=1, **MOE.get(model_type, {})
    )
    args = parse_checkpoint_config(raw)
    assert args.max_position_embeddings == 4096 and windows(raw) == [None] * 4 and not args.notes
    assert 4096 in windows(raw | {"rope_scaling": YARN})


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_a_window_without_a_length_is_transformers_default(model_type: str) -> None:
    raw = family_config(
        model_type,
        use_sliding_window=True,
        max_position_embeddings=4097,
        max_window_layers=1,
        **MOE.get(model_type, {}),
    )
    assert 4096 in windows({key: value for key, value in raw.items() if key != "sliding_window"})


@pytest.mark.parametrize(
    ("model_type", "changes", "layers"),
    [
        ("mistral", {}, {0, 1, 2, 3}),
        ("mixtral", {}, {0, 1, 2, 3}),
        ("qwen3_moe", {"max_window_layers": 4}, {0, 1, 2, 3}),  # every layer, whatever these two say
        ("qwen3_moe", {"layer_types": ["full_attention"] * 4}, {0, 1, 2, 3}),
        ("qwen2_moe", {"max_window_layers": 28}, {0, 2}),  # every second layer below it
        ("qwen2_moe", {"max_window_layers": 1}, {0}),
        ("qwen2_moe", {"max_window_layers": 0}, set()),
        ("qwen2_moe", {"layer_types": ["full_attention"] * 4}, set()),
        ("qwen2_moe", {"max_window_layers": 0, "layer_types": MIXED}, {1, 3}),
        ("qwen2", {"max_window_layers": 3}, {3}),  # the layers from there on
        ("qwen2", {"max_window_layers": 0}, {0, 1, 2, 3}),
        ("qwen2", {"max_window_layers": 4}, set()),
        ("qwen2", {}, set()),  # from the 28th on
    ],
    ids=str,
)
def test_which_layers_have_the_window_is_the_family_s_rule(
    model_type: str, changes: dict[str, Any], layers: set[int]
) -> None:
    raw = family_config(model_type, sliding_window=512, use_sliding_window=True, **MOE.get(model_type, {}), **changes)
    assert {layer for layer, window in enumerate(windows(raw)) if window == 512} == layers
    if model_type not in ("mistral", "mixtral"):
        assert windows(raw | {"use_sliding_window": False}) == [None] * 4
    assert parse_checkpoint_config(raw).notes == ()


def test_windows_that_are_no_windows() -> None:
    with pytest.raises(ModelError, match="sliding_window=0 lets a token attend to nothing"):
        parse_checkpoint_config(family_config("mistral", sliding_window=0))
    with pytest.raises(ModelError, match="layer_types names 2 of 4 layers"):
        parse_checkpoint_config(changed(use_sliding_window=True, sliding_window=9, layer_types=["full_attention"] * 2))


def test_a_model_without_head_embeds_and_says_so() -> None:
    args = parse_checkpoint_config(changed(architectures=["Qwen3Model"], tie_word_embeddings=False))
    assert args.tie_word_embeddings and any("no head" in note for note in args.notes)
    assert not parse_checkpoint_config(QWEN3).notes
    for key, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        with pytest.raises(UnsupportedModel, match=key):
            parse_checkpoint_config(changed(**{key: value}))


def test_unknown_architecture_lists_ours() -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        parse_checkpoint_config(changed(model_type="gpt2", architectures=["GPT2LMHeadModel"]))
    assert all(family.architecture in str(refusal.value) for family in FAMILIES.values())


@pytest.mark.parametrize(
    "config",
    [
        family_config("mistral", sliding_window=4096),
        family_config("mistral"),
        changed(use_sliding_window=False, sliding_window=512),
        changed(use_sliding_window=True, sliding_window=512, max_window_layers=4),
        changed(use_sliding_window=True, sliding_window=4096),
        changed(layer_types=["full_attention"] * 4),
        changed(attn_logit_softcapping=None, residual_multiplier=1.0),
        changed(architectures=...),
        changed(model_type=...),
    ],
    ids=str,
)
def test_inactive_keys_pass(config: dict[str, Any]) -> None:
    assert parse_checkpoint_config(config).notes == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"hidden_size": -4}, "hidden_size=-4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"intermediate_size": "96"}, "intermediate_size='96'"),
        ({"num_attention_heads": True}, "num_attention_heads=True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"head_dim": None, "hidden_size": 66}, "hidden_size=66"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5"),
        ({"rope_scaling": LLAMA3 | {"type": "llama3", "high_freq_factor": 0.5}}, "high_freq_factor=0.5"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' must be an object or null"),
        ({"rope_parameters": ["yarn"]}, "rope_parameters=['yarn'] must be an object or null"),
        ({"rope_scaling": {"type": "linear", "factor": {}}}, "rope_scaling.factor={} is an object"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": 1}, "rope_parameters=1"),
    ],
    ids=str,
)
def test_wrong_values_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as error:
        parse_checkpoint_config(changed(**changes), "/models/x/config.json")
    assert named in str(error.value) and "/models/x/config.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_notes_list_what_was_ignored() -> None:
    notes = parse_checkpoint_config(changed(auto_map={"AutoModel": "x.py"}, sparkle=1, glitter=2)).notes
    assert any("auto_map" in note for note in notes) and any("glitter, sparkle" in note for note in notes)
    notes = parse_checkpoint_config(changed(rope_scaling={"type": "linear", "factor": 2.0, "odd": 1})).notes
    assert any("odd" in note for note in notes)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_checkpoint_config(tmp_path)
    for text in ("{", "[1]", '"x"', f'{{"vocab_size": {"1" * 5000}}}', "[" * 200_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match="download it again"):
            read_checkpoint_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert read_checkpoint_config(tmp_path) == parse_checkpoint_config(QWEN3)


IMPLEMENTED = {
    "DeepSeek-V2-Lite", "GLM-4.5", "GLM-4.5-Air", "GLM-5", "Llama-3.1-8B", "Llama-3.1-8B-Instruct",
    "Llama-3.3-70B-Instruct", "Mistral-7B-Instruct-v0.3", "Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B-v0.1",
    "Qwen2.5-7B", "Qwen2.5-7B-Instruct", "Qwen3-0.6B", "Qwen3-235B-A22B", "Qwen3-30B-A3B", "Qwen3-8B",
}  # fmt: skip


def test_every_real_configuration(shared: Path) -> None:
    """Each one parses without an unknown key, quantized or not."""
    parsed = set()
    for path in sorted((shared / "hf").glob("*/config.json")):
        assert not [note for note in read_checkpoint_config(path.parent).notes if "not known" in note]
        parsed.add(path.parent.name)
    raws = {name: json.loads((shared / "hf" / name / "config.json").read_text()) for name in parsed}
    assert {name for name in parsed if "quantization_config" not in raws[name]} == IMPLEMENTED
    assert len(parsed) > len(IMPLEMENTED)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", "4096"),
        ("max_window_layers", "28"),
        ("layer_types", [{}]),
        ("layer_types", "full_attention"),
        ("architectures", 5),
        ("architectures", "Qwen3ForCausalLM"),
        ("architectures", [{}]),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 10**40),
        ("head_dim", 10**400),
        ("hidden_size", 10**400),
        ("sliding_window", 10**400),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_named(key: str, value: Any) -> None:
    damaged = changed(**({"use_sliding_window": True} | {key: value}))
    with pytest.raises(ModelError, match=f"folder/config.json: {key}=.* must be ") as error:
        parse_checkpoint_config(damaged, "folder/config.json")
    assert "\n" not in str(error.value)


def test_a_model_type_that_is_no_name_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="model_type"):
        parse_checkpoint_config(changed(model_type=["qwen3"]))


def test_seed_oss_has_biases_unless_it_says_otherwise() -> None:
    def biases(**changes: Any) -> tuple[bool, bool]:
        (mixer,) = parse_checkpoint_config(family_config("seed_oss", **changes)).mixers
        assert isinstance(mixer, GroupedArgs)
        return mixer.input_bias, mixer.output_bias

    assert biases() == (True, False) and biases(attention_bias=False) == (False, False)
    assert biases(attention_out_bias=True) == (True, True)
    with pytest.raises(UnsupportedModel, match="attention_out_bias"):
        parse_checkpoint_config(changed(attention_out_bias=True))


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"hidden_act": ["silu"]}, "hidden_act="),
        ("smollm3", {"no_rope_layers": [[], 1, 1, 1]}, "no_rope_layers=.* must be a list of 4 numbers"),
        ("llama", {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_theta=1.0 must be above 1"),
        (
            "llama",
            {"rope_scaling": LLAMA3 | {"type": "llama3", "original_max_position_embeddings": 10**40}},
            "original_max_position_embeddings=1000.* must be a positive integer",
        ),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "rope_scaling and rope_parameters are missing"),
        (
            "ministral3",
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "llama_4_scaling_beta=None must be a positive n",
        ),
    ],
)
def test_settings_that_cannot_be_read(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_checkpoint_config(family_config(family, **changes))


@pytest.mark.parametrize("kinds", [["full_attention"] * 4, ["sliding_attention"] * 3 + ["full_attention"], None])
def test_exaone_rotates_layers_with_a_window(kinds: list[str] | None) -> None:
    """And all layers, if there is no window: as transformers' Exaone4Attention."""
    raw = family_config("exaone4", layer_types=kinds, sliding_window=32)
    sliding = kinds or ["sliding_attention"] * 3 + ["full_attention"]
    turning = [one.mixer.rope.kind != "none" for one in parse_checkpoint_config(raw).layers]
    assert turning == [kind == "sliding_attention" for kind in sliding]
    without = parse_checkpoint_config(raw | {"sliding_window": None, "layer_types": ["full_attention"] * 4})
    assert all(one.mixer.rope.kind == "default" for one in without.layers)


def test_keys_around_a_language_model() -> None:
    """Null means nothing; a class that is no generator is refused."""
    inner = family_config("gemma3_text", tie_word_embeddings=False, dtype="bfloat16")
    raw = {"model_type": "gemma3", "text_config": inner, "architectures": ["Gemma3ForConditionalGeneration"]}
    args = parse_checkpoint_config(raw | {"tie_word_embeddings": None, "dtype": None})
    assert (args.tie_word_embeddings, args.dtype) == (False, "bfloat16")
    assert parse_checkpoint_config(raw | {"tie_word_embeddings": True}).tie_word_embeddings
    assert "gemma3 also reads images" in " ".join(args.notes)
    with pytest.raises(UnsupportedModel, match="'Gemma3ForSequenceClassification' of model_type 'gemma3'"):
        parse_checkpoint_config(raw | {"architectures": ["Gemma3ForSequenceClassification"]})


def test_known_families_that_do_not_run_say_what_is_missing() -> None:
    for name, needs in LACKING.items():
        if name not in FAMILIES and name not in WRAPPERS:
            with pytest.raises(
                UnsupportedModel, match=re.escape(f"{name!r} is not implemented yet: it needs {needs}.")
            ):
                parse_checkpoint_config(changed(model_type=name, architectures=None))
