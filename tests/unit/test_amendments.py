"""Amendments: what may be changed, from which round on, and by whom."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import pytest

from node.config.amendments import (
    CHANGEABLE,
    MOST_AMENDMENTS,
    MOST_BYTES,
    MOST_DEPTH,
    Amendment,
    AmendmentError,
    SignedAmendment,
    changed,
    decode_list,
    rewound,
    rewound_tokens,
    schedule_of,
)
from node.config.loader import known_keys
from node.config.manifest import RunConfig
from node.errors import PeerError
from node.status import AMENDMENT_REFUSALS
from node.swarm.governance.charter import AmendmentRefused, Charter, add_signature, sign_amendment
from node.swarm.identity import Identity, new_identity
from node.swarm.messages import Join, is_feasible, is_kept

RUN = "ab" * 32
FOUNDER, OTHER = new_identity(), new_identity()
SETTINGS = RunConfig(governance="founder", governance_keys=(FOUNDER.peer_id,))


def amendment(number: int = 1, from_round: int = 10, action: str = "amend", **more: Any) -> Amendment:
    changes = {"inner.lr": 2e-4} if action == "amend" else {}
    content = {"run": RUN, "number": number, "from_round": from_round, "action": action, "changes": changes} | more
    return Amendment.model_validate(content)


def accepted(*amendments: Amendment, charter: Charter | None = None) -> bytes:
    """The list of a run that has accepted these, one a round."""
    charter, known = charter or Charter(RUN, SETTINGS), b""
    for round_, one in enumerate(amendments):
        known = charter.accept(known, sign_amendment(FOUNDER, one), round_)
    return known


def refusal(charter: Charter, known: bytes, signed: SignedAmendment, round_: int = 0) -> str:
    with pytest.raises(AmendmentRefused) as refused:
        charter.accept(known, signed, round_)
    return refused.value.refusal


def test_every_changeable_key_is_a_setting_of_the_run() -> None:
    assert [key for key in CHANGEABLE if f"run.{key}" not in known_keys()] == []
    assert not {key for key in CHANGEABLE if key.startswith(("model.", "governance", "data.tokenizer"))}


def test_settings_change_in_the_order_of_their_rounds() -> None:
    known = accepted(
        amendment(1, 20, changes={"inner.lr": 0.1}),
        amendment(2, 10, changes={"inner.lr": 0.2, "total_tokens": 7}),
        amendment(3, 20, changes={"round.inner_steps": 5}),
    )
    schedule = schedule_of(SETTINGS, known)
    rates = [schedule.at(round_).run.inner.lr for round_ in (0, 9, 10, 19, 20, 1000)]
    assert rates == [SETTINGS.inner.lr, SETTINGS.inner.lr, 0.2, 0.2, 0.1, 0.1]
    assert [schedule.at(round_).run.round.inner_steps for round_ in (19, 20)] == [500, 5]
    assert schedule.at(10).run.total_tokens == 7


@pytest.mark.parametrize("number", [10**400, -(10**400), 2**63, 1e300])
def test_a_number_too_large_for_exact_arithmetic_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="a number is too large"):
        amendment(changes={"inner.lr": number})
    text = amendment().canonical().replace("0.0002", json.dumps(number))
    listed = json.dumps(
        [{"rewound_tokens": None, "round": 0, "signed": {"signatures": {}, "text": text}}],
        sort_keys=True, separators=(",", ":"),
    ).encode()  # fmt: skip
    with pytest.raises(AmendmentError):
        decode_list(listed)
    with pytest.raises(PeerError):
        Charter(RUN, RunConfig()).check_list(listed)


def test_a_value_of_any_depth_is_read_or_refused() -> None:
    """The stack may be almost full when a text is read, so each depth up to far beyond the limit of Python matters."""
    canonical = amendment(changes={"data.weights": [0]}).canonical()
    for depth in range(1, 1100):
        text = canonical.replace("[0]", "[" * depth + "0" + "]" * depth)
        if depth <= MOST_DEPTH:
            assert SignedAmendment(text=text, signatures={}).amendment.changes
        else:
            with pytest.raises(AmendmentError):
                _ = SignedAmendment(text=text, signatures={}).amendment


def test_the_last_numbers_are_for_resume_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.swarm.governance.charter.MOST_AMENDMENTS", 4)
    charter, known = Charter(RUN, SETTINGS), accepted(amendment(1, 10), amendment(2, 11, "pause"))
    assert refusal(charter, known, sign_amendment(FOUNDER, amendment(3, 12)), 2) == "oversized"
    for number, action in ((3, "resume"), (4, "stop")):
        known = charter.accept(known, sign_amendment(FOUNDER, amendment(number, 12, action)), number)
    assert refusal(charter, known, sign_amendment(FOUNDER, amendment(5, 12, "resume")), 9) == "oversized"


def test_a_rollback_at_the_limit_of_the_list_can_still_take_place(monkeypatch: pytest.MonkeyPatch) -> None:
    back = sign_amendment(FOUNDER, amendment(1, 20, "rollback", to_round=0, state="ef" * 32))
    size = len(Charter(RUN, SETTINGS).accept(b"", back, 5))
    for limit in range(size - 1, size + 40):
        monkeypatch.setattr("node.swarm.governance.charter.MOST_LIST_BYTES", limit)
        monkeypatch.setattr("node.config.amendments.MOST_LIST_BYTES", limit)
        try:
            known = Charter(RUN, SETTINGS).accept(b"", back, 5)
        except AmendmentRefused:
            continue
        assert decode_list(rewound(known, 1, -(2**63) + 1))
    assert known


def test_only_new_entries_of_a_known_list_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [accepted(*(amendment(i, 10 * i) for i in range(1, n + 1))) for n in range(1, 21)]
    charter, checked = Charter(RUN, SETTINGS), []
    accept = charter.accept

    def count(before: bytes, signed: SignedAmendment, round_: int) -> bytes:
        checked.append(round_)
        return accept(before, signed, round_)

    monkeypatch.setattr(charter, "accept", count)
    charter.check_list(known[17])
    assert checked == list(range(18))
    charter.check_list(known[19])
    assert checked[18:] == [18, 19]
    with pytest.raises(PeerError):
        charter.check_list(known[19].replace(b"inner.lr", b"outer.lr"))


def test_a_run_pauses_resumes_and_stops() -> None:
    known = accepted(
        amendment(1, 10, "pause"), amendment(2, 12, "resume"), amendment(3, 14, "pause"), amendment(4, 16, "stop")
    )
    schedule = schedule_of(SETTINGS, known)
    assert [schedule.at(round_).is_paused for round_ in (9, 10, 11, 12, 13, 14, 99)] == [
        False, True, True, False, False, True, True,
    ]  # fmt: skip
    assert [schedule.at(round_).is_stopped for round_ in (15, 16, 99)] == [False, True, True]


def test_schedules_go_back_with_a_rollback_that_took_place() -> None:
    known = accepted(amendment(1, 10), amendment(2, 20, "rollback", to_round=0, state="ef" * 32), amendment(3, 20))
    schedule = schedule_of(SETTINGS, known)
    assert {round_: one.number for round_, one in schedule.rollbacks.items()} == {20: 2}
    assert rewound_tokens(known) == 0
    after = rewound(known, 2, 500)
    assert rewound_tokens(after) == 500 and [one.rewound_tokens for one in decode_list(after)] == [None, 500, None]
    Charter(RUN, SETTINGS).check_list(after)
    assert schedule_of(SETTINGS, after) == schedule


def test_a_rollback_needs_more_than_half_of_the_members_with_its_state() -> None:
    back = amendment(1, 9, "rollback", to_round=2, state="ef" * 32)
    kept, lacking = (
        Join(run=RUN, parent=RUN, state=RUN, tokens=1, step_s=1.0, norm=1.0, keeps=keeps) for keeps in ("ef" * 8, "")
    )
    assert is_kept(back, [kept, kept, lacking])
    assert not is_kept(back, [kept, lacking])
    assert is_kept(amendment(), [lacking])
    assert not is_feasible(back, [kept, lacking])


def test_a_round_of_too_few_members_does_not_accept_their_least_number() -> None:
    join = Join(run=RUN, parent=RUN, state=RUN, tokens=1, step_s=1.0, norm=1.0)
    three = amendment(changes={"round.min_peers": 3})
    assert is_feasible(three, [join] * 3) and not is_feasible(three, [join] * 2)
    assert is_feasible(amendment(), [join])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"inner.lr": -1.0}, "greater than 0"),
        ({"inner.lr": True}, "cannot be true"),
        ({"sync.auto": 1}, "cannot be 1"),
        ({"data.weights": [1.0, 2.0]}, "as many numbers"),
        ({"inner.sequence_length": 4096}, "longer than"),
        ({"phases": [{"from_tokens": 10**12, "lr_ratio": 0.5}]}, "does not begin before total_tokens"),
        ({"data.sources": ["text:../secret"]}, "outside of node.text_dir"),
    ],
)
def test_settings_that_are_not_valid_together_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(AmendmentError, match=why):
        changed(SETTINGS, changes)
    charter = Charter(RUN, SETTINGS)
    assert refusal(charter, b"", sign_amendment(FOUNDER, amendment(changes=changes))) == "invalid"


def test_settings_of_a_later_round_must_be_valid_as_well() -> None:
    known = accepted(amendment(1, 50, changes={"data.sources": ["text:a", "text:b"], "data.weights": [1.0, 2.0]}))
    late = amendment(2, 10, changes={"data.sources": ["text:a", "text:b", "text:c"]})
    assert accepted(late.model_copy(update={"number": 1}))
    one = amendment(2, 60, changes={"data.sources": ["text:a"]})
    assert refusal(Charter(RUN, SETTINGS), known, sign_amendment(FOUNDER, one), 5) == "invalid"


@pytest.mark.parametrize(
    "content",
    [
        {"changes": {}},
        {"action": "pause", "changes": {"inner.lr": 1.0}},
        {"changes": {"model.hidden_size": 8}},
        {"changes": {"governance": "fixed"}},
        {"changes": {"total_tokens": 2**64}},
        {"from_round": 0},
        {"action": "rollback", "changes": {}},
        {"action": "rollback", "changes": {}, "to_round": 4, "state": "ef" * 32},
        {"action": "rollback", "changes": {}, "to_round": 0, "state": "EF" * 32},
        {"to_round": 0, "state": "ef" * 32},
        {"number": MOST_AMENDMENTS + 1},
        {"number": 1.0},
        {"unknown": 1},
    ],
)
def test_content_of_another_form_is_no_amendment(content: dict[str, Any]) -> None:
    good = amendment(1, 5).model_dump()
    text = json.dumps(good | content, sort_keys=True, separators=(",", ":"))
    signed = add_signature(FOUNDER, SignedAmendment(text=text, signatures={}))
    assert refusal(Charter(RUN, SETTINGS), b"", signed) == "invalid"


def test_m_of_n_keys_must_sign() -> None:
    keys = [new_identity() for _ in range(3)]
    settings = RunConfig(governance="keys", governance_keys=tuple(key.peer_id for key in keys), governance_threshold=2)
    charter = Charter(RUN, settings)
    one = sign_amendment(keys[0], amendment())
    assert refusal(charter, b"", one) == "forged"
    assert refusal(charter, b"", add_signature(OTHER, one)) == "forged"
    both = add_signature(keys[2], one)
    known = charter.accept(b"", both, 0)
    assert decode_list(known)[0].signed == both
    assert charter.accept(b"", add_signature(keys[1], both), 0)


def test_nobody_may_amend_a_fixed_run() -> None:
    charter = Charter(RUN, RunConfig())
    assert refusal(charter, b"", sign_amendment(FOUNDER, amendment())) == "forged"
    assert refusal(charter, b"", SignedAmendment(text=amendment().canonical(), signatures={})) == "forged"


def test_a_list_from_a_peer_is_checked_as_if_it_were_accepted_again() -> None:
    charter = Charter(RUN, SETTINGS)
    known = accepted(amendment(1, 10), amendment(2, 11, "pause"))
    charter.check_list(known)
    entries = json.loads(known)
    damaged = [
        entries[1:],
        entries[::-1],
        [entries[0], entries[0]],
        [entries[0] | {"round": 10}],
        [entries[0], entries[1] | {"round": 0}],
        [entries[0] | {"signed": entries[0]["signed"] | {"signatures": {}}}],
        [{**entries[0], "more": 1}],
        {"no": "list"},
    ]
    for one in damaged:
        with pytest.raises(PeerError):
            charter.check_list(json.dumps(one, sort_keys=True, separators=(",", ":")).encode())
    for data in (b"[]", b"\xff", known + b" ", b"[" * 10_000):
        with pytest.raises(PeerError):
            charter.check_list(data)


class Forger:
    """Makes amendments that no round may accept, each with the reasons for which it may be refused."""

    def __init__(self, rng: random.Random, known: bytes, round_: int) -> None:
        self.rng, self.known, self.round = rng, decode_list(known), round_
        self.next = len(self.known) + 1

    def draw(self) -> tuple[str, SignedAmendment]:
        kinds = (self.forged, self.replayed, self.late, self.early, self.conflicting, self.oversized, self.invalid)
        make = self.rng.choice(kinds)
        return make.__name__, make()

    def _good(self, **more: Any) -> Amendment:
        lr, ahead = self.rng.uniform(1e-6, 1.0), self.rng.randint(1, 50)
        usual: dict[str, Any] = {"number": self.next, "from_round": self.round + ahead, "changes": {"inner.lr": lr}}
        return amendment(**(usual | more))

    def forged(self) -> SignedAmendment:
        signed = sign_amendment(FOUNDER, self._good())
        signature = signed.signatures[FOUNDER.peer_id]
        at = self.rng.randrange(len(signature))
        flipped = signature[:at] + self.rng.choice("0123456789abcdef".replace(signature[at], "")) + signature[at + 1 :]
        other_run = sign_amendment(FOUNDER, self._good(run="cd" * 32))
        wrong_purpose = OTHER.sign("diloco join", signed.text.encode()).hex()
        return self.rng.choice(
            [
                sign_amendment(OTHER, self._good()),
                add_signature(OTHER, signed),
                SignedAmendment(text=signed.text, signatures={}),
                SignedAmendment(text=signed.text, signatures={FOUNDER.peer_id: flipped}),
                SignedAmendment(text=signed.text, signatures={FOUNDER.peer_id: signature.upper()}),
                SignedAmendment(text=signed.text, signatures={FOUNDER.peer_id: wrong_purpose}),
                SignedAmendment(text=signed.text, signatures={FOUNDER.peer_id: signature + "00"}),
                SignedAmendment(text=self._good().canonical(), signatures=signed.signatures),
                SignedAmendment(text=signed.text, signatures={self._noise(52): signature}),
                other_run,
            ]
        )

    def replayed(self) -> SignedAmendment:
        return self.rng.choice(self.known).signed

    def late(self) -> SignedAmendment:
        return sign_amendment(FOUNDER, amendment(self.next, self.rng.randint(1, self.round)))

    def early(self) -> SignedAmendment:
        return sign_amendment(FOUNDER, amendment(self.next + self.rng.randint(1, 100), self.round + 1))

    def conflicting(self) -> SignedAmendment:
        return sign_amendment(FOUNDER, self._good(number=self.rng.randrange(1, self.next)))

    def oversized(self) -> SignedAmendment:
        sources = [f"text:{self._noise(100)}" for _ in range(MOST_BYTES // 100 - self.rng.randint(0, 4))]
        text = self._good(changes={"data.sources": sources}).canonical()[:MOST_BYTES]
        return add_signature(FOUNDER, SignedAmendment(text=text, signatures={}))

    def invalid(self) -> SignedAmendment:
        good = json.loads(self._good().canonical())
        junk: list[Any] = [None, [], {}, "x", -1, 1e400, self._noise(20), [[[]]], True]
        texts = [
            json.dumps(good),
            json.dumps(good | {self._noise(5): 1}, sort_keys=True, separators=(",", ":")),
            json.dumps({**good, "changes": {"inner.lr": self.rng.choice(junk)}}, sort_keys=True, separators=(",", ":")),
            json.dumps({**good, "changes": {self._noise(8): 1}}, sort_keys=True, separators=(",", ":")),
            self._noise(self.rng.randint(0, 200)),
            "[" * self.rng.randint(1, 5000),
        ]
        return add_signature(FOUNDER, SignedAmendment(text=self.rng.choice(texts), signatures={}))

    def _noise(self, length: int) -> str:
        return "".join(self.rng.choices(string.printable, k=length))


def test_none_of_a_thousand_bad_amendments_is_accepted() -> None:
    rng, charter = random.Random(8), Charter(RUN, SETTINGS)
    known = accepted(amendment(1, 10), amendment(2, 11, "pause"), amendment(3, 12, "resume"))
    seen: dict[str, set[str]] = {}
    for _ in range(1000):
        kind, signed = Forger(rng, known, 20).draw()
        found = refusal(charter, known, signed, 20)
        assert found in AMENDMENT_REFUSALS
        seen.setdefault(kind, set()).add(found)
    expected = {name: {name} for name in AMENDMENT_REFUSALS}
    assert seen == expected, "each kind is refused for its own reason"
    assert charter.accept(known, sign_amendment(FOUNDER, amendment(4, 21)), 20)


def test_a_signature_is_of_one_identity() -> None:
    def signers(identity: Identity) -> set[str]:
        return set(sign_amendment(identity, amendment()).signatures)

    assert signers(FOUNDER) == {FOUNDER.peer_id} != signers(OTHER)
