#!/usr/bin/env bash
# Do what a stranger does with a plugin: install it as a wheel into a fresh environment, certify it, train with it.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/source" "$work/empty"
tar -C "$root" --exclude-vcs --exclude=./.venv --exclude=./build --exclude=./runs --exclude=./.cache -cf - . \
  | tar -C "$work/source" -xf -

"${PYTHON:-python3}" -m venv "$work/venv"
bin="$work/venv/bin"
export PIP_CONSTRAINT="$work/source/constraints.txt"
for example in third_party_dispatcher two_hop_dispatcher quack_gemm; do
  "$bin/python" -m pip wheel -qq --no-deps --wheel-dir "$work" "$work/source/examples/$example"
done
"$bin/python" -m pip install -qq "$work/source[testing]"
"$bin/python" -m pip install -qq "$work"/moefw_ring-*.whl "$work"/moefw_two_hop-*.whl "$work"/moefw_quack-*.whl

cd "$work/empty"
echo "They are listed, with their distributions:"
"$bin/moefw" plugins | grep -E '^dispatcher +ring +moefw-ring 0\.1\.0 +yes '
"$bin/moefw" plugins | grep -E '^dispatcher +two_hop +moefw-two-hop 0\.1\.0 +yes '

echo "A spec takes it, and its options:"
spec="$work/source/examples/quickstart.yaml"
"$bin/moefw" check "$spec" 'dispatch={use: ring, both_ways: false}' parallel.experts.ep=4 train.tokens_per_step=4096

echo "They are certified, in an empty folder:"
for use in ring two_hop; do
  "$bin/python" -m pytest --quiet -p no:cacheprovider --moefw-dispatcher $use
done

echo "One whose library is missing is refused, the doctor says how to install it, and over a fake it is certified:"
"$bin/moefw" doctor | grep -A1 -E '^missing +quack '
{ "$bin/moefw" check "$spec" gemm.use=quack precision.use=bf16 || true; } 2>&1 | grep -F "pip install 'moefw-quack[cu12]'"
"$bin/python" -m pytest --quiet -p no:cacheprovider "$work/source/examples/quack_gemm/tests"

echo "A package of moefw new installs and is certified, too:"
"$bin/moefw" new router mine
"$bin/python" -m pip install -qq ./moefw-mine
"$bin/moefw" plugins | grep -E '^router +mine +moefw-mine 0\.1\.0 +yes '
"$bin/python" -m pytest --quiet -p no:cacheprovider --moefw-router mine

echo "They train on two ranks as alltoall does:"
for use in ring two_hop alltoall; do
  "$bin/moefw" train "$spec" "dispatch={use: $use}" precision.use=fp32 train.steps=4 train.eval_tokens=8192 \
    "run.dir=$work/$use"
done
"$bin/python" - "$work" <<'PYTHON'
import json, math, sys
from pathlib import Path

def losses(use):
    lines = (Path(sys.argv[1]) / use / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]

wanted = losses("alltoall")
assert len(wanted) == 4
for use in ("alltoall", "ring", "two_hop"):
    found = losses(use)
    print(f"{use:8}", *(f"{loss:.5f}" for loss in found))
    assert all(math.isclose(one, two, rel_tol=1e-4) for one, two in zip(found, wanted, strict=True))
PYTHON
