"""Reading of a checkpoint's quantization: every spelling, the option beside it, and what no kernel runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.contracts.errors import ConfigError, ModelError, UnsupportedModel, UserError
from quire.contracts.scheme import Scheme
from quire.quantization.read import FLAGS, METHODS, REFUSED, check_flag, find_quantization, format_words
from quire.quantization.rules import HEAD, head_is_quantized, rules_of

from ...support.quantized_checkpoints import FORMS, FP4_GROUP, GPTQ, TOKEN8, compressed, numbers

AWQ = FORMS["awq"].config
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", HEAD],
}
Q, GATE = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.gate_proj"


def mixed(layers: object) -> dict[str, Any]:
    """The config of ModelOpt with an algorithm for each module."""
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("fp8", "quantization_config='fp8' must be an object"),
        (8, "quantization_config=8"),
        (True, "quantization_config=True"),
        ([1], "quantization_config=[1]"),
        ({"quant_method": ["fp8"]}, "quantization_config: quant_method=['fp8']"),
        ({"quant_method": {}}, "quantization_config: quant_method={}"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "to_not_convert='lm_h"),
        ({"quant_method": None}, "quantization_config: quant_method=None"),
        *(
            ({"quant_method": "fp8", "weight_block_size": block}, f"weight_block_size={block!r}")
            for block in (128, [128], [0, 128], [-128, 128], [128, 1.5], [128, 128, 128], [], "128", True)
        ),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups=[1]"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": "Linear"}}}, "targets='Linear'"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:("]}}}, "'re:('"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 4}}}, "weights=4"),
        ({"quant_method": "gptq", "dynamic": {"(": {}}}, "dynamic={'(': {}}"),
        ({"quant_method": "gptq", "modules_in_block_to_quantize": ["q_proj"]}, "modules_in_block_to_quantize="),
        ({"quant_method": "awq", "modules_to_not_convert": [1]}, "modules_to_not_convert=[1]"),
        (mixed(None), "quantized_layers=None must be an object of modules"),
        (mixed({Q: "NVFP4"}), "quantized_layers={'model.layers.3.self_attn.q_proj': 'NVFP4'}"),
    ],
    ids=str,
)
def test_wrong_values_are_named(config: Any, named: str) -> None:
    with pytest.raises(ModelError) as error:
        find_quantization(Path("/models/x"), {"quantization_config": config})
    assert named in str(error.value) and "/models/x/config.json" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"group_size": 64, "bits": 4}, "has no quant_method"),
        ({"quant_method": "mxfp8"}, "asks for 'mxfp8', which is not implemented"),
        ({"quant_method": "gguf"}, "'gguf'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_algo": "W4A8_NVFP4_FP8"}, "quant_algo='W4A8_NVFP4_FP8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "only FP8, NVFP4, W4A16_NVFP4 and MIXED_PRECISION"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "NVFP4 in groups of 32 has no kernel"),
        (mixed({Q: {"quant_algo": "MXFP8"}}), f"quant_algo='MXFP8' of {Q} is not implemented"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "blocks of 64 x 128"),
        ({"quant_method": "fp8", "activation_scheme": "sometimes"}, "activation_scheme='sometimes'"),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}, "blocks with static"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        (AWQ | {"bits": 3}, "AWQ with 3 bits"),
        (AWQ | {"version": "gemv"}, "version='gemv'"),
        (AWQ | {"group_size": 20}, "group_size=20"),
        (AWQ | {"group_size": None}, "group_size=None is not a whole number"),
        (GPTQ | {"bits": 3}, "GPTQ with 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
        (compressed("pack-quantized", numbers(2, "int", "channel")), "weights of 2-bit int per channel"),
        (
            compressed("pack-quantized", numbers(4, "int", "channel"), TOKEN8),
            "activations of 8-bit int per token (dynamic",
        ),
        (compressed("float-quantized", numbers(8, "float", "channel")), "activations that are not quantized"),
        (
            compressed("nvfp4-pack-quantized", numbers(4, "float", "group", group_size=32)),
            "only symmetric groups of 16",
        ),
        (compressed("nvfp4-pack-quantized", FP4_GROUP | {"symmetric": False}), "only symmetric groups of 16"),
        (compressed("nvfp4-pack-quantized", FP4_GROUP, TOKEN8 | {"type": "float"}), "activations of 8-bit float per t"),
        (
            compressed("mxfp4-pack-quantized", numbers(4, "float", "group", group_size=16)),
            "only symmetric groups of 32",
        ),
        (compressed("float-quantized", FP4_GROUP), "'float-quantized' is not implemented (one of mxfp4-pack-quantized"),
        (
            compressed(
                "mxfp4-pack-quantized",
                numbers(4, "float", "group", group_size=32),
                numbers(4, "float", "group", group_size=32, dynamic=True),
            ),
            "activations of 4-bit float per group (dynamic",
        ),
        (compressed("marlin-24", numbers(4, "int", "channel")), "format='marlin-24'"),
        (compressed("int-quantized", numbers(8, "int", "channel", symmetric=False), TOKEN8), "zero points"),
        (compressed("int-quantized", numbers(8, "int", "channel"), TOKEN8 | {"symmetric": False}), "asymmetric"),
        (compressed("int-quantized", numbers(8, "int", "group", group_size=32), TOKEN8), "8-bit int per group"),
        (compressed("float-quantized", numbers(8, "float", "block", block_structure=[64, 64])), "per block"),
        (compressed("int-quantized", numbers([8], "int", {}), TOKEN8), "[8]-bit"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_what_no_kernel_runs_is_refused_in_one_line(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        rules_of(find_quantization(Path("x"), {"quantization_config": config}).config)(Q)
    assert said in str(error.value) and "\n" not in str(error.value) and ": use the " in str(error.value)


@pytest.mark.parametrize(
    ("asked", "config", "said"),
    [
        ("fp8", {}, ""),
        ("FP8", {}, ""),
        (None, {}, None),
        ("auto", {}, None),
        ("fp8", FORMS["fp8-block"].config, None),
        ("awq", AWQ, None),
        ("gptq_marlin", GPTQ, "the weights are gptq"),
        ("awq_marlin", AWQ, "the weights are awq"),
        ("marlin", AWQ, "the weights are awq"),
        ("slimquant_marlin", GPTQ, "the weights are gptq"),
        ("fp8", FORMS["fbgemm"].config, "the weights are fbgemm_fp8"),
        ("compressed_tensors", FORMS["ct-w4-group"].config, None),
        ("modelopt", FORMS["modelopt"].config, None),
        ("modelopt", FORMS["modelopt-nvfp4"].config, None),
        ("modelopt_fp4", FORMS["modelopt-nvfp4"].config, "the weights are modelopt"),
        ("nvfp4", FORMS["ct-nvfp4"].config, "the weights are compressed-tensors"),
        ("petit_nvfp4", mixed({Q: {"quant_algo": "W4A16_NVFP4"}}), "the weights are modelopt"),
    ],
)
def test_names_of_the_option(asked: str | None, config: dict[str, Any], said: str | None) -> None:
    found = find_quantization(Path("x"), {"quantization_config": config}, asked)
    if said == "":
        assert found.config == {"quant_method": "online fp8"} and "blocks of 128 x 128" in found.notes[0]
        return
    assert found.config.get("quant_method") == config.get("quant_method")
    notes = [note for note in found.notes if note.startswith("--quantization")]
    assert (not notes) if said is None else said in notes[0]


@pytest.mark.parametrize(
    ("asked", "config", "said"),
    [
        ("awq", GPTQ, "--quantization awq contradicts x/config.json, whose quantization_config says 'gptq'"),
        ("fp8", FORMS["ct-fp8-channel"].config, "says 'compressed-tensors': leave the flag out"),
        ("awq", {}, "has no quantization_config, and only fp8 quantizes while loading"),
        ("slimquant_marlin", {}, "only fp8 quantizes"),
        ("gguf", {}, "--quantization gguf is not implemented"),
        ("nvfp4", GPTQ, "nvfp4 contradicts x/config.json, whose quantization_config says 'gptq': leave"),
        ("nvfp4", FORMS["ct-mxfp4"].config, "says 'compressed-tensors' without NVFP4: leave the flag out"),
        ("modelopt_fp4", FORMS["modelopt"].config, "says 'modelopt' without NVFP4: leave the flag out"),
        ("modelopt_fp4", mixed({Q: {"quant_algo": "FP8"}}), "says 'modelopt' without NVFP4: leave the flag out"),
        ("modelopt_fp4", {}, "only fp8 quantizes while loading"),
        ("modelopt_mxfp8", {}, "modelopt_mxfp8 is not implemented"),
        ("bitsandbytes", {}, "is not implemented: use the unq"),
        ("turbo", {}, "--quantization turbo does not exist (one of fp8"),
    ],
)
def test_options_that_contradict_the_checkpoint(asked: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_quantization(Path("x"), {"quantization_config": config}, asked)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_every_name_has_an_answer() -> None:
    assert not set(FLAGS) & set(REFUSED) and all(set(found) <= set(METHODS) for found in FLAGS.values())
    assert all(check_flag(name) == name for name in FLAGS)


@pytest.mark.parametrize(
    ("file", "content", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
        (
            "hf_quant_config.json",
            {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
            },
            "modelopt",
        ),
    ],
)
def test_files_beside_config_json(tmp_path: Path, file: str, content: dict[str, Any], method: str) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    found = find_quantization(tmp_path, {})
    assert found.config["quant_method"] == method and rules_of(found.config)(Q) is not None
    for text in ("{", "[1]", '"x"'):
        (tmp_path / file).write_text(text)
        with pytest.raises(UserError, match="download it again"):
            find_quantization(tmp_path, {})


@pytest.mark.parametrize(
    ("config", "quantizes"),
    [
        (FORMS["ct-nvfp4"].config, False),
        (FORMS["ct-nvfp4-inputs"].config, True),
        (FORMS["modelopt-nvfp4"].config, True),
        (FORMS["modelopt-nvfp4"].config | {"quant_algo": "W4A16_NVFP4"}, False),
        (mixed({Q: {"quant_algo": "FP8"}, GATE: {"quant_algo": "NVFP4"}}), True),
        (mixed({Q: {"quant_algo": "FP8"}, GATE: {"quant_algo": "W4A16_NVFP4"}}), False),
        (FORMS["modelopt"].config, False),
    ],
    ids=str,
)
def test_a_note_says_that_activations_are_not_quantized_to_nvfp4(config: dict[str, Any], quantizes: bool) -> None:
    notes = find_quantization(Path("x"), {"quantization_config": config}).notes
    assert [note.startswith("activations are not quantized to NVFP4: weights stay packed") for note in notes] == [
        True
    ] * quantizes


def test_older_spellings() -> None:
    for raw in (
        {"compression_config": FORMS["ct-int8-channel"].config},
        {"quantization_config": {"quant_algo": "FP8", "quant_method": "MODELOPT"}},
        {"quantization_config": {"method": "gptq", "format": "gptq_v2", "bits": 4, "group_size": 32}},
    ):
        assert rules_of(find_quantization(Path("x"), raw).config)(Q) is not None


@pytest.mark.parametrize(
    ("config", "module", "rule"),
    [
        (FORMS["fp8-block"].config | {"modules_to_not_convert": ["model.layers.3"]}, Q, ""),
        (FORMS["fp8-block"].config | {"ignored_layers": [Q]}, Q, ""),
        (FORMS["fp8-block"].config | {"modules_to_not_convert": ["gate"]}, GATE, "fp8"),
        (FORMS["fp8-block"].config | {"scale_fmt": "ue8m0"}, Q, "fp8 ue8m0"),
        (AWQ | {"modules_to_not_convert": ["self_attn"]}, Q, ""),
        (AWQ | {"modules_to_not_convert": ["v_proj"]}, Q, "awq"),
        (AWQ | {"group_size": -1}, Q, "awq channel"),
        (GPTQ | {"dynamic": {"-:.*q_proj": {}}}, Q, ""),
        (GPTQ | {"dynamic": {"-:.*q_proj": {}}}, GATE, "gptq"),
        (GPTQ | {"dynamic": {"+:.*q_proj": {"bits": 8}, ".*": {"bits": 3}}}, Q, "gptq w8"),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}, GATE, ""),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, Q, "gptq"),
        (GPT_OSS, Q, ""),
        (GPT_OSS, "model.layers.3.mlp.router", ""),
        (GPT_OSS, "model.layers.3.mlp.experts.gate_up_proj", "mxfp4"),
        (GPT_OSS | {"modules_to_not_convert": ["model.layers.*.mlp"]}, "model.layers.3.mlp.experts.down_proj", ""),
        (GPT_OSS | {"modules_to_not_convert": None}, "model.layers.3.mlp.experts.down_proj", "mxfp4"),
        (FORMS["ct-mxfp4"].config, Q, "mxfp4-pack-quantized"),
        (FORMS["modelopt"].config | {"exclude_modules": ["model.layers.3*"]}, Q, ""),
        (FORMS["modelopt"].config | {"ignore": ["model.layers.3.self_attn"]}, Q, ""),
        (FORMS["modelopt-nvfp4"].config | {"quant_algo": "W4A16_NVFP4"}, Q, "modelopt nvfp4"),
        (FORMS["modelopt-nvfp4"].config | {"quant_method": "modelopt_fp4"}, Q, "modelopt nvfp4"),
        (FORMS["modelopt-nvfp4"].config | {"exclude_modules": ["model.layers.3*"]}, Q, ""),
        (mixed({Q: {"quant_algo": "FP8"}}), Q, "modelopt"),
        (mixed({Q: {"quant_algo": "FP8"}}), GATE, ""),
        (mixed({"model.layers.3.mlp": {"quant_algo": "nvfp4", "group_size": 16}}), GATE, "modelopt nvfp4"),
        (mixed({GATE: {"quant_algo": "NVFP4"}}) | {"ignore": ["model.layers.3.mlp*"]}, GATE, ""),
        (FORMS["ct-nvfp4"].config, Q, "nvfp4-pack-quantized"),
        (FORMS["ct-nvfp4-inputs"].config, Q, "nvfp4-pack-quantized"),
        (compressed("pack-quantized", numbers(4, "int", "channel")) | {"ignore": [Q]}, Q, ""),
        (compressed("pack-quantized", numbers(4, "int", "channel")) | {"ignore": ["re:.*self_attn.*"]}, Q, ""),
    ],
)
def test_modules_that_a_config_names(config: dict[str, Any], module: str, rule: str) -> None:
    found = rules_of(find_quantization(Path("x"), {"quantization_config": config}).config)(module)
    words = "" if found is None else found.format + " ue8m0" * found.scheme.ue8m0
    words += " w8" * (found is not None and found.scheme.values == "w8")
    words += " channel" * (found is not None and found.scheme.block == (1, 0) and found.format == "awq")
    assert words == rule


def test_the_nearest_of_several_groups_decides() -> None:
    """A name before a pattern before a class of modules, whatever the order of the groups."""
    groups = {
        "a": {"targets": ["Linear"], "weights": numbers(4, "int", "group", group_size=32), "format": "pack-quantized"},
        "b": {
            "targets": ["re:.*self_attn.*"],
            "weights": numbers(8, "float", "channel"),
            "format": "float-quantized",
            "input_activations": numbers(8, "float", "token", dynamic=True),
        },
        "c": {"targets": [Q], "weights": None},
    }
    rules = rules_of({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups})
    assert rules(Q) is None
    other, gate = rules(Q.replace("q_proj", "o_proj")), rules(GATE)
    assert other is not None and other.scheme == Scheme(values="e4m3", block=(1, 0), inputs="token")
    assert gate is not None and gate.scheme == Scheme(values="w4", block=(1, 32)) and gate.format == "pack-quantized"


def test_the_head() -> None:
    assert not head_is_quantized(FORMS["fp8-block"].config) and not head_is_quantized(AWQ)
    assert not head_is_quantized(GPTQ) and head_is_quantized(GPTQ | {"lm_head": True})
    assert rules_of(FORMS["ct-w4-group"].config)(HEAD) is None, "it is ignored there"


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({}, ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "fp8 in blocks of 128 x 64"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq (4-bit weights in groups of 128)"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq (8-bit weights)"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
                        "input_activations": None,
                    }
                },
            },
            "compressed-tensors (4-bit int weights per group of 64)",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {
                        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token"},
                    }
                },
            },
            "compressed-tensors (8-bit float weights per channel, 8-bit float activations per token)",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "compressed-tensors"),
    ],
)
def test_formats_with_their_bits(quantization: dict[str, Any], words: str) -> None:
    assert format_words(quantization) == words
