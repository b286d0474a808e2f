#!/usr/bin/env bash
# Exports and trains two arms, the KL Band and the fixed interval: bash run.sh [overrides of verl's settings].
# GPUS is the number of GPUs of this machine (1), OUT the folder of the exported jobs (verl-jobs).
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
OUT="${OUT:-verl-jobs}"
for method in band-kl clip; do
  bandpo export verl -c gsm8k -c "$HERE/experiment.yaml" -c "methods/$method" \
    --out "$OUT/$method" --nodes 1 --gpus-per-node "${GPUS:-1}"
  bash "$OUT/$method/run.sh" "$@"
done
