#!/bin/sh
# Prints the Python that `make` builds .venv with, or says on standard error what is missing. The arguments are the
# versions that have a lock, in order of preference, as "3.11 3.12 3.13".
#
# `python3` comes first, where it is one of them: the system's choice. Then the path, then pyenv's folder: its commands on
# the path (shims) only say that a version is there.
versions=$*

# Debian's python3 has no venv without the package python3-venv, and fails only when pip is to be installed.
fits() {
    found=$("$1" -c 'import sys, ensurepip, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 1
    case " $versions " in *" $found "*) return 0 ;; esac
    return 1
}

set -- python3
for version in $versions; do set -- "$@" "python$version"; done
for version in $versions; do set -- "$@" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; done
for candidate; do
    if fits "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done
echo "no Python of $versions with its module venv was found, on the path or below ${PYENV_ROOT:-$HOME/.pyenv};" \
    "install one (Debian: python3-venv), or name it: make PYTHON=/path/to/python3" >&2
exit 1
