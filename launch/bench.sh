#!/usr/bin/env bash
# Measure serving on this machine as docs/benchmarks shows it, in under 30 minutes on two cores, which it wants to itself.
#
#   launch/bench.sh [--out DIR] [--model PATH] [--only NAME,...] [--resume] [-- SGLANG_FLAGS]
#
# Sets everything up first, and makes the demo model where no other is given. The raw lines go to DIR
# (benchmarks/results), pictures and logs to logs/bench; `launch/docs.sh --write` makes the tables of them.
# What fails does not stop the others; it is named at the end, and the exit status is 1. --only: some of compare-small,
# compare-large, weights, sweep, overlap, or of those that are measured where they are named: compare-rate,
# compare-once-tight, compare-once-roomy, compare-windows, gaps (12, 5, 5, 6 and 7 minutes), compare-dynamo,
# compare-vllm (10, 10 and 14; the latter need what launch/dynamo.sh and launch/vllm.sh install).
# --resume: not what was measured today at this commit. Flags: --dtype float32 if none.
set -euo pipefail
out='' model='' only='' resume=''
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    --out) out=$(realpath -m "$2") && shift 2 ;;
    --model) model=$(realpath -m "$2") && shift 2 ;;
    --only) only=$2 && shift 2 ;;
    --resume) resume=yes && shift ;;
    --) shift && break ;;
    *) echo "launch/bench.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done
usual=(compare-small compare-large weights sweep overlap)
names=("${usual[@]}" compare-rate compare-once-tight compare-once-roomy compare-windows gaps compare-dynamo
  compare-vllm)
for name in ${only//,/ }; do
  case " ${names[*]} " in
    *" $name "*) ;;
    *) echo "launch/bench.sh: --only: '$name' is not one of ${names[*]}" >&2; exit 2 ;;
  esac
done
only=${only:-$(IFS=,; echo "${usual[*]}")}
# float32: processors without bfloat16 instructions compute it almost three times as fast
flags=("$@")
[ $# -gt 0 ] || flags=(--dtype float32)
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" bench
cd "$root"
unset PYTHONDONTWRITEBYTECODE # or every process would compile pdserve
out=${out:-benchmarks/results}
pictures=logs/bench # relative: what is kept names no path of this machine
mkdir -p "$out" "$pictures"
if [ -z "$model" ]; then
  model=models/demo-small
  [ -f "$model/config.json" ] || "$venv/bin/pdserve" model demo --size small --out "$model"
fi
LIMIT_S=$((30 * 60))
today=$(date -u +%F)
commit=$(git rev-parse --short HEAD 2>/dev/null || echo none)
began=$SECONDS child='' failed=()

# Ctrl-C, SIGTERM: what runs stops its servers, and nothing more is begun
stop() {
  trap '' INT TERM HUP
  [ -z "$child" ] || { kill -TERM "$child" && wait "$child"; } || true
  exit 130
}
trap stop INT TERM HUP

# current FILE NAME: whether FILE was measured whole, at this commit
current() { [ -e "$1" ] && [ ! -e "$pictures/$2.failed" ] && head -n 1 "$1" | grep -q "\"commit\": \"$commit\""; }

# measure NAME MINUTES COMMAND...: where it is asked for, run a command that takes so long, if there is time for it, and
# stop it when there is no more; keep its JSON lines under the day's name, of one that failed what it measured, where
# nothing better is there
measure() {
  local name=$1 minutes=$2 status=0 left=$((LIMIT_S - SECONDS + began))
  local lines=$pictures/$name.jsonl kept=$out/$name-$today.jsonl plot=(--plot "$pictures/$name.png")
  [ "$name" != gaps ] || plot=()
  shift 2
  case ",$only," in *",$name,"*) ;; *) return 0 ;; esac
  if [ -n "$resume" ] && current "$kept" "$name"; then
    printf '\n== %s: measured today at %s\n' "$name" "$commit" >&2
    return 0
  fi
  if [ $((60 * minutes)) -gt "$left" ]; then
    failed+=("$name (no time left; --only $name measures it)")
    return 0
  fi
  printf '\n== python -m benchmarks %s\n' "$*" >&2
  timeout --kill-after=90 "$left" "$venv/bin/pdserve" bench "$1" --json "${plot[@]}" "${@:2}" \
    --model "$model" -- "${flags[@]}" >"$lines" &
  child=$!
  wait "$child" || status=$?
  child=''
  if [ "$status" -ne 0 ]; then
    failed+=("$name (status $status)")
    if [ -e "$kept" ] || [ "$(wc -l <"$lines")" -lt 2 ]; then return 0; fi
    touch "$pictures/$name.failed"
  else
    rm -f "$pictures/$name.failed"
  fi
  mv "$lines" "$kept"
}

# The time, for two cores that compute 500 to 600 of a prompt's tokens a second and decode ten: a server is up in 35 to
# 50 s, so all loads of one device cache share their servers (3.3 minutes for the four, with warm-up).
#   documents, 4 users of 2,100 tokens, 3 turns, 10 tokens answered: a cold turn takes 5.6 s, one from the pool 1.4 to
#     1.8 s. Small cache: plain 12 x 5.6 s, each of the others 4 x 5.6 + 8 x 1.6 s: 3 minutes a round. Large: 2.5.
#   turns, 8 users, 3 turns of 330 new tokens, 8 answered: 2.5 minutes a round. More turns would show more reuse (here a
#     cache that forgets nothing gains 2.5 x at most), and cost more than there is time for.
#   no-reuse, 16 prompts of 410 tokens, 1.3 s each: 1.4 minutes a round.
# compare-small, with Mooncake where it is installed, 4 + 6.5 for a round of each + 3.5 for documents again, compare-large
# 3.3 + 4, weights 2.3, sweep 0.8 + 2.2, overlap 1.3: 28 minutes. --minutes of a command begins no round of a load that would end later, so a
# slower machine measures fewer rounds. One request at a time: a prompt's computing has both cores. The sessions of the
# small cache are gone from device and host when they come again, but for the second turn of `turns`, which the host
# still holds.
# Memory: compare-small six workers of 2.5 GiB each, with KV caches of at most 0.3 GiB, three pools of 1 GiB: 20 GiB;
# compare-large five, with at most 0.7 GiB, and two pools: 18 GiB.
documents=long-input-short-output,scale=0.1,users=4,rounds=3
measure compare-small 14 compare --sizes small --load "$documents" --load eic,scale=0.04,rounds=3 \
  --concurrency 1 --repeat 3 --minutes 14 --silence 60 --pool-capacity 1GiB
measure compare-large 8 compare --sizes large --load "$documents" --load no-reuse,scale=0.1,rounds=2 \
  --concurrency 1 --repeat 3 --minutes 7.7 --silence 60 --pool-capacity 1GiB --against plain,file,agg,disagg
measure weights 3 weights --tokens 1024 --repeat 4 --silence 60
measure sweep 3 sweep disagg --scale 0.04 --rounds 3 --limit-ms 4000 --start 0.2 --steps 1 --seconds 20 --minutes 2.2
# Requests at random times, and two workers that share two processors (LMBenchmark's load, a seventh as long).
measure compare-rate 12 compare --sizes small --load long-input-short-output,scale=0.14,users=4,rounds=4 --rate 0.2 \
  --concurrency 2 --repeat 3 --minutes 12 --silence 60 --pool-capacity 1GiB --against file,agg,disagg
# The same memory in all: the pool alone holds less than the sessions (tight), or all of them (roomy).
for room in tight:160MiB roomy:1GiB; do
  measure "compare-once-${room%:*}" 5 compare --sizes small --load "$documents" --concurrency 1 --repeat 3 --minutes 5 \
    --silence 60 --pool-capacity "${room#*:}" --against agg,agg-once
done
# A model most of whose layers see a window: its pages have two parts.
case ",$only," in *,compare-windows,*)
  windows=models/demo-windows
  [ -f "$windows/config.json" ] || "$venv/bin/pdserve" model demo --size small --window 512 --out "$windows"
  model=$windows measure compare-windows 6 compare --sizes small --load "$documents" --concurrency 1 --repeat 3 --minutes 6 \
    --silence 60 --pool-capacity 1GiB --against plain,file,agg
  ;;
esac
# Another store below the workers; another front, and another engine, on the pool.
measure compare-dynamo 10 compare --sizes small --load "$documents" --concurrency 1 --repeat 3 --minutes 10 --silence 60 \
  --pool-capacity 1GiB --against agg,dynamo,disagg,dynamo-disagg
measure compare-vllm 14 compare --sizes small --load "$documents" --concurrency 1 --repeat 3 --minutes 14 --silence 60 \
  --pool-capacity 1GiB --against vllm,vllm-cpu,vllm-disk,vllm-pool
measure gaps 7 gaps --tokens 4000 --output-tokens 200 --rounds 4 --silence 60
# as with a long prompt, which is computed in chunks
flags+=(--chunked-prefill-size 256)
measure overlap 2 weights --tokens 1024 --rounds 1 --repeat 3 --pull-step 256 --silence 60
printf '\n%d minutes; kept: %s\n' $(((SECONDS - began + 59) / 60)) "$out/*-$today.jsonl" >&2
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
