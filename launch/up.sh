# Sourced by agg.sh and disagg.sh with the name of the cluster and the user's arguments: set up, make the demo model
# where no other is asked for, and hand over to `pdserve up`.

# Sets model. Without a network it is one with random weights.
make_demo_model() {
  local said
  model=$root/models/smollm2-135m
  if [ -f "$model/config.json" ]; then return; fi
  say "making the demo model, SmolLM2-135M, of which 93 MB are downloaded"
  if said=$("$venv/bin/pdserve" model demo --out "$model" 2>&1); then return; fi
  said=${said##*$'\n'}
  say "${said#*error: }; serving a model with random weights in its place, demo-small"
  model=$root/models/demo-small
  [ -f "$model/config.json" ] || "$venv/bin/pdserve" model demo --size small --out "$model" >/dev/null
}

cluster=$1
shift
for argument in "$@"; do
  case $argument in
    --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    --model | --model=*) model_given=1 ;;
    --config | --config=*) config_given=1 ;;
    --) break ;;
  esac
done
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" serve
defaults=()
if [ -z "${config_given:-}" ]; then
  defaults+=(--run-dir "$root/logs/$cluster")
  if [ -z "${model_given:-}" ]; then
    make_demo_model
    defaults+=(--model "$model")
  fi
fi
exec "$venv/bin/pdserve" up "$root/launch/$cluster.toml" "${defaults[@]}" "$@"
