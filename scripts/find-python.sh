#!/bin/sh
# Prints a Python of at least 3.11 that can make virtual environments, or nothing. With --explain: says what is missing.
for python in python3.11 python3.12 python3.13 python3 python; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        if [ "$1" != --explain ]; then echo "$python"; fi
        exit 0
    fi
done
if [ "$1" = --explain ]; then
    echo "No Python 3.11 or newer with its venv module was found (looked for python3.11, 3.12, 3.13, python3, python)."
    echo "Install one (on Debian and Ubuntu: python3, python3-venv), or name it: make ... PYTHON=/path/to/python3.12"
fi >&2
