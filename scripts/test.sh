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

# Transformer Engine's Python files, beside the packages and not among them: without a GPU it cannot
# be imported, but tests read it and run parts of it.
TE=transformer-engine==2.20.2
te_files=$(dirname "$(dirname "$PY")")/$TE
if [[ -z ${MEGATRON_EXT_TE_SOURCE:-} && ! -d $te_files ]]; then
    # Not in its place before it is complete; where it cannot be had, its tests are skipped.
    (install_packages --no-deps --target "$te_files.partial" "$TE" && mv "$te_files.partial" "$te_files") ||
        say "no $TE here; the tests that read it are skipped"
fi
if [[ -z ${MEGATRON_EXT_TE_SOURCE:-} && -d $te_files ]]; then
    export MEGATRON_EXT_TE_SOURCE=$te_files
fi

wrong=()
check() {
    say "$*"
    "$@" >&2 || wrong+=("$*")
}
check ruff check .
check ruff format --check .
check mypy
check shellcheck --external-sources scripts/*.sh scripts/slurm/* .ci/run

# All of it in several processes: most tests wait for ranks or for imports. A file stays in one
# process, so what its tests share is made once.
if [[ $# -eq 0 ]]; then
    workers=$(($(getconf _NPROCESSORS_ONLN) + 1))
    set -- -n $((workers < 6 ? workers : 6)) --dist loadfile
fi

say "pytest $*"
status=0
"$PY" -m pytest "$@" || status=$?
if [[ $status -eq 0 && ${#wrong[@]} -gt 0 ]]; then
    for command in "${wrong[@]}"; do say "failed: $command (see above)"; done
    status=1
fi
exit "$status"
