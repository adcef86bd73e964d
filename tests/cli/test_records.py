"""Records: round trip, survive a restart and a crash in mid-write, tolerate people's editors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ullage_cli.errors import InputError
from ullage_cli.records import RecordFolder
from ullage_operator.model import Remediation


def opened(folder: Path) -> RecordFolder:
    records = RecordFolder(folder)
    records.open()
    return records


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rename(path: Path, name: str) -> None:
    path.rename(path.with_name(name))


async def test_round_trip_over_a_restart(tmp_path: Path, effective: Remediation) -> None:
    await opened(tmp_path / "r").save(effective)
    assert list(await opened(tmp_path / "r").load()) == [effective]
    written = yaml.safe_load((tmp_path / "r" / "demo-evict-1.yaml").read_text())
    assert (written["kind"], written["status"]["blocksFreed"]) == ("Remediation", 42)


async def test_saving_again_replaces(
    tmp_path: Path, make_record: Callable[..., Remediation], effective: Remediation
) -> None:
    records = opened(tmp_path)
    await records.save(make_record())
    assert (await records.load())[0].status.phase == "Running"
    await records.save(effective)
    assert [record.status.phase for record in await records.load()] == ["Succeeded"]


async def test_deleting_is_final_and_repeatable(tmp_path: Path, effective: Remediation) -> None:
    records = opened(tmp_path)
    await records.save(effective)
    await records.delete("demo-evict-1")
    await records.delete("demo-evict-1")
    assert list(await records.load()) == []
    assert names(tmp_path) == []


class PowerCut(BaseException):
    """Not an Exception: nothing in the store may handle it."""


@pytest.mark.parametrize("when", ["fsync", "replace"])
async def test_a_crash_in_mid_write_leaves_the_old_record_whole(
    tmp_path: Path,
    make_record: Callable[..., Remediation],
    effective: Remediation,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    await opened(tmp_path).save(make_record())

    def cut(*_: object) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(*(os, "fsync", cut) if when == "fsync" else (Path, "replace", cut))
        with pytest.raises(PowerCut):
            await opened(tmp_path).save(effective)
    assert len(names(tmp_path)) == 2  # the record and the unfinished one
    assert [record.status.phase for record in await opened(tmp_path).load()] == ["Running"]
    assert names(tmp_path) == ["demo-evict-1.yaml"]


async def test_a_person_approves_by_editing_the_file(tmp_path: Path, make_record: Callable[..., Remediation]) -> None:
    records = opened(tmp_path)
    await records.save(make_record(phase="Proposed"))
    file = tmp_path / "demo-evict-1.yaml"
    document = yaml.safe_load(file.read_text())
    document["spec"] |= {"approved": True, "approvedBy": "kim"}
    file.write_text(yaml.safe_dump(document))
    (record,) = await records.load()
    assert (record.spec.approved, record.spec.approved_by) == (True, "kim")


async def test_a_half_edited_file_keeps_its_last_good_state(tmp_path: Path, effective: Remediation) -> None:
    records = opened(tmp_path)
    await records.save(effective)
    file = tmp_path / "demo-evict-1.yaml"
    good = file.read_text()
    file.write_text(good[:100])
    assert list(await records.load()) == [effective]
    assert list(records.problems) == ["demo-evict-1.yaml"]
    file.write_text(good)
    assert list(await records.load()) == [effective]
    assert records.problems == {}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not a Remediation record"),
        ("", "is not a Remediation record"),
        ("kind: Remediation\n", "metadata: Field required"),
        ("\x00", "is not a Remediation record"),
    ],
)
def test_an_unreadable_record_stops_the_start(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "x.yaml").write_text(content)
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"--state-dir: {tmp_path / 'x.yaml'}: is not a Remediation record")
    assert complaint in message
    assert message.endswith("repair or remove the file")
    assert "\n" not in message


async def test_a_file_under_a_wrong_name_is_named(tmp_path: Path, effective: Remediation) -> None:
    await opened(tmp_path).save(effective)
    rename(tmp_path / "demo-evict-1.yaml", "other.yaml")
    with pytest.raises(InputError, match="does not match the file's name"):
        opened(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--state-dir: cannot use"):
        opened(tmp_path / "file" / "records")
