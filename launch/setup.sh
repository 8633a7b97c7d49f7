#!/usr/bin/env bash
# Sets this checkout up: .venv with pdserve and all it needs. Called or sourced by the other scripts; done in a
# moment when nothing has changed, installed over what is there when only requirements have. With a GPU: SGLang's normal
# install. Without: torch for CPU where its index can be reached, and SGLang with the light set of dependencies in
# requirements-cpu.txt. Either in the versions, and from the files, that constraints.txt pins (lock.sh writes it).
# PDSERVE_IMAGE=cpu, gpu or none: into /opt/pdserve what servers of an image need, without pdserve itself (Containerfile).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
image=${PDSERVE_IMAGE:-}
venv=${image:+/opt/pdserve}
venv=${venv:-$root/.venv}
PATH=$PATH:/usr/sbin:/sbin # where Debian has ldconfig and tc, and only root looks

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

# need NAME PACKAGE...: install Debian packages, or say how
need() {
  local what=$1
  shift
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "$what is missing: installing $*"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@"; } \
      >/dev/null || fail "could not install $*; install them and try again"
  else
    fail "$what is missing: run 'sudo apt-get install $*' (or your system's like) and try again"
  fi
}

find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  fail "Python 3.11 or newer is needed and none of python3, python3.13, python3.12, python3.11 is"
}

has_gpu() { [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; }

# With a GPU, SGLang compiles its page hash when it starts: a compiler, and OpenSSL's headers
check_compiler() {
  command -v g++ >/dev/null || need "a C++ compiler" g++
  echo '#include <openssl/evp.h>' | g++ -E -x c++ - >/dev/null 2>&1 || need "OpenSSL's header files" libssl-dev
}

make_venv() {
  if [ -L "$venv" ]; then rm "$venv"; fi # another checkout's: it stays as it is
  if uv=$(command -v uv); then
    "$uv" venv --quiet --clear --python "$python" "$venv"
  else
    uv=$venv/bin/uv
    "$python" -c 'import ensurepip' 2>/dev/null ||
      need "Python's venv module" "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    "$python" -m venv --clear "$venv"
    say "installing uv into .venv"
    sed -n '/^uv==/,/[^\\]$/p' launch/constraints.txt | "$venv/bin/python" -m pip install --quiet \
      --disable-pip-version-check --no-deps --require-hashes --requirement /dev/stdin
  fi
}

# The check of an address, whose grammar takes 2 s of each process of SGLang: jsonschema imports it where it is there.
# It comes with a validator that cyclonedx-bom asks for, and no list of packages needs it.
left_out='rfc3987-syntax; sys_platform == "none"'

# compiled now, so that the first start of a worker does not do it, twice at a time
install() {
  "$uv" pip install --python "$venv/bin/python" --compile-bytecode --constraints launch/constraints.txt \
    --overrides <(echo "$left_out") "$@"
}

# ours EXTRA...: what pyproject.toml asks for, without SGLang, which would bring its CUDA-only dependencies
ours() {
  "$venv/bin/python" -c '
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = sum((extras[name] for name in sys.argv[1:] or extras), project["dependencies"])
print(*(name for name in wanted if not name.startswith("sglang")), sep="\n")' "$@"
}

install_cpu() {
  local backend=()
  # a torch that is installed already, or an answer kept from last time, says nothing of the index
  if UV_HTTP_TIMEOUT=5 UV_HTTP_RETRIES=0 timeout 30 "$uv" pip install --python "$venv/bin/python" --quiet \
    --dry-run --reinstall --refresh --no-deps --torch-backend=cpu torch >/dev/null 2>&1; then
    backend=(--torch-backend=cpu)
  else
    say "the index of CPU builds of torch is out of reach: taking the ordinary build (larger)"
  fi
  install "${backend[@]}" -r <(engine_on_cpu) -r <(ours "$@")
  install --no-deps "$(grep -o 'sglang==[0-9.]*' pyproject.toml | head -n 1)"
}

# the servers of an image have no tests
engine_on_cpu() { sed "${image:+/^# tests\$/,\$d}" launch/requirements-cpu.txt; }

install_image() {
  local servers=(object redis otel)
  case $image in
    cpu) install_cpu "${servers[@]}" ;;
    gpu) install -r pyproject.toml "${servers[@]/#/--extra=}" ;;
    none) install -r <(ours "${servers[@]}" | grep -vE '^"?(torch|transformers|tokenizers|safetensors)') ;;
    *) fail "PDSERVE_IMAGE must be cpu, gpu or none, found '$image'" ;;
  esac
}

is_current() { [ "$(cat "$venv/pdserve-setup" 2>/dev/null)" = "$1" ]; }

set_up() {
  local python kind of stamp uv
  cd "$root"
  PATH=${PATH//"$venv/bin:"/} # an activated .venv is not what to make .venv from
  python=$(find_python)
  kind=cpu
  if [ -n "$image" ]; then kind=image; elif has_gpu; then kind=gpu; fi
  of="$kind $("$python" -V) $root" # a copied or moved .venv would run the other checkout
  stamp="$of $image $(cat pyproject.toml launch/constraints.txt launch/requirements-cpu.txt launch/setup.sh | sha256sum)"
  if is_current "$stamp"; then return; fi
  exec 9<launch/setup.sh
  flock -n 9 || { say "another set-up of $root runs: waiting for it" && flock 9; }
  if is_current "$stamp"; then return; fi
  say "setting up $venv ($kind, $("$python" -V)); this takes about a minute on a fast line"
  if [ "$kind" = gpu ]; then check_compiler; fi
  # what runs in .venv goes on while requirements are installed over it, and would not if it were made anew
  if ! [[ $(cat "$venv/pdserve-setup" 2>/dev/null) = "$of "* ]] ||
    ! uv=$(command -v uv || command -v "$venv/bin/uv"); then make_venv; fi
  case $kind in
    image) install_image ;;
    gpu) install -e '.[test,docs,bench,object,redis,mooncake,otel,release]' ;;
    cpu)
      install_cpu
      install --no-deps -e .
      ;;
  esac
  printf '%s\n' "$stamp" >"$venv/pdserve-setup"
  say "done"
}

(set_up)
export PATH="$venv/bin:$PATH" # ninja, for SGLang's just-in-time builds
