#!/usr/bin/env bash
# Checks everything, on a bare machine too: style, types, tests.
#
#   scripts/test.sh                        style, types and all default tests
#   scripts/test.sh --all                  the slow tiers too: other Megatron versions, campaigns
#   scripts/test.sh --processor-budget=N   at fault if the tests take more than N s
#   scripts/test.sh tests/ranks -k launch  other arguments go to pytest
#
# The first run makes a virtual environment beside the repository (see scripts/lib.sh) and fetches
# stock Megatron-LM (see scripts/get_megatron.sh): the newest supported release, with --all every
# version. Without it the tests that need it are left out, and the last lines say how many. The very
# last line is pytest's, and the exit status is pytest's, or 1 where style or types are at fault.
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

mapfile -t tags < <(scripts/get_megatron.sh --list)
if [[ " $* " != *" --all "* ]]; then
    read -r tag _ < <(newest_release)
    tags=("$tag")
fi
if [[ -z ${MEGATRON_LM:-} || ${#tags[@]} -gt 1 ]]; then
    for tag in "${tags[@]}"; do
        scripts/get_megatron.sh "$tag" >/dev/null || true # pytest says what that leaves out
    done
fi

wrong=()
check() {
    say "$*"
    "$@" >&2 || wrong+=("$*")
}
check ruff check .
check ruff format --check .
check mypy
check codespell
check shellcheck --external-sources scripts/*.sh scripts/slurm/* .ci/run

# All of it in several processes: most tests wait for ranks or for imports. A file stays in one
# process, so what its tests share is made once; the slowest tiers come first.
if [[ "$*" == --all || "$*" =~ ^(--processor-budget=[0-9]+)?$ ]]; then
    workers=$(($(getconf _NPROCESSORS_ONLN) + 2))
    set -- "$@" --workers $((workers < 6 ? workers : 6)) --durations=25
fi

say "pytest $*"
status=0
"$PY" -m pytest "$@" || status=$?
if [[ $status -eq 0 && ${#wrong[@]} -gt 0 ]]; then
    for command in "${wrong[@]}"; do say "failed: $command (see above)"; done
    status=1
fi
exit "$status"
