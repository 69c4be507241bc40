#!/usr/bin/env bash
# Applies the patch of a Megatron-LM checkout's version with plain git; no Python is needed.
#
#   scripts/apply_patches.sh CHECKOUT             or nothing is changed
#   scripts/apply_patches.sh --revert CHECKOUT    the original bytes back
#
# The same lines as of `megatron-ext patch apply|revert`, which also knows versions without a patch.
set -euo pipefail

unset CDPATH # it would send cd elsewhere
PATCHES=$(cd "$(dirname "${BASH_SOURCE[0]}")/../patches" && pwd)

die() {
    echo "apply_patches: $*" >&2
    exit 2
}

options=(--whitespace=nowarn) undo=(--reverse) already="applied already"
if [[ ${1:-} == --revert ]]; then
    options+=(--reverse) undo=() already="not applied, nothing to revert"
    shift
fi
[[ $# -eq 1 && $1 != -* ]] ||
    die "give the folder of a Megatron-LM checkout, after --revert to take the patch out."
info=$1/megatron/core/package_info.py
[[ -f $info ]] || die "$1 is no Megatron-LM checkout: it has no megatron/core/package_info.py."
value() { sed -nE "s/^$1[[:space:]]*=[[:space:]]*['\"]?([0-9a-z.]*).*/\1/p" "$info" | head -n 1; }
line=$(value MAJOR).$(value MINOR)
version=$line.$(value PATCH)$(value PRE_RELEASE)
# The one of this very version, of a commit that says so, or of the same line.
for series in "$PATCHES/core_v$version" "$PATCHES/core_v$version"-* "$PATCHES/core_v$line."*; do
    if [[ -d $series ]]; then break; fi
done
[[ -d $series ]] ||
    die "there are patches for $(cd "$PATCHES" && echo *) only; try \`megatron-ext patch apply $1\`."
cd -P "$1"
# Inside a repository that is not its own, git would silently do nothing.
export GIT_CEILING_DIRECTORIES=${PWD%/*}
if git -c core.autocrlf=false apply --check "${undo[@]}" "$series"/*.patch 2>/dev/null; then
    echo "apply_patches: $1: $already" >&2
    exit 0
fi
git -c core.autocrlf=false apply "${options[@]}" "$series"/*.patch ||
    die "the patch of ${series##*/} does not fit $1 (see above), so nothing was changed."
