"""The exception tree of diloco-node. The numbers are the exit codes of the process.

    NodeError                 70  a bug, unless a subclass has another code
    ├── UsageError             2  wrong flags, configuration, invite, data folder or host name of the API
    │   ├── ConfigError
    │   ├── InviteError
    │   ├── DataFolderError
    │   │   └── IdentityInUse     another running node has the identity of this one
    │   └── ReleaseError          a release file that is forged, old, expired or not one
    ├── MachineError           3  this machine lacks something: memory, GPU, disk, a free port
    │   ├── QuotaError            limits.disk_gb leaves no room, so nothing was written
    │   └── DamagedState          a stored outer state cannot be read
    ├── ManifestError          4  the manifest does not have the hash of the invite, or is not valid
    ├── ProtocolError         10  the run uses another protocol, or a newer version wrote this data folder
    ├── RestartError          75  the program was updated, or the disk was full at the start; another start may work
    ├── TrainingError         70  loss or gradient is not finite; the parameters are unchanged
    ├── Unreachable          (internal) the source of the text does not answer now, but may answer later
    ├── Damaged              (internal) this part of the text cannot be read, so reading continues at another place
    └── SwarmError            (internal; always handled, never ends the process)
        ├── RoundFailed           no complete result for this round; the inputs are unchanged
        ├── PeerError             one peer broke a rule or did not answer
        └── TransferFailed        the download of a state ended early; verified parts are kept

The message of an error is one sentence for a person and names the remedy. `code` is one word for programs.
"""

from __future__ import annotations

from pathlib import Path


def cause_of(error: BaseException) -> str:
    """The text of an exception, or the name of its class if it has no text. Messages quote it in brackets."""
    return str(error) or type(error).__name__


class NodeError(Exception):
    """The root of the tree. The command line prints `str(error)` without a traceback."""

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

    @classmethod
    def of_another_user(cls, folder: Path) -> DataFolderError:
        return cls(f"The data folder {folder} belongs to another user: run the command as that user.")


class IdentityInUse(DataFolderError):
    code = "identity_in_use"

    def __init__(self, file: Path) -> None:
        super().__init__(
            f"Another running node has the identity of this one, probably from a copy of its data folder: stop one of "
            f"the two for good, or remove {file}, and this node makes a new identity."
        )


class ReleaseError(UsageError):
    code = "bad_release"


class MachineError(NodeError):
    exit_code = 3
    code = "machine"


class QuotaError(MachineError):
    code = "disk_quota"


class DamagedState(MachineError):
    code = "damaged_state"


class ManifestError(NodeError):
    exit_code = 4
    code = "wrong_manifest"


class ProtocolError(NodeError):
    exit_code = 10
    code = "protocol_too_old"


class RestartError(NodeError):
    exit_code = 75
    code = "start_again"


class TrainingError(NodeError):
    code = "not_finite"


class Unreachable(NodeError):
    code = "text_unreachable"


class Damaged(NodeError):
    code = "text_damaged"


class SwarmError(NodeError):
    code = "swarm"


class RoundFailed(SwarmError):
    """`code` is the label `reason` of the metric `sync_failures_total`."""

    code = "round_failed"


class PeerError(SwarmError):
    """`code` is the label `reason` of the metric `peer_rejected_total`."""

    code = "bad_message"


class TransferFailed(SwarmError):
    code = "transfer_failed"
