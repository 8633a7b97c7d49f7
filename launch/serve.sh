#!/usr/bin/env bash
# Serve a model on this machine with the cluster that launch/NAME.toml describes, or a file of your own.
#
#   launch/serve.sh NAME [--model PATH] [--port N] [--run-dir DIR] [OPTIONS OF pdserve up] [-- SGLANG_FLAGS]
#
# NAME: disagg, agg, elastic, hosts, vllm, dynamo. Sets everything up first (virtual environment, demo model). Without
# --model SmolLM2-135M is downloaded and served. NAME may be the path of a file of your own, like ./mine.toml. Ctrl-C stops every process.
set -euo pipefail

# Sets model. Without a network it is one with random weights.
make_demo_model() {
  local said
  model=$root/models/smollm2-135m
  if [ -f "$model/config.json" ]; then return; fi
  say "making the demo model, SmolLM2-135M, of which 93 MB are downloaded"
  if said=$("$venv/bin/python" -m pdserve.engine.demo "$model" 2>&1); then return; fi
  said=${said##*$'\n'}
  say "${said#*error: }; serving a model with random weights in its place, demo-small"
  model=$root/models/demo-small
  [ -f "$model/config.json" ] || (cd "$root" && "$venv/bin/python" -m tests.support.random_model small "$model")
}

for argument in "$@"; do
  case $argument in
    --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    --model | --model=*) model_given=1 ;;
    --) break ;;
  esac
done
cluster=${1:?a name like disagg: see --help}
shift
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" serve
defaults=()
file=$cluster
if [ "$cluster" = "${cluster%.toml}" ]; then
  file=$root/launch/$cluster.toml
  defaults+=(--run-dir "$root/logs/$cluster")
  if [ -z "${model_given:-}" ]; then
    make_demo_model
    defaults+=(--model "$model")
  fi
fi
exec "$venv/bin/pdserve" up "$file" "${defaults[@]}" "$@"
