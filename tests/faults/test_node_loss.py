"""A lost node costs time and no row; slow, because Ray takes its time to declare a node dead."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import psutil, ray, raylance
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
node = cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
decode = raylance.Image("image", size=(16, 16), augment=raylance.RandomResizedCrop(), hflip=0.5)
dataset = raylance.dataset(sys.argv[1], columns=["image", "id"], decode=decode, remainder="ragged")

def epoch(lose):
    rows = []
    # One decoder: of two, the other may be on another node, and do all that is left before the loss is seen.
    with dataset.loader(num_decoders=1, inflight_bytes=200_000, placement_timeout_s=120) as loader:
        for step, batch in enumerate(loader.iter_torch_batches(global_batch_size=50)):
            rows += list(zip(batch["id"].tolist(), batch["image"].long().flatten(1).sum(1).tolist()))
            if lose and step == 5:
                cluster.add_node(num_cpus=2)
                workers = psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
                cluster.remove_node(node, allow_graceful=False)
                # On a busy machine they outlive their node for long enough to do all that is left.
                psutil.wait_procs(workers, timeout=60)
        return rows, loader.stats()["helpers_replaced"]

try:
    undisturbed, none = epoch(lose=False)
    disturbed, replaced = epoch(lose=True)
finally:
    ray.shutdown()  # a cluster does not remove the node that this process is connected to
    cluster.shutdown()  # its address would stay behind, for the next Ray of this machine to wait for
assert none == 0 and replaced >= 1, (none, replaced)
assert len(undisturbed) == 953 and disturbed == undisturbed
print("the same rows and bytes,", replaced, "helpers replaced")
"""


@pytest.mark.promise("P6")
def test_a_lost_node_costs_no_row(images_uri: str, tmp_path: Path) -> None:
    script = tmp_path / "lose_a_node.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, str(script), images_uri], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the same rows and bytes" in ran.stdout
