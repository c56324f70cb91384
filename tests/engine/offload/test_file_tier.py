"""The offload tier of files below host memory. Prefixes evicted from host memory are read back,
also after a restart. Incomplete or incompatible files are ignored and the prefix is computed
again."""

import contextlib
import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from common.requests.namespace import SHARED, page_names
from engine.offload import page_files
from engine.offload.file_tier import AFTER_FAULT_S
from engine.offload.page_files import FileFault, PageFiles, check_locks
from engine.offload.page_records import HEADER_BYTES, RECORD_BYTES, version_of
from tests.engine.offload.test_host_tier import (
    KINDS,
    QUICK_KINDS,
    SIZE,
    FileTier,
    Talks,
    Watcher,
    ask,
    drawn,
    load,
    talking_rig,
)
from tests.support.engine.engine_rig import Rig


def small(path: Path, **options: object) -> Rig:
    return FileTier(path).rig(**options)


def restarted(rig: Rig, **options: object) -> Rig:
    """Return the next process of the same node."""
    rig.run()
    rig.tiers.close()
    return rig.again(**options)


def file_of(path: Path, name: str = "pages") -> Path:
    return path / "0" / name


def forgotten(rig: Rig, prompt: list[int]) -> None:
    """Use so many other prompts that only files have this one."""
    FileTier(Path()).forget(rig, prompt)
    match = rig.tiers.match(np.array(prompt, np.int32), SHARED)
    assert match is not None and len(match.filed) == len(prompt) // SIZE


def test_a_prefix_is_found_after_a_restart(tmp_path):
    rig = small(tmp_path)
    prompt = drawn(1, 160)
    ask(rig, prompt)
    rig = restarted(rig)
    assert set(page_names(prompt, SIZE, SHARED)) <= set(rig.cache.page_names())
    assert ask(rig, [*prompt, 5]).cached_tokens == 160
    rig.assert_at_rest()


def damage(path: Path, at: int, how: int) -> None:
    """Damage the file by one bit, or truncate it."""
    content = bytearray(path.read_bytes())
    content[at] ^= how
    path.write_bytes(content if how else content[:at])


@pytest.mark.parametrize("running", [True, False])
def test_a_changed_page_is_computed_again(tmp_path, running):
    rig = small(tmp_path)
    prompt = drawn(1, 160)
    ask(rig, prompt)
    slot = written_slots(rig, prompt)[5]
    if running:
        forgotten(rig, prompt)
    damage(file_of(tmp_path), slot * 4 * SIZE + 7, 1)
    rig = rig if running else restarted(rig)
    assert ask(rig, [*prompt, 5]).cached_tokens == 5 * SIZE
    assert rig.tiers.files.faults == {FileFault.DAMAGED: 1}
    rig.assert_at_rest()
    assert ask(rig, [*prompt, 5]).cached_tokens == 160


def written_slots(rig: Rig, prompt: list[int]) -> list[int]:
    keys = rig.cache.keys(np.array(prompt, np.int32))
    return [rig.tiers.files.cache.index.get(key).places[0] for key in keys]


@pytest.mark.parametrize(
    "name, at, how, left",
    [
        ("index", HEADER_BYTES + 5 * RECORD_BYTES + 20, 1, 9),
        ("index", HEADER_BYTES + 5 * RECORD_BYTES + 20, 0, 5),
        ("pages", 5 * 4 * SIZE + 7, 0, 5),
        ("index", 20, 1, 0),
        ("index", 20, 0, 0),
    ],
    ids=["record", "torn record", "torn page", "header", "torn header"],
)
def test_the_rest_of_truncated_or_changed_files_is_found(tmp_path, name, at, how, left):
    rig = small(tmp_path)
    ask(rig, drawn(1, 160), 1)
    assert len(rig.tiers.files.cache.index) == 10
    rig.run()
    rig.tiers.close()
    damage(file_of(tmp_path, name), at, how)
    rig = rig.again()
    assert len(rig.tiers.files.cache.index) == left
    ask(rig, drawn(1, 160))
    rig.assert_at_rest()


def test_a_record_in_the_place_of_another_is_ignored(tmp_path):
    rig = small(tmp_path)
    ask(rig, drawn(1, 160), 1)
    rig.tiers.close()
    index = bytearray(file_of(tmp_path, "index").read_bytes())
    first, second = HEADER_BYTES, HEADER_BYTES + RECORD_BYTES
    index[first:second] = index[second : second + RECORD_BYTES]
    file_of(tmp_path, "index").write_bytes(index)
    assert len(rig.again().tiers.files.cache.index) == 9


def test_the_least_recently_used_prefixes_are_dropped_first(tmp_path):
    rig = small(tmp_path, file_pages=30)
    old, used = drawn(1, 160), drawn(2, 160)
    ask(rig, old, 1)
    ask(rig, used, 1)
    ask(rig, old, 1)
    ask(rig, drawn(3, 160), 1)
    ask(rig, drawn(4, 160), 1)
    rig = restarted(rig)
    assert rig.tiers.files.cache.num_filled == 30
    assert file_of(tmp_path).stat().st_size <= 30 * 4 * SIZE
    assert ask(rig, [*used, 5], 1).cached_tokens == 0
    rig = restarted(rig)
    assert rig.tiers.match(np.array(drawn(4, 160), np.int32), SHARED) is not None


def test_with_a_smaller_limit_as_much_as_fits_is_kept(tmp_path):
    rig = small(tmp_path)
    ask(rig, drawn(1, 160), 1)
    rig = restarted(rig, file_pages=4)
    assert rig.tiers.files.cache.num_filled == 4
    assert file_of(tmp_path).stat().st_size == 4 * 4 * SIZE


def test_a_flush_deletes_the_files_and_frees_the_disk(tmp_path):
    rig = small(tmp_path)
    prompt = drawn(1, 160)
    ask(rig, prompt)
    rig.store.delays.extend([3] * 10)
    ask(rig, drawn(2, 160))
    rig.scheduler.flush_cache()
    rig.check()
    assert not set(rig.cache.page_names())
    rig = restarted(rig)
    assert ask(rig, prompt).cached_tokens == 0
    assert file_of(tmp_path).stat().st_size < 30 * 4 * SIZE


def test_on_a_full_disk_the_existing_capacity_remains(tmp_path, monkeypatch):
    most, write_all = HEADER_BYTES + 20 * RECORD_BYTES, page_files._write_all

    def write(file: int, data: memoryview, at: int) -> None:
        if at + len(data) > most:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file, data, at)

    monkeypatch.setattr(page_files, "_write_all", write)
    rig = small(tmp_path)
    for seed in range(8):
        ask(rig, drawn(seed, 160), 1)
    assert set(rig.tiers.files.faults) == {FileFault.FULL}
    rig.check()
    rig = restarted(rig)
    assert ask(rig, [*drawn(7, 160), 5], 1).cached_tokens == 160
    rig.assert_at_rest()


def test_a_disk_that_fails_ends_no_process_and_is_retried(tmp_path):
    rig = small(tmp_path)
    files, now = rig.store.files, [0.0]
    rig.tiers.files._now = lambda: now[0]
    real, files._pages = files._pages, os.open(file_of(tmp_path), os.O_RDONLY)
    ask(rig, drawn(1, 160), 1)
    assert set(rig.tiers.files.faults) == {FileFault.WRITE}
    num_faults = rig.tiers.files.faults.total()
    ask(rig, drawn(2, 160), 1)
    assert rig.tiers.files.faults.total() == num_faults
    os.close(files._pages)
    files._pages, now[0] = real, AFTER_FAULT_S
    ask(rig, drawn(3, 160), 1)
    assert rig.tiers.files.num_written >= 10
    rig.assert_at_rest()


def test_watchers_are_notified_of_a_changed_page(tmp_path):
    rig = small(tmp_path)
    prompt = drawn(1, 160)
    ask(rig, prompt)
    slot = written_slots(rig, prompt)[5]
    told = Watcher(rig)
    forgotten(rig, prompt)
    damage(file_of(tmp_path), slot * 4 * SIZE + 7, 1)
    name = page_names(prompt, SIZE, SHARED)[5]
    told.check()
    assert name in told.names
    load(rig, prompt)
    told.check()
    assert name not in told.names


def talk(seed: int, path: Path, windows: tuple[int | None, ...], state_pages: int) -> Rig:
    """Run conversations whose turns are served by one process after the other."""
    rng = random.Random(seed)
    rig = talking_rig(rng, windows, state_pages, (40, 90), (60, 400), disk_dir=path)
    said = None
    for _ in range(2):
        rig.copier.delays.extend(rng.choices((0, 0, 1, 4), k=300))
        rig.store.delays.extend(rng.choices((0, 0, 1, 6), k=300))
        talks = Talks(rig, rng, left=25)
        talks.talks = talks.talks if said is None else said
        talks.run()
        said, last, rig = talks.talks, rig, restarted(rig)
    return last


@pytest.mark.long
@pytest.mark.parametrize("windows, state_pages", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_conversations_continue_correctly_from_any_tier(seed, tmp_path, windows, state_pages):
    talk(seed, tmp_path, windows, state_pages)


@pytest.mark.parametrize("windows, state_pages", QUICK_KINDS)
def test_conversations_continue_from_files(tmp_path, windows, state_pages):
    rigs = [talk(seed, tmp_path / str(seed), windows, state_pages) for seed in (50, 51)]
    assert sum(rig.tiers.file_tokens for rig in rigs) > 200


MEMORY = np.zeros((4, 64), np.uint8)


def opened(path: Path, version: bytes = b"v" * 16) -> PageFiles:
    return PageFiles(path, MEMORY, version=version, num_bytes=1 << 16)


def test_each_node_has_its_own_directory(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.directory != second.directory
    first.close()
    third = opened(tmp_path)
    assert third.directory == first.directory
    second.close()
    third.close()


def test_a_node_prefers_the_directory_of_a_compatible_one(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path, version=b"w" * 16)
    place = second.directory
    first.close()
    second.close()
    again = opened(tmp_path, version=b"w" * 16)
    assert again.directory == place
    again.close()


def test_other_users_cannot_read_the_files(tmp_path):
    files = opened(tmp_path / "new")
    assert [p.stat().st_mode & 0o777 for p in (tmp_path / "new", files.directory)] == [0o700] * 2
    assert {p.stat().st_mode & 0o777 for p in files.directory.iterdir()} == {0o600}
    files.close()


def left(path: Path, kind: str, elsewhere: Path) -> None:
    """Leave a file under a name that is opened next, as another user of a shared directory
    might."""
    path.unlink(missing_ok=True)
    match kind:
        case "symbolic link":
            path.symlink_to(elsewhere)
        case "hard links":
            path.hardlink_to(elsewhere)
        case "regular":
            os.mkfifo(path)


@pytest.mark.parametrize("kind", ["symbolic link", "hard links", "regular"])
@pytest.mark.parametrize("name", ["pages", "index"])
def test_a_file_prepared_by_another_user_is_rejected_and_not_changed(tmp_path, name, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious" * 100)
    elsewhere.chmod(0o640)
    (tmp_path / "tier" / "0").mkdir(parents=True)
    left(tmp_path / "tier" / "0" / name, kind, elsewhere)
    with pytest.raises(ConfigError, match=rf"engine\.offload\.disk_dir: .*{kind}.*/0/{name}"):
        opened(tmp_path / "tier")
    assert elsewhere.read_bytes() == b"precious" * 100
    assert elsewhere.stat().st_mode & 0o777 == 0o640


def test_a_directory_that_is_a_symbolic_link_is_rejected_and_not_changed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "0").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="symbolic link"):
        opened(tmp_path / "tier")
    assert elsewhere.stat().st_mode & 0o777 == 0o755 and not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["0", "0/index", "0/pages"])
def test_files_of_another_user_are_rejected(tmp_path, name, monkeypatch):
    opened(tmp_path).close()
    real, other = os.fstat, os.stat(tmp_path / name).st_ino

    def fstat(descriptor):
        found = real(descriptor)
        return (
            os.stat_result([*found[:4], os.geteuid() + 1, *found[5:]])
            if found.st_ino == other
            else found
        )

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(ConfigError, match=rf"belongs to user {os.geteuid() + 1}, .*{name}"):
        opened(tmp_path)


def test_a_directory_writable_for_all_users_is_rejected_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.offload.page_files.MOST_NODES", 1)
    files = opened(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.offload\.disk_dir: 1 nodes already use"):
        opened(tmp_path)
    files.close()


def test_impossible_directories_are_rejected_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"engine\.offload\.disk_dir: .*file"):
        opened(tmp_path / "file")


def test_versions_differ_in_every_field():
    told = {"dtype": "float32", "page_size": "16"}
    versions = {
        version_of(told, b""),
        version_of(told, b"w"),
        version_of(told | {"dtype": "bfloat16"}, b""),
        version_of(told | {"more": ""}, b""),
        version_of({"dtype": "float32page_size", "": "16"}, b""),
    }
    assert len(versions) == 5


LOCAL = "27 1 254:0 / / rw,relatime - ext4 /dev/root rw\n"


@pytest.mark.parametrize(
    ("kind", "options", "refused"),
    [
        ("nfs4", "rw,vers=4.2,local_lock=none", ""),
        ("nfs", "rw,vers=3,nolock,local_lock=all", "nfs mounted with local_lock=all"),
        ("nfs4", "rw,local_lock=flock", "nfs4 mounted with local_lock=flock"),
        ("cifs", "rw,nobrl", "cifs mounted with nobrl"),
        ("lustre", "rw,localflock", "lustre mounted with localflock"),
        ("fuse.remote", "rw", ""),
    ],
)
def test_mounts_that_hide_locks_from_other_hosts_are_rejected(
    tmp_path, caplog, kind, options, refused
):
    shared = tmp_path / "on shared"
    (shared / "pages").mkdir(parents=True)
    at = str(shared.resolve()).replace(" ", "\\040")
    mounts = f"{LOCAL}30 27 0:50 / {at} rw,relatime shared:1 - {kind} server:/x {options}\n"
    check_locks(tmp_path, mounts)  # beside it
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        check_locks(shared / "pages", mounts)
    assert ("may not work across hosts" in caplog.text) == kind.startswith("fuse")
