#!/usr/bin/env bash
# Checks everything, on a bare machine too: style, types, tests.
#
#   scripts/test.sh                      all of it
#   scripts/test.sh tests/cpu -k launch  the arguments go to pytest
#
# The first run makes a virtual environment beside the repository; see scripts/lib.sh. The last
# line is pytest's, and the exit status is pytest's, or 1 where style or types are at fault.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
prepare_environment
cd "$REPO"

wrong=()
check() {
    say "$*"
    "$@" >&2 || wrong+=("$*")
}
check ruff check .
check ruff format --check .
check mypy
check shellcheck --external-sources scripts/*.sh .ci/run

say "pytest $*"
status=0
"$PY" -m pytest "$@" || status=$?
if [[ $status -eq 0 && ${#wrong[@]} -gt 0 ]]; then
    for command in "${wrong[@]}"; do say "failed: $command (see above)"; done
    status=1
fi
exit "$status"
