"""Every error of ours, in one tree. Knows exit codes; knows nothing else.

    NodeError                 70  our own fault, unless a subclass says otherwise
    ├── UsageError             2  wrong flags, configuration, invite, data folder, host name of the API
    │   ├── ConfigError
    │   ├── InviteError
    │   └── DataFolderError
    ├── MachineError           3  this machine cannot do it: memory, GPU, disk, port of swarm or API
    │   └── QuotaError            limits.disk_gb leaves no room; what was to be written is not
    ├── RefusedError           4  the swarm refused this node
    │   └── ManifestError         the manifest offered does not have the hash of the invite
    ├── ProtocolError         10  the swarm speaks a newer protocol, or a newer version wrote this data folder
    ├── TrainingError         70  loss or gradient is no longer a finite number; the parameters were not touched
    ├── TextError            (internal; reading goes on elsewhere, or later)
    │   ├── Unreachable           the source does not answer now; it may later
    │   └── Damaged               this part of it cannot be read, now or later
    └── SwarmError            (internal; always caught by a policy, never ends the process)
        ├── RoundFailed           no complete result for this round; inputs are untouched
        ├── PeerError             one peer broke a rule or went silent
        └── TransferFailed        a state download ended early; what was verified is kept

The message of an error is one sentence for a person and names the mend. `code` is one word for a program.
"""

from __future__ import annotations


class NodeError(Exception):
    """Root of the tree. `str(error)` is one sentence with the mend; no traceback is shown for it."""

    exit_code = 70
    code = "internal"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class UsageError(NodeError):
    exit_code = 2
    code = "usage"


class ConfigError(UsageError):
    code = "bad_config"


class InviteError(UsageError):
    code = "bad_invite"


class DataFolderError(UsageError):
    code = "data_folder"


class MachineError(NodeError):
    exit_code = 3
    code = "machine"


class QuotaError(MachineError):
    code = "disk_quota"


class RefusedError(NodeError):
    exit_code = 4
    code = "refused"


class ManifestError(RefusedError):
    code = "wrong_manifest"


class ProtocolError(NodeError):
    exit_code = 10
    code = "protocol_too_old"


class TrainingError(NodeError):
    code = "not_finite"


class TextError(NodeError):
    code = "text"


class Unreachable(TextError):
    code = "text_unreachable"


class Damaged(TextError):
    code = "text_damaged"


class SwarmError(NodeError):
    code = "swarm"


class RoundFailed(SwarmError):
    """The round has no complete result. `code` is the reason used as label in `sync_failures_total`."""

    code = "round_failed"


class PeerError(SwarmError):
    """One peer broke a rule or went silent. `code` is the reason used as label in `peer_rejected_total`."""

    code = "bad_message"


class TransferFailed(SwarmError):
    code = "transfer_failed"
