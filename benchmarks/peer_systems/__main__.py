"""Run one system in this process, in an empty current folder: `python -m peer_systems SYSTEM JOB_FILE`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch

from peer_systems.job import Clock, Job


def main(system: str, job_file: str) -> None:
    job, clock = Job(**json.loads(Path(job_file).read_text())), Clock()
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    results = Path(job.folder).absolute() / system
    parameters = importlib.import_module(f"peer_systems.{system.replace('-', '_')}").run(job, clock)
    torch.save([value.detach().cpu().clone() for value in parameters], results.with_suffix(".pt"))
    measured = {"rounds": clock.rounds, "evaluations": clock.evaluations}
    if job.device == "cuda":
        measured["gpu_memory"] = torch.cuda.max_memory_allocated()
    results.with_suffix(".json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
