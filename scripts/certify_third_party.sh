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
"$bin/python" -m pip wheel -qq --no-deps --wheel-dir "$work" "$work/source/examples/third_party_dispatcher"
"$bin/python" -m pip install -qq "$work/source[testing]"
"$bin/python" -m pip install -qq "$work"/moefw_ring-*.whl

cd "$work/empty"
echo "It is listed, with its distribution:"
"$bin/moefw" plugins | grep -E '^moefw_dispatchers +ring +moefw-ring 0\.1\.0 +yes '

echo "A spec takes it, and its options:"
spec="$work/source/examples/quickstart.yaml"
"$bin/moefw" check "$spec" 'dispatch={use: ring, both_ways: false}' parallel.experts.ep=4 train.tokens_per_step=4096

echo "It is certified, in an empty folder:"
"$bin/python" -m pytest --quiet -p no:cacheprovider --moefw-dispatcher ring

echo "A package of moefw new installs and is certified, too:"
"$bin/moefw" new router mine
"$bin/python" -m pip install -qq ./moefw-mine
"$bin/moefw" plugins | grep -E '^moefw_routers +mine +moefw-mine 0\.1\.0 +yes '
"$bin/python" -m pytest --quiet -p no:cacheprovider --moefw-router mine

echo "It trains on two ranks as alltoall does:"
for use in ring alltoall; do
  "$bin/moefw" train "$spec" "dispatch={use: $use}" train.steps=4 train.eval_tokens=8192 "run.dir=$work/$use"
done
"$bin/python" - "$work" <<'PYTHON'
import json, math, sys
from pathlib import Path

def losses(use):
    lines = (Path(sys.argv[1]) / use / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]

ring, alltoall = losses("ring"), losses("alltoall")
print("ring    ", *(f"{loss:.5f}" for loss in ring))
print("alltoall", *(f"{loss:.5f}" for loss in alltoall))
assert len(ring) == len(alltoall) == 4
assert all(math.isclose(one, two, rel_tol=1e-4) for one, two in zip(ring, alltoall))
PYTHON
