#!/usr/bin/env bash
# Packs vLLM 0.26.0 and the wheels it needs, for a GPU machine that has Python 3.12, torch 2.11 (CUDA 13) and transformers but no network,
# into parts of at most 40 MB: OUT/a, OUT/b, OUT/c (vLLM) and OUT/d (dependencies). Usage: pack_vllm.sh OUT
# There: cat a/part_00 b/part_01 c/part_02 | xz -dc | tar xf - -C DIR; xz -dc d/site.txz | tar xf - -C DIR; then
# PYTHONPATH=DIR:src VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 python3 -m quire.bench.peer.run_vllm qwen3-8b --out result.json
# (a DIR of its own: its versions are not ours)
set -euo pipefail
out=${1:?usage: pack_vllm.sh OUT}; here=$(cd "$(dirname "$0")" && pwd); work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$out/a" "$out/b" "$out/c" "$out/d" "$work/wheels" "$work/vllm" "$work/site"
platforms=(); for n in 2_5 2_12 2_17 2_24 2_26 2_27 2_28 2_31 2_34 2_35; do platforms+=(--platform "manylinux_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform manylinux2010_x86_64 --platform linux_x86_64)
fetch() { python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" "$@"; }
fetch -d "$work" vllm==0.26.0
fetch -d "$work/wheels" -r "$here/pack_vllm.txt"
(cd "$work/vllm" && unzip -q ../vllm-*.whl && rm -rf vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/vllm-rs vllm/third_party/fmha_sm100 vllm/third_party/deep_gemm/include)
for wheel in "$work"/wheels/*.whl; do unzip -q -o "$wheel" -d "$work/site"; done
rm -rf "$work/site/pycountry/locales" "$work/site/mistral_common/data" "$work/site/sentry_sdk"
tar cf - -C "$work/vllm" . | xz -T0 -8 > "$work/vllm.txz"
tar cf - -C "$work/site" . | xz -T0 -6 > "$out/d/site.txz"
split -b 40000000 -d "$work/vllm.txz" "$work/part_"
mv "$work/part_00" "$out/a/"; mv "$work/part_01" "$out/b/"; mv "$work/part_02" "$out/c/"
du -h "$out"/*/*
