#!/usr/bin/env bash
# Check this checkout: format, lint, types, import rules and all tests.
#
#   launch/test.sh [--fast] [PYTEST_ARGUMENTS]
#
# Sets everything up first. --fast leaves out the end-to-end tests, which start real SGLang servers.
set -euo pipefail
case ${1:-} in
  --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
esac
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
cd "$root"
python -m tests.support.debian "$@"
unset PYTHONDONTWRITEBYTECODE # or hundreds of processes would each compile pdserve
selection=()
if [ "${1:-}" = --fast ]; then
  selection=(-m "not e2e")
  shift
fi
step() { printf '\n== %s\n' "$*" && "$@"; }
step ruff format --check .
step ruff check .
step mypy --strict pdserve docs/generate docs/examples
if [ $# -gt 0 ]; then
  step python -m pytest --durations=15 "${selection[@]}" "$@"
  exit
fi
# Most tests wait more than they compute, so two run at a time, those of one file one by one; the end-to-end alone.
at_a_time=${PDSERVE_TESTS_AT_A_TIME:-2}
failed=0
step python -m pytest --durations=15 -n "$at_a_time" --dist loadfile --no-loadscope-reorder -m "not e2e" || failed=1
[ ${#selection[@]} -gt 0 ] || step python -m pytest --durations=15 -m e2e || failed=1
exit $failed
