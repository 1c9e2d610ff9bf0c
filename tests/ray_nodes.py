"""A Ray cluster of two nodes on loopback, for tests: python -m tests.ray_nodes FOLDER

Prints its address when it is ready. The second node has its user folders in FOLDER, as another machine has
its own. A line on standard input ends the second node like a crash; the end of the input ends the cluster.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main(folder: str) -> None:
    quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 2}
    homes = {f"XDG_{kind}_HOME": f"{folder}/{kind.lower()}" for kind in ("CONFIG", "CACHE", "DATA", "STATE")}
    size = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"include_dashboard": False, "_system_config": quick, **size}
    )
    second = cluster.add_node(env_vars=homes, **size)
    print(cluster.address, flush=True)
    if sys.stdin.readline():
        cluster.remove_node(second, allow_graceful=False)
        sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
