#!/usr/bin/env bash
# Tries every hook and patch on each supported Megatron-LM and on its newest main.
#
#   scripts/upgrade_check.sh [--page FILE] [--json FILE]
#
# Prints what does not fit, with what to do, and what moved from each version to the next. Exit
# status 1 if a hook or patch of a supported version, or a hook of main, does not fit.
#
# Checkouts: scripts/get_megatron.sh; main is cloned anew from $MEGATRON_LM_GIT (default: NVIDIA's
# on GitHub), $MEGATRON_LM_BRANCH (main). $PYTHON: an interpreter with torch and megatron-core,
# whose installed megatron-core is tried, too; default: the environment of scripts/test.sh.
set -euo pipefail

unset CDPATH # it would send cd elsewhere
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SOURCE=${MEGATRON_LM_GIT:-https://github.com/NVIDIA/Megatron-LM.git}
BRANCH=${MEGATRON_LM_BRANCH:-main}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi
if [[ -z ${PYTHON:-} ]]; then
    # shellcheck source=scripts/lib.sh
    source "$HERE/lib.sh"
    prepare_environment
    PYTHON=$PY
fi
if [[ -d $SOURCE ]]; then
    SOURCE=file://$(cd "$SOURCE" && pwd)
fi

checkouts=(installed=)
mapfile -t tags < <("$HERE/get_megatron.sh" --list)
for tag in "${tags[@]}"; do
    path=$("$HERE/get_megatron.sh" "$tag")
    checkouts+=("$tag=$path")
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo "upgrade_check: cloning $BRANCH from $SOURCE" >&2
git clone --quiet --depth 1 --branch "$BRANCH" -- "$SOURCE" "$scratch/main" </dev/null >&2 || {
    echo "upgrade_check: could not clone $BRANCH from $SOURCE; set MEGATRON_LM_GIT." >&2
    exit 2
}
checkouts+=("main=$scratch/main")
PYTHONPATH=${HERE%/*} "$PYTHON" -m scripts.upgrade_check "$@" -- "${checkouts[@]}"
