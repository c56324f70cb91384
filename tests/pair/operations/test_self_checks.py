"""An idle node checks its page accounting, and ends when a page is missing."""

import pytest

from common.errors import EngineFault
from engine.kv_cache.pages import PageHolder
from node.control import engine_control
from tests.pair.rig import PairRig


# Seen failing without the call of `self_check` in the desk, and with a role without a self-check.
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_idle_node_detects_a_leaked_page(known, monkeypatch, role):
    monkeypatch.setattr(engine_control, "SELF_CHECK_INTERVAL_S", 0.0)
    with PairRig(known.loaded) as rig:
        (node,) = getattr(rig, role)
        rig.until(lambda: not node.step(), "the node is idle")
        node.role.idle()
        leaked = node.engine.pages.allocate(1, PageHolder.REQUEST)
        with pytest.raises(EngineFault, match="REQUEST"):
            node.role.idle()
        node.engine.pages.drop(leaked, PageHolder.REQUEST)


# Seen failing without the check of `busy`: each pause of a running node checks every page.
def test_a_node_with_requests_does_not_check_its_pages(known, monkeypatch):
    monkeypatch.setattr(engine_control, "SELF_CHECK_INTERVAL_S", 0.0)
    with PairRig(known.loaded) as rig:
        rig.faults[0].freeze()
        rig.ask(range(40))
        rig.until(lambda: rig.decode[0].queue("transfer") == 1, "its pages are being read")
        leaked = rig.decode[0].engine.pages.allocate(1, PageHolder.REQUEST)
        rig.decode[0].role.idle()
        rig.decode[0].engine.pages.drop(leaked, PageHolder.REQUEST)
        rig.faults[0].release()
