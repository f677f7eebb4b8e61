"""A real Slurm on this machine with a controller, nodes and fake GPUs, but without root, systemd and cgroups.

All daemons listen on the loopback device, write to one folder, and end with the process that started them. Nodes are
slurmd processes that declare more memory than the machine has. GPUs are unused character devices, which Slurm allocates
like real GPUs. It works with Slurm 22.05 (Debian 12) and 26.05. `missing` lists binaries that are not installed.
"""

import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

BINARIES = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
NODES = ("cpu1", "cpu2", "gpu1")
GPUS = ("/dev/null", "/dev/zero")  # any character devices work, but Slurm rejects regular files
MIN_JOB_AGE = 3600  #: seconds for which Slurm remembers a finished job, because tests query them
KILL_WAIT = 20  #: seconds from SIGTERM to SIGKILL


def missing() -> list[str]:
    """List missing programs of Slurm. Debian's packages are slurmctld, slurmd, slurm-client and munge."""
    return [name for name in BINARIES if not shutil.which(name, path=PATH)]


class Cluster:
    """Two CPU nodes (partition ``cpu``, the default), and a GPU node with two GPUs (partition ``gpu``).

    Jobs of a third partition, ``urgent``, preempt those of ``gpu``. Slurm itself does not requeue jobs.

    Parameters
    ----------
    folder
        The folder of all files. Its path must be short, because the paths of sockets are limited.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        #: Snakemake's job steps remove SLURM_CONF from the environment but keep PATH, so the commands are wrapped.
        self.environment = os.environ | {"SLURM_CONF": str(self.conf), "PATH": f"{folder}/bin:{PATH}"}

    def start(self) -> None:
        """Start all daemons, and wait until all nodes are idle."""
        for name in ("state", "spool", "log", "bin"):
            (self.folder / name).mkdir(parents=True)
        self._configure()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        options = [
            f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in ("key-file", "pid-file", "log-file")
        ]
        more = [f"--seed-file={self.folder}/munge.seed", f"--socket={self.folder}/munge.socket"]
        self._daemon("munged", "munged", "--foreground", "--force", *options, *more)
        self._until("munged", lambda: self._works("munge", "-n", "-S", f"{self.folder}/munge.socket"))
        self.start_controller()
        for node in NODES:
            self.start_node(node)

    def stop(self) -> None:
        """End all daemons and running jobs."""
        for node in NODES:
            if node in self._daemons:
                self.kill_node(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    def start_node(self, node: str) -> None:
        """Start or restart a node, and wait until it is ready."""
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        self._daemon(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))
        self._until(node, lambda: {"UNKNOWN", "DOWN", "NOT_RESPONDING"}.isdisjoint(self.state(node)))

    def kill_controller(self) -> None:
        """Kill slurmctld. Jobs continue."""
        daemon = self._daemons.pop("slurmctld")
        daemon.kill()
        daemon.wait()

    def start_controller(self, memory: int = MIN_JOB_AGE) -> None:
        """Start slurmctld, and wait for it. It remembers a finished job for ``memory`` seconds."""
        self.conf.write_text(re.sub(r"MinJobAge=\d+", f"MinJobAge={memory}", self.conf.read_text()))
        self._daemon("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        self._until("slurmctld", lambda: self._works("scontrol", "show", "config"))

    def restore(self) -> None:
        """Cancel all jobs and restart ended daemons for the next test."""
        if f"MinJobAge={MIN_JOB_AGE}\n" not in self.conf.read_text():
            self.kill_controller()
        if "slurmctld" not in self._daemons:
            self.start_controller()
        self.run("scontrol", "update", "PartitionName=gpu", "MaxTime=INFINITE")
        for job in self.jobs("PD,R"):
            self.run("scancel", str(job))
        for node in NODES:
            if node not in self._daemons:
                self.start_node(node)

    def state(self, node: str) -> list[str]:
        """Return IDLE, MIXED, ALLOCATED, DOWN or UNKNOWN, then flags such as NOT_RESPONDING.

        This is the state in the controller. sinfo derives its state from allocations, and shows ``mixed*`` for minutes
        if a node is down.
        """
        shown = self.run("scontrol", "show", "node", "-o", node)
        return next(field for field in shown.split() if field.startswith("State=")).removeprefix("State=").split("+")

    def kill_node(self, node: str) -> None:
        """Simulate a power failure of a node: kill its slurmd and all processes of its jobs."""
        jobs = self.run("squeue", "-h", "-w", node, "-t", "R,CG,S", "-o", "%A").split()
        daemon = self._daemons.pop(node)
        daemon.kill()  # before its jobs, because it would report their end to the controller
        daemon.wait()
        for job in jobs:
            self.kill(int(job))

    def kill(self, job: int) -> None:
        """Kill all processes of a job."""
        for pid in self.processes(job):
            _kill(pid)

    def processes(self, job: int) -> list[int]:
        """List the processes of a job: its step daemons, then their descendants."""
        table = {pid: (parent, command) for pid, parent, command in _processes()}
        daemons = [pid for pid, (_, command) in table.items() if command.startswith(f"slurmstepd: [{job}.")]
        found = [*daemons]
        for pid in found:
            found += [child for child, (parent, _) in table.items() if parent == pid]
        return found

    def run(self, *command: str) -> str:
        """Run a command of Slurm. Return its output."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True)
        return done.stdout

    def jobs(self, states: str = "R") -> dict[int, str]:
        """Return the rule of each job in these states by the job's number."""
        lines = self.run("squeue", "-h", "-t", states, "-o", "%A %k").splitlines()
        return {int(job): comment for job, _, comment in (line.partition(" ") for line in lines)}

    def details(self, job: int) -> dict[str, str]:
        """Return the fields of `scontrol show job`, with the names of newer versions than Slurm 22.05."""
        printed = self.run("scontrol", "show", "job", "-d", "-o", str(job))
        fields = printed.replace(" TRES=", " AllocTRES=").replace("=gres:", "=gres/").split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def queue(self) -> str:
        """Return Slurm's lists of all jobs and nodes."""
        jobs = self.run("squeue", "-a", "-t", "all", "-S", "i", "-o", "%A %.12P %.12T %.20S %.20e %.30R %k")
        return f"{jobs}{self.run('sinfo', '-N', '-l')}"

    def log(self) -> str:
        """Return the end of each daemon's log."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("log/*")))

    def _works(self, *command: str) -> bool:
        return not subprocess.run(command, env=self.environment, capture_output=True, check=False).returncode

    def _until(self, name: str, ready: Callable[[], Any], seconds: float = 120) -> None:
        for _ in range(round(seconds * 10)):
            if ready():
                return
            try:
                self._daemons[name].wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError(f"{name} ended:\n{self.log()}")
        raise RuntimeError(f"{name} is not ready:\n{self.log()}")

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / "log" / name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def _configure(self) -> None:
        folder, host, user = self.folder, socket.gethostname().split(".")[0], getpass.getuser()
        control, *ports = _free_ports(1 + len(NODES))
        lines = {
            "ClusterName": "fedpipe",
            "FirstJobId": 1000 * control,  # unique among clusters, because a job's number identifies its processes
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": control,
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={folder}/munge.socket",
            "CredType": "cred/munge",
            "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "spool/%n",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": folder / "slurmd.%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/linux",
            "JobAcctGatherFrequency": "task=3",
            "JobAcctGatherParams": "OverMemoryKill",  # instead of cgroups, which a container does not have
            "AccountingStorageType": "accounting_storage/none",
            "PropagateResourceLimits": "NONE",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU_Memory",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "bf_interval=5,sched_interval=5,sched_min_interval=0,batch_sched_delay=0",
            "PriorityType": "priority/basic",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "GresTypes": "gpu",
            "ReturnToService": 2,
            "SlurmdParameters": "config_overrides",  # use the CPUs and memory of the lines below
            "MinJobAge": MIN_JOB_AGE,
            "SlurmctldTimeout": 30,
            "SlurmdTimeout": 20,  # long enough for a busy machine
            "MessageTimeout": 60,
            "KillWait": KILL_WAIT,
            "CompleteWait": 0,
            "JobRequeue": 0,
            "TCPTimeout": 5,
        }
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        for node, port in zip(NODES, ports, strict=True):
            gpus = f" Gres=gpu:fake:{len(GPUS)}" if node.startswith("gpu") else ""
            where = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            text += f"NodeName={node} {where} CPUs=8 RealMemory=200000{gpus} State=UNKNOWN\n"
        text += "PartitionName=cpu Nodes=cpu[1-2] Default=YES State=UP\n"
        text += "PartitionName=gpu Nodes=gpu1 PriorityTier=1 GraceTime=60 State=UP\n"
        text += "PartitionName=urgent Nodes=gpu1 PriorityTier=2 PreemptMode=OFF State=UP\n"
        self.conf.write_text(text)
        devices = "".join(f"NodeName=gpu1 Name=gpu Type=fake File={file} Flags=nvidia_gpu_env\n" for file in GPUS)
        (folder / "gres.conf").write_text(f"AutoDetect=off\n{devices}")
        for name in ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun", "sacct", "sacctmgr", "sshare"):
            real = shutil.which(name, path=PATH)
            wrapper = folder / "bin" / name
            wrapper.write_text(f'#!/bin/sh\nSLURM_CONF={self.conf} exec {real} "$@"\n')
            wrapper.chmod(0o755)


def _free_ports(count: int) -> list[int]:
    """Find free ports outside the range that the system uses for connections, so they stay free."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found: list[int] = []
    ports = [*range(1024, low), *range(high + 1, 2**16)] or [*range(1024, 2**16)]
    secrets.SystemRandom().shuffle(ports)
    for port in ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} ports are free")


def _processes() -> Iterator[tuple[int, int, str]]:
    """Yield the ID, parent and command line of each process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # the process has ended
            continue
        yield int(folder.name), parent, command


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> None:
    """Start a cluster for experiments with `python -m tests.cluster.slurm FOLDER`, and end it with Ctrl+C."""
    cluster = Cluster(Path(sys.argv[1]).resolve())
    cluster.start()
    print(f"export SLURM_CONF={cluster.conf} PATH={cluster.folder}/bin:$PATH", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        cluster.stop()


if __name__ == "__main__":
    main()
