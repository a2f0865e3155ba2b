"""Reinforcement learning whose rollouts end in any order: prompts are leased, and each is learned from once.

Generators take prompts, and some rollouts are a thousand times as long as others; one in ten fails, and generators die.
The trainer learns from what has ended, and saves its policy with the state of the leases. Kill it, and run it again: no
prompt is lost, none is learned from twice, and long rollouts are as likely as short ones.

    python -m jobs.examples.rollouts --out runs/rollouts
    python -m jobs.examples.rollouts --out runs/cursor --cursor   # the same with a position of what was handed out

The second one stands for the cursor of a DataLoader: what is under way when it is killed is never learned from. Exit
status: 1 if prompts were lost or learned from twice.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import ray

import raylance

BATCH, SAVE_EVERY = 16, 4  # rollouts of a step of training; steps
LEASE_S = 5.0  # longer than the longest rollout takes
_RATE_S = 0.002  # seconds of a rollout of length 1


def length_of(prompt: int) -> float:
    """Returns the length of a prompt's rollout: most are short, and few are very long."""
    return float(min(1000.0, 1.0 + np.random.default_rng(prompt).pareto(1.0)))


@ray.remote(num_cpus=0, max_retries=0)
def generate(prompts: Any, rows: int, seed: int) -> list[tuple[list[int], int, float]]:
    """Makes the rollouts of some prompts: leases, or tickets and prompts that were taken for it. Returns ticket, prompt
    and reward of those that ended well.
    """
    rng = np.random.default_rng(seed)
    leases = prompts if isinstance(prompts, raylance.runs.Leases) else None
    if leases is not None:
        lease = leases.lease(rows)
        tickets, ids = lease.tickets, lease.rows["prompt"]
    else:
        tickets, ids = np.zeros((len(prompts), 3), dtype=np.int64), np.array(prompts)
    if rng.random() < 0.02:
        os._exit(1)  # it dies, and says nothing
    ended = []
    for ticket, prompt in sorted(zip(tickets.tolist(), ids.tolist(), strict=True), key=lambda each: length_of(each[1])):
        time.sleep(_RATE_S * length_of(prompt))
        if rng.random() < 0.1 and leases is not None:
            leases.fail([ticket])
        else:
            ended.append((ticket, prompt, float(rng.normal())))
    return ended


class Policy:
    """What is learned: a number, and how often from each prompt. It stands for a model and its optimizer."""

    def __init__(self, folder: Path, prompts: int) -> None:
        self.path, self.step, self.value = folder / "policy.json", 0, 0.0
        self.learned, self.saved = [0] * prompts, None
        if self.path.exists():
            found = json.loads(self.path.read_text())
            self.step, self.value, self.learned, self.saved = (
                found[name] for name in ("step", "value", "learned", "data")
            )

    def learn(self, rollouts: list[tuple[int, float]]) -> None:
        """Makes a step of training."""
        self.step += 1
        for prompt, reward in rollouts:
            self.value += 0.01 * (reward - self.value)
            self.learned[prompt] += 1

    def save(self, data: Any) -> None:
        """Saves the policy, and what its data need to continue, as one."""
        found = {"step": self.step, "value": self.value, "learned": self.learned, "data": data}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(self.path)


def by_leases(data: raylance.Dataset, folder: Path, policy: Policy, generators: int) -> None:
    """Trains until each prompt was learned from."""
    leases = raylance.runs.Leases(data, folder, name="prompts", epochs=1, most_ahead=256, lease_s=LEASE_S)
    if policy.saved is not None:
        leases.load_state_dict(policy.saved)  # what was learned since is lost with the policy, and comes again
    elif leases.progress().done:
        raise SystemExit(f"{folder} has leases, and no policy: give another folder")
    else:
        policy.save(leases.state_dict())
    seed = int.from_bytes(os.urandom(4))
    running, ended = [generate.remote(leases, 8, seed + number) for number in range(generators)], []
    while not leases.progress().is_over:
        done, running = ray.wait(running, timeout=0.2)
        ended += rollouts_of(done)
        seed += generators
        running += [generate.remote(leases, 8, seed + number) for number in range(len(done))]
        if len(ended) >= BATCH or (ended and not done):
            counts = leases.done([ticket for ticket, _, _ in ended])  # False if another lease of it was first
            policy.learn(
                [(prompt, reward) for (_, prompt, reward), is_mine in zip(ended, counts, strict=True) if is_mine]
            )
            ended = []
            if policy.step % SAVE_EVERY == 0:
                policy.save(leases.state_dict())
    policy.save(leases.state_dict())
    print(leases.prove())


def by_cursor(data: raylance.Dataset, policy: Policy, generators: int) -> None:
    """Trains until all prompts were handed out: a state says how many, and nothing of those that are under way."""
    with data.loader(record=False, runtime="threads") as loader:
        if policy.saved is not None:
            loader.load_state_dict(policy.saved)
        seed, running, ended = int.from_bytes(os.urandom(4)), [], []
        batches = iter(loader.iter_batches(global_batch_size=8)) if not loader.epoch else iter(())
        is_over = False
        while running or not is_over:
            while len(running) < generators and not is_over:
                batch = next(batches, None)
                is_over = batch is None
                seed += 1
                running += [] if batch is None else [generate.remote(batch["prompt"].tolist(), 8, seed)]
            done, running = ray.wait(running, timeout=0.2) if running else ([], [])
            ended += rollouts_of(done)
            if len(ended) >= BATCH or (is_over and not running):
                policy.learn([(prompt, reward) for _, prompt, reward in ended])
                ended = []
                if policy.step % SAVE_EVERY == 0 or not running:
                    policy.save(loader.state_dict())


def rollouts_of(tasks: list[Any]) -> list[tuple[list[int], int, float]]:
    """Returns what some generators have made; those that died made nothing."""
    found = []
    for task in tasks:
        try:
            found += ray.get(task)
        except ray.exceptions.WorkerCrashedError:
            continue
    return found


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run, which continues if it was killed")
    parser.add_argument("--prompts", type=int, default=600, help="default %(default)s")
    parser.add_argument("--generators", type=int, default=4, help="at once, default %(default)s")
    parser.add_argument("--cursor", action="store_true", help="a position of what was handed out, in place of leases")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    uri = str(args.out / "prompts.lance")
    if not os.path.exists(uri):
        lance.write_dataset(pa.table({"prompt": np.arange(args.prompts)}), uri)
    data = raylance.dataset(uri, order="row", seed=1, remainder="ragged")
    policy = Policy(args.out, args.prompts)
    if args.cursor:
        by_cursor(data, policy, args.generators)
    else:
        by_leases(data, args.out, policy, args.generators)
    lost = [prompt for prompt, times in enumerate(policy.learned) if not times]
    twice = sum(times > 1 for times in policy.learned)
    means = [np.mean([length_of(prompt) for prompt in some]) for some in (lost or [0], range(args.prompts))]
    of_lost = f", of mean length {means[0]:.1f}, where all have {means[1]:.1f}" if lost else ""
    print(f"{args.prompts} prompts in {policy.step} steps: {len(lost)} lost{of_lost}; {twice} learned from twice")
    return int(bool(lost or twice))


if __name__ == "__main__":
    sys.exit(main())
