"""``ray_cluster_of.py PROGRAM``: runs a Python program beside a local Ray of two nodes of a core each, at RAY_ADDRESS."""

from __future__ import annotations

import os
import subprocess
import sys

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

from ray.cluster_utils import Cluster

nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
try:
    nodes.add_node(num_cpus=1)
    done = subprocess.run([sys.executable, *sys.argv[1:]], env={**os.environ, "RAY_ADDRESS": nodes.address}, check=False)
finally:
    nodes.shutdown()
sys.exit(done.returncode)
