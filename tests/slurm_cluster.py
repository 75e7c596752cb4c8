"""A SLURM cluster of two nodes: slurmctld and two slurmd of this machine, on hosts of their own
(two_hosts.py), with a key of their own for munge. Two partitions: a job of `high` pre-empts those
of `low`, which are requeued."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_launch import wait_until
from two_hosts import TwoHosts, two_hosts

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
_CONF = """\
ClusterName=test
SlurmctldHost=host0(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
MpiDefault=none
ReturnToService=2
NodeName=host0 NodeAddr=10.77.0.1 CPUs=2 State=UNKNOWN
NodeName=host1 NodeAddr=10.77.0.2 CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""  # noqa: E501


class SlurmCluster:
    """The running daemons, seen from its first node."""

    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder

    def run(self, *arguments: str) -> str:
        """Runs a command of SLURM's on the first node. Returns what it printed, also on stderr."""
        done = self.hosts.hosts[0].run("env", f"SLURM_CONF={self.folder}/slurm.conf", *arguments)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout + done.stderr

    def submit(self, *arguments: str) -> str:
        """Submits a job; returns its number."""
        return self.run("sbatch", "--parsable", *arguments).strip()

    def job(self, number: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait_for(self, what: Callable[[], bool], within_s: float, log: Path | None = None) -> None:
        def said() -> str:
            own = log.read_text() if log is not None and log.exists() else ""
            return f"{own}\n{self.logs()}"

        wait_until(what, within_s, said)

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("munge/log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in files)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Starts a cluster whose files are all in `folder`, and ends it. Skips the test where it cannot
    be had."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"SLURM is not installed: no {', '.join(missing)} (Debian: slurm-wlm)")
    with two_hosts() as hosts:
        for name in ("munge", "state", "host0", "host1"):
            (folder / name).mkdir(parents=True)
        # munge lets everybody, or nobody, reach its socket
        for parent in (folder, *folder.parents):
            if parent.stat().st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
                parent.chmod(0o755)
        munge = folder / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        cluster = SlurmCluster(hosts, folder)
        first, second = hosts.hosts
        environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        files = {
            "key": "key-file",
            "socket": "socket",
            "pid": "pid-file",
            "log": "log-file",
            "seed": "seed-file",
        }
        options = [f"--{option}={munge / name}" for name, option in files.items()]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
        daemons = [first.start("munged", "--force", "--foreground", *options, **quiet)]
        cluster.wait_for((munge / "socket").exists, 20)
        daemons.append(first.start("slurmctld", "-D", **quiet))
        for host in (first, second):
            daemons.append(host.start("slurmd", "-D", "-N", host.name, **quiet))
        idle = ("sinfo", "--noheader", "--states=idle", "--partition=low", "--format=%D")
        cluster.wait_for(lambda: _answers(cluster, idle) == "2", 30)
        try:
            yield cluster
        finally:
            for daemon in daemons:
                daemon.kill()
                daemon.wait()


def _answers(cluster: SlurmCluster, arguments: tuple[str, ...]) -> str:
    done = cluster.hosts.hosts[0].run("env", f"SLURM_CONF={cluster.folder}/slurm.conf", *arguments)
    return done.stdout.strip()
