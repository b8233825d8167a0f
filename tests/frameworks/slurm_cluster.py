"""A Slurm cluster in a namespace: one controller and several `slurmd`, each a node with an address of its own; munge for their messages."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from isolated_hosts import ADDRESS, Hosts, poll, program

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}({first})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MailProg=/bin/true
PartitionName=all Nodes=ALL Default=YES
"""


class Slurm(Hosts):
    """Nodes n1, n2, …, with 4 CPUs each."""

    def __enter__(self) -> Slurm:
        super().__enter__()
        folder = self.folder
        (folder / "state").mkdir()
        host = os.uname().nodename
        text = CONFIGURATION.format(host=host, first=ADDRESS.format(1), folder=folder)
        for n in range(1, self.count + 1):
            text += f"NodeName=n{n} NodeHostname={host} NodeAddr={ADDRESS.format(n)} Port={17000 + n} CPUs=4\n"
        (folder / "slurm.conf").write_text(text)
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")
        (folder / "munge.key").write_bytes(os.urandom(256))
        (folder / "munge.key").chmod(0o600)
        files = [f"--{name}={folder}/munge.{name[:-5]}" for name in ("key-file", "pid-file", "log-file", "seed-file")]
        self.run(program("munged") or "", "--force", *files, f"--socket={folder}/munge.socket")
        self.start("slurmctld.out", "slurmctld", "-D")
        for n in range(1, self.count + 1):
            self.start_node(n)
        poll(
            lambda: self.run("sinfo", "-h", "-o", "%D %t", check=False).strip() == f"{self.count} idle", 60, "no nodes"
        )
        return self

    def start_node(self, number: int) -> None:
        self.start(f"slurmd-n{number}.out", "slurmd", "-D", "-N", f"n{number}")

    def lose_node(self, name: str) -> None:
        """Kill all processes of a node: its daemon, the steps and their tasks."""

        def of_node(folder: Path) -> bool:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
            return f"SLURMD_NODENAME={name}".encode() in variables or words[:4] == [
                b"slurmd",
                b"-D",
                b"-N",
                name.encode(),
            ]

        for process in self.processes(of_node):
            os.kill(process, signal.SIGKILL)

    def submit(self, file: str, folder: Path, *options: str, **variables: str) -> str:
        """Submit a batch script from a folder, as a user does; the number of its job."""
        text = self.run("sbatch", "--parsable", f"--chdir={folder}", *options, str(folder / file), **variables)
        return text.strip().splitlines()[-1]

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        words = self.run("scontrol", "show", "job", job, check=False).split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    def start_again(self, job: str, *changes: str) -> None:
        """Let a job that was queued again start now: Slurm would wait two minutes."""
        poll(lambda: self.field(job, "JobState") in ("PENDING", *ENDED), 120, "not queued again")
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now", *changes, check=False)

    def finish(self, job: str, timeout_s: float = 480) -> str:
        """Wait until a job has ended; its state."""
        poll(
            lambda: self.field(job, "JobState") in ENDED,
            timeout_s,
            f"job {job} is {self.field(job, 'JobState')} and has not ended",
        )
        return self.field(job, "JobState")
