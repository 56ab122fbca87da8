#!/bin/bash
# {{ experiment.name }}: {{ cluster.trainers | counted("trainer") }}, {{ cluster.trainers_per_node }} on each of {{ cluster.nodes | counted("node") }}.
# {{ cluster.servers | counted("parameter server") }}: {{ "each on a node of its own, behind these" if own_hosts else "on these nodes, one on each of the first" }}.
# Written by fleetbench {{ version }}: fleetbench launch --print slurm
#
#   sbatch JOB.sh            train
#
# Fill in what your site asks for. A job that is preempted goes on when it is started again, from the last checkpoint: trainers call
# fleet.save_persistables(FOLDER) now and then, and servers fleet.init_server(FOLDER). Servers write none when the launch is ended.
##SBATCH --partition=...
##SBATCH --account=...
#SBATCH --time=02:00:00
#SBATCH --job-name={{ experiment.name }}
#SBATCH --output={{ experiment.name }}-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --exclusive
#SBATCH --nodes={{ hosts }}
#SBATCH --ntasks-per-node=1
{% if cores %}
#SBATCH --cpus-per-task={{ cores }}
{% endif %}
set -euo pipefail

if (($# > 0)); then
    echo "usage: sbatch JOB.sh, without arguments: with parameter servers it trains, and there is no tuning" >&2
    exit 2
fi
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${{ '{#' }}hosts[@]} != {{ hosts }})); then
    echo "this allocation has ${{ '{#' }}hosts[@]} nodes, and the job needs {{ hosts }}" >&2
    exit 3
fi
printf -v workers '%s:{{ cluster.trainers_per_node }},' "${hosts[@]:0:{{ cluster.nodes }}}"
printf -v servers '%s:{{ run.port }},' "${hosts[@]:{{ cluster.nodes if own_hosts else 0 }}:{{ cluster.servers }}}"

{% if "OMP_NUM_THREADS" not in run.environment %}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
{% endif %}
{% for key, value in run.environment.items() %}
export {{ key }}={{ value | sh }}
{% endfor %}

# One launcher a node, each of which finds itself in the lists. They end by themselves, and name the same culprit.
# exec: the signal that comes before the time is up goes to the step itself.
exec srun --overlap --kill-on-bad-exit=0 --wait=0 --nodes={{ hosts }} --ntasks={{ hosts }} --ntasks-per-node=1 --cpus-per-task={{ cores or '"$SLURM_CPUS_ON_NODE"' }} \
    fleetbench launch --servers "${servers%,}" --workers "${workers%,}" --startup-timeout {{ startup_s }} {{ script }}
