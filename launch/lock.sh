#!/usr/bin/env bash
# Pins what setup.sh installs, or lists what it has installed. The pins are `uv pip compile`'s, not `uv lock`'s: uv.lock
# holds the address of each file in an index, of which this repository has none, and its overrides would leave out
# SGLang's requirements for CUDA on machines with a GPU, too. setup.sh leaves them out as it installs.
#
#   launch/lock.sh [--upgrade]   write launch/constraints.txt anew: its versions are kept while they fit, or are the newest
#   launch/lock.sh --sbom FILE   write a CycloneDX list (JSON) of what is installed in .venv, with versions and licences
#
# Sets everything up first. Packages have hashes, so that an index cannot give other files. torch and what goes with it
# have none: machines without a GPU take them from PyTorch's index where that can be reached, and its files are others.
set -euo pipefail
upgrade=() sbom=''
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    --upgrade) upgrade=(--upgrade) ;;
    --sbom) sbom=$(realpath -m "$2") && shift ;;
    *) echo "launch/lock.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
  shift
done
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" serve release
cd "$root"
if [ -n "$sbom" ]; then
  exec cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --output-file "$sbom" "$venv/bin/python"
fi
made=$(mktemp)
trap 'rm -f "$made"' EXIT
cp launch/constraints.txt "$made" # uv keeps the versions that its output file has
uv pip compile --quiet "${upgrade[@]}" --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-annotate --no-header --all-extras pyproject.toml \
  -o "$made" >/dev/null
{
  echo '# Written by launch/lock.sh, which says why some packages have no hashes.'
  awk '/^[a-z0-9]/ { plain = /^(torch|torchvision|torchaudio|torchcodec|triton)==/; if (plain) sub(/ \\$/, "") }
    !(plain && /^ /)' "$made"
} >launch/constraints.txt
