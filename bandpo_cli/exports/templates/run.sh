#!/usr/bin/env bash
# Runs the experiment of config.yaml on verl {{ version }}. Arguments are further overrides.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
quoted() { printf "'%s'" "${1//\'/\\\'}"; }  # a text in the syntax of Hydra's overrides
{% if VERL_USE_EXTERNAL_MODULES -%}
export VERL_USE_EXTERNAL_MODULES={{ module }}
{% endif -%}
{% if MLFLOW_TRACKING_URI -%}
DEFAULT_URI={{ uri }}
export MLFLOW_TRACKING_URI="${MLFLOW_TRACKING_URI:-$DEFAULT_URI}"
{% endif -%}
python3 -m verl.trainer.main_ppo {{ "\\" }}
{%- for argument in arguments %}
  {{ argument }} {{ "\\" }}
{%- endfor %}
  "$@"
