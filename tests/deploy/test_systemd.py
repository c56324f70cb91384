"""The unit for systemd, and the settings that the guide puts beside it."""

import re

from common.config import PrefillConfig, ServerConfig
from common.settings import read
from tests.support.programs import ROOT

UNIT = ROOT / "deploy" / "systemd" / "baton@.service"
GUIDE = ROOT / "docs" / "install.md"


def test_a_drained_process_has_time_and_is_started_again():
    entries = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    assert entries["Restart"] == "always"  # a drain ends with exit code 0
    assert float(entries["TimeoutStopSec"]) > ServerConfig(port=1).drain_timeout_s
    assert entries["KillMode"] == "mixed"  # only the process itself may get SIGTERM


def test_the_settings_of_the_guide_are_valid(tmp_path):
    (block,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    file = tmp_path / "prefill.yaml"
    file.write_text(block)
    config = read(PrefillConfig, "baton serve prefill", [f"--config={file}"])
    assert config.server.tls.mutual
    assert config.transfer.listen_host == config.server.host
