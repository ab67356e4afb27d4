"""A whole line of vLLM behind `quire`: GLM-5 in INT8, replicas that share experts, drafts of its own layer."""

import shlex
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire import LLM, SamplingParams

from ..e2e.serving import running_server
from ..support.many_ranks import Left
from ..support.prediction_layers import predicting
from ..support.quantized_checkpoints import FORMS, quantize_checkpoint

# As it was typed for eight GPUs, but with two replicas and the context of the tiny model.
LINE = """
    --disable-log-requests -q slimquant_marlin --trust-remote-code -dp 2 -tp 1 --enable-expert-parallel
    --disable-custom-all-reduce --dtype bfloat16 --enable-chunked-prefill --max-model-len 1000
    --max-num-batched-tokens 128 --max-num-seqs 32 --enable-prefix-caching --block-size 64
    --gpu-memory-utilization 0.88 --kv-cache-dtype fp8_ds_mla
    -cc '{"inductor_compile_config":{"combo_kernels": false}}'
    --speculative_config '{"method":"mtp","num_speculative_tokens":3, "quantization": "slimquant_marlin"}'
"""
PROMPTS = [[(5 * i * i + 3 * n) % 8000 for i in range(n)] for n in (5, 130, 41, 200)]  # above 128: chunks
NEW = 24
# Log-probabilities. The last bit of a number can change how it is rounded to INT8 or e4m3, or which expert it takes:
# last bits of norms move those of this model by up to 0.24. A token that is no choice is some 4 below the best.
CLOSE, CLOSE_MEAN = 1.5, 0.03


def test_the_line(left: Left, shared: Path, engine: Callable[..., LLM], tmp_path: Path) -> None:
    """Each token of the answers, drafted or not, is one that an engine without any of it would choose."""
    tokenizer = shared / "models" / "quire-tiny"
    plain = predicting(tmp_path / "plain", "glm_moe_dsa", tokenizer, 0.05)
    quantize_checkpoint(plain, tmp_path / "w8a8", FORMS["ct-int8-channel"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, tmp_path / "w8a8")
    own = ["--device", "cpu", "--num-threads", "1", "--kv-cache-memory-bytes", "16M"]
    with running_server(str(tmp_path / "w8a8"), *shlex.split(LINE), *own) as server, ThreadPoolExecutor(4) as pool:

        def answer(prompt: list[int]) -> list[int]:
            asked = {
                "prompt": prompt,
                "max_tokens": NEW,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            (choice,) = server.ask("/v1/completions", asked).json()["choices"]
            return list(choice["token_ids"])

        answers = list(pool.map(answer, PROMPTS * 2))  # the second of a text reads blocks of the first
        (accepted,) = server.metric("quire:spec_decode_num_accepted_tokens_total").values()
        assert "2 replicas in lock-step" in server.stderr and "fp8_ds_mla" in server.stderr
    assert accepted > sum(map(len, answers)) // 4
    llm = engine(tmp_path / "w8a8", dtype="float32", max_model_len=1000)
    asked = SamplingParams(max_tokens=0, prompt_logprobs=1)
    behind = []
    for prompt, ids in zip(PROMPTS * 2, answers, strict=True):
        (output,) = llm.generate([prompt + ids], asked, use_tqdm=False)
        assert len(ids) == NEW and output.prompt_logprobs is not None
        for token, row in zip(ids, output.prompt_logprobs[len(prompt) :], strict=True):
            assert row is not None
            behind.append(max(one.logprob for one in row.values()) - row[token].logprob)
    assert max(behind) < CLOSE and sum(behind) / len(behind) < CLOSE_MEAN, behind
