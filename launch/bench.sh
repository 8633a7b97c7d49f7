#!/usr/bin/env bash
# Measure serving on this machine as the README shows it, in under 30 minutes on two cores, which it wants to itself.
#
#   launch/bench.sh [--out DIR] [--model PATH]
#
# Sets everything up first, and makes the demo model where no other is given. The raw lines go to DIR
# (pdserve/bench/results), pictures and logs to logs/bench; `python -m tests.readme` makes the README's tables of them.
set -euo pipefail
out='' model=''
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    --out) out=$(realpath -m "$2") && shift 2 ;;
    --model) model=$(realpath -m "$2") && shift 2 ;;
    *) echo "launch/bench.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
unset PYTHONDONTWRITEBYTECODE # or every process would compile pdserve
out=${out:-pdserve/bench/results}
pictures=logs/bench # relative: what is kept names no path of this machine
mkdir -p "$out" "$pictures"
if [ -z "$model" ]; then
  model=models/demo-small
  [ -f "$model/config.json" ] || "$venv/bin/pdserve" model demo --size small --out "$model"
fi
today=$(date -u +%F)

# measure NAME COMMAND...: a command's JSON lines, kept under the day's name once all of them are there
measure() {
  local name=$1
  shift
  printf '\n== pdserve bench %s\n' "$*" >&2
  "$venv/bin/pdserve" bench "$1" --json --plot "$pictures/$name.png" "${@:2}" >"$pictures/$name.jsonl"
  mv "$pictures/$name.jsonl" "$out/$name-$today.jsonl"
}

# float32: processors without bfloat16 instructions compute it almost three times as fast
one=(--model "$model" -- --dtype float32)
began=$SECONDS
measure weights weights --tokens 1024 --repeat 5 "${one[@]}"
measure compare-no-reuse compare --preset no-reuse --scale 0.1 --users 4 --rounds 2 --sizes large --repeat 1 \
  --against plain,agg,disagg "${one[@]}"
measure sweep sweep disagg --scale 0.05 --rounds 4 --limit-ms 4000 --start 0.25 --steps 1 "${one[@]}"
measure compare-turns compare --preset eic --scale 0.05 --users 6 --rounds 4 --sizes small --repeat 3 \
  --minutes 9 "${one[@]}"
measure compare-documents compare --preset long-input-short-output --scale 0.05 --users 6 --rounds 4 --repeat 3 \
  --minutes 12 "${one[@]}"
printf '\nmeasured in %d minutes: %s\n' $(((SECONDS - began + 59) / 60)) "$out/*-$today.jsonl" >&2
