"""The systemd unit, and its settings in the guide."""

import re

from common.config import PrefillConfig, RouterConfig, ServerConfig
from common.settings import read
from tests.support.processes.programs import ROOT

UNIT = ROOT / "deploy" / "systemd" / "baton@.service"
GUIDE = ROOT / "docs" / "install.md"


def test_a_process_has_time_to_drain_and_is_restarted():
    entries = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    assert entries["Restart"] == "always"  # a drain ends with exit code 0
    assert float(entries["TimeoutStopSec"]) > ServerConfig(port=1).drain_timeout_s
    assert entries["KillMode"] == "mixed"  # only the process itself may get SIGTERM


def test_the_settings_of_the_guide_are_valid(tmp_path):
    for block in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        (tmp_path / re.search(r"/etc/baton/(.*)", block)[1]).write_text(block)
    node = read(PrefillConfig, "baton serve prefill", [f"--config={tmp_path}/prefill.yaml"])
    assert node.server.tls.mutual
    assert node.transfer.listen_host == node.server.host
    router = read(RouterConfig, "baton serve router", [f"--config={tmp_path}/router.yaml"])
    assert router.tls_to_nodes.mutual
    assert f"{node.server.host}:{node.server.port}" in router.prefill
