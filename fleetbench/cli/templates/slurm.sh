#!/bin/bash
# {{ experiment.name }}: {{ cluster.trainers | counted("trainer") }}, {{ cluster.trainers_per_node }} on each of {{ cluster.nodes | counted("node") }}.
# Written by fleetbench {{ version }}: fleetbench launch --print slurm
#
#   sbatch JOB.sh            train
#   sbatch JOB.sh tune       tune, the driver outside: this script runs it, and it starts the workers in steps of their own
#   sbatch JOB.sh inside     tune, the driver inside: one step, in which every task is a worker and task 0 also drives
#
# Fill in what your site asks for. A job that is preempted goes on when it is started again.
##SBATCH --partition=...
##SBATCH --account=...
#SBATCH --time=02:00:00
#SBATCH --job-name={{ experiment.name }}
#SBATCH --output={{ experiment.name }}-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --exclusive
#SBATCH --nodes={{ cluster.nodes }}
#SBATCH --ntasks-per-node={{ cluster.trainers_per_node }}
{% if cores %}
#SBATCH --cpus-per-task={{ cores_per_trainer }}
{% endif %}
{% if gpus %}
#SBATCH --gpus-per-node={{ gpus }}
{% endif %}
set -euo pipefail

experiment={{ path | sh }}
trainer=({{ command }})
{% if not cores %}
# Nothing declares cluster.cores_per_node: a node's trainers share all of its cores.
cores=$((SLURM_CPUS_ON_NODE > {{ cluster.trainers_per_node }} ? SLURM_CPUS_ON_NODE / {{ cluster.trainers_per_node }} : 1))
{% endif %}
# Every task sees all of its node's devices and takes the one of its number there, so that they reach each other directly.
workers=(srun --overlap --kill-on-bad-exit=1 --distribution=block --nodes={{ cluster.nodes }} --ntasks={{ cluster.trainers }}
    --ntasks-per-node={{ cluster.trainers_per_node }} --cpus-per-task={{ cores_per_trainer or '"$cores"' }})

{% if "OMP_NUM_THREADS" not in run.environment %}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
{% endif %}
{% for key, value in run.environment.items() %}
export {{ key }}={{ value | sh }}
{% endfor %}

# exec: the signal that comes before the time is up goes to the command itself.
case "${1:-train}" in
    train) exec "${workers[@]}" "${trainer[@]}" ;;
    tune)
{% if cluster.nodes > 1 %}
        export TMPDIR="$PWD"  # where the driver leaves its orders: a folder that all nodes see
{% endif %}
        exec fleetbench tune "$experiment" -- "${workers[@]}" "${trainer[@]}"
        ;;
    inside) exec "${workers[@]}" fleetbench tune "$experiment" -- "${trainer[@]}" ;;
    *)
        echo "usage: sbatch JOB.sh [train|tune|inside]" >&2
        exit 2
        ;;
esac
