#!/usr/bin/env bash
# Quire and vLLM on the same work, in turn, three rounds, on a quiet machine: alternate.sh QUIRE_PYTHON VLLM_PYTHON
set -euo pipefail
ours=${1:?usage: alternate.sh QUIRE_PYTHON VLLM_PYTHON} theirs=${2:?usage: alternate.sh QUIRE_PYTHON VLLM_PYTHON}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=4
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="${here%/tools/peer}/src${PYTHONPATH:+:$PYTHONPATH}"  # both find the package without installation
for round in 1 2 3; do
  for work in "latency_b1,decode_b64 0.125 128" "prefill_4k 0.015625 1024"; do
    read -r names scale longest <<< "$work"
    echo "round $round, $names"
    "$ours" -m quire bench throughput --model qwen3-0.6b --only "$names" --scale "$scale" --max-len "$longest" \
      --repeat 2 --max-model-len 2048 --dtype bfloat16
    "$theirs" "$here/run_vllm.py" qwen3-0.6b --only "$names" --scale "$scale" --max-len "$longest" \
      --repeat 2 --engine-args '{"max_model_len": 2048, "dtype": "bfloat16"}'
  done
done
