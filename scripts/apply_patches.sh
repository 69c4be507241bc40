#!/usr/bin/env bash
# Puts the patch series into a Megatron-LM checkout with plain git; no Python is needed.
#
#   scripts/apply_patches.sh CHECKOUT             all patches, or none
#   scripts/apply_patches.sh --revert CHECKOUT    the original bytes back
#
# The same as `megatron-ext patch apply|revert`: a file that is not exactly Megatron's (or, for
# --revert, exactly the patched one) is refused, and then nothing is changed. The hashes are those
# of the patches' own index lines.
set -euo pipefail

unset CDPATH # it would send cd elsewhere
PATCHES=$(cd "$(dirname "${BASH_SOURCE[0]}")/../patches" && pwd)

die() {
    echo "apply_patches: $*" >&2
    exit 2
}

usage="give the folder of a Megatron-LM checkout, after --revert to take the patches out."
revert=no
if [[ ${1:-} == --revert ]]; then
    revert=yes
    shift
fi
[[ $# -eq 1 && $1 != -* ]] || die "$usage"
checkout=$1
command -v git >/dev/null || die "git is not installed; use \`megatron-ext patch\`, which needs none."

info=$checkout/megatron/core/package_info.py
[[ -f $info ]] || die "$checkout is no Megatron-LM checkout: it has no megatron/core/package_info.py."
number() { sed -nE "s/^$1[[:space:]]*=[[:space:]]*([0-9]+).*/\1/p" "$info" | head -n 1; }
line=$(number MAJOR).$(number MINOR)
series=
known=()
for folder in "$PATCHES"/*/; do
    known+=("$(basename "$folder")")
    if [[ $(basename "$folder") == core_v"$line".* ]]; then series=$folder; fi
done
[[ -n $series ]] ||
    die "$checkout is Megatron $line.$(number PATCH), and there are patches for ${known[*]} only;" \
        "check out one of these."
tag=$(basename "$series")
patches=("$series"*.patch)

# What every file must be before (the first patch that touches it says so) and after (the last).
declare -A before after
file=
while read -r first second rest; do
    case $first in
    diff) file=${rest##* b/} ;;
    index)
        after[$file]=${second#*..}
        [[ -n ${before[$file]:-} ]] || before[$file]=${second%..*}
        ;;
    esac
done < <(grep -hE '^(diff --git|index) ' "${patches[@]}")

root=$(cd "$checkout" && pwd -P)

hash_of() { git hash-object --no-filters -- "$1"; }

done_files=()
for file in "${!before[@]}"; do
    folder=$(dirname "$file")
    if [[ $(cd "$checkout/$folder" 2>/dev/null && pwd -P) != "$root/$folder" ]]; then
        die "$file is missing in $checkout, or behind a link, so nothing was changed; $tag has it."
    fi
    if [[ ! -f $checkout/$file || -L $checkout/$file ]]; then
        die "$file is missing in $checkout, or a link, so nothing was changed; $tag has it."
    fi
    case $(hash_of "$checkout/$file") in
    "${before[$file]}") ;;
    "${after[$file]}") done_files+=("$file") ;;
    *) die "$file has changes of its own in $checkout (it is not that of $tag, patched or not), so" \
        "nothing was changed; put your changes aside, or train with \`python -m" \
        "megatron_ext.launch\`, which needs no patch." ;;
    esac
done
if [[ $revert == no && ${#done_files[@]} -eq ${#before[@]} ]]; then
    die "$checkout has the $tag patches already; nothing to do."
elif [[ $revert == no && ${#done_files[@]} -gt 0 ]]; then
    die "$checkout has only ${#done_files[@]} of ${#before[@]} files patched, as after an" \
        "interrupted run; run this with --revert first."
elif [[ $revert == yes && ${#done_files[@]} -eq 0 ]]; then
    die "$checkout has none of the $tag patches; nothing to do."
fi

# git works on copies outside the checkout; what it made is looked at before any file is replaced.
work=$(mktemp -d)
staged=()
trap 'rm -rf "$work" "${staged[@]}"' EXIT
options=(--whitespace=nowarn)
files=("${!before[@]}")
if [[ $revert == yes ]]; then
    # After an interrupted run, only these have something to take out.
    files=("${done_files[@]}")
    options+=(--reverse)
    mapfile -t patches < <(printf '%s\n' "${patches[@]}" | tac)
fi
for file in "${files[@]}"; do
    mkdir -p "$(dirname "$work/$file")"
    cp "$checkout/$file" "$work/$file"
    options+=("--include=$file")
done
# Elsewhere than in a repository of its own, git would look upwards for one.
(
    cd "$work"
    GIT_CEILING_DIRECTORIES=$(dirname "$(pwd -P)") git -c core.autocrlf=false apply \
        "${options[@]}" "${patches[@]}"
) || die "the $tag patches do not fit, so nothing was changed; get $PATCHES anew."
for file in "${files[@]}"; do
    made=$(hash_of "$work/$file")
    if [[ $revert == yes ]]; then wanted=${before[$file]}; else wanted=${after[$file]}; fi
    [[ $made == "$wanted" ]] ||
        die "the $tag patches make another $file, so nothing was changed; get $PATCHES anew."
    new=$(mktemp "$checkout/$(dirname "$file")/.apply_patches.XXXXXX") ||
        die "cannot write in $checkout/$(dirname "$file"), so nothing was changed."
    staged+=("$new")
    cat "$work/$file" >"$new"
    chmod --reference="$checkout/$file" "$new"
    chown --reference="$checkout/$file" "$new" 2>/dev/null || true
done
# Renames only from here on: each is one step, and all of them take no time to interrupt.
trap '' INT TERM HUP
for index in "${!files[@]}"; do
    mv -f "${staged[index]}" "$checkout/${files[index]}"
done
if [[ $revert == yes ]]; then did="taken out of"; else did="put into"; fi
echo "$tag patches $did $checkout: ${files[*]}"
