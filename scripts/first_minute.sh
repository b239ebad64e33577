#!/usr/bin/env bash
# The road from a recipe to merged weights with an installed pi-lora, in a new folder outside the checkout: four steps of
# the demo, which show that everything is there, not what it learns.
#   scripts/first_minute.sh PI_LORA FOLDER
set -euo pipefail
command=$1 folder=$2
mkdir "$folder"
cd "$folder"
unset PYTHONPATH
# An empty cache: nothing was prepared before.
export PI_LORA_CACHE=$PWD/cache
set -x
"$command" env
"$command" recipes
"$command" plan 7b_16k
"$command" train demo training.steps=4 evaluation.perplexity.documents=1 \
    evaluation.passkey.depths=2 evaluation.passkey.trials=1
"$command" eval all adapters/demo
"$command" report adapters/demo --html
"$command" merge adapters/demo
"$command" eval passkey models/demo --depths 2 --trials 1
