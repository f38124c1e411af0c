"""No publication is torn, missing or there twice, though publishers are killed at random moments.

    python -m tests.benchmarks.publishing [--kills 50] [--seed 1] [--minutes 30]

Three publishers have the same rounds waiting and publish them to one place: a folder, a stand-in for the Hugging Face
hub, and a URL. At random moments one of their processes is killed by SIGKILL. It starts again at once, or with the next
round, so that another one takes its turn. In the end each round must be at the place once, with all its files, as
`diloco-node verify` checks them.

The processes are real. They copy publications that were made before, because loading torch would take most of the time,
and they wait a little at each file and request, so that most kills hit a publication in progress.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from node.config.schema import Config
from node.errors import NodeError
from node.publication.publisher import Publisher
from node.publication.stores import COMPLETE, revision_of
from node.publication.waiting_rounds import SCRATCH, WaitingRounds
from node.worker.publisher import FOLDER, PublisherStart, make_publisher
from tests.benchmarks.figures import Figure, Result
from tests.benchmarks.processes import ROOT, end_all_on_sigterm
from tests.benchmarks.series import Series, with_earlier
from tests.publish_hub import PublishHub

PUBLISHERS = tuple(f"12D3KooWpublisher{number}" for number in range(3))
TURN_S = 1.5
DELAY_S = 0.04
"""A publisher waits so long at each file and request."""
SPAN_S = 0.8
"""A kill comes within this time after a publisher has begun with a round. A publication takes about as long."""
AIMED_RATIO = 0.8
"""Share of the kills that hit the publisher that has begun, if it still works. The others hit any."""
AT_ONCE_RATIO = 0.5
"""Share of the killed publishers that start again at once."""
END_S = 120.0
PREPARED = "prepared"
KINDS = ("folder", "hub", "url")


# The process of a publisher


def serve() -> None:
    """Publish all waiting rounds. The start comes as a line on stdin."""
    start = PublisherStart.model_validate_json(sys.stdin.readline())
    prepared = start.config.node.data_dir.parent / PREPARED
    publisher: Any = make_publisher(start, lambda event: print(event.model_dump_json(), flush=True))
    publisher._write = lambda waiting, target: shutil.copytree(prepared / waiting.revision, target)
    _slow_down()
    assert isinstance(publisher, Publisher)
    publisher.run()


def _slow_down() -> None:
    from fsspec.implementations.local import LocalFileSystem

    def slowly(work: Callable[..., Any]) -> Callable[..., Any]:
        def slow_work(*args: Any, **kwargs: Any) -> Any:
            time.sleep(DELAY_S)
            return work(*args, **kwargs)

        return slow_work

    os.fsync = slowly(os.fsync)
    LocalFileSystem.put_file = slowly(LocalFileSystem.put_file)


# The contest


class NoOuterState:
    """A waiting round needs no outer state, because its publication was made before."""

    def link_outer(self, round: int, target: Path) -> bool:
        target.mkdir(parents=True)
        return True


class Contest:
    """Three publishers at one place."""

    def __init__(self, folder: Path, address: str, environment: Mapping[str, str], rng: random.Random) -> None:
        self._folder, self._address, self._rng = folder, address, rng
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self._rounds = {peer: WaitingRounds(folder / peer / FOLDER) for peer in PUBLISHERS}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._kept_dead: set[str] = set()
        """Publishers that were killed and start with the next round."""
        self.added: list[str] = []
        self.kills = self.kills_at_work = 0
        self.results: Counter[str] = Counter()
        (folder / PREPARED).mkdir(parents=True)

    def add_round(self, template: Path) -> None:
        """Let another round wait at all publishers. `template` is a publication with the round's number as its name."""
        from node.worker.publishing import rank_of  # Not at the top, as the publishers' processes need no torch.

        number = int(template.name)
        digest = json.loads((template / "diloco.json").read_text())["state_digest"]
        revision = revision_of(number, digest)
        shutil.copytree(template, self._folder / PREPARED / revision)
        for peer, rounds in self._rounds.items():
            rounds.add(NoOuterState(), number, digest, rank_of(digest, peer, set(PUBLISHERS)))
        self.added.append(revision)
        self._kept_dead.clear()

    @property
    def _is_done(self) -> bool:
        """Whether no round waits at a publisher that may start."""
        return not any(rounds.all() for peer, rounds in self._rounds.items() if peer not in self._kept_dead)

    @property
    def _at_work(self) -> list[str]:
        """The live publishers that have begun with a round."""
        return [
            peer
            for peer, process in self._processes.items()
            if process.poll() is None and any((self._folder / peer / FOLDER / SCRATCH).glob("*"))
        ]

    def keep_alive(self) -> None:
        """Start the publishers that have something to do."""
        for peer, rounds in self._rounds.items():
            process = self._processes.get(peer)
            if process is not None and process.poll() is not None:
                self._collect(self._processes.pop(peer))
            if peer not in self._processes and peer not in self._kept_dead and rounds.all():
                self._processes[peer] = self._start(peer)

    def _start(self, peer: str) -> subprocess.Popen[str]:
        config = Config.model_validate(
            {
                "node": {"data_dir": str(self._folder / peer)},
                "publish": {"to": self._address, "turn_s": TURN_S},
            }
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.publishing", "--serve"],
            cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(PublisherStart(config=config, peer_id=peer).model_dump_json() + "\n")
        process.stdin.close()
        return process

    def _collect(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            self.results.update(json.loads(line)["result"] for line in lines if line.endswith("\n"))
        process.wait()

    def kill_one(self) -> None:
        """Wait until a publisher has begun and for a random time, and kill one."""
        self._run_until(lambda: bool(self._at_work) or self._is_done)
        time.sleep(self._rng.uniform(0.0, SPAN_S))
        at_work = self._at_work
        live = [peer for peer, process in self._processes.items() if process.poll() is None]
        if not live:
            return
        peer = self._rng.choice(at_work if at_work and self._rng.random() < AIMED_RATIO else live)
        self.kills_at_work += peer in at_work
        process = self._processes.pop(peer)
        process.kill()
        self._collect(process)
        self.kills += 1
        if self._rng.random() >= AT_ONCE_RATIO and len(self._kept_dead) < len(PUBLISHERS) - 1:
            self._kept_dead.add(peer)

    def finish(self, *, with_all: bool = False) -> None:
        """Let the publishers work until no round waits. Those that are kept dead stay so, unless `with_all`."""
        if with_all:
            self._kept_dead.clear()
        self._run_until(lambda: self._is_done)

    def _run_until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + END_S
        while not condition():
            assert time.monotonic() < end_s, f"{self._address}: rounds still wait after {END_S:g} s"
            self.keep_alive()
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            self._collect(process)
        self._processes.clear()


def templates(folder: Path, count: int) -> list[Path]:
    """Publications of the first rounds of a run."""
    from node.training.checkpoint import CheckpointStore
    from tests.unit.test_export import make_trained, run_of

    manifest, _, digest = make_trained(folder / "node", run_of())
    del manifest
    place = folder / "one"
    config = Config.model_validate({"node": {"data_dir": str(folder / "node")}, "publish": {"to": str(place)}})
    WaitingRounds(folder / "node" / FOLDER).add(CheckpointStore(folder / "node" / "checkpoints", 2), 1, digest, 0)
    make_publisher(PublisherStart(config=config, peer_id="maker"), lambda _event: None).run()
    return [
        _renumbered(place / revision_of(1, digest), folder / "rounds" / str(number)) for number in range(1, count + 1)
    ]


def _renumbered(publication: Path, target: Path) -> Path:
    """A copy of a publication for another round, which `verify` accepts."""
    from node.diloco.digest import root_digest

    shutil.copytree(publication, target)
    path = target / "diloco.json"
    record = json.loads(path.read_text())
    record["round"] = int(target.name)
    leaves = [bytes.fromhex(leaf) for leaf in record["leaves"]]
    record["state_digest"] = root_digest(
        record["round"],
        record["tokens"],
        record["parameters"],
        leaves,
        bytes.fromhex(record["credit_root"]),
        record["moments"],
    )
    path.write_text(json.dumps(record))
    return target


# The places


@contextmanager
def place(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, str], Callable[[Path], list[tuple[str, Path]]]]]:
    """Yield the address of a place, the environment of its publishers, and a function that reads what is there.

    That function returns revision and folder of each publication that a reader finds there.
    """
    if kind == "hub":
        with PublishHub(token="hf_bench", delay_s=DELAY_S) as hub:
            yield "hub:ada/tiny", {**hub.environment, "HF_TOKEN": "hf_bench"}, lambda to: _in_hub(hub, to)
    elif kind == "url":
        yield f"local://{folder / 'place'}", {}, lambda _to: _in_url(folder / "place")
    else:
        yield (
            str(folder / "place"),
            {},
            lambda _to: [(path.name, path) for path in (folder / "place").iterdir() if not path.name.startswith(".")],
        )


def _in_hub(hub: PublishHub, to: Path) -> list[tuple[str, Path]]:
    repository = hub.repositories["ada/tiny"]
    found = []
    for number, commit in enumerate(repository.commits[1:]):
        folder = to / str(number)
        for name, data in commit.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        found.append((commit.title if repository.tags.get(commit.title) == commit.id else "no tag", folder))
    return found


def _in_url(root: Path) -> list[tuple[str, Path]]:
    found = []
    for folder in root.iterdir():
        with suppress(FileNotFoundError):
            found.append((folder.name, folder / json.loads((folder / COMPLETE).read_text())["part"]))
    return found


def judge_place(found: list[tuple[str, Path]], added: list[str], cache: Path) -> dict[str, list[str]]:
    """The faults of a place."""
    from node.publication.model_folder import verify_model_folder

    counts = Counter(revision for revision, _ in found)
    torn = []
    for revision, folder in found:
        try:
            record = verify_model_folder(folder, cache)
            is_right = revision_of(record.round, record.state_digest) == revision
        except NodeError:
            is_right = False
        if not is_right:
            torn.append(revision)
    return {
        "torn": torn,
        "missing": [revision for revision in added if revision not in counts],
        "twice": [revision for revision, count in counts.items() if count > 1],
        "unknown": [revision for revision in counts if revision not in added],
    }


def play(folder: Path, kind: str, kills: int, seed: int, minutes: float = 30.0) -> dict[str, Any]:
    """Kill publishers `kills` times at one place, or until `minutes` are over. Returns what happened."""
    rng = random.Random(f"{seed} {kind}")
    began_s = time.monotonic()
    with place(kind, folder) as (address, environment, read):
        made = iter(templates(folder / "made", 2 + kills))
        contest = Contest(folder / "nodes", address, environment, rng)
        try:
            while contest.kills < kills and time.monotonic() - began_s < 60 * minutes:
                contest.add_round(next(made))
                for _ in range(rng.choice((1, 1, 2))):
                    contest.kill_one()
                contest.finish()
            contest.finish(with_all=True)
        finally:
            contest.close()
        found = read(folder / "read")
    faults = judge_place(found, contest.added, folder / "cache")
    return {
        "place": kind,
        "kills": contest.kills,
        "kills_at_work": contest.kills_at_work,
        "rounds": len(contest.added),
        "results": dict(contest.results),
        "seconds": round(time.monotonic() - began_s),
        **faults,
    }


def judge(series: list[Series]) -> Result:
    places = [one for run in series for one in run.samples["places"]]
    rounds = sum(one["rounds"] for one in places)
    faults = sum(len(one[kind]) for one in places for kind in ("torn", "missing", "twice", "unknown"))
    figures = [
        Figure(f"publishing: {name}", "", rounds - bad, rounds, "rounds", low=1.0)
        for name, bad in (
            ("whole", sum(len(one["torn"]) for one in places)),
            ("there", sum(len(one["missing"]) for one in places)),
            ("there once", sum(len(one["twice"]) + len(one["unknown"]) for one in places)),
        )
    ]
    kills, at_work = (sum(one[what] for one in places) for what in ("kills", "kills_at_work"))
    notes = [
        *(run.note for run in series),
        f"{kills} kills of publishers, {at_work} of them in mid-publication; {rounds} rounds, {faults} faults.",
        *(f"{one['place']}: {one['kills']} kills, {one['rounds']} rounds, {one['results']}" for one in places),
    ]
    return Result("publishing", figures, notes, {"series": [asdict(run) for run in series]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="at each place")
    parser.add_argument("--seed", type=int, default=1, help="another seed adds to the stored results")
    parser.add_argument("--minutes", type=float, default=30.0, help="end earlier at each place, after so long")
    parser.add_argument("--places", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    end_all_on_sigterm()
    samples = []
    for kind in options.places:
        with tempfile.TemporaryDirectory(prefix="diloco-bench-") as temporary:
            samples.append(play(Path(temporary), kind, options.kills, options.seed, options.minutes))
            print(json.dumps(samples[-1]), flush=True)
    return judge(with_earlier("publishing", Series(options.seed, {"places": samples}))).conclude()


if __name__ == "__main__":
    raise SystemExit(main())
