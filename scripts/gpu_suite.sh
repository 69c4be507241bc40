#!/usr/bin/env bash
# The GPU suite in its tiny form as on a bare GPU image: that image's torch, megatron-core as a wheel
# only, nothing of ours installed. Nightly; needs a package index.
#
#   scripts/gpu_suite.sh [TORCH]      2.11.0 is what images have
#
# Makes .venv-gpu beside the repository. The exit status is the suite's.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
torch=${1:-2.11.0}
python=$(find_python)
read -r _ wheel _ < <(newest_release)
venv=$REPO/.venv-gpu
PY=$venv/bin/python
if [[ ! -x $PY ]]; then "$python" -m venv "$venv"; fi
# Megatron's own imports; it is not installed, so pip does not bring them.
install_packages "torch==$torch" numpy einops pyyaml regex pybind11 packaging pytest pytest-timeout
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PY" -m pip download --quiet --no-deps --dest "$folder/wheels" "megatron-core==$wheel"
cd / # not the repository
"$PY" "$REPO/benchmarks/gpu/bare.py" "$folder/wheels" "$folder/out" --tiny
