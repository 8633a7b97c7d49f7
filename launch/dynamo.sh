#!/usr/bin/env bash
# Serve a model by NVIDIA Dynamo on this machine: its frontend with the KV router, SGLang workers, and a pool node that
# keeps the workers' pages. See docs/other-engines.md.
#
#   launch/dynamo.sh [agg|disagg] [--model PATH] [--port N] [--workers N] [--run-dir DIR] [--arena-dir DIR]
#                    [--pool-capacity SIZE] [-- SGLANG_FLAGS]
#   launch/dynamo.sh --set-up     only set up
#   launch/dynamo.sh --test       run the tests with Dynamo, which start real workers (five minutes)
#
# agg: workers that do prefill and decode (the default, two of them). disagg: one of each, SGLang's own transfer between
# them. Sets everything up first: Dynamo goes into .venv-dynamo, which sees .venv behind it, because its pins differ.
# Says that it is ready once every worker has answered. Ctrl-C stops every process.
set -euo pipefail
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
case ${1:-} in --help | -h) usage && exit ;; esac
extra=serve
if [ "${1:-}" = --test ]; then extra=test; fi
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" "$extra"
mode=agg model= port=8000 workers=2 run=$root/logs/dynamo arena= capacity=2GiB version=1.6.1
START_S=600 # two engines on a busy machine
case ${1:-} in agg | disagg | --set-up | --test) mode=$1 && shift ;; esac
while [ $# -gt 0 ]; do
  case $1 in
    --model) model=$2 && shift 2 ;;
    --port) port=$2 && shift 2 ;;
    --workers) workers=$2 && shift 2 ;;
    --run-dir) run=$2 && shift 2 ;;
    --arena-dir) arena=$2 && shift 2 ;;
    --pool-capacity) capacity=$2 && shift 2 ;;
    --) shift && break ;;
    *) usage && exit 2 ;;
  esac
done

dynamo=$root/.venv-dynamo
if [ "$(cat "$dynamo/pdserve-setup" 2>/dev/null)" != "$version $venv" ]; then
  say "installing Dynamo $version into $dynamo"
  uv=$(command -v uv || printf '%s' "$venv/bin/uv")
  "$uv" venv --quiet --clear --python "$venv/bin/python" "$dynamo"
  # without its extra `sglang`, which pins another SGLang and CUDA packages; the other requirements are in .venv
  "$uv" pip install --quiet --python "$dynamo/bin/python" --no-deps "ai-dynamo==$version" "ai-dynamo-runtime==$version"
  "$uv" pip install --quiet --python "$dynamo/bin/python" blake3 'kubernetes<33' 'pydantic<=2.13.5'
  site=$("$dynamo/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  behind=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf 'import site; site.addsitedir(%s)\n' "'$behind'" >"$site/pdserve.pth"
  printf '%s\n' "$version $venv" >"$dynamo/pdserve-setup"
fi
case $mode in
  --set-up) exit ;;
  --test) cd "$root" && exec "$venv/bin/python" -m pytest -v tests/e2e/test_dynamo.py ;;
esac

if [ -z "$model" ]; then
  model=$root/models/demo-small
  [ -f "$model/config.json" ] || "$venv/bin/pdserve" model demo --size small --out "$model"
fi
name=$(basename "$model")
mkdir -p "$run"
run=$(cd "$run" && pwd)
# pages lie in memory: by user and run directory, so that clusters of one host are not in each other's way
[ -n "$arena" ] || arena=/dev/shm/pdserve-$(id -u)/dynamo-$(printf '%s' "$run" | sha256sum | head -c 8)
rm -rf "$run/discovery"
# Dynamo's planes without etcd and NATS
export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=$run/discovery DYN_REQUEST_PLANE=tcp DYN_EVENT_PLANE=zmq
export HF_HUB_OFFLINE=1 # the model is a directory
# fields that only SGLang and pdserve know are left out, as they leave out what they do not know
export DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS=${DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS:-1}
events=tcp://127.0.0.1:$((port + 100))

started=()
stop() {
  trap - EXIT
  trap '' INT TERM
  for ((i = ${#started[@]} - 1; i >= 0; i--)); do kill "${started[i]}" 2>/dev/null || true; done
  for _ in $(seq 30); do
    [ -n "$(jobs -rp)" ] || break
    sleep 1
  done
  # a worker hears nothing while it starts SGLang; its schedulers are of its session
  for pid in "${started[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
  wait
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
begin() { # begin NAME COMMAND...
  local log=$run/$1.log
  say "$1: log $log"
  shift
  # this script alone ends it, Ctrl-C does not; and the kernel does, should the script be killed
  setpriv --pdeathsig KILL setsid "$@" >"$log" 2>&1 &
  started+=($!)
}

cat >"$run/pool.toml" <<END
name = "pool"
listen = ["unix:$run/pool.sock"]
arena_dir = "$arena"
capacity_bytes = "$capacity"
[events]
address = "$events"
format = "objects"
END
cat >"$run/worker.toml" <<END
pool_events = "$events"
[engine]
model_path = "$model"
[pool]
nodes = [{ node = "pool", address = "unix:$run/pool.sock" }]
[direct]
trusted_network = true # disagg: Mooncake listens on all interfaces, for everybody
bootstrap_port = $((port + 101))
END
begin pool "$venv/bin/pdserve" pool serve --config "$run/pool.toml"
roles=(prefill decode)
if [ "$mode" = agg ]; then
  roles=()
  for ((i = 0; i < workers; i++)); do roles+=(agg); done
fi
for i in "${!roles[@]}"; do
  # by the environment's interpreter: .venv's own script would not see Dynamo
  begin "${roles[i]}$i" "$dynamo/bin/python" -m pdserve dynamo "${roles[i]}" --config "$run/worker.toml" \
    --engine.port $((port + 200 + i)) --kv-events "tcp://127.0.0.1:$((port + 300 + i))" -- "$@"
done
begin frontend "$dynamo/bin/python" -m dynamo.frontend --http-port "$port" --router-mode kv --shared-cache-type hicache
url=http://127.0.0.1:$port
# answers HEADER: a short completion is answered
answers() {
  curl -sf -m 60 "$url/v1/completions" -H 'Content-Type: application/json' -H "$1" \
    -d "{\"model\": \"$name\", \"prompt\": \"1 + 1 =\", \"max_tokens\": 1}" >/dev/null
}
# is_served: the frontend knows the model and every worker, and each of them answers through it. The list of models
# comes first, but says nothing of what the router knows.
is_served() {
  local worker workers=()
  curl -sf -m 5 "$url/v1/models" | grep "\"$name\"" >/dev/null || return 1
  mapfile -t workers < <(curl -sf -m 5 "$url/health" | grep -o '"endpoint":"generate",[^{]*"instance_id":[0-9]*')
  [ ${#workers[@]} -ge ${#roles[@]} ] || return 1
  [ "$mode" = agg ] || workers=(any) # they answer each request together
  for worker in "${workers[@]##*:}"; do answers "x-worker-instance-id: $worker" || return 1; done
}
deadline=$((SECONDS + START_S))
until is_served; do
  for i in "${!started[@]}"; do kill -0 "${started[i]}" 2>/dev/null || fail "a process has ended: see $run/*.log"; done
  [ "$SECONDS" -lt "$deadline" ] || fail "the model is not served by all workers after $START_S s: see $run/*.log"
  sleep 1
done
say "ready: $url/v1 serves $name. Ctrl-C stops it."
wait -n "${started[@]}" || true
fail "a process has ended: see $run/*.log"
