#!/usr/bin/env bash
# Fetches a Megatron-LM checkout of a supported version and prints its path.
#
#   scripts/get_megatron.sh core_v0.19.0        one version
#   scripts/get_megatron.sh --list              the supported versions
#
# Location (other tools rely on it): ${XDG_CACHE_HOME:-~/.cache}/megatron-ext/Megatron-LM/<tag>
# Source: $MEGATRON_LM_GIT, a URL or the path of a repository; default: NVIDIA's on GitHub.
# A checkout that is there is left as it is. An interrupted run leaves nothing half done.
set -euo pipefail

unset CDPATH # it would send cd elsewhere
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
LIST=$HERE/../megatron_ext/releases.txt
mapfile -t SUPPORTED < <(awk '/^core_/ { print $1 }' "$LIST")
SOURCE=${MEGATRON_LM_GIT:-https://github.com/NVIDIA/Megatron-LM.git}
ROOT=${XDG_CACHE_HOME:-$HOME/.cache}/megatron-ext/Megatron-LM

die() {
    echo "get_megatron: $*" >&2
    exit 2
}

if [[ $# -ne 1 ]]; then
    die "give one version: ${SUPPORTED[*]} (or --list)."
fi
if [[ $1 == --list ]]; then
    printf '%s\n' "${SUPPORTED[@]}"
    exit 0
fi
tag=$1
commit=$(awk -v tag="$tag" '$1 == tag { print $4 }' "$LIST")
[[ -n $commit ]] || die "$tag is not supported; supported are ${SUPPORTED[*]}."

target=$ROOT/$tag
if [[ -d $target/megatron/core ]]; then
    echo "$target"
    exit 0
fi
[[ ! -e $target ]] || die "$target exists but is no Megatron-LM checkout; move it away."
command -v git >/dev/null || die "git is not installed."

# A shallow fetch from a local repository needs a URL; of a path, git would copy everything.
if [[ -d $SOURCE ]]; then
    SOURCE=file://$(cd "$SOURCE" && pwd)
fi
mkdir -p "$ROOT"
partial=$(mktemp -d "$ROOT/.$tag.XXXXXX")
trap 'rm -rf "$partial"' EXIT
echo "get_megatron: fetching $tag from $SOURCE" >&2
what=$commit # GitHub gives any commit by its full name
if [[ $commit == - ]]; then what=refs/tags/$tag; fi
git -c init.defaultBranch=main init --quiet "$partial/$tag"
{
    git -C "$partial/$tag" fetch --quiet --depth 1 -- "$SOURCE" "$what" &&
        git -C "$partial/$tag" -c advice.detachedHead=false checkout --quiet FETCH_HEAD
} </dev/null >&2 ||
    die "could not fetch $tag from $SOURCE; set MEGATRON_LM_GIT to a repository that has it."
[[ -d $partial/$tag/megatron/core ]] || die "$SOURCE has no megatron/core at $tag."
# Another run may have been faster: then its checkout stays and ours is dropped.
mv -T "$partial/$tag" "$target" 2>/dev/null || [[ -d $target/megatron/core ]] ||
    die "could not move the checkout to $target."
echo "$target"
