# Sourced by the scripts of this folder: goes to the repository, finds a Python, makes .venv and installs the pinned
# packages into it. Done once: a second call with the same requirements installs nothing.

CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." # not to a folder of that name which the caller's CDPATH holds

fail() {
    echo "error: $*" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Sets `python` to $PYTHON, else to the newest of the names below that runs.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON does not run as Python 3.11 or newer; name another one"
        python=$PYTHON
        return
    fi
    for python in python3.13 python3.12 python3.11 python3; do
        if is_new_enough "$python"; then return; fi
    done
    fail "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python3 bash $0"
}

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# A .venv that works is kept, unless the caller asks by $PYTHON for another version.
make_venv() {
    if is_new_enough .venv/bin/python; then
        if [ -z "${PYTHON:-}" ] || [ "$(version_of .venv/bin/python)" = "$(version_of "$python")" ]; then return; fi
    fi
    echo "making .venv with Python $(version_of "$python")"
    # Where the standard library has no ensurepip (Debian without python3-venv), pip works from outside the environment.
    "$python" -m venv --clear .venv >/dev/null 2>&1 || "$python" -m venv --clear --without-pip .venv
}

pip_install() {
    if .venv/bin/python -m pip --version >/dev/null 2>&1; then
        .venv/bin/python -m pip install "$@"
    else
        "$python" -m pip --python .venv/bin/python install "$@"
    fi
}

# jax's plugin for a GPU or a TPU, installed by hand: beside another jax it is not used, and all would run on the CPU.
holds_an_accelerators_jax() {
    [ ! -e .venv/installed-requirements-tpu.txt ] && .venv/bin/python -c 'import sys; from importlib.util import find_spec
sys.exit(not any(map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu"))))'
}

# install FILE: once for each content of FILE; the stamp lies in .venv and goes with it.
install() {
    local stamp=.venv/installed-$1
    if cmp -s "$1" "$stamp"; then return; fi
    if holds_an_accelerators_jax; then
        fail "$PWD/.venv holds jax for a GPU or a TPU, and the versions of $1 may part it from its plugin; run this in another clone"
    fi
    echo "installing the packages of $1"
    pip_install --quiet --disable-pip-version-check --requirement "$1" || fail "the packages of $1 could not be installed; see above"
    cp "$1" "$stamp"
}

find_python
make_venv
install requirements.txt
export PATH="$PWD/.venv/bin:$PATH"
