#!/bin/bash
# {{ experiment.name }}: {{ cluster.trainers | counted("trainer") }}, {{ cluster.trainers_per_node }} on each of {{ cluster.nodes | counted("node") }}.
# Written by fleetbench {{ version }}: fleetbench launch --print torchrun
#
{% if cluster.nodes > 1 %}
# On every node, with NODE_RANK 0 to {{ cluster.nodes - 1 }} and an address of node 0 that every node reaches:
#
#   NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash JOB.sh            train
#   NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash JOB.sh inside     tune, the driver inside: every trainer is a worker, and rank 0 also drives
{% else %}
#   bash JOB.sh            train
#   bash JOB.sh tune       tune, the driver outside: it starts the workers
#   bash JOB.sh inside     tune, the driver inside: every trainer is a worker, and rank 0 also drives
{% endif %}
set -euo pipefail

experiment={{ path | sh }}
trainer=({{ torchrun_arguments }})
{% if cluster.nodes > 1 %}
workers=(torchrun --nnodes={{ cluster.nodes }} --nproc-per-node={{ cluster.trainers_per_node }} --max-restarts=0
    --node-rank="${NODE_RANK:?which node is this, from 0?}"
    --master-addr="${MASTER_ADDR:?an address of node 0}" --master-port="${MASTER_PORT:-{{ run.port }}}")
{% else %}
workers=(torchrun --standalone --nnodes=1 --nproc-per-node={{ cluster.trainers_per_node }} --max-restarts=0)
{% endif %}

{% if "OMP_NUM_THREADS" not in run.environment %}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
{% endif %}
{% for key, value in run.environment.items() %}
export {{ key }}={{ value | sh }}
{% endfor %}

case "${1:-train}" in
    train) exec "${workers[@]}" "${trainer[@]}" ;;
{% if cluster.nodes == 1 %}
    tune) exec fleetbench tune "$experiment" -- "${workers[@]}" "${trainer[@]}" ;;
{% endif %}
    inside) exec "${workers[@]}" -m fleetbench tune "$experiment" -- {{ command }} ;;
    *)
        echo "usage: bash JOB.sh [train|{{ "tune|" if cluster.nodes == 1 }}inside]" >&2
        exit 2
        ;;
esac
