"""Writes and checks certificates of credit."""

from __future__ import annotations

from html import escape
from pathlib import Path

from pydantic import ValidationError

from node.api.public_page import short
from node.errors import DataFolderError, PeerError, UsageError
from node.swarm.chain.certificate import (
    CREDIT_FILE,
    MOST_BYTES,
    Certificate,
    CreditRecord,
    ProvenCredit,
    certify,
    check,
)
from node.swarm.identity import load_identity

BADGE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{text}">
<title>{text}</title>
<rect width="{width}" height="20" rx="3" fill="#24292f"/>
<rect x="{left}" width="{right}" height="20" rx="3" fill="#1f6feb"/>
<g fill="#fff" font-family="Verdana,Geneva,DejaVu Sans,sans-serif" font-size="11">
<text x="6" y="14" textLength="{first}">{name}</text>
<text x="{at}" y="14" textLength="{second}">{given}</text>
</g>
</svg>
"""
CHARACTER_WIDTH = 6.6
"""Mean width of a character of the badge's font at 11 px. `textLength` corrects it."""


def certificate_of(data_dir: Path) -> tuple[Certificate, ProvenCredit]:
    """The certificate of the folder's own key, and what it proves.

    Raises DataFolderError without a table of credit, and UsageError without credit.
    """
    path = data_dir / CREDIT_FILE
    try:
        if not (data_dir / "identity.key").exists():
            raise DataFolderError(f"{data_dir} has no identity.key: name the data folder of a node that has trained.")
        record = CreditRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError as exc:
        raise DataFolderError(
            f"{data_dir} holds no table of credit yet: let the node take part in two rounds first."
        ) from exc
    except PermissionError as exc:
        raise DataFolderError.of_another_user(data_dir) from exc
    except (OSError, ValidationError) as exc:
        raise DataFolderError(f"{path} cannot be read: the node writes it again after the next rounds.") from exc
    try:
        certificate = certify(record, load_identity(data_dir / "identity.key"))
        return certificate, check(certificate)
    except PeerError as exc:
        raise DataFolderError(f"{path} proves nothing, because {exc}: wait for the next rounds.") from exc
    except KeyError as exc:
        raise UsageError(
            f"No round up to {record.evidence.round} includes this node's work: let it take part in a round first.",
            code="no_credit",
        ) from exc


def verify_file(path: Path) -> ProvenCredit:
    """Check a certificate. Raises UsageError with the reason if it is not valid."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path} is too long for a certificate: name a file that `certificate` has written.")
        return check(Certificate.model_validate_json(path.read_bytes()))
    except OSError as exc:
        raise UsageError(
            f"{path} cannot be read ({exc.strerror}): name a file that `certificate` has written."
        ) from exc
    except ValidationError as exc:
        raise UsageError(f"{path} is not a certificate: name a file that `certificate` has written.") from exc
    except PeerError as exc:
        raise UsageError(
            f"{path} is not a valid certificate, because {exc}: ask its owner for a new one.", code="not_valid"
        ) from exc


def describe(finding: ProvenCredit) -> str:
    """What a valid certificate proves, in a few lines."""
    entry, share = finding.entry, finding.entry.tokens / finding.tokens if finding.tokens else 0.0
    signers = "\n            ".join(finding.signers)
    return f"""\
The certificate is valid.
Member      {entry.member}
Run         {finding.run_name} ({finding.run})
Gave        {entry.tokens:,} tokens in {entry.rounds:,} rounds, from round {entry.first_round} to {entry.last_round}
Share       {share:.2%} of the {finding.tokens:,} tokens of the run up to round {finding.round}
Signed      by {len(finding.signers)} of the {finding.contributors} contributors to round {finding.round}:
            {signers}
This proves that these keys have signed it. Ask a member of the run whether these keys belong to its
members, and whether its round {finding.round} has the head {finding.head}."""


def badge(finding: ProvenCredit) -> str:
    """An SVG with the name of the run and the tokens that the member gave."""
    name, given = finding.run_name, f"{short(finding.entry.tokens)} tokens given"
    first, second = (round(CHARACTER_WIDTH * len(text)) for text in (name, given))
    left = first + 12
    return BADGE.format(
        width=left + second + 12, text=escape(f"{name}: {given}", quote=True), left=left, right=second + 12,
        first=first, name=escape(name), at=left + 6, second=second, given=escape(given),
    )  # fmt: skip
