#!/usr/bin/env bash
# Fetches a stock Megatron-LM checkout into the user cache, where tests and demos look for it.
#
# Usage: ./scripts/get_megatron.sh TAG [TAG...]
#
# Environment (optional):
#   MEGATRON_LM_GIT   repository to clone; default: https://github.com/NVIDIA/Megatron-LM.git
#   XDG_CACHE_HOME    cache root; default: ~/.cache
set -euo pipefail

SUPPORTED=(core_v0.16.1 core_v0.17.1 core_v0.18.2 core_v0.19.0)
SOURCE=${MEGATRON_LM_GIT:-https://github.com/NVIDIA/Megatron-LM.git}
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/megatron-ext/Megatron-LM

if [[ $# -eq 0 || $1 == -h || $1 == --help ]]; then
    printf 'usage: %s TAG [TAG...]\nsupported: %s\n' "$0" "${SUPPORTED[*]}" >&2
    exit 2
fi
# git ignores --depth for a plain path, but not for a URL.
[[ -d $SOURCE ]] && SOURCE=file://$(cd "$SOURCE" && pwd)

mkdir -p "$CACHE"
for tag in "$@"; do
    target=$CACHE/$tag
    if [[ -f $target/pretrain_gpt.py ]]; then
        printf '%s\n' "$target"
        continue
    fi
    if [[ " ${SUPPORTED[*]} " != *" $tag "* ]]; then
        printf 'note: megatron_ext supports %s, not %s\n' "${SUPPORTED[*]}" "$tag" >&2
    fi
    # Cloned beside the target and moved in one step: an interrupted run leaves no half checkout.
    temporary=$(mktemp -d "$CACHE/.$tag.XXXXXX")
    trap 'rm -rf "$temporary"' EXIT
    if ! git -c advice.detachedHead=false clone --quiet --depth 1 --branch "$tag" \
        "$SOURCE" "$temporary/checkout"; then
        printf 'error: cannot clone tag %s of %s; check the tag and the network, or set MEGATRON_LM_GIT to a copy\n' \
            "$tag" "$SOURCE" >&2
        exit 1
    fi
    rm -rf "$target"
    mv "$temporary/checkout" "$target"
    rm -rf "$temporary"
    printf '%s\n' "$target"
done
