#!/bin/sh
# Runs the benchmarks that do not need data, root or a GPU, one after another, and TensorFlow's and JAX's
# steps if these are installed. Writes their JSON to a directory.
#   benchmarks/run_all.sh [DIRECTORY [OPTIONS FOR ALL SCRIPTS]]
# example: benchmarks/run_all.sh results --np 2 --seconds 5 --module ringdance.torch
set -eu
here=$(dirname "$0")
directory=${1:-benchmark-results}
[ $# -gt 0 ] && shift
mkdir -p "$directory"
for name in allreduce resnet50_gradients training_step idle timeline; do
    "${PYTHON:-python}" "$here/$name.py" --json "$directory/$name.json" "$@"
    echo
done
for framework in tensorflow jax; do
    if "${PYTHON:-python}" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$framework') is None)"; then
        "${PYTHON:-python}" "$here/${framework}_step.py" --json "$directory/${framework}_step.json" "$@"
        echo
    fi
done
