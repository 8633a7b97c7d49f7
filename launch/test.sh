#!/usr/bin/env bash
# Check this checkout: format, lint, types, import rules and tests.
#
#   launch/test.sh [--fast | --all] [PYTEST_ARGUMENTS]
#
# Sets everything up first. --fast leaves out the end-to-end tests, which start real SGLang servers. --all runs the
# extended tests too: tests/selection.py says which those are, and when they run without it.
set -euo pipefail
case ${1:-} in
  --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
esac
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
cd "$root"
python -m tests.support.debian "$@"
unset PYTHONDONTWRITEBYTECODE # or hundreds of processes would each compile pdserve
fast='' words=()
case ${1:-} in
  --fast) fast=1 && shift ;;
  --all) words=(--all) && shift ;;
esac
step() { printf '\n== %s\n' "$*" && "$@"; }
tests() { step python -m pytest --durations=15 "${words[@]}" "$@" || failed=1; }

failed=0
step ruff format --check .
step ruff check .
types=$(mktemp)
mypy --strict pdserve docs/generate docs/examples >"$types" 2>&1 & # beside the tests, which wait much
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true; rm -f "$types"' EXIT
if [ $# -gt 0 ]; then
  tests ${fast:+-m "not e2e"} "$@"
else
  # Most tests wait more than they compute, so two run at a time, those of one file one by one; the end-to-end alone.
  tests -n "${PDSERVE_TESTS_AT_A_TIME:-2}" --dist loadfile --no-loadscope-reorder -m "not e2e"
  [ -n "$fast" ] || tests -m e2e
fi
printf '\n== mypy --strict\n'
wait "$mypy" || failed=1
cat "$types"
exit $failed
