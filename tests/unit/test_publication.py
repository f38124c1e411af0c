"""Publications: their addresses, places, turns, and the process that publishes; and what `run --from` takes of them."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.cli import main
from node.config.amendments import rewound
from node.config.manifest import Manifest, RunConfig
from node.config.publish_address import parse_publish_address
from node.config.schema import Config, PublishConfig
from node.errors import ConfigError, DamagedState, MachineError, UsageError
from node.host.disk_quota import LEAST_BYTES
from node.publication.model_card import CurvePoint, curve_drawing, read_curve, with_point, write_curve
from node.publication.model_folder import STATE_FILE, read_publication, verify_model_folder
from node.publication.publisher import Publisher, PublishEvent
from node.publication.stores import (
    COMPLETE,
    RECORD_FILE,
    CheckSize,
    Store,
    Superseded,
    open_store,
    revision_of,
    round_of,
)
from node.publication.waiting_rounds import MOST_WAITING, TURN_FILE, WaitingRounds
from node.status import PublicationInfo
from node.swarm.chain.chain import Tip
from node.swarm.governance.charter import Charter
from node.swarm.identity import new_identity
from node.swarm.member import MemberSnapshot
from node.swarm.messages import accept
from node.training.checkpoint import CheckpointStore, read_outer
from node.worker.continued_run import continued_run
from node.worker.duty_process import DutyProcess
from node.worker.publisher import FOLDER, PublisherStart, make_publisher, publish_command, read_token
from node.worker.publishing import MOST_RANK, Publishing, known_publication, rank_of
from node.worker_protocol import FoundFrom
from tests.api.daemon import alive, wait_for
from tests.publish_hub import PublishHub, Repository
from tests.unit.data_folder import make_data_folder
from tests.unit.fake_duty import FakeProcess
from tests.unit.swarm_data import committed
from tests.unit.test_amendments import FOUNDER, accepted, amendment
from tests.unit.test_export import make_trained, run_of

TOKEN = "hf_secret_of_this_test"
PEER = "12D3KooWexampleexample"
ONE, TWO = revision_of(3, "ab" * 32), revision_of(7, "cd" * 32)


# Addresses


@pytest.mark.parametrize(
    ("text", "kind", "place"),
    [
        ("hub:ada/tiny", "hub", "ada/tiny"),
        ("/srv/models", "folder", "/srv/models"),
        ("file:///srv/models", "folder", "/srv/models"),
        ("file://localhost/srv/my%20models", "folder", "/srv/my models"),
        ("models", "folder", str(Path("models").absolute())),
        ("s3://bucket/models/", "url", "s3://bucket/models"),
        ("memory://models", "url", "memory://models"),
    ],
)
def test_an_address_is_a_folder_a_model_of_the_hub_or_a_url(text: str, kind: str, place: str) -> None:
    address = parse_publish_address(text)
    assert (address.kind, address.place, address.revision) == (kind, place, "")
    assert parse_publish_address(str(address)) == address


def test_an_address_to_read_may_name_a_revision() -> None:
    address = parse_publish_address(f"hub:ada/tiny@{ONE}", may_have_revision=True)
    assert (address.place, address.revision) == ("ada/tiny", ONE)
    assert parse_publish_address(str(address), may_have_revision=True) == address


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hub:tiny", "write hub:OWNER/NAME"),
        ("hub:ada/../x", "write hub:OWNER/NAME"),
        ("hub:ada/tiny@main", "which the node chooses by itself: write hub:ada/tiny"),
        ("gopher://models", "fsspec knows no scheme 'gopher': write a folder"),
        ("s3://key:secret@bucket/x", "put them into the environment"),
        ("a\nb", "control characters: write a folder"),
    ],
)
def test_a_bad_address_is_one_sentence_with_the_remedy(
    text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", f"--publish.to={text}"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") <= 1 + text.count("\n")


@pytest.mark.parametrize("words", [["--join", "diloco1-x"], ["--any"]])
def test_from_excludes_other_ways_into_a_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--from", "models", *words]) == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_from_with_a_bad_address_ends_with_the_code_of_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--from", "hub:tiny", "--data-dir", str(tmp_path / "new")]) == 2
    assert "--from hub:tiny is not allowed: 'hub:tiny' is not a model of the hub" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# The draw


def test_publishers_take_turns_in_an_order_that_the_head_determines() -> None:
    peers = {f"peer {number}" for number in range(8)}
    firsts = set()
    for number in range(40):
        head = f"{number:064x}"
        ranks = {peer: rank_of(head, peer, peers) for peer in peers}
        assert sorted(ranks.values()) == list(range(8))
        firsts |= {peer for peer, rank in ranks.items() if rank == 0}
    assert len(firsts) > 4


def test_a_node_that_knows_no_other_publisher_is_the_first() -> None:
    assert rank_of("ab" * 32, "me", set()) == 0


# Waiting rounds


class Outer:
    """Checkpoints of which any round exists, unless it is in `gone`."""

    def __init__(self, *gone: int) -> None:
        self._gone = gone

    def link_outer(self, round: int, target: Path) -> bool:
        if round in self._gone:
            return False
        target.mkdir(parents=True)
        (target / "outer.safetensors").write_text(str(round))
        return True


def test_rounds_wait_in_their_order_until_they_are_removed(tmp_path: Path) -> None:
    rounds = WaitingRounds(tmp_path / FOLDER, lambda: 50.0)
    assert rounds.all() == []
    assert rounds.add(Outer(), 7, "cd" * 32, 1) and rounds.add(Outer(), 3, "ab" * 32, 0)
    assert not rounds.add(Outer(), 3, "ab" * 32, 0), "it waits already"
    assert not rounds.add(Outer(9), 9, "ef" * 32, 0), "its checkpoint is gone"
    again = WaitingRounds(tmp_path / FOLDER)
    assert [(one.round, one.revision, one.turn.rank) for one in again.all()] == [(3, ONE, 0), (7, TWO, 1)]
    again.remove(again.all()[0])
    assert [one.round for one in rounds.all()] == [7]
    rounds.clear()
    assert again.all() == [] and list((tmp_path / FOLDER).iterdir()) == []


def test_only_the_newest_rounds_wait(tmp_path: Path) -> None:
    rounds = WaitingRounds(tmp_path)
    for number in range(MOST_WAITING + 3):
        rounds.add(Outer(), number, f"{number:064x}", 0)
    assert [one.round for one in rounds.all()] == list(range(3, MOST_WAITING + 3))


def test_rounds_that_the_disk_refused_leave_nothing_behind(tmp_path: Path) -> None:
    rounds, full = WaitingRounds(tmp_path), OSError(errno.ENOSPC, "No space left on device")

    class FullDisk(Outer):
        def link_outer(self, round: int, target: Path) -> bool:
            super().link_outer(round, target)
            raise full

    for number in range(3):
        with pytest.raises(OSError, match="No space"):
            rounds.add(FullDisk(), number, f"{number:064x}", 0)
    assert len(list(tmp_path.iterdir())) == 1
    rounds.add(Outer(), 7, "ab" * 32, 0)
    assert [one.round for one in rounds.all()] == [7] and len(list(tmp_path.iterdir())) == 1
    (rounds.all()[0].folder / TURN_FILE).unlink()  # A process was killed while it removed the round.
    rounds.add(Outer(), 8, "ab" * 32, 0)
    assert [one.round for one in rounds.all()] == [8] and len(list(tmp_path.iterdir())) == 1


def test_the_turn_comes_after_those_of_the_members_before(tmp_path: Path) -> None:
    rounds = WaitingRounds(tmp_path, lambda: 1000.0)
    rounds.add(Outer(), 3, "ab" * 32, 2)
    (waiting,) = rounds.all()
    waits = [waiting.waits_s(10.0, now_s) for now_s in (1000.0, 1015.0, 1020.0, 5000.0)]
    assert waits == [20.0, 5.0, 0.0, 0.0]
    assert waiting.waits_s(10.0, -1e9) == 20.0, "a clock that was set back adds no time"


def test_a_checkpoint_is_kept_for_its_publication_after_the_store_has_removed_it(tmp_path: Path) -> None:
    _, anchor, digest = make_trained(tmp_path, run_of())
    store = CheckpointStore(tmp_path / "checkpoints", 1)
    rounds = WaitingRounds(tmp_path / FOLDER)
    assert rounds.add(store, 1, digest, 0)
    newest = store.newest(repair=False)
    assert newest is not None
    store.save(replace(newest, round=2, state_digest="ef" * 32))
    assert store.rounds() == [2]
    kept = read_outer(rounds.all()[0].folder)
    assert kept.state_digest == digest and kept.anchor.equal(anchor) and kept.momentum.numel() == anchor.numel()
    (rounds.all()[0].folder / "outer.safetensors").write_bytes(b"damaged")
    with pytest.raises(MachineError, match="is damaged"):
        read_outer(rounds.all()[0].folder)


# Places


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PublishHub]:
    with PublishHub(token=TOKEN) as server:
        for name, value in {**server.environment, "HF_HOME": str(tmp_path / "home")}.items():
            monkeypatch.setenv(name, value)
        # The library has read the variable when it was imported, maybe by an earlier test.
        endpoint = server.environment["HF_ENDPOINT"]
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture(params=["folder", "url", "hub"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "hub":
        request.getfixturevalue("hub")
        return "hub:ada/tiny"
    return f"local://{tmp_path / 'place'}" if request.param == "url" else str(tmp_path / "place")


def store_at(address: str, part: str = "mine") -> Store:
    return open_store(parse_publish_address(address, may_have_revision=True), token=TOKEN, part=part)


def any_size(_: int) -> None:
    """Any publication fits."""


def record_text(text: str) -> str:
    return json.dumps({"text": text, "files": {"README.md": "its hash"}})


def make_folder(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    (path / RECORD_FILE).write_text(record_text(text))
    (path / "README.md").write_text(f"# {text}\n")
    return path


def test_a_place_holds_a_revision_once(address: str, tmp_path: Path) -> None:
    store = store_at(address)
    assert not store.has(ONE)
    assert store.put(ONE, make_folder(tmp_path / "one", "one"))
    assert store.has(ONE) and not store.has(TWO)
    assert not store_at(address, "other").put(ONE, make_folder(tmp_path / "other", "other"))
    assert (store.fetch(tmp_path / "got", any_size) / RECORD_FILE).read_text() == record_text("one")


def test_the_newest_whole_revision_is_fetched(address: str, tmp_path: Path) -> None:
    store = store_at(address)
    for revision, text in ((ONE, "one"), (TWO, "two")):
        store.put(revision, make_folder(tmp_path / text, text))
    assert (store_at(address).fetch(tmp_path / "got", any_size) / RECORD_FILE).read_text() == record_text("two")
    one = f"{address}@{ONE}" if address.startswith("hub:") else f"{address}/{ONE}"
    assert (store_at(one).fetch(tmp_path / "old", any_size) / RECORD_FILE).read_text() == record_text("one")


def test_a_place_without_a_publication_says_so(address: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, MachineError)) as caught:
        store_at(address).fetch(tmp_path / "got", any_size)
    assert ":" in str(caught.value) and caught.value.exit_code in (2, 3)


def test_a_url_without_its_marker_holds_nothing(tmp_path: Path) -> None:
    store = store_at(f"local://{tmp_path / 'place'}")
    store.put(ONE, make_folder(tmp_path / "one", "one"))
    marker = tmp_path / "place" / ONE / COMPLETE
    whole = marker.read_text()
    for torn in ("", whole[:5], "{}", '{"part": "../x"}', "[]"):
        marker.write_text(torn)
        assert not store.has(ONE), torn
    with pytest.raises(UsageError, match="no whole publication"):
        store.fetch(tmp_path / "got", any_size)
    assert store.put(ONE, tmp_path / "one") and marker.read_text() == whole


def test_two_publishers_at_one_url_do_not_mix_their_files(tmp_path: Path) -> None:
    first, second = (store_at(f"local://{tmp_path / 'place'}", part) for part in ("first", "second"))
    make_folder(tmp_path / "place" / ONE / "first", "torn")  # The first was killed before its marker.
    assert second.put(ONE, make_folder(tmp_path / "two", "two"))
    assert not first.put(ONE, make_folder(tmp_path / "one", "one"))
    got = first.fetch(tmp_path / "got", any_size)
    assert {path.name: path.read_text() for path in got.iterdir()} == {
        RECORD_FILE: record_text("two"),
        "README.md": "# two\n",
    }


def test_two_publishers_of_one_name_keep_the_part_that_counts(tmp_path: Path) -> None:
    """Both have looked before either was done."""
    first: Any = store_at(f"local://{tmp_path / 'place'}")
    second = store_at(f"local://{tmp_path / 'place'}")
    complete_part = first._complete_part
    looks: list[str | None] = []

    def look(fs: Any, folder: str) -> str | None:
        looks.append(complete_part(fs, folder))
        if len(looks) == 1:
            second.put(ONE, tmp_path / "one")
        return looks[-1]

    make_folder(tmp_path / "one", "one")
    first._complete_part = look
    assert not first.put(ONE, tmp_path / "one")
    assert looks == [None, "mine"]
    assert (second.fetch(tmp_path / "got", any_size) / RECORD_FILE).read_text() == record_text("one")


def test_nothing_is_downloaded_without_room(address: str, tmp_path: Path) -> None:
    """A folder is read where it is."""
    store_at(address).put(ONE, make_folder(tmp_path / "one", "one"))
    sizes: list[int] = []

    def refuse(size_bytes: int) -> None:
        sizes.append(size_bytes)
        raise MachineError("no room")

    if "://" in address or address.startswith("hub:"):
        with pytest.raises(MachineError, match="no room"):
            store_at(address).fetch(tmp_path / "got", refuse)
        assert sizes == [len(record_text("one")) + len("# one\n")]
        assert not any(path.is_file() for path in (tmp_path / "got").rglob("*"))
    else:
        assert store_at(address).fetch(tmp_path / "got", refuse) == tmp_path / "place" / ONE


def test_a_repository_with_other_files_is_refused_and_keeps_them(hub: PublishHub, tmp_path: Path) -> None:
    hub.repositories["ada/tiny"] = repository = Repository()
    repository.add("thesis", {".gitattributes": b"", "README.md": b"", "thesis.pdf": b"years"})
    with pytest.raises(UsageError, match="name an empty or a new repository"):
        store_at("hub:ada/tiny").put(ONE, make_folder(tmp_path / "one", "one"))
    assert [commit.title for commit in repository.commits] == ["thesis"]
    repository.add("only the files of a new repository", {".gitattributes": b"", "README.md": b""})
    assert store_at("hub:ada/tiny").put(ONE, tmp_path / "one")


def test_a_folder_that_cannot_be_read_is_a_failure_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read every folder, so the refusal is made here."""

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(MachineError, match="make the folder readable"):
        store_at(str(tmp_path / "place")).has(ONE)


def test_the_hub_gets_one_commit_and_a_tag_for_each_revision(hub: PublishHub, tmp_path: Path) -> None:
    store = store_at("hub:ada/tiny")
    store.put(ONE, make_folder(tmp_path / "one", "one"))
    (tmp_path / "one" / "README.md").unlink()
    store.put(TWO, tmp_path / "one")
    repository = hub.repositories["ada/tiny"]
    assert [commit.title for commit in repository.commits] == ["initial commit", ONE, TWO]
    assert set(repository.tags) == {ONE, TWO}
    assert set(repository.commits[-1].files) == {".gitattributes", RECORD_FILE}, "files of the old revision are left"


def test_own_files_of_the_owner_stay_on_the_hub_and_are_not_fetched(hub: PublishHub, tmp_path: Path) -> None:
    store = store_at("hub:ada/tiny")
    store.put(ONE, make_folder(tmp_path / "one", "one"))
    repository = hub.repositories["ada/tiny"]
    own = {"LICENSE": b"MIT", "model-q4.gguf": b"small", "results/eval.md": b"good"}
    repository.add("own files", repository.commits[-1].files | own)
    store.put(TWO, make_folder(tmp_path / "two", "two"))
    assert own.items() <= repository.commits[-1].files.items()
    got = store.fetch(tmp_path / "got", any_size)
    assert {path.name for path in got.iterdir()} == {RECORD_FILE, "README.md"}


def test_a_commit_whose_publisher_died_before_the_tag_is_tagged_and_not_repeated(
    hub: PublishHub, tmp_path: Path
) -> None:
    store = store_at("hub:ada/tiny")
    store.put(ONE, make_folder(tmp_path / "one", "one"))
    repository = hub.repositories["ada/tiny"]
    repository.tags.clear()
    assert not store_at("hub:ada/tiny").put(ONE, tmp_path / "one")
    assert len(repository.commits) == 2 and repository.tags == {ONE: repository.commits[-1].id}


def test_a_commit_between_the_look_and_the_own_commit_is_noticed(hub: PublishHub, tmp_path: Path) -> None:
    """Two publishers are at the same revision, and both have seen that it is not there."""
    store: Any = store_at("hub:ada/tiny")
    store.put(ONE, make_folder(tmp_path / "one", "one"))
    looks: list[bool] = []
    has = store._has

    def has_and_then_another_is_faster(revision: str) -> bool:
        looks.append(has(revision))
        if len(looks) == 1:
            hub.repositories["ada/tiny"].add(TWO, {RECORD_FILE: b"theirs"})
        return looks[-1]

    store._has = has_and_then_another_is_faster
    assert not store.put(TWO, make_folder(tmp_path / "two", "two"))
    assert looks == [False, True]
    titles = [commit.title for commit in hub.repositories["ada/tiny"].commits]
    assert titles.count(TWO) == 1


def test_a_round_older_than_the_newest_on_the_hub_is_superseded(hub: PublishHub, tmp_path: Path) -> None:
    store = store_at("hub:ada/tiny")
    store.put(TWO, make_folder(tmp_path / "two", "two"))
    with pytest.raises(Superseded):
        store.put(ONE, make_folder(tmp_path / "one", "one"))
    assert (store.fetch(tmp_path / "got", any_size) / RECORD_FILE).read_text() == record_text("two")


def test_a_token_that_may_not_write_is_named_by_its_place_and_not_shown(hub: PublishHub, tmp_path: Path) -> None:
    store = open_store(parse_publish_address("hub:ada/tiny"), token="hf_wrong_secret")
    with pytest.raises(MachineError, match=r"HF_TOKEN or publish\.token_file") as caught:
        store.put(ONE, make_folder(tmp_path / "one", "one"))
    assert caught.value.exit_code == 3 and "hf_wrong_secret" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_a_failure_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "place").write_text("a file")
    with pytest.raises(MachineError, match="make the folder readable and writable"):
        store_at(str(tmp_path / "place")).put(ONE, make_folder(tmp_path / "one", "one"))


def test_a_full_disk_is_named_as_the_cause(tmp_path: Path) -> None:
    """A limit for the size of a file stands for the end of the disk. It holds for a whole process."""
    big = make_folder(tmp_path / "one", "one")
    (big / "model.safetensors").write_bytes(bytes(2_000_000))
    lines = (
        "import resource, signal, sys; from pathlib import Path",
        "from node.config.publish_address import parse_publish_address; from node.publication.stores import open_store",
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))",
        "open_store(parse_publish_address(sys.argv[1])).put(sys.argv[2], Path(sys.argv[3]))",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(tmp_path / "place"), ONE, str(big)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.splitlines()[-1]
    assert "File too large" in last and "free disk" in last and "[(" not in last
    assert list((tmp_path / "place").glob(f"{ONE}*")) == []


def test_a_url_whose_package_is_missing_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MachineError, match=r"needs a Python package that is not installed .*s3fs"):
        store_at("s3://bucket/models").has(ONE)


# The publisher


class FakeStore:
    """A place that other publishers may fill, and that may fail."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.problems: list[Exception] = []
        self.puts: list[str] = []

    def has(self, revision: str) -> bool:
        if self.problems:
            raise self.problems.pop(0)
        return revision in self.there

    def put(self, revision: str, folder: Path) -> bool:
        self.puts.append(revision)
        is_new = revision not in self.there
        self.there.add(revision)
        return is_new

    def fetch(self, target: Path, check_size: CheckSize) -> Path:
        raise NotImplementedError


class Scene:
    """A publisher whose time passes only while it sleeps."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1000.0
        self.store = FakeStore()
        self.rounds = WaitingRounds(folder, lambda: self.now_s)
        self.events: list[PublishEvent] = []
        self.written: list[int] = []
        self.on_sleep: dict[float, Any] = {}
        self.publisher = Publisher(
            self.rounds, self.store, self._write, folder / ".scratch", turn_s=100.0,
            tell=self.events.append, sleep=self._sleep, clock=lambda: self.now_s,
        )  # fmt: skip

    def _write(self, waiting: Any, target: Path) -> None:
        self.written.append(waiting.round)
        target.mkdir(parents=True)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for at_s in [at_s for at_s in self.on_sleep if at_s <= self.now_s]:
            self.on_sleep.pop(at_s)()

    @property
    def results(self) -> list[tuple[str, int]]:
        return [(event.result, event.round) for event in self.events]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_all_waiting_rounds_are_published_oldest_first(scene: Scene) -> None:
    scene.rounds.add(Outer(), 7, "cd" * 32, 0)
    scene.rounds.add(Outer(), 3, "ab" * 32, 0)
    scene.publisher.run()
    assert scene.results == [("published", 3), ("published", 7)] and scene.store.puts == [ONE, TWO]
    assert scene.rounds.all() == [] and scene.now_s == 1000.0


def test_the_next_in_turn_publishes_what_the_first_has_not(scene: Scene) -> None:
    scene.rounds.add(Outer(), 3, "ab" * 32, 2)
    scene.publisher.run()
    assert scene.results == [("published", 3)] and scene.now_s == 1200.0


def test_a_clock_that_was_set_back_adds_no_time_to_a_turn(scene: Scene) -> None:
    scene.rounds.add(Outer(), 3, "ab" * 32, 1)
    scene.now_s = -7200.0
    scene.publisher.run()
    assert scene.results == [("published", 3)] and scene.now_s == -7100.0


def test_the_next_in_turn_writes_nothing_if_the_first_has_published(scene: Scene) -> None:
    scene.rounds.add(Outer(), 3, "ab" * 32, 2)
    scene.on_sleep[1060.0] = lambda: scene.store.there.add(ONE)
    scene.publisher.run()
    assert scene.results == [("found", 3)] and scene.written == [] and scene.now_s == 1060.0


def test_a_place_that_fails_is_tried_again_ever_more_rarely(scene: Scene) -> None:
    scene.rounds.add(Outer(), 3, "ab" * 32, 0)
    scene.store.problems = [MachineError("It does not work: repair it.", code="no_place")] * 9
    scene.publisher.run()
    assert scene.results == [("failed", 3)] * 9 + [("published", 3)]
    assert [event.retry_s for event in scene.events[:9]] == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert scene.events[0].reason == "It does not work: repair it."


def test_what_cannot_be_written_is_given_up_and_the_next_round_follows(scene: Scene) -> None:
    scene.rounds.add(Outer(), 3, "ab" * 32, 0)
    scene.rounds.add(Outer(), 7, "cd" * 32, 0)
    scene.store.problems = [DamagedState("The outer state is damaged: remove it.")]
    scene.publisher.run()
    assert scene.results == [("given_up", 3), ("published", 7)] and scene.rounds.all() == []


def test_a_round_that_waits_for_too_long_is_given_up(scene: Scene) -> None:
    scene.rounds.add(Outer(), 3, "ab" * 32, 3)
    scene.on_sleep[1050.0] = scene.rounds.clear
    scene.publisher.run()
    assert scene.results == [("given_up", 3)] and scene.store.puts == []


def test_a_round_that_the_node_gives_up_while_it_is_read_is_not_called_damaged(scene: Scene) -> None:
    scene.rounds.add(Outer(), 3, "ab" * 32, 0)

    def write(_waiting: Any, _target: Path) -> None:
        scene.rounds.clear()
        raise DamagedState("The outer state is damaged: remove it.")

    scene.publisher._write = write
    scene.publisher.run()
    assert scene.results == [("given_up", 3)] and "left its chain" in scene.events[0].reason


def test_a_superseded_round_is_forgotten(scene: Scene) -> None:
    scene.rounds.add(Outer(), 3, "ab" * 32, 0)
    scene.store.problems = [Superseded()]
    scene.publisher.run()
    assert scene.results == [("superseded", 3)] and scene.rounds.all() == []


# A whole publication


def publish(folder: Path, to: str, digest: str) -> list[PublishEvent]:
    config = Config.model_validate({"node": {"data_dir": str(folder)}, "publish": {"to": to, "every_rounds": 2}})
    WaitingRounds(folder / FOLDER).add(CheckpointStore(folder / "checkpoints", 2), 1, digest, 0)
    events: list[PublishEvent] = []
    make_publisher(PublisherStart(config=config, peer_id=PEER), events.append).run()
    return events


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A publication in a folder."""
    _, _, digest = make_trained(tmp_path / "node", run_of())
    write_curve(
        tmp_path / "node" / FOLDER / "curve.json", [CurvePoint(0, 200, 4.0, None), CurvePoint(9, 900, 1.0, 1.0)]
    )
    assert [event.result for event in publish(tmp_path / "node", str(tmp_path / "place"), digest)] == ["published"]
    return tmp_path / "place" / revision_of(1, digest)


def test_a_publication_has_the_whole_outer_state(published: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "node" / "checkpoints", 2)
    checkpoint = store.newest(repair=False)
    assert checkpoint is not None
    found = read_publication(published, tmp_path / "cache")
    assert found.record.state_digest == checkpoint.state_digest and round_of(published.name) == 1
    assert found.state.anchor.equal(checkpoint.anchor) and found.state.momentum.equal(checkpoint.momentum)
    assert (found.state.round, found.state.tokens, found.state.credit.tokens) == (1, 400, 400)
    card = (published / "README.md").read_text(encoding="utf-8")
    assert "`diloco-node run --publish.to place --publish.every_rounds 2`" in card
    assert "Rounds 0 to 0" in card and "curve.svg" in card
    assert main(["verify", str(published)]) == 0


@pytest.mark.parametrize("name", [STATE_FILE, "model.safetensors", "manifest.json", "README.md", "curve.svg"])
def test_a_changed_publication_is_refused(published: Path, tmp_path: Path, name: str) -> None:
    data = bytearray((published / name).read_bytes())
    data[-3] ^= 1
    (published / name).write_bytes(data)
    with pytest.raises(UsageError, match=r"has changed|is damaged"):
        read_publication(published, tmp_path / "cache")


def test_another_momentum_is_refused_though_the_list_of_files_agrees(published: Path, tmp_path: Path) -> None:
    from node.publication.model_folder import hash_of

    data = bytearray((published / STATE_FILE).read_bytes())
    data[-200] ^= 1
    (published / STATE_FILE).write_bytes(data)
    record = json.loads((published / RECORD_FILE).read_bytes())
    record["files"][STATE_FILE] = hash_of(published / STATE_FILE)
    (published / RECORD_FILE).write_text(json.dumps(record))
    with pytest.raises(UsageError, match=f"{STATE_FILE} is"):
        verify_model_folder(published, tmp_path / "cache")


def test_an_exported_model_is_no_publication(tmp_path: Path) -> None:
    make_trained(tmp_path / "node", run_of())
    assert main(["export", str(tmp_path / "out"), "--data-dir", str(tmp_path / "node")]) == 0
    with pytest.raises(UsageError, match=r"--run\.model\.start"):
        read_publication(tmp_path / "out", tmp_path / "cache")


def continued(published: Path, own: RunConfig, *keys: str, address: str = "/srv/models") -> RunConfig:
    publication = read_publication(published, published.parent / "cache")
    return continued_run(publication, own, FoundFrom(address=address, own_keys=keys))


def test_a_continued_run_has_the_settings_of_the_publication_and_those_of_its_founder(published: Path) -> None:
    own = RunConfig.model_validate({"name": "mine", "inner": {"lr": 0.5, "batch_size": 77}})
    run = continued(published, own, "run.name", "run.inner.lr")
    before = read_publication(published, published.parent / "cache").manifest.run
    assert (run.name, run.inner.lr) == ("mine", 0.5) and run.inner.batch_size == before.inner.batch_size != 77
    assert run.model.start == published.name
    hub_run = continued(published, own, address="hub:ada/tiny")
    assert hub_run.model.start == f"hub:ada/tiny@{published.name}" and hub_run.name == before.name


def test_a_publication_has_the_amendments_and_a_run_founded_from_it_their_settings(tmp_path: Path) -> None:
    manifest, amendments, digest = make_amended(tmp_path / "node")
    publish(tmp_path / "node", str(tmp_path / "place"), digest)
    place = tmp_path / "place" / revision_of(1, digest)
    found = read_publication(place, tmp_path / "cache")
    assert found.record.state_digest == digest and found.state.amendments == amendments
    assert continued(place, RunConfig()).inner.lr == 0.125 != found.manifest.run.inner.lr, "round 2 follows"
    card = (place / "README.md").read_text()
    assert '"lr": 0.125' in card and f"400 of {manifest.run.total_tokens + 30:,}" in card
    run = continued(place, RunConfig(total_tokens=375), "run.total_tokens")
    assert run.total_tokens == 375, "the schedules have 370 of 400 tokens behind them"
    with pytest.raises(ConfigError, match="complete, with 370 of 370 tokens"):
        continued(place, RunConfig(total_tokens=370), "run.total_tokens")
    record = json.loads((place / RECORD_FILE).read_bytes())
    (place / RECORD_FILE).write_text(json.dumps(record | {"amendments": ""}))
    with pytest.raises(UsageError, match="contradicts itself"):
        verify_model_folder(place, tmp_path / "cache")


def make_amended(folder: Path) -> tuple[Manifest, bytes, str]:
    """A data folder after round 1 of a run that has gone back by 30 tokens. Returns manifest, amendments and digest."""
    run = run_of().model_copy(update={"governance": "founder", "governance_keys": (FOUNDER.peer_id,)})
    manifest = make_data_folder(folder, run)
    more: Any = {"run": manifest.hash}
    amendments = accepted(
        amendment(1, 2, changes={"inner.lr": 0.125}, **more),
        amendment(2, 9, changes={"inner.lr": 0.5}, **more),
        amendment(3, 4, "rollback", to_round=0, state="ef" * 32, **more),
        charter=Charter(manifest.hash, run),
    )
    _, _, digest = make_trained(folder, run, rewound(amendments, 3, 30))
    return manifest, rewound(amendments, 3, 30), digest


def test_a_publication_with_forged_amendments_is_not_valid(tmp_path: Path) -> None:
    amendments = accepted(amendment(1, 2, changes={"inner.lr": 0.125}))
    _, _, digest = make_trained(tmp_path / "node", run_of(), amendments)
    publish(tmp_path / "node", str(tmp_path / "place"), digest)
    with pytest.raises(UsageError, match="its amendments are damaged"):
        verify_model_folder(tmp_path / "place" / revision_of(1, digest), tmp_path / "cache")


@pytest.mark.parametrize(
    ("key", "tables", "words"),
    [
        ("run.model.hidden_size", {"model": {"hidden_size": 64}}, "another model than run.model.hidden_size"),
        ("run.outer.optimizer", {"outer": {"optimizer": "adam"}}, "choose nesterov"),
        ("run.total_tokens", {"total_tokens": 400}, "--run.total_tokens to a larger number"),
        ("run.model.start", {"model": {"start": "x"}}, "set one of them"),
        ("run.sync.fragments", {"sync": {"fragments": 60}}, "do not fit those of the publication|"),
    ],
)
def test_settings_that_do_not_fit_the_publication_are_refused(
    published: Path, key: str, tables: dict[str, Any], words: str
) -> None:
    own = RunConfig.model_validate(tables)
    if words.endswith("|"):
        assert continued(published, own, key).sync.fragments == 60  # It is not used by blocking rounds.
        return
    with pytest.raises(ConfigError, match=words):
        continued(published, own, key)


# The command


def test_publish_publishes_the_newest_round_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, digest = make_trained(tmp_path / "node", run_of())
    words = ["publish", str(tmp_path / "place"), "--data-dir", str(tmp_path / "node")]
    assert main(words) == 0
    revision = revision_of(1, digest)
    assert f"Round 1 is published at {tmp_path / 'place'}, as {revision}." in capsys.readouterr().out
    assert verify_model_folder(tmp_path / "place" / revision, tmp_path / "cache").round == 1
    assert main(words) == 0
    assert "is at" in capsys.readouterr().out
    assert list((tmp_path / "node" / "cache").iterdir()) == [], "the scratch folder is left"


def test_publish_writes_no_copy_for_which_the_disk_limit_leaves_no_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trained(tmp_path / "node", run_of())
    (tmp_path / "node" / "large").write_bytes(bytes(LEAST_BYTES))
    words = ["publish", str(tmp_path / "place"), "--data-dir", str(tmp_path / "node")]
    assert main([*words, f"--limits.disk_gb={LEAST_BYTES / 1e9}"]) == 3
    assert "limits.disk_gb allows" in capsys.readouterr().err
    assert main(words) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_publish_that_gets_a_signal_leaves_no_copy_behind(tmp_path: Path, number: signal.Signals) -> None:
    make_trained(tmp_path / "node", run_of())
    program = """
import sys, time, node.cli, node.commands.publish as publish
def write(manifest, checkpoint, folder, **_):
    folder.mkdir()
    print("writes", flush=True)
    for _ in range(600):  # Python handles a signal that comes just before a long sleep only after it.
        time.sleep(0.1)
publish.write_model_folder = write
sys.exit(node.cli.main())
"""
    words = ["publish", str(tmp_path / "place"), "--data-dir", str(tmp_path / "node")]
    with subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writes\n"
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert list((tmp_path / "node" / "cache").iterdir()) == []


def test_publish_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path / "place")
    for words, problem in (
        (["publish"], "write `diloco-node publish ADDRESS`"),
        (["publish", "hub:tiny"], "write hub:OWNER/NAME"),
        (["publish", place], "belongs to no run yet"),
        (["publish", place, "--publish.every_rounds", "0"], "greater than or equal to 1"),
    ):
        assert main([*words, "--data-dir", str(tmp_path / "node")]) == 2
        said = capsys.readouterr().err
        assert problem in said and said.count("\n") == 1, said
    make_data_folder(tmp_path / "node", run_of())
    assert main(["publish", place, "--data-dir", str(tmp_path / "node")]) == 2
    assert "No checkpoint has a committed round yet" in capsys.readouterr().err


# Token and card


def test_the_token_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    config = Config.model_validate({"publish": {"token_file": str(tmp_path / "token")}})
    assert read_token(config) == TOKEN and read_token(Config()) is None
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UsageError, match="is empty: write the hub's token into it"):
        read_token(config)
    (tmp_path / "token").unlink()
    with pytest.raises(UsageError, match="cannot be read: name a file"):
        read_token(config)


def test_the_command_on_the_card_names_no_folder_of_this_machine() -> None:
    config = Config.model_validate({"publish": {"to": "/home/ada/my models"}})
    assert publish_command(config) == "diloco-node run --publish.to 'my models' --publish.every_rounds 100"


def test_the_curve_forgets_rounds_of_a_chain_that_the_node_has_left(tmp_path: Path) -> None:
    curve = [CurvePoint(number, 100 * number, 4.0 - number / 10, None) for number in range(5)]
    changed = with_point(curve, CurvePoint(3, 290, 2.0, 2.5))
    assert [(point.round, point.tokens) for point in changed] == [(0, 0), (1, 100), (2, 200), (3, 290)]
    write_curve(tmp_path / FOLDER / "curve.json", changed)
    assert read_curve(tmp_path / FOLDER / "curve.json", until_round=9) == changed
    (tmp_path / FOLDER / "curve.json").write_text("[[1]]")
    assert read_curve(tmp_path / FOLDER / "curve.json", until_round=9) == []
    drawn = curve_drawing(changed)
    assert drawn.startswith("<svg") and drawn.count("<polyline") == 2 and "290 tokens" in drawn


def test_a_long_curve_is_thinned_and_keeps_its_newest_point() -> None:
    curve: Any = []
    for number in range(2000):
        curve = with_point(curve, CurvePoint(number, number, 1.0, None))
    assert curve[-1].round == 1999 and 200 < len(curve) <= 512


# The process beside the worker


def test_a_publication_whose_files_were_removed_meanwhile_is_not_published(tmp_path: Path) -> None:
    """It would count as published for ever, and at the hub it would remove the publication before."""
    (tmp_path / "round-3").mkdir()
    store = open_store(parse_publish_address("memory://removed"), token="", part="a")
    with pytest.raises(MachineError, match="removed while they were published: try again"):
        store.put("round-3", tmp_path / "round-3")
    assert not store.has("round-3")


class Lines:
    """What a duty's process has written, and why it failed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failures: list[str] = []
        self.heard = threading.Event()

    def on_line(self, line: str) -> None:
        self.lines.append(line.strip())
        self.heard.set()

    def on_failure(self, reason: str) -> None:
        self.failures.append(reason)
        self.heard.set()

    def wait(self) -> None:
        assert self.heard.wait(30), "nothing was heard"
        self.heard.clear()


ECHO = "import sys; print('got', sys.stdin.readline().strip(), flush=True)"


def test_the_process_starts_when_a_round_waits_and_gets_its_order(tmp_path: Path) -> None:
    rounds, lines = WaitingRounds(tmp_path / FOLDER), Lines()
    process = DutyProcess(
        ECHO, lambda: "the order", rounds, lines.on_line, lines.on_failure, command=(sys.executable, "-c"), retry_s=60
    )
    assert not lines.heard.wait(0.2), "it started without a round"
    rounds.add(Outer(), 3, "ab" * 32, 0)
    process.wake()
    lines.wait()
    process.close()
    assert lines.lines == ["got the order"] and lines.failures == []


def test_a_process_that_fails_says_why_and_starts_again(tmp_path: Path) -> None:
    rounds, lines = WaitingRounds(tmp_path / FOLDER), Lines()
    rounds.add(Outer(), 3, "ab" * 32, 0)
    process = DutyProcess(
        "raise SystemExit('the disk is full')", str, rounds, lines.on_line, lines.on_failure,
        command=(sys.executable, "-c"), retry_s=0.05,
    )  # fmt: skip
    lines.wait()
    lines.wait()
    process.close()
    assert lines.failures[:2] == ["the disk is full"] * 2


def test_a_process_that_is_silent_for_too_long_is_killed_and_started_again(tmp_path: Path) -> None:
    rounds, lines = WaitingRounds(tmp_path / FOLDER), Lines()
    rounds.add(Outer(), 3, "ab" * 32, 0)
    code = "import sys, time; print('begun', flush=True); sys.stdout.close(); time.sleep(100)"
    process = DutyProcess(
        code, str, rounds, lines.on_line, lines.on_failure, command=(sys.executable, "-c"), retry_s=0.05, limit_s=1.8
    )
    for _ in range(4):
        lines.wait()
    process.close()
    assert lines.failures[:2] == ["it has not ended within 0.0005 h"] * 2


@pytest.mark.parametrize(
    "code",
    [
        "import os, time; print(os.getpid(), flush=True); time.sleep(100)",
        "import subprocess; print(subprocess.Popen(['sleep', '100']).pid, flush=True)",
    ],
    ids=["itself", "a process that it has left behind, which holds its output open"],
)
def test_close_kills_a_process_that_hangs(tmp_path: Path, code: str) -> None:
    rounds, lines = WaitingRounds(tmp_path / FOLDER), Lines()
    rounds.add(Outer(), 3, "ab" * 32, 0)
    process = DutyProcess(code, str, rounds, lines.on_line, lines.on_failure, command=(sys.executable, "-c"))
    lines.wait()
    began_s = time.monotonic()
    process.close()
    assert time.monotonic() - began_s < 4 and lines.failures == []
    wait_for(lambda: not alive(int(lines.lines[0])), 10)  # SIGKILL may take effect after `kill` returns.
    assert [one.round for one in rounds.all()] == [3]


# The worker's part


class FakeReporter:
    def __init__(self) -> None:
        self.publication = PublicationInfo()
        self.notices: list[str] = []

    def notice(self, code: str, text: str) -> None:
        assert code == "publish"
        self.notices.append(text)


class FakeCounters:
    def __init__(self) -> None:
        self.totals: Any = type("Totals", (), {"publications": {}})()


def is_last(tip: Tip) -> bool:
    return tip.state.tokens >= 10**9


def tip_of(round_: int, tokens: int) -> Any:
    return SimpleNamespace(
        proof="x",
        head="ab" * 32,
        round=round_,
        digest="",
        state=SimpleNamespace(tokens=tokens, amendments=b"", credit=()),
    )


@pytest.fixture
def publishing(tmp_path: Path) -> tuple[Publishing, FakeReporter, Any]:
    make_trained(tmp_path / "node", run_of())
    config = Config.model_validate(
        {"node": {"data_dir": str(tmp_path / "node")}, "publish": {"to": str(tmp_path / "place"), "every_rounds": 5}}
    )
    reporter: Any = FakeReporter()
    counters: Any = FakeCounters()
    store = CheckpointStore(tmp_path / "node" / "checkpoints", 2)
    made = Publishing(
        config, store, reporter, counters, lambda: MemberSnapshot(peer_id=PEER), is_last, command=FakeProcess
    )
    return made, reporter, counters


def test_every_kth_round_and_the_last_one_are_due(publishing: tuple[Publishing, FakeReporter, Any]) -> None:
    made, *_ = publishing
    assert [number for number in range(-1, 20) if made.is_due(tip_of(number, 100))] == [4, 9, 14, 19]
    assert made.is_due(tip_of(7, 10**9)) and not made.is_due(tip_of(-1, 10**9))


def test_what_the_process_says_is_reported(publishing: tuple[Publishing, FakeReporter, Any]) -> None:
    made, reporter, counters = publishing
    process: Any = made._process
    event = PublishEvent(result="failed", round=4, revision=ONE, reason="It does not work: repair it.")
    process.on_line(event.model_dump_json())
    made.attend()
    assert reporter.notices == ["Round 4 is not published yet: It does not work: repair it."]
    assert reporter.publication.problem == reporter.notices[0]
    process.on_line(event.model_copy(update={"result": "published"}).model_dump_json())
    made.attend()
    assert (reporter.publication.round, reporter.publication.revision, reporter.publication.problem) == (4, ONE, "")
    assert reporter.notices[-1] == "" and counters.totals.publications == {"failed": 1, "published": 1}
    reason = "this node has left its chain, or had no room for it."
    given_up = PublishEvent(result="given_up", round=5, revision=ONE, reason=reason)
    process.on_line(given_up.model_dump_json())
    made.attend()
    assert reporter.notices[-1] == f"Round 5 is not published by this node: {reason}"
    assert reporter.publication.problem == reporter.notices[-1] and reporter.publication.round == 4
    process.on_failure("the process has no memory")
    process.on_line("no JSON")
    made.attend()
    assert "the process has no memory" in reporter.notices[-2] and "no JSON" in reporter.notices[-1]
    known = known_publication(made._config)
    assert (known.round, known.revision, known.problem) == (4, ONE, ""), "a restart knows it"
    elsewhere = made._config.model_copy(update={"publish": PublishConfig(to="/another/place")})
    assert known_publication(elsewhere).round == -1


def test_a_saved_round_that_is_due_waits_for_its_turn(publishing: tuple[Publishing, FakeReporter, Any]) -> None:
    made, reporter, _ = publishing
    process: Any = made._process
    digest = CheckpointStore(made._folder.parent / "checkpoints", 2).newest(repair=False).state_digest  # type: ignore[union-attr]
    tip = tip_of(1, 10**9)
    tip.digest = digest
    assert made.is_over
    made.saved(tip)
    made.saved(tip)
    assert process.wakes == 1 and [one.round for one in made._rounds.all()] == [1] and not made.is_over
    made.attend()
    assert reporter.publication.waiting == 1
    made.chain_left()
    made.attend()
    assert made.is_over and reporter.publication.waiting == 0
    tip.head, tip.proof = "cd" * 32, None
    made.saved(tip)
    assert made._rounds.all() == [], "the state that a run was founded from is published already"


@pytest.mark.parametrize("name", ["adapter_config.json", "chat_template.jinja", "modeling_evil.py", "more/model.bin"])
def test_a_publication_with_an_added_file_is_not_valid(published: Path, tmp_path: Path, name: str) -> None:
    (published / ".gitattributes").write_text("x")
    verify_model_folder(published, tmp_path / "cache")
    (published / name).parent.mkdir(exist_ok=True)
    (published / name).write_text("{}")
    with pytest.raises(UsageError, match=f"{name.split('/')[0]} was added"):
        verify_model_folder(published, tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nothing", ""),
        ("text", "is forged"),
        ("signature", "is forged"),
        ("run", "is of another round"),
        ("round", "is of another round"),
        ("head", "is of another round"),
        ("votes", "lacks the votes of more than half"),
    ],
)
def test_a_publication_with_a_forged_certificate_is_not_valid(
    published: Path, tmp_path: Path, change: str, message: str
) -> None:
    from node.publication.model_folder import CERTIFICATE_FILE, hash_of

    members = sorted((new_identity() for _ in range(4)), key=lambda one: one.peer_id)
    record = json.loads((published / RECORD_FILE).read_bytes())
    run = "ab" * 32 if change == "run" else record["manifest_hash"]
    proof = committed("cd" * 32, record["round"] + (change == "round"), members, run=run)
    outcome = proof.outcome
    if change == "text":
        outcome = outcome.model_copy(update={"text": '{"anything":"at all"}'})
    if change == "signature":
        outcome = outcome.model_copy(update={"signature": "00" * 64})
    voters = members[: 2 if change == "votes" else 3]
    votes = {one.peer_id: accept(one, outcome.hash, 0) for one in voters}
    proof = proof.model_copy(update={"outcome": outcome, "accepts": votes, "hashes": ""})
    (published / CERTIFICATE_FILE).write_text(proof.model_dump_json())
    record["files"][CERTIFICATE_FILE] = hash_of(published / CERTIFICATE_FILE)
    record["head"] = "ab" * 32 if change == "head" else outcome.hash
    (published / RECORD_FILE).write_text(json.dumps(record))
    if not message:
        assert verify_model_folder(published, tmp_path / "cache").confirmed_head == outcome.hash
        return
    with pytest.raises(UsageError, match=message):
        verify_model_folder(published, tmp_path / "cache")


def test_false_publishers_delay_a_round_by_a_few_turns_only() -> None:
    strangers = {new_identity().peer_id for _ in range(100)}
    assert rank_of("ab" * 32, "me", strangers) <= MOST_RANK
