#!/usr/bin/env bash
# Measure serving on this machine as the README shows it, in under 30 minutes on two cores, which it wants to itself.
#
#   launch/bench.sh [--out DIR] [--model PATH] [--minutes N]
#
# Sets everything up first, and makes the demo model where no other is given. The raw lines go to DIR
# (pdserve/bench/results), pictures and logs to logs/bench; `python -m tests.readme` makes the README's tables of them.
# N: minutes for the comparison, which takes most of the time (14).
set -euo pipefail
out='' model='' minutes=14
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    --out) out=$(realpath -m "$2") && shift 2 ;;
    --model) model=$(realpath -m "$2") && shift 2 ;;
    --minutes) minutes=$2 && shift 2 ;;
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

# measure NAME COMMAND...: the command's JSON lines, kept under the day's name once all of them are there
measure() {
  local name=$1
  shift
  printf '\n== pdserve bench %s\n' "$*" >&2
  "$venv/bin/pdserve" bench "$@" --json --plot "$pictures/$name.png" >"$pictures/$name.jsonl"
  mv "$pictures/$name.jsonl" "$out/$name-$today.jsonl"
}

began=$SECONDS
load=(--scale 0.05 --users 6 --rounds 4)
measure weights weights --tokens 1024 --repeat 5 --model "$model"
measure compare-no-reuse compare --preset no-reuse --scale 0.1 --users 4 --rounds 2 --sizes large --repeat 1 \
  --against plain,agg,disagg --model "$model"
measure sweep sweep disagg --scale 0.05 --rounds 4 --limit-ms 4000 --start 0.25 --steps 1 --seconds 30 \
  --model "$model"
measure compare compare --preset eic "${load[@]}" --minutes "$minutes" --model "$model"
printf '\nmeasured in %d minutes: %s\n' $(((SECONDS - began + 59) / 60)) "$out/*-$today.jsonl" >&2
