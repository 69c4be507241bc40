#!/usr/bin/env bash
# Environment, linters, types, shell checks, and the default test suite, in one command.
#
# Usage: ./scripts/test.sh [pytest's arguments]      e.g. ./scripts/test.sh -k numerics
#
# Tests of stock checkouts run where one is found ($MEGATRON_LM, or the cache that
# ./scripts/get_megatron.sh TAG fills) and are skipped, with that command, where none is.
set -euo pipefail

# shellcheck source=scripts/lib.sh
source "$(dirname "$0")/lib.sh"
cd "$ROOT"

make_environment

say "linters and types"
ruff check --output-format concise .
ruff format --check --quiet . || die "some files are not formatted; run: $VENV/bin/ruff format ."
mypy
shellcheck --external-sources scripts/*.sh .ci/run

say "tests"
export OMP_NUM_THREADS=1
python -m pytest -ra "$@"
