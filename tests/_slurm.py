"""A real Slurm of one node on this machine, for the tests that are marked ``slurm``. Needs root and a Debian or Ubuntu."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PACKAGES = ("slurm-wlm", "munge")
_CONFIG = """\
ClusterName=keel
SlurmctldHost=localhost
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
JobRequeue=1
NodeName=localhost CPUs={cpus} RealMemory=20000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def install() -> None:
    """Install Slurm and munge where they are missing."""
    if shutil.which("slurmctld") and shutil.which("munged"):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=True, env=environment)
    subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *_PACKAGES], check=True, env=environment)


@contextmanager
def one_node_cluster(folder: Path) -> Iterator[Path]:
    """A cluster of this machine, its files in a scratch folder, its daemons ended afterwards.

    Yields:
        The configuration file, which SLURM_CONF has to name for every command.
    """
    install()
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(folder=folder, cpus=os.cpu_count()), encoding="utf-8")
    environment = {**os.environ, "SLURM_CONF": str(config)}
    munge_pid = _start_munge(folder)
    try:
        subprocess.run(["slurmctld"], check=True, env=environment)
        subprocess.run(["slurmd", "-N", "localhost"], check=True, env=environment)
        _wait_for_node(environment)
        yield config
    finally:
        subprocess.run(["scancel", "--me", "--full"], check=False, env=environment)
        for pid_file in ("slurmd.pid", "slurmctld.pid"):
            _end(folder / pid_file)
        if munge_pid is not None:
            _end(munge_pid)


def _start_munge(folder: Path) -> Path | None:
    """Start munged unless one answers already; its pid file."""
    if subprocess.run(["munge", "-n"], check=False, capture_output=True).returncode == 0:
        return None
    owner = pwd.getpwnam("munge")
    place = Path("/run/munge")
    place.mkdir(parents=True, exist_ok=True)
    os.chown(place, owner.pw_uid, owner.pw_gid)
    pid = place / "munged.pid"
    command = f"munged --pid-file={pid} --log-file={place}/munged.log"
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", command], check=True)
    return pid


def _wait_for_node(environment: dict[str, str]) -> None:
    state = ""
    for _ in range(120):
        answer = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], capture_output=True, text=True, check=False, env=environment
        )
        state = answer.stdout.strip() or answer.stderr.strip()
        if state == "idle":
            return
        time.sleep(0.25)
    raise RuntimeError(f"the node is '{state}' after 30 seconds, not idle")


def _end(pid_file: Path) -> None:
    """End a daemon by its own pid file, and wait until it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):
        pid = int(pid_file.read_text(encoding="ascii"))
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
