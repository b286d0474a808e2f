#!/usr/bin/env bash
# Uses an installed wheel as a new user does, in an empty folder: bash scripts/use_wheel.sh PATH_OF_BANDPO
set -euo pipefail
bandpo=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH
[[ $("$bandpo" --version) =~ ^bandpo\ [0-9]+\.[0-9]+\.[0-9]+$ ]] # without a commit
"$bandpo" train --steps 2 --no-mlflow --name demo
"$bandpo" view demo
"$bandpo" configs | grep -q paper/base
"$bandpo" configs show methods/clip >/dev/null
"$bandpo" report runs/demo >/dev/null
"$bandpo" doctor
ls runs/demo/view report/report.html
