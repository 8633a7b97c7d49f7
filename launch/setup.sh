#!/usr/bin/env bash
# Set this checkout up: .venv with pdserve and extras of pyproject.toml, in the versions that constraints.txt pins.
#
#   launch/setup.sh [EXTRA...]     what serving needs (`serve`), or these; extras that are there already stay
#
# The other scripts source it with the extras that they need. Done in a moment when nothing has changed, installed over
# what is there when only requirements have. Without a GPU: torch for CPU where its index can be reached, and SGLang
# without what without-cuda.txt names. PDSERVE_IMAGE=cpu, gpu or none: for Containerfile, into /opt/pdserve.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${PDSERVE_IMAGE:+/opt/pdserve}
venv=${venv:-$root/.venv}
PATH=$PATH:/usr/sbin:/sbin # where Debian has ldconfig and tc, and only root looks

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "error: $*" && exit 1; }
has_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null || nvidia-smi -L >/dev/null 2>&1; }

need() { # NAME PACKAGE...: install Debian packages, or say how
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    fail "$1 is missing: run 'sudo apt-get install ${*:2}' (or your system's like) and try again"
  fi
  say "$1 is missing: installing ${*:2}"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends --yes "${@:2}"; } \
    >/dev/null || fail "could not install ${*:2}; install them and try again"
}

make_venv() {
  if [ -L "$venv" ]; then rm "$venv"; fi # another checkout's: it stays as it is
  if [ -n "$uv" ]; then "$uv" venv --quiet --clear --python "$python" "$venv" && return || fail "no $venv"; fi
  "$python" -c 'import ensurepip' 2>/dev/null || need "Python's venv module" "python$("$python" -c "$version")-venv"
  "$python" -m venv --clear "$venv"
  uv=$venv/bin/uv
  sed -n '/^uv==/,/[^\\]$/p' launch/constraints.txt | "$venv/bin/python" -m pip install --quiet \
    --disable-pip-version-check --no-deps --require-hashes -r /dev/stdin || fail "could not install uv"
}

install() {
  local how=(pip install --python "$venv/bin/python" --constraints launch/constraints.txt) light=()
  if [ "$kind" = cpu ]; then
    light=(--overrides launch/without-cuda.txt --extra cpu)
    # an installed torch, or an answer kept from last time, says nothing of the index
    if UV_HTTP_TIMEOUT=5 UV_HTTP_RETRIES=0 timeout 30 "$uv" "${how[@]}" --quiet --dry-run --reinstall --refresh \
      --no-deps --torch-backend=cpu torch >/dev/null 2>&1; then light+=(--torch-backend=cpu); fi
  elif [ "$kind" = gpu ] && ! echo '#include <openssl/evp.h>' | g++ -E -x c++ - >/dev/null 2>&1; then
    need "a C++ compiler, or OpenSSL's headers, for SGLang's page hash," g++ libssl-dev
  fi
  "$uv" "${how[@]}" "${light[@]}" -r pyproject.toml "$@" || fail "could not install what pdserve needs"
}

set_up() {
  local kind=cpu python uv of files was extras stamp=$venv/pdserve-setup editable=(-e .)
  local version='import sys; sys.version_info < (3, 11) and sys.exit(1); print("%d.%d" % sys.version_info[:2])'
  cd "$root"
  PATH=${PATH//"$venv/bin:"/} # an activated .venv is not what to make .venv from
  for python in python3 python3.13 python3.12 python3.11 ''; do "$python" -c "$version" &>/dev/null && break; done
  [ -n "$python" ] || fail "Python 3.11 or newer is needed: none of python3, python3.13, python3.12, python3.11 is"
  if [ -n "${PDSERVE_IMAGE:-}" ]; then kind=$PDSERVE_IMAGE editable=(); elif has_gpu; then kind=gpu; fi
  of="$kind, $("$python" -V), $root" # a copied or moved .venv would run the other checkout
  files=$( (cat pyproject.toml launch/{constraints.txt,without-cuda.txt,setup.sh} && cat pdserve/*/native/*.c 2>/dev/null || :) | sha256sum)
  exec 9<launch/setup.sh
  flock -n 9 || { say "another set-up of $root runs: waiting for it" && flock 9; }
  mapfile -t was < <(cat "$stamp" 2>/dev/null)
  mapfile -t extras < <(printf '%s\n' ${was[2]:-} "$@" | sort -u)
  [ "${was[*]}" != "$of $files ${extras[*]}" ] || return 0
  say "setting up $venv ($of) for ${extras[*]}"
  # what runs in .venv goes on while requirements are installed over it, and would not if it were made anew
  uv=$(command -v uv || true)
  if [ "${was[0]:-}" != "$of" ] || ! uv=${uv:-$(command -v "$venv/bin/uv")}; then make_venv; fi
  install "${extras[@]/#/--extra=}" "${editable[@]}"
  # an image has bytecode of all; here only what a worker imports is compiled
  [ ${#editable[@]} = 0 ] || env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m pdserve.engine.first_import
  printf '%s\n' "$of" "$files" "${extras[*]}" >"$stamp"
  say "done"
}

(set_up "${@:-serve}")
export PATH="$venv/bin:$PATH" # ninja, for SGLang's just-in-time builds
