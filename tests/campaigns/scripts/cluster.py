"""A Slurm cluster of this one machine, on loopback, in a temporary folder; for tests."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import PATIENCE, wait_until

DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")

# linuxproc: Slurm signals every process of a task, the harder case for scripts that save on a
# signal; and it needs no control groups.
CONFIGURATION = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Programs of Slurm and munge that this machine lacks."""
    return [name for name in (*DAEMONS, *CLIENTS) if _find(name) is None]


def _find(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(12000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"found fewer than {count} free ports between 12000 and 32000")


class Cluster:
    """Runs Slurm's commands against the cluster in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str, **environment: str) -> str:
        """The output of one of Slurm's commands; an AssertionError shows what it said instead."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What ``scontrol show job`` says, by name."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        """The daemons' last words."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in paths)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Start the daemons in ``folder``, which must be short: a socket's path has 108 characters.

    Raises:
        AssertionError: the node does not get ready; the text has the daemons' logs.
    """
    host = socket.gethostname().split(".")[0]
    folder.chmod(0o700)  # munged trusts no folder that others could write to
    for name in ("state", "spool"):
        (folder / name).mkdir()
    controller, daemon = _free_ports(2)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            host=host,
            controller=controller,
            daemon=daemon,
            user=getpass.getuser(),
            folder=folder,
            cores=os.cpu_count(),
        )
    )
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    cluster = Cluster(folder)
    started: list[subprocess.Popen[bytes]] = []
    try:
        munge = [
            f"--{name}={folder}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")
        ]
        munge += ["--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
        started.append(_start(cluster, "munged", munge))
        socket_is_there = (folder / "munge.socket").exists
        wait_until(socket_is_there, lambda: f"munged is not ready\n{cluster.logs()}", every=0.1)
        started.append(_start(cluster, "slurmctld", ["-D", "-i"]))
        started.append(_start(cluster, "slurmd", ["-D"]))
        idle = functools.partial(_is_idle, cluster)
        wait_until(idle, lambda: f"the node is not ready\n{cluster.logs()}", every=0.1)
        yield cluster
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(started):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(cluster: Cluster, name: str, options: list[str]) -> subprocess.Popen[bytes]:
    program = _find(name)
    assert program is not None
    with (cluster.folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [program, *options],
            env={**os.environ, **cluster.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cluster.folder,
        )


def _is_idle(cluster: Cluster) -> bool:
    try:
        return "idle" in cluster.call("sinfo", "--noheader", "--format=%t")
    except AssertionError:
        return False
