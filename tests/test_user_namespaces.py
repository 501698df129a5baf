"""Network namespaces of a user who is not root, where the system lets everybody have them (user_namespaces(7))."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.launching import LOCKSTEP, lasting_directory, needs_namespaces, skip_or_fail

# Whom Linux calls nobody, and who owns nothing.
_USER = 65534
# A container may allow user namespaces, and forbid what hosts need in them.
_NEEDED = "mount -t tmpfs tmpfs /run && ip link add br0 type bridge && ip netns add n0 && ip netns exec n0 true"


@needs_namespaces
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv runs a command as another user")
def test_two_hosts_of_a_user_who_is_not_root() -> None:
    with lasting_directory() as home:  # nobody else may enter those of pytest
        os.chown(home, _USER, _USER)
        own = dict.fromkeys(("HOME", "TMPDIR", "LOCKSTEP_CACHE"), str(home))
        environment = {**os.environ, **own, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}

        def as_user(*command: str) -> subprocess.CompletedProcess[str]:
            words = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", *command]
            return subprocess.run(words, env=environment, cwd=home, capture_output=True, text=True, timeout=300)

        tried = as_user("unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _NEEDED)
        lacks = f"user {_USER} may not make hosts in a user namespace: {tried.stderr.strip()}"
        skip_or_fail(lacks if tried.returncode else None, "REQUIRE_USER_NAMESPACES")
        tried = as_user(sys.executable, "-c", "import launch.cli")
        lacks = f"user {_USER} may not read Lockstep and its packages: {tried.stderr.strip()[-200:]}"
        skip_or_fail(lacks if tried.returncode else None, "REQUIRE_USER_NAMESPACES")

        run = home / "run"
        options = ("--task", "token-tagging", "--max-steps", "4", "--threads-per-rank", "1", "--output-dir", str(run))
        done = as_user(str(LOCKSTEP), "ddp", "--engine", "netns", "--num-nodes", "2", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        record = json.loads((run / "node0" / "record.json").read_text())
        assert {rank["hostname"] for rank in record["ranks"]} == {"n0", "n1"}
        assert len({rank["weights_sha256"] for rank in record["ranks"]}) == 1
        assert (run / "node0" / "model.safetensors").stat().st_uid == _USER
